"""Clients that people use, unchanged, each in a process of its own but the official one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

SAID = "Hello \N{SNOWMAN} there"
HERE = Path(__file__).parent


def run(*command: str) -> str:
    # LiteLLM would ask the network for prices.
    env = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120, env=env)
    return done.stdout


def client(name: str, url: str) -> dict[str, Any]:
    *_, last = run(sys.executable, str(HERE / f"{name}_client.py"), url).splitlines()
    found: dict[str, Any] = json.loads(last)
    return found


def test_openai(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as official:
        ask: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": f":::{SAID}"}], "seed": 1}
        assert official.chat.completions.create(**ask).choices[0].message.content == SAID
        chunks = official.chat.completions.create(**ask, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == SAID
        with official.chat.completions.stream(**ask) as stream:
            assert stream.get_final_completion().choices[0].message.content == SAID
        assert official.completions.create(model="toy", prompt="abc", max_tokens=2).choices[0].text == "ab"
        assert [model.id for model in official.models.list()] == ["toy"]
        with pytest.raises(openai.NotFoundError) as missing:
            official.embeddings.create(model="toy", input="a")
        assert missing.value.code == "unknown_url"
        with pytest.raises(openai.BadRequestError) as bad:
            official.chat.completions.create(**ask, top_p=2)
        assert bad.value.param == "top_p"


def test_langchain(url: str) -> None:
    found = client("langchain", url)
    assert found.pop("answer").startswith("cold in Oslo for call_")  # our template names the call
    assert found == {
        "whole": SAID,
        "fingerprint": "toy-1",
        "streamed": SAID,
        "call": ["weather", {"city": "Oslo"}],
        "streamed calls": [["weather", {"city": "Oslo"}]],
    }


@pytest.mark.slow  # to import
def test_litellm(url: str) -> None:
    found = client("litellm", url)
    refused = found.pop("refused")
    assert "max_tokens must be at least 1" in refused
    assert found == {"whole": SAID, "fingerprint": "toy-1", "streamed": SAID, "text": "ab"}


def test_curl(url: str) -> None:
    body = json.dumps({"model": "toy", "messages": [{"role": "user", "content": f":::{SAID}"}], "stream": True})
    shown = run("curl", "-sSN", f"{url}/v1/chat/completions", "-H", "content-type: application/json", "-d", body)
    *events, done, end = shown.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == SAID
    bad = run("curl", "-sS", "-w", " %{http_code} %{content_type}", f"{url}/v1/chat/completions", "-d", body)
    assert bad.endswith(" 415 application/json")
