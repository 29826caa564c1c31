"""What a grammar allows: against a fresh matcher, against another regular expression engine, and at its edges."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.engine.grammar import MAX_COMPILE_S, MAX_MASKS, Compiler, Constraint
from backend.engine.grammar_source import MAX_MULTIPLE, MAX_WHITE_SPACE, GrammarError
from backend.protocol import MAX_GRAMMAR_BYTES, Grammar, TokenizerFiles
from tests.backend.tiny_models import VOCAB, tiny_tokenizer

START, EOS = 256, 257
TOKENIZER = tiny_tokenizer()
FILES = TokenizerFiles(TOKENIZER.to_str(), None, [EOS], {})
COMPILER = Compiler(FILES, VOCAB)
BYTES = {id_: TOKENIZER.decode([id_]) for id_ in range(VOCAB) if id_ < TOKENIZER.get_vocab_size()}


def schema(value: object) -> Grammar:
    return Grammar("json_schema", json.dumps(value))


PERSON = schema(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 9},
            "age": {"type": "integer", "minimum": -3, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["a", "bb", None, 1.5]}, "maxItems": 3},
        },
        "required": ["name"],
        "additionalProperties": False,
    }
)
GRAMMARS = [
    PERSON,
    schema({"type": "object"}),
    schema({"anyOf": [{"type": "number"}, {"type": "array"}]}),
    Grammar("regex", r"(\w+ ){1,3}[0-9]{3}-[a-f]+"),
    Grammar("regex", "(yes|no|ja/nein\n)+"),
    Grammar("regex", "[é-ü]{2,}x?"),
    Grammar("regex", "(?s).*"),
]
COMPILED = {grammar: COMPILER.compile(grammar) for grammar in GRAMMARS}


def ids_of(mask: bytes | None) -> set[int]:
    assert mask is not None
    return {i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1}


def outcome(constraint: Constraint, generated: Sequence[int]) -> bytes | str | None:
    try:
        return constraint.allowed(generated)
    except GrammarError as error:
        return str(error)


def encode(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


def ask(grammar: Grammar, text: str, stop_ids: frozenset[int] = frozenset({EOS})) -> set[int] | None:
    mask = COMPILER.compile(grammar).constrain(stop_ids).allowed(encode(text))
    return None if mask is None else ids_of(mask)


# Where to go from a sequence: on with an allowed token, on with any tokens, or back to a beginning of it.
steps = st.one_of(
    st.tuples(st.just("on"), st.integers(0, 2**16)),
    st.tuples(st.just("on"), st.integers(0, 2**16)),
    st.tuples(st.just("astray"), st.integers(0, VOCAB - 1)),
    st.tuples(st.just("back"), st.integers(0, 2**16)),
)


@pytest.mark.parametrize("grammar", GRAMMARS, ids=range(len(GRAMMARS)))
@given(moves=st.lists(steps, max_size=40))
@settings(max_examples=20, deadline=None)
def test_what_is_allowed_depends_on_the_tokens_alone(grammar: Grammar, moves: list[tuple[str, int]]) -> None:
    """Whatever a matcher was asked before, it answers as one that was asked nothing, compiled then and there."""
    walker = COMPILED[grammar].constrain(frozenset({EOS, START}))
    tokens: list[int] = []
    for kind, number in moves:
        allowed = outcome(walker, tokens)
        if kind == "back":
            tokens = tokens[: number % (len(tokens) + 1)]
        elif kind == "astray":
            tokens = [*tokens, number]
        elif isinstance(allowed, bytes):
            choices = sorted(ids_of(allowed))
            tokens = [*tokens, choices[number % len(choices)]]
        fresh = COMPILER.compile(grammar).constrain(frozenset({EOS, START}))
        assert outcome(walker, tokens) == outcome(fresh, tokens)


@pytest.mark.parametrize(
    "pattern", [r"(th|in|the )+[0-9]{2}", r"[a-c]*(?:an|ban)ana|x{3,}", r"\d+(\.\d{1,2})? the?", "(?i)in.th"]
)
def test_a_regex_allows_what_another_engine_allows(pattern: str) -> None:
    grammar, other = Grammar("regex", pattern), regex.compile(pattern)
    walker = COMPILER.compile(grammar).constrain(frozenset({EOS}))
    frontier: list[list[int]] = [[]]
    for _ in range(60):
        tokens = frontier.pop(0)
        text = TOKENIZER.decode(tokens)
        expected = {
            id_
            for id_, piece in BYTES.items()
            if piece.isascii() and piece and other.fullmatch(text + piece, partial=True)
        }
        if other.fullmatch(text):
            expected.add(EOS)
        allowed = ids_of(walker.allowed(tokens))
        assert {id_ for id_ in allowed if id_ == EOS or BYTES[id_].isascii()} == expected
        frontier += [[*tokens, id_] for id_ in sorted(expected - {EOS})[:: max(1, len(expected) // 4)]]
        frontier = frontier or [[]]


def test_it_may_end_exactly_where_the_text_is_complete() -> None:
    grammar = schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    whole = '{"a": 12}'
    for length in range(len(whole)):
        allowed = ask(grammar, whole[:length])
        assert allowed and not allowed & {EOS, START}
    assert ask(grammar, whole) == {EOS}
    assert ask(grammar, whole, frozenset({EOS, START})) == {EOS, START}
    number = ask(schema({"type": "integer"}), "12")
    assert number and EOS in number and len(number) > 1


def test_a_stop_id_with_a_text_is_text() -> None:
    """It ends the answer where the grammar takes it, and is not added behind the end."""
    grammar = Grammar("regex", "ab*c")
    (b,), (c,) = encode("b"), encode("c")
    assert ask(grammar, "a", frozenset({EOS, b, c})) == {b, c}
    assert ask(grammar, "abc", frozenset({EOS, b, c})) == {EOS}


def test_behind_what_is_not_of_the_grammar_everything_is_allowed() -> None:
    grammar = Grammar("regex", "ab*")
    walker = COMPILED[PERSON].constrain(frozenset({EOS}))
    assert walker.allowed(encode("nonsense")) is None
    assert ask(grammar, "ac") is None and ask(grammar, "acb") is None
    for generated in ([EOS], [*encode("ab"), EOS], [*encode("ab"), START], [*encode("ab"), EOS, EOS], [VOCAB - 1]):
        assert COMPILER.compile(grammar).constrain(frozenset({EOS})).allowed(generated) is None


def test_white_space_in_json_is_free_but_bounded() -> None:
    assert ask(PERSON, '{\n\t"name" :\r\n' + " " * (MAX_WHITE_SPACE - 2)) == set(encode('"'))
    assert ask(PERSON, '{"name":' + " " * (MAX_WHITE_SPACE + 1)) is None
    assert ask(PERSON, " {") is None


def test_properties_come_in_the_order_of_the_schema() -> None:
    def order(*names: str) -> Grammar:
        return schema({"type": "object", "properties": {name: {"const": 1} for name in names}, "required": list(names)})

    assert ask(order("a", "b"), '{"a') and ask(order("a", "b"), '{"b') is None
    assert ask(order("b", "a"), '{"b') and ask(order("b", "a"), '{"a') is None


def test_null_and_numbers_mean_what_they_say() -> None:
    assert ask(schema({"const": None}), "null") == {EOS}
    assert ask(schema({"enum": [None, 1.0]}), "1") and ask(schema({"const": 0.5}), "0.5") == {EOS}
    assert ask(schema({"type": "integer", "multipleOf": 7}), "49") and ask(schema({"multipleOf": 7}), "49")
    seven = ask(schema({"type": "integer", "multipleOf": 7}), "50")
    assert seven and EOS not in seven


REFUSED: list[tuple[Grammar, str]] = [
    (Grammar("regex", "("), "unclosed group"),
    (Grammar("regex", "[z-a]"), "character class range"),
    (Grammar("regex", r"a(?=b)"), "look-around"),
    (Grammar("regex", r"(a)\1"), "backreferences"),
    (Grammar("regex", r"\bx"), "lookarounds"),
    (Grammar("regex", "a)(b"), "unopened group"),
    (Grammar("regex", "(" * 60_000), "regex"),
    (Grammar("regex", "[a&&b]"), "no token to go on"),
    (Grammar("json_schema", "{"), "not JSON"),
    (Grammar("json_schema", "nonsense"), "not JSON"),
    (Grammar("json_schema", '{"minimum": NaN}'), "NaN"),
    (Grammar("json_schema", '{"minimum": %s}' % ("1" * 5000)), "too many digits"),
    (Grammar("json_schema", "[1]"), "must be a JSON object"),
    (Grammar("json_schema", "true"), "must be a JSON object"),
    (Grammar("json_schema", '{"items":' * 5000 + "1" + "}" * 5000), "nested too deeply"),
    (Grammar("json_schema", '{"type":"array","items":' * 200 + "true" + "}" * 200), "recursion limit"),
    (schema({"type": "strin"}), "Invalid type"),
    (schema({"type": "integer", "minimum": "x"}), "minimum"),
    (schema({"type": "integer", "minimum": 5, "maximum": 3}), "greater than"),
    (schema({"not": {}}), "not"),
    (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
    (schema({"if": {}, "then": {}}), "if"),
    (schema({"$ref": "#"}), "no token to go on"),
    (schema({"$ref": "#/$defs/x"}), "x"),
    (schema({"$ref": "https://example.com/schema.json"}), "example.com"),
    (schema({"$ref": "file:///etc/hostname"}), "hostname"),
    (schema({"type": "string", "format": "banana"}), "banana"),
    (schema({"type": "string", "pattern": "("}), "regex"),
    (schema({"type": "string", "x-guidance": {"lenient": True}} | {"not": {}}), "x-guidance"),
    (schema({"multipleOf": 2**31}), "at most"),
    (schema({"multipleOf": 0}), "above 0"),
    (schema({"multipleOf": -1}), "above 0"),
    (schema({"multipleOf": 1e300}), "below"),
    (Grammar("json_schema", '{"multipleOf": 1e999}'), "below"),
    (schema({"multipleOf": 1e-30}), "decimal places"),
    (schema({"allOf": [{"multipleOf": 311}, {"type": "integer", "multipleOf": 353}]}), str(311 * 353)),
    (schema({"items": [{"properties": {"x": {"multipleOf": MAX_MULTIPLE + 1}}}]}), "at most"),
]


@pytest.mark.parametrize(("grammar", "said"), REFUSED, ids=lambda value: str(value)[:50])
def test_a_bad_grammar_is_refused_and_says_why(grammar: Grammar, said: str) -> None:
    with pytest.raises(GrammarError) as caught:
        COMPILER.compile(grammar)
    message = str(caught.value)
    assert said in message and "llguidance" not in message and "\n" not in message


@pytest.mark.parametrize("multiple", [1, 7, 0.01, 0.1, 1e-9, 12.5, 1000, MAX_MULTIPLE])
def test_multiples_that_are_fine(multiple: float) -> None:
    COMPILER.compile(schema({"type": "number", "multipleOf": multiple, "description": {"multipleOf": True}}))


@pytest.mark.parametrize("text", ["", "x" * (MAX_GRAMMAR_BYTES + 1), "é" * (MAX_GRAMMAR_BYTES // 2 + 1)])
def test_a_grammar_has_a_size(text: str) -> None:
    with pytest.raises(ValueError, match="text must"):
        Grammar("regex", text)


def test_large_grammars_that_are_fine() -> None:
    names = [f"property number {i}" for i in range(400)]
    COMPILER.compile(schema({"type": "object", "properties": dict.fromkeys(names, True), "required": names}))
    COMPILER.compile(Grammar("regex", "|".join(f"word{i}" for i in range(5000))))
    long = ask(Grammar("regex", "(x{1000}){1000}"), "x" * 100)
    assert long == set(encode("x"))


def test_a_grammar_that_takes_too_long_is_refused() -> None:
    times = iter([0.0, MAX_COMPILE_S, 100.0, 100.1 + MAX_COMPILE_S])
    clocked = Compiler(FILES, VOCAB, clock=lambda: next(times))
    clocked.compile(PERSON)
    with pytest.raises(GrammarError, match="longer than"):
        clocked.compile(PERSON)


def test_too_complex_a_text_fails_and_leaves_the_rest_alone() -> None:
    compiled = COMPILER.compile(Grammar("regex", "(?:(?:a?){100}){100}"))
    constraint = compiled.constrain(frozenset({EOS}))
    (a,) = encode("a")
    with pytest.raises(GrammarError, match="lexer"):
        for length in range(200):
            constraint.allowed([a] * length)
    # Its matcher is of no use any more, for this call or another; nothing must pass for a free choice.
    for other in (constraint, compiled.constrain(frozenset({EOS}))):
        with pytest.raises(GrammarError, match="lexer"):
            other.allowed([a])
    assert compiled.worn
    assert ask(Grammar("regex", "(?:(?:a?){100}){100}"), "a") == {a, EOS}


def test_a_dead_end_is_one_behind_its_tokens_alone() -> None:
    endless = {"$ref": "#/$defs/endless"}
    grammar = schema({"type": "object", "properties": {"a": endless, "b": {}}, "$defs": {"endless": endless}})
    compiled = COMPILER.compile(grammar)
    constraint, other = (compiled.constrain(frozenset({EOS})) for _ in range(2))
    for _ in range(2):
        with pytest.raises(GrammarError, match="no token"):
            constraint.allowed(encode('{"a":'))
        assert constraint.allowed(encode('{"b":')) == other.allowed(encode('{"b":'))
    assert ids_of(constraint.allowed(encode('{"b":1}'))) == {EOS} and not compiled.worn


def test_a_compiled_grammar_wears_out() -> None:
    compiled = COMPILER.compile(Grammar("regex", "a*"))
    constraint = compiled.constrain(frozenset({EOS}))
    before = compiled.masks
    for _ in range(10):
        constraint.allowed([])
    assert compiled.masks == before + 10 and not compiled.worn
    compiled.masks = MAX_MASKS
    assert compiled.worn


def test_a_tokenizer_that_is_no_use_is_refused() -> None:
    for files in (
        TokenizerFiles("", None, [2], {}),
        TokenizerFiles("{}", None, [2], {}),
        TokenizerFiles('{"model": {}}', None, [2], {}),
        TokenizerFiles('{"added_tokens": []}', None, [], {}),
    ):
        with pytest.raises(GrammarError):
            Compiler(files, VOCAB)
    with pytest.raises(GrammarError, match="vocab"):
        Compiler(FILES, VOCAB - 100)
