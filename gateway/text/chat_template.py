"""Messages to prompt text, by the model's own Jinja template, as Hugging Face renders it.

Owns the sandbox and the names a template may use. The template comes with the weights and is not trusted with more than
rendering: the sandbox is immutable and holds no module.

In doubt: `strftime_now` lets a template put today's date into the prompt. Such a prompt differs tomorrow, and so does
its answer; the guarantee holds for the prompt's tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import NoReturn

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.domain import ChatPrompt, Message, Tool
from gateway.errors import RequestError, StartError
from gateway.text.tool_formats import tool_format

CONTINUED = "\ue000\ue001\ue002"
"""Marks the end of the message that is to be continued; private-use characters that no template treats specially."""

_FAILURES = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What a template raises that was not written for such messages or variables, besides Jinja's own errors."""

_OURS = ("messages", "tools", "documents", "add_generation_prompt")


class ChatTemplate:
    """A compiled template; `now` is asked only by templates that show the date."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], now: Callable[[], datetime]) -> None:
        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        env.filters["tojson"] = _tojson
        env.globals["raise_exception"] = _raise
        env.globals["strftime_now"] = lambda form: now().strftime(form)
        self._special_tokens = dict(special_tokens)
        try:
            self._template = env.from_string(source)
            names = meta.find_undeclared_variables(env.parse(source))
        except TemplateError as error:
            raise StartError(f"the model's chat template does not compile: {error}") from error
        self.takes_tools = "tools" in names
        self.variables = frozenset(names) - {*_OURS, *env.globals, *special_tokens}
        """What a request may set: names the template uses and nobody else gives a meaning to."""
        self.tool_format = tool_format(source) if self.takes_tools else None

    def render(self, chat: ChatPrompt) -> str:
        """The prompt, up to where the assistant speaks; raises `RequestError` naming the field at fault."""
        self._check(chat)
        messages = [_turn(message) for message in chat.messages]
        if chat.continues:
            messages[-1]["content"] = chat.messages[-1].content + CONTINUED
        try:
            text = self._template.render(
                {
                    **chat.variables,
                    "messages": messages,
                    "tools": [_tool(tool) for tool in chat.tools] or None,
                    "documents": None,
                    "add_generation_prompt": chat.opens_turn,
                    **self._special_tokens,
                }
            )
        except (TemplateError, *_FAILURES) as error:
            raise RequestError(f"the model's chat template refuses the messages: {error}", param="messages") from error
        return _up_to_the_mark(text) if chat.continues else text

    def _check(self, chat: ChatPrompt) -> None:
        for name in chat.variables:
            if name not in self.variables:
                field = f"chat_template_kwargs.{name}"
                raise RequestError(f"{field} is no variable of the model's chat template", param=field)
        if chat.tools and self.tool_format is None:
            why = "calls tools in an unknown format" if self.takes_tools else "has no tools"
            raise RequestError(f"tools are not supported: the model's chat template {why}", param="tools")
        for index, message in enumerate(chat.messages):
            if message.uses_tools and not self.takes_tools:
                field = f"messages[{index}]." + ("role" if message.role == "tool" else "tool_calls")
                raise RequestError(f"{field} is not supported: the model's chat template has no tools", param=field)


def _turn(message: Message) -> dict[str, object]:
    turn: dict[str, object] = {"role": message.role, "content": message.content}
    if message.name is not None:
        turn["name"] = message.name
    if message.tool_calls:
        turn["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    return turn


def _tool(tool: Tool) -> dict[str, object]:
    function: dict[str, object] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.parameters is not None:
        function["parameters"] = dict(tool.parameters)
    return {"type": "function", "function": function}


def _up_to_the_mark(text: str) -> str:
    if text.count(CONTINUED) != 1:
        raise RequestError(
            "continue_final_message is not supported: the model's chat template does not show the message as it is",
            param="continue_final_message",
        )
    return text[: text.index(CONTINUED)]


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; at inference its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012  # jinja2's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: object, indent: int | None = None, **_ignored: object) -> str:
    # Jinja's own filter escapes for HTML, which would put other tokens before the model than it was trained on.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
