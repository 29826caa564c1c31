"""Reads what the gateway sends, and checks the parts that every answer has."""

from __future__ import annotations

import json
from typing import Any

import httpx
from toy_model import ids

PROMPT = ids("<|start|>user\nhi<|end|><|start|>assistant\n")
"""The prompt of the chat that tests ask about where they do not care."""


def events(response: httpx.Response) -> list[Any]:
    """The data of a stream, `[DONE]` and comments as text."""
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    data = [block.removeprefix("data: ") for block in blocks]
    return [json.loads(text) if text.startswith("{") else text for text in data]


def error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    found: dict[str, Any] = body["error"]
    return found
