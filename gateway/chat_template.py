"""Messages to prompt text, by the model's own Jinja template, as Hugging Face renders it.

Owns the sandbox and the names a template may use. The template comes with the weights and is not trusted with more than
rendering: the sandbox is immutable and holds no module.

In doubt: `strftime_now` lets a template put today's date into the prompt. Such a prompt differs tomorrow, and so does
its answer; the guarantee holds for the prompt's tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.errors import RequestError, StartError


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
        except TemplateError as error:
            raise StartError(f"the model's chat template does not compile: {error}") from error

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt up to where the assistant speaks."""
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except TemplateError as error:
            raise RequestError(f"the model's chat template refuses the messages: {error}", param="messages") from error


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
