"""LiteLLM as a client of the gateway: `python litellm_client.py URL` prints what it got as JSON."""

from __future__ import annotations

import json
import sys

import litellm

SAID = ":::Hello \N{SNOWMAN} there"


def main(url: str) -> dict[str, object]:
    ask = {
        "model": "openai/toy",
        "messages": [{"role": "user", "content": SAID}],
        "api_base": f"{url}/v1",
        "api_key": "none",
        "seed": 1,
        "extra_body": {"is_deterministic": True},
    }
    whole = litellm.completion(**ask)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(**ask, stream=True))
    try:
        litellm.completion(**ask, max_tokens=-1)
    except litellm.BadRequestError as error:
        refused = str(error)
    text = litellm.text_completion(
        model="text-completion-openai/toy", prompt="abc", api_base=f"{url}/v1", api_key="none", max_tokens=2
    )
    return {
        "whole": whole.choices[0].message.content,
        "fingerprint": whole.system_fingerprint,
        "streamed": streamed,
        "refused": refused,
        "text": text.choices[0].text,
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))  # noqa: T201
