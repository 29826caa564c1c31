"""Reads a configuration file key by key and gathers every mistake in it.

Owns how a mistake is said: file, line, the path of the key, what is wrong, and for an unknown key the nearest right
name. Knows no key of any file: those are its callers'.

    mistakes = Mistakes("policy.yaml")
    root = open_document(text, mistakes)
    version = root.take("version", parse_version)
    with root.section("defaults") as defaults: ...
    root.close()
    mistakes.raise_any()

A parser takes the plain value (text, number, boolean, null, list or dict of these) and raises `ValueError` saying what
it must be. It must not repeat a value that may be secret.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from policies.strict_yaml import Node, Scalar, YamlError, parse_yaml

Plain: TypeAlias = Scalar | list["Plain"] | dict[str, "Plain"]
T = TypeVar("T")

_PLAIN_KEY = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class Mistake:
    """One thing wrong. `path` is the key's, empty for the document itself."""

    line: int
    path: str
    message: str


class FileMistakes(ValueError):
    """A file cannot be used; its text has a line for each mistake, in the order of the file."""

    def __init__(self, file: str, mistakes: Sequence[Mistake]) -> None:
        self.file = file
        self.mistakes = tuple(sorted(mistakes, key=lambda mistake: mistake.line))
        super().__init__("\n".join(map(self._say, self.mistakes)))

    def _say(self, mistake: Mistake) -> str:
        where = f"{self.file}:{mistake.line}: "
        return where + (f"{mistake.path}: " if mistake.path else "") + mistake.message


class Mistakes:
    """Gathers what is wrong with one file."""

    def __init__(self, file: str) -> None:
        self.file = file
        self._found: list[Mistake] = []

    def add(self, line: int, path: str, message: str) -> None:
        self._found.append(Mistake(line, path, message))

    def raise_any(self) -> None:
        """Raise `FileMistakes` if there is any."""
        if self._found:
            raise FileMistakes(self.file, self._found)


class Section:
    """One mapping of the file. Each key is taken once; `close` reports those that nobody knows."""

    def __init__(self, node: Node, path: str, mistakes: Mistakes) -> None:
        self.path = path
        self.line = node.line
        self._mistakes = mistakes
        self._known: list[str] = []
        if node.value is None:
            node = Node({}, node.line, {})
        if not isinstance(node.value, dict):
            mistakes.add(node.line, path, "must be a mapping of keys to values")
            node = Node({}, node.line, {})
        assert isinstance(node.value, dict)
        assert node.key_lines is not None
        self._values = node.value
        self._lines = node.key_lines

    def __repr__(self) -> str:
        return f"<Section {self.path or '(document)'} {list(self._values)}>"

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def take(self, key: str, parse: Callable[[Plain], T]) -> T | None:
        """The value of a key, or None where it is missing or wrong; what is wrong is noted."""
        self._known.append(key)
        if (node := self._values.get(key)) is None:
            return None
        try:
            return parse(_plain(node))
        except ValueError as error:
            self.mistake(str(error), key)
            return None

    def require(self, key: str, parse: Callable[[Plain], T]) -> T | None:
        """Like `take`, and a missing key is a mistake."""
        if key not in self._values:
            self.mistake(f"the key {key!r} is missing")
        return self.take(key, parse)

    def section(self, key: str) -> Section | None:
        """The mapping under a key, None where there is none."""
        self._known.append(key)
        node = self._values.get(key)
        return None if node is None else Section(node, join(self.path, key), self._mistakes)

    def entries(self) -> Iterator[tuple[str, Section]]:
        """Every key with the mapping under it, where the keys are the user's own names."""
        for key in self._values:
            section = self.section(key)
            assert section is not None
            yield key, section

    def items(self, key: str) -> list[Section]:
        """The mappings in the list under a key."""
        self._known.append(key)
        node = self._values.get(key)
        if node is None or node.value is None:
            return []
        if not isinstance(node.value, list):
            self.mistake("must be a list", key)
            return []
        path = join(self.path, key)
        return [Section(item, f"{path}[{index}]", self._mistakes) for index, item in enumerate(node.value)]

    def mistake(self, message: str, key: str | None = None) -> None:
        """Note a mistake of one key, or of the section as a whole."""
        if key is None:
            self._mistakes.add(self.line, self.path, message)
        else:
            self._mistakes.add(self._lines.get(key, self.line), join(self.path, key), message)

    def close(self) -> None:
        """Note every key that was not asked for."""
        for key in self._values:
            if key not in self._known:
                near = difflib.get_close_matches(key, self._known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(self._known)}"
                self.mistake(f"unknown key; {hint}", key)


def open_document(text: str, mistakes: Mistakes) -> Section:
    """The document's outermost section. Raises `FileMistakes` at once where the text is no YAML."""
    try:
        node = parse_yaml(text)
    except YamlError as error:
        mistakes.add(error.line, "", str(error))
        mistakes.raise_any()
        raise AssertionError from error
    return Section(node, "", mistakes)


def join(path: str, key: str) -> str:
    """The path of a key in a section; a key that is no plain word is quoted, in ASCII: paths go into headers too."""
    name = key if _PLAIN_KEY.fullmatch(key) else json.dumps(key)
    return f"{path}.{name}" if path else name


def _plain(node: Node) -> Plain:
    if isinstance(node.value, list):
        return [_plain(item) for item in node.value]
    if isinstance(node.value, dict):
        return {key: _plain(item) for key, item in node.value.items()}
    return node.value
