"""The name of a log: a digest of all that determines a verified token sequence, and of who may read it.

Owns the classification: each field of a completion, its jobs and their sampling either goes into the key or is a view,
which chooses how much of the sequence is shown and how. A field that is not in `FIELDS` fails the build: the digest
reads this table, and a test compares it with the types.

In front of the digest stand two short tags, of the tenant and of the fingerprint, so that what is purged can be told by
its name and costs nothing until then. They only select; what tells one log from another is the digest.

Each value is written by its type, with its length in front, so no two different jobs write the same bytes. Numbers are
written as the type that their field has: 0 and 0.0 are one temperature.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from backend.protocol import Grammar, Sampling
from gateway.domain import Completion, Job

TAG_BYTES = 4
KEY_BYTES = 2 * TAG_BYTES + 32
VERSION = b"verbatim log 2"
"""Changes with the encoding of keys or entries; logs of another version are not found."""


@dataclass(frozen=True, slots=True)
class InKey:
    """Determines the tokens or their logprobs; `write` makes bytes of it."""

    why: str
    write: Callable[..., bytes]


@dataclass(frozen=True, slots=True)
class View:
    """Another value shows the same sequence in another way."""

    why: str


def _bytes(value: bytes) -> bytes:
    return struct.pack(">Q", len(value)) + value


def _text(value: str) -> bytes:
    return b"s" + _bytes(value.encode())


def _whole(value: int) -> bytes:
    return b"i" + struct.pack(">q", value)


def _real(value: float) -> bytes:
    return b"d" + struct.pack(">d", float(value) + 0.0)  # no -0.0


def _ids(value: tuple[int, ...]) -> bytes:
    return b"t" + _bytes(struct.pack(f">{len(value)}q", *value))


def _set_of_ids(value: tuple[int, ...]) -> bytes:
    return _ids(tuple(sorted(set(value))))


def _biases(value: tuple[tuple[int, float], ...]) -> bytes:
    return b"b" + _bytes(b"".join(_whole(id_) + _real(bias) for id_, bias in value))


def _grammar(value: Grammar | None) -> bytes:
    return b"n" if value is None else _fields(value)


def _sampling(value: Sampling) -> bytes:
    is_long = value.grammar is not None or value.logit_bias
    return _fields(value) if is_long else _short_sampling(value)


@lru_cache(1024)
def _short_sampling(value: Sampling) -> bytes:
    """Most requests sample alike, and equal samplings write equal bytes."""
    return _fields(value)


FIELDS: Mapping[type, Mapping[str, InKey | View]] = {
    Completion: {
        "fingerprint": InKey("weights, arithmetic and tokenizer: who produced the tokens", _text),
        "model": View("a name for clients; the fingerprint says what it stands for"),
        "mode": View("only verified completions have logs"),
        "jobs": View("each job has a log of its own"),
        "choices": View("each choice is a job, and its seed tells it from the others"),
        "stops": View("stop strings are judged on committed tokens"),
        "continues": View("how the first token's text is written"),
        "spelled": View("which special tokens are written as text"),
        "windows": View("never change the result"),
    },
    Job: {
        "prompt": InKey("what is gone on from", _ids),
        "sampling": InKey("how each token is chosen", _sampling),
        "stop_ids": InKey(
            "end the sequence, and min_tokens and a grammar look at them; their order is nothing", _set_of_ids
        ),
        "max_tokens": View("how much of the sequence is asked for"),
        "top_logprobs": View("how many alternatives are shown; a log keeps as many as were computed"),
    },
    Sampling: {
        "temperature": InKey("changes the choice", _real),
        "top_p": InKey("changes the choice", _real),
        "top_k": InKey("changes the choice", _whole),
        "min_p": InKey("changes the choice", _real),
        "seed": InKey("changes the choice", _whole),
        "presence_penalty": InKey("changes the choice", _real),
        "frequency_penalty": InKey("changes the choice", _real),
        "repetition_penalty": InKey("changes the choice", _real),
        "logit_bias": InKey("changes the choice; in ascending order of ids already", _biases),
        "min_tokens": InKey("until then no stop id can be chosen", _whole),
        "grammar": InKey("changes the choice", _grammar),
    },
    Grammar: {
        "kind": InKey("how the text is read", _text),
        "text": InKey("equal texts are equal grammars", _text),
    },
}
"""What is in the key and what is not, and why."""


def _fields(value: object) -> bytes:
    """All fields of a value that are in the key, each behind its name."""
    type_ = type(value)
    written = [
        _text(name) + field.write(getattr(value, name))
        for name, field in FIELDS[type_].items()
        if isinstance(field, InKey)
    ]
    return b"r" + _text(type_.__name__) + _bytes(b"".join(written))


def log_key(reader: str | None, fingerprint: str, job: Job) -> bytes:
    """The key of a job's log, `KEY_BYTES` long. `reader` is the tenant whose it is, None for one that is shared."""
    digest = hashlib.sha256(_bytes(VERSION) + _reader(reader) + _text(fingerprint) + _fields(job)).digest()
    return reader_tag(reader) + fingerprint_tag(fingerprint) + digest


def reader_tag(reader: str | None) -> bytes:
    """What the keys of a tenant's logs begin with. Others' may too, once in 2**32."""
    return _tag(_reader(reader))


def fingerprint_tag(fingerprint: str) -> bytes:
    """What stands behind that, for all logs of a fingerprint."""
    return _tag(_text(fingerprint))


def fingerprint_tag_of(key: bytes) -> bytes:
    """The tag of the fingerprint in a key."""
    return key[TAG_BYTES : 2 * TAG_BYTES]


def _reader(reader: str | None) -> bytes:
    return b"n" if reader is None else _text(reader)


@lru_cache(1024)
def _tag(written: bytes) -> bytes:
    return hashlib.sha256(written).digest()[:TAG_BYTES]
