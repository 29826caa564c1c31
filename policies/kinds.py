"""What the value of a setting may be: how it is read, and what an editor's JSON Schema says of it.

Owns both in one place, so that they cannot disagree. Knows no setting.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, Protocol, TypeAlias, TypeVar

Json: TypeAlias = dict[str, object]
T_co = TypeVar("T_co", covariant=True)
E = TypeVar("E", bound=StrEnum)

UNLIMITED = "unlimited"
MAX_WHOLE = 2**63 - 1
_PATTERN = re.compile(r"[^*]+\*?|\*")


class Kind(Protocol[T_co]):
    """A kind of value."""

    def parse(self, value: object) -> T_co:
        """The value as it is used; raises `ValueError` saying what it must be."""
        ...

    def schema(self) -> Json: ...


@dataclass(frozen=True, slots=True)
class Word(Generic[E]):
    """One of a few words."""

    of: type[E]

    def parse(self, value: object) -> E:
        if isinstance(value, str) and value in list(self.of):
            return self.of(value)
        raise ValueError(f"must be one of {', '.join(self.of)}")

    def schema(self) -> Json:
        return {"enum": [str(word) for word in self.of]}


@dataclass(frozen=True, slots=True)
class Words(Generic[E]):
    """A list of distinct words, at least one."""

    of: type[E]

    def parse(self, value: object) -> tuple[E, ...]:
        if isinstance(value, list) and value:
            words = [word for word in self.of if word in value]
            if len(words) == len(value):
                return tuple(sorted(words, key=value.index))
        raise ValueError(f"must be a list of different words out of {', '.join(self.of)}")

    def schema(self) -> Json:
        return {"type": "array", "items": Word(self.of).schema(), "minItems": 1, "uniqueItems": True}


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number between two bounds, both included."""

    least: int
    most: int = MAX_WHOLE

    def parse(self, value: object) -> int:
        if isinstance(value, int) and not isinstance(value, bool) and self.least <= value <= self.most:
            return value
        if self.least == self.most:
            raise ValueError(f"must be {self.least}")
        upper = "" if self.most == MAX_WHOLE else f" and at most {self.most}"
        raise ValueError(f"must be a whole number of at least {self.least}{upper}")

    def schema(self) -> Json:
        return {"type": "integer", "minimum": self.least, "maximum": self.most}


@dataclass(frozen=True, slots=True)
class Number:
    """A number between two bounds, both included."""

    least: float
    most: float

    def parse(self, value: object) -> float:
        # Written so that NaN fails the comparison.
        if isinstance(value, int | float) and not isinstance(value, bool) and self.least <= value <= self.most:
            return float(value) + 0.0  # no -0.0
        raise ValueError(f"must be a number between {self.least:g} and {self.most:g}")

    def schema(self) -> Json:
        return {"type": "number", "minimum": self.least, "maximum": self.most}


@dataclass(frozen=True, slots=True)
class Flag:
    """true or false."""

    def parse(self, value: object) -> bool:
        if isinstance(value, bool):
            return value
        raise ValueError("must be true or false")

    def schema(self) -> Json:
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class Limited:
    """A whole number of at least 1, or the word `unlimited`, which is None."""

    def parse(self, value: object) -> int | None:
        if value == UNLIMITED:
            return None
        try:
            return Whole(1).parse(value)
        except ValueError as error:
            raise ValueError(f"{error}, or the word {UNLIMITED}") from None

    def schema(self) -> Json:
        return {"oneOf": [Whole(1).schema(), {"const": UNLIMITED}]}


@dataclass(frozen=True, slots=True)
class Patterns:
    """A list of names; one that ends in `*` stands for all that begin so."""

    def parse(self, value: object) -> tuple[str, ...]:
        if isinstance(value, list) and all(isinstance(item, str) and is_pattern(item) for item in value):
            return tuple(value)
        raise ValueError("must be a list of names; a * may stand at the end of a name only")

    def schema(self) -> Json:
        return {"type": "array", "items": {"type": "string", "pattern": f"^({_PATTERN.pattern})$"}}


@dataclass(frozen=True, slots=True)
class Name:
    """Some text, not empty."""

    def parse(self, value: object) -> str:
        if isinstance(value, str) and value:
            return value
        raise ValueError("must be text; put it in quotes where it looks like something else")

    def schema(self) -> Json:
        return {"type": "string", "minLength": 1}


@dataclass(frozen=True, slots=True)
class Names:
    """A list of texts."""

    def parse(self, value: object) -> tuple[str, ...]:
        if isinstance(value, list):
            return tuple(map(Name().parse, value))
        raise ValueError("must be a list of text")

    def schema(self) -> Json:
        return {"type": "array", "items": Name().schema()}


def is_pattern(text: str) -> bool:
    """Whether `text` is a name, or the beginning of names with a `*` behind it."""
    return _PATTERN.fullmatch(text) is not None


def matches(pattern: str, name: str) -> bool:
    """Whether a name is the pattern's, or begins as the pattern does."""
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern
