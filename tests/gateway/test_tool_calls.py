"""Tool calls in text: what is a call, what is content, and that the pieces in which text comes make no difference."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.text.tool_calls import CallArguments, CallEvent, CallReader, CallStart, Content, Reader, Syntax, WholeCall
from gateway.text.tool_formats import CALL_LIST, HERMES, LLAMA, MISTRAL, MISTRAL_NAMED, tool_format

Events = list[CallEvent]
SYNTAXES = {
    "hermes": HERMES.syntax,
    "mistral": MISTRAL.syntax,
    "mistral named": MISTRAL_NAMED.syntax,
    "llama": LLAMA.syntax,
    "list": CALL_LIST,
}


def read(reader: Reader, pieces: list[str]) -> list[Any]:
    """Content as text, calls as pairs of name and arguments, in order."""
    events = [event for piece in pieces for event in reader.push(piece)] + reader.finish()
    found: list[Any] = []
    calls = 0
    for event in events:
        match event:
            case Content():
                found = (
                    [*found[:-1], found[-1] + event.text]
                    if found and isinstance(found[-1], str)
                    else [*found, event.text]
                )
            case CallStart():
                assert event.index == calls
                calls += 1
                found.append([event.name, ""])
            case CallArguments():
                assert event.index == calls - 1
                found[-1][1] += event.text
    return [item if isinstance(item, str) else tuple(item) for item in found]


def whole(syntax: Syntax, text: str) -> list[Any]:
    return read(CallReader(syntax, ["f", "g"]), [text])


F = '{"name": "f", "arguments": {"a": 1}}'
CASES: list[tuple[str, str, list[Any]]] = [
    ("hermes", "no call", ["no call"]),
    ("hermes", " \n spaced \n ", [" \n spaced \n "]),
    ("hermes", "", []),
    ("hermes", f"<tool_call>\n{F}\n</tool_call>", [("f", '{"a": 1}')]),
    ("hermes", f"Let me see.\n\n<tool_call>{F}</tool_call>", ["Let me see.", ("f", '{"a": 1}')]),
    ("hermes", f"<tool_call>{F}</tool_call>\n<tool_call>\n{F}</tool_call>\n", [("f", '{"a": 1}'), ("f", '{"a": 1}')]),
    ("hermes", f"<tool_call>{F}</tool_call> and so on ", [("f", '{"a": 1}'), "and so on "]),
    (
        "hermes",
        '<tool_call>{"name":"any","arguments":{"s":"}\\"{</tool_call>"}}</tool_call>',
        [("any", '{"s":"}\\"{</tool_call>"}')],
    ),
    ("hermes", '<tool_call>{"arguments": {"a": {}}, "name": "f"}</tool_call>', [("f", '{"a": {}}')]),
    ("hermes", '<tool_call>{"id": 3, "name": "f", "arguments": {}}</tool_call>', [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, "id": "}"}</tool_call>', [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "\\u0066", "arguments": {}}</tool_call>', [("f", "{}")]),
    # Cut off by the limit: what there is of the arguments is shown.
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b', [("f", '{"a": "b')]),
    ("hermes", f"<tool_call>{F}", [("f", '{"a": 1}')]),
    ("hermes", f"<tool_call>{F}\n</tool_", [("f", '{"a": 1}')]),
    ("hermes", f"<tool_call>{F[:-1]}", [("f", '{"a": 1}')]),
    ("hermes", f"<tool_call>{F[:-1]}</tool_call><tool_call>{F}</tool_call>", [("f", '{"a": 1}')] * 2),
    ("hermes", '<tool_call>{"name": "f", "argu', ['<tool_call>{"name": "f", "argu']),
    # Looks like a call and is none.
    ("hermes", "a <tool_call>b</tool_call>", ["a <tool_call>b</tool_call>"]),
    ("hermes", "a <tool_call></tool_call> ", ["a <tool_call></tool_call> "]),
    ("hermes", "<tool_call>{'name': 'f'}</tool_call>", ["<tool_call>{'name': 'f'}</tool_call>"]),
    ("hermes", '<tool_call>{"nome": "f"}</tool_call>', ['<tool_call>{"nome": "f"}</tool_call>']),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}', ['<tool_call>{"name": 3, "arguments": {}}']),
    ("hermes", "a < b <tool_calls> <tool_cal", ["a < b <tool_calls> <tool_cal"]),
    ("hermes", F, [F]),
    ("mistral", f"[TOOL_CALLS] [{F}, {F}]", [("f", '{"a": 1}'), ("f", '{"a": 1}')]),
    ("mistral", f"[TOOL_CALLS]{F}", [("f", '{"a": 1}')]),
    ("mistral", f"Hm. [TOOL_CALLS][{F}] done", ["Hm.", ("f", '{"a": 1}'), "done"]),
    ("mistral", f"[TOOL_CALLS] [{F}, ", [("f", '{"a": 1}')]),
    ("mistral", "[TOOL_CALLS] []", ["[TOOL_CALLS] []"]),
    ("mistral", "[1, 2] [TOOL", ["[1, 2] [TOOL"]),
    ("mistral named", '[TOOL_CALLS]f[ARGS]{"a": {}}[TOOL_CALLS]g[ARGS]{}', [("f", '{"a": {}}'), ("g", "{}")]),
    ("mistral named", '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": 1}', [("f", '{"a": 1}')]),
    ("mistral named", "[TOOL_CALLS]f[ARGS]nothing {", ["[TOOL_CALLS]f[ARGS]nothing {"]),
    ("mistral named", "[TOOL_CALLS]f[ARG", ["[TOOL_CALLS]f[ARG"]),
    ("llama", '{"name": "f", "parameters": {"a": 1}}', [("f", '{"a": 1}')]),
    ("llama", ' \n{"type": "function", "name": "f", "parameters": {}}', [("f", "{}")]),
    ("llama", f"{F}; {F}\n", [("f", '{"a": 1}'), ("f", '{"a": 1}')]),
    ("llama", f"<|python_tag|>{F};{F}", [("f", '{"a": 1}'), ("f", '{"a": 1}')]),
    ("llama", '<|python_tag|>{"name": "h", "parameters": {}}', [("h", "{}")]),
    ("llama", '{"name": "Ann", "parameters": {"age": 3}}', ['{"name": "Ann", "parameters": {"age": 3}}']),
    ("llama", '{"answer": 42}', ['{"answer": 42}']),
    ("llama", '{"answer": 42', ['{"answer": 42']),
    ("llama", f"Here: {F}", [f"Here: {F}"]),
    ("llama", '<|python_tag|>search.call(q="x")', ['<|python_tag|>search.call(q="x")']),
    ("llama", f"{F}; and more", [("f", '{"a": 1}'), "; and more"]),
    ("list", f"[{F}, {F}]", [("f", '{"a": 1}'), ("f", '{"a": 1}')]),
    ("list", f"[{F}, {F[:-3]}", [("f", '{"a": 1}'), ("f", '{"a": ')]),
]


@pytest.mark.parametrize(("syntax", "text", "expected"), CASES)
def test_calls(syntax: str, text: str, expected: list[Any]) -> None:
    assert whole(SYNTAXES[syntax], text) == expected


@pytest.mark.parametrize(("syntax", "text", "expected"), CASES)
def test_pieces_make_no_difference(syntax: str, text: str, expected: list[Any]) -> None:
    assert read(CallReader(SYNTAXES[syntax], ["f", "g"]), list(text)) == expected
    for cut in range(len(text)):
        assert read(CallReader(SYNTAXES[syntax], ["f", "g"]), [text[:cut], text[cut:]]) == expected


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "[CALL_ID]"),
    *('{"name": "f", "arguments": ', '{"name": "h", "parameters": ', '{"a": "}{"}', "{}", "}", "{", "[", "]", ",", ";"),
    *(" ", "\n", "f", "text", '"', "\\", F, '{"arguments": {}, "name": "g"}', "<", "</tool_"),
]


@given(st.sampled_from(sorted(SYNTAXES)), st.lists(st.sampled_from(FRAGMENTS), max_size=10), st.data())
def test_no_text_is_read_in_two_ways(syntax: str, fragments: list[str], data: st.DataObject) -> None:
    text = "".join(fragments)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]
    found = read(CallReader(SYNTAXES[syntax], ["f", "g"]), pieces)
    assert found == whole(SYNTAXES[syntax], text)
    if not any(isinstance(item, tuple) for item in found):
        assert found == ([text] if text else [])


@pytest.mark.parametrize("syntax", sorted(SYNTAXES))
def test_content_is_shown_at_once(syntax: str) -> None:
    reader = CallReader(SYNTAXES[syntax], ["f"])
    assert reader.push("Some words") == [Content("Some words")]
    assert reader.push(" more") == [Content(" more")]


@pytest.mark.parametrize("name", ["hermes", "mistral", "mistral named", "llama"])
def test_arguments_are_shown_as_they_come(name: str) -> None:
    syntax = SYNTAXES[name]
    head = 'f[ARGS]{"a"' if not syntax.wrapped else '{"name": "f", "arguments": {"a"'
    reader = CallReader(syntax, ["f"])
    assert reader.push(syntax.marker + head) == [CallStart(0, "f"), CallArguments(0, '{"a"')]
    assert reader.push(": [1") == [CallArguments(0, ": [1")]
    assert repr(reader) == "<CallReader arguments calls=1 held=''>"


def test_a_text_that_is_one_call() -> None:
    assert read(WholeCall("f"), ['{"a"', "", ": 1}"]) == [("f", '{"a": 1}')]
    assert read(WholeCall("f"), []) == [("f", "")]


def test_a_format_is_known_by_what_its_template_shows() -> None:
    for template, expected in (
        ('<tool_call>\n{\\"name\\": ..., \\"arguments\\": ...}\n</tool_call>', HERMES),
        ("<tool_call><function=f></function></tool_call> arguments", None),
        ("<tool_call>f <arg_key>a</arg_key></tool_call> arguments", None),
        ("[TOOL_CALLS] [{{ call.function | tojson }}]", MISTRAL),
        ("[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}", MISTRAL_NAMED),
        ("<|python_tag|>", LLAMA),
        ('{"name": function name, "parameters": dictionary of arguments}', LLAMA),
        ("{% for tool in tools %}{{ tool }}{% endfor %}", None),
    ):
        assert tool_format(template) == expected
