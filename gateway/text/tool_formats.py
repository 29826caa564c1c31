"""The tool-call syntaxes in use by the models served, and which of them a model's chat template teaches.

Owns the table and its clues. A template shows a model's syntax because it writes earlier calls back into the prompt.
One that shows none of these has no format here: its calls could not be told from text, so tools are refused.

- Hermes, Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, a block for each call.
- Mistral: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`; later models `[TOOL_CALLS]name[ARGS]{...}`.
- Llama 3: `{"name": ..., "parameters": {...}}`, several of them parted by semicolons, behind `<|python_tag|>` or at the
  beginning of the text. Its calls of built-in tools in Python are content.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gateway.text.tool_calls import Syntax

_OBJECT_HEAD = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\\x00-\x1f]|\\["\\/bfnrt])*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A syntax, the special tokens that must be spelled out for it to be read, and the shape of ids it goes with."""

    name: str
    syntax: Syntax
    spelled: tuple[str, ...]
    short_ids: bool = False
    """Mistral's templates take call ids of nine letters and digits only."""


HERMES = ToolFormat(
    "hermes",
    Syntax("<tool_call>", re.compile(r"\s*"), _OBJECT_HEAD, end="</tool_call>"),
    ("<tool_call>", "</tool_call>"),
)
MISTRAL = ToolFormat(
    "mistral",
    Syntax("[TOOL_CALLS]", re.compile(r"\s*[\[,]?\s*"), _OBJECT_HEAD, end="]"),
    ("[TOOL_CALLS]",),
    short_ids=True,
)
MISTRAL_NAMED = ToolFormat(
    "mistral with named arguments",
    Syntax(
        "[TOOL_CALLS]",
        re.compile(r"\s*"),
        re.compile(r"([\w.-]+)(?:\[CALL_ID\][^\[{]*)?\[ARGS\]\s*(?=\{)"),
        wrapped=False,
    ),
    ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    short_ids=True,
)
LLAMA = ToolFormat(
    "llama 3",
    Syntax("<|python_tag|>", re.compile(r"[\s;]*"), _OBJECT_HEAD, bare="{"),
    ("<|python_tag|>",),
)
CALL_LIST = Syntax("", re.compile(r"\s*[\[,]?\s*"), _OBJECT_HEAD, bare="[", end="]")
"""`[{"name": ..., "parameters": {...}}, ...]` and nothing else: what a grammar makes of any model's answer."""


def tool_format(template: str) -> ToolFormat | None:
    """The format that a chat template's source teaches."""
    if "<tool_call>" in template:
        # Others use the same marker around XML.
        xml = "<function=" in template or "<arg_key>" in template
        return None if xml or "arguments" not in template else HERMES
    if "[TOOL_CALLS]" in template:
        return MISTRAL_NAMED if "[ARGS]" in template else MISTRAL
    if "<|python_tag|>" in template or re.search(r'\\?"parameters\\?": dictionary', template):
        return LLAMA
    return None
