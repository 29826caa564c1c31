from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policies.strict_yaml import MAX_DEPTH, Node, Scalar, YamlError, parse_yaml

# However busy the machine is: no time is asserted.
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def plain(node: Node) -> object:
    if isinstance(node.value, list):
        return [plain(item) for item in node.value]
    if isinstance(node.value, dict):
        return {key: plain(item) for key, item in node.value.items()}
    return node.value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("off", "off"),
        ("no", "no"),
        ("true", True),
        ("False", False),
        ("~", None),
        ("", None),
        ("'true'", "true"),
        ('"12"', "12"),
        ("12", 12),
        ("-7", -7),
        ("012", 12),
        ("0x10", "0x10"),
        ("1_000", "1_000"),
        ("1.5", 1.5),
        ("-.5e3", -500.0),
        ("1e999", "1e999"),
        (".inf", ".inf"),
        (".nan", ".nan"),
        ("2030-01-31", "2030-01-31"),
        ("9" * 5000, "9" * 5000),
        ("<<", "<<"),
    ],
)
def test_scalars(text: str, value: Scalar) -> None:
    found = parse_yaml(f"key: {text}")
    assert plain(found) == {"key": value}
    assert type(found.value["key"].value) is type(value)  # type: ignore[index,call-overload]


def test_lines_are_those_of_the_text() -> None:
    root = parse_yaml("a: 1\n\nb:\n  c: [x,\n    y]\n")
    assert root.key_lines == {"a": 1, "b": 3}
    assert isinstance(root.value, dict)
    inner = root.value["b"].value
    assert isinstance(inner, dict)
    items = inner["c"].value
    assert isinstance(items, list)
    assert [item.line for item in items] == [4, 5]


@pytest.mark.parametrize("text", ["", "\n", "# only a comment\n"])
def test_nothing_is_null(text: str) -> None:
    assert parse_yaml(text).value is None


BOMB = "a: &a [x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [*{chr(97 + i)}, *{chr(97 + i)}]\n" for i in range(20)
)


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        (BOMB, 1, "anchors are not supported"),
        ("a: 1\nb: *a\n", 2, "undefined alias|aliases are not supported"),
        ("a: 1\nb: 2\na: 3\n", 3, "the key 'a' stands twice, first on line 1"),
        ("a: !!python/object/apply:os.system [x]\n", 1, "tags are not supported"),
        ("a: !!str 3\n", 1, "tags are not supported"),
        ("a: 1\n---\nb: 2\n", 2, "a second document"),
        ("? [1, 2]\n: 3\n", 1, "a key must be plain text"),
        ("a: [1\nb: 2\n", 2, "not YAML"),
        ("a:\n\t- 1\n", 2, "not YAML"),
        ("a: 'x\n", 2, "not YAML"),
        ("a: \x00\n", 1, "not YAML"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), 1, "nested deeper"),
        ("[" * 100_000, 1, "nested deeper|nesting depth"),
    ],
)
def test_what_is_refused(text: str, line: int, said: str) -> None:
    with pytest.raises(YamlError, match=said) as caught:
        parse_yaml(text)
    assert caught.value.line == line


def test_a_syntax_error_does_not_repeat_the_text_around_it() -> None:
    with pytest.raises(YamlError) as caught:
        parse_yaml("hash: vb_0123_topsecret: [topsecret\n")
    assert "secret" not in str(caught.value)


@UNHURRIED
@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        parse_yaml(text)
    except YamlError as error:
        assert error.line >= 1
