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


def folded(items: list[Any]) -> list[dict[str, Any]]:
    """The choices of an answer sent whole, put together from a stream's chunks as a client does it."""
    choices: dict[int, dict[str, Any]] = {}
    for item in items:
        for piece in item["choices"]:
            if piece["index"] not in choices:
                choices[piece["index"]] = {"index": piece["index"], "logprobs": None, "finish_reason": None}
            choice = choices[piece["index"]]
            assert choice["finish_reason"] is None, "a piece behind the last"
            choice["finish_reason"] = piece["finish_reason"]
            if piece["logprobs"] is not None:
                choice["logprobs"] = _joined(choice["logprobs"], piece["logprobs"])
            if "text" in piece:
                choice["text"] = choice.get("text", "") + piece["text"]
            else:
                _add_delta(choice.setdefault("message", {"content": None, "refusal": None}), piece["delta"])
    return [choices[index] for index in sorted(choices)]


def _joined(into: dict[str, Any] | None, more: dict[str, Any]) -> dict[str, Any]:
    if into is None:
        return dict(more)
    return {name: values if values is None else into[name] + values for name, values in more.items()}


def _add_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    assert set(delta) <= {"role", "content", "refusal", "tool_calls"}
    if "role" in delta:
        assert "role" not in message
        message["role"] = delta["role"]
    if delta.get("content") is not None:
        message["content"] = (message["content"] or "") + delta["content"]
    for call in delta.get("tool_calls", []):
        calls = message.setdefault("tool_calls", [])
        if call["index"] == len(calls):
            calls.append({key: call[key] for key in ("id", "type", "function")})
        else:
            assert set(call) == {"index", "function"}
            calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
