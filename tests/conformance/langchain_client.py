"""LangChain's ChatOpenAI against the gateway: `python langchain_client.py URL` prints what it got as JSON."""

from __future__ import annotations

import json
import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

SAID = ":::Hello \N{SNOWMAN} there"
CALL = ':::Well. <tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"cold in {city}"


def main(url: str) -> dict[str, object]:
    chat = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model="toy", seed=1, extra_body={"is_deterministic": True})
    whole = chat.invoke(SAID)
    streamed = "".join(str(chunk.content) for chunk in chat.stream(SAID))
    bound = chat.bind_tools([weather])
    question = HumanMessage(CALL)
    called = bound.invoke([question])
    (call,) = called.tool_calls
    result = ToolMessage(f":::{weather.invoke(call['args'])}", tool_call_id=call["id"])
    answer = bound.invoke([question, called, result])
    gathered = None
    for chunk in bound.stream([question]):
        gathered = chunk if gathered is None else gathered + chunk
    return {
        "whole": whole.content,
        "fingerprint": whole.response_metadata["system_fingerprint"],
        "streamed": streamed,
        "call": [call["name"], call["args"]],
        "streamed calls": [[call["name"], call["args"]] for call in gathered.tool_calls],
        "answer": answer.content,
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))  # noqa: T201
