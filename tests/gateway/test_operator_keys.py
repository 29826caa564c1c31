"""The operator's keys: what is encrypted for one purpose and name is nothing to another."""

from __future__ import annotations

import pytest

from gateway.operator_keys import KEY_ID_BYTES, OperatorKeys, Tampered, UnknownKey

KEYS = (bytes(range(32)), bytes(32))
HEAD, NAME, PLAIN = b"head", b"name", b"what is kept"


def test_what_is_encrypted_with_any_of_the_keys_is_read() -> None:
    old, new = OperatorKeys(KEYS[:1], b"one"), OperatorKeys(KEYS[::-1], b"one")
    for writer in (old, new):
        kept = writer.encrypt(NAME, HEAD, PLAIN)
        assert kept.startswith(HEAD) and PLAIN not in kept
        assert new.decrypt(NAME, len(HEAD), kept) == PLAIN
    with pytest.raises(UnknownKey):
        old.decrypt(NAME, len(HEAD), new.encrypt(NAME, HEAD, PLAIN))


def test_another_purpose_or_name_is_refused() -> None:
    kept = OperatorKeys(KEYS, b"one").encrypt(NAME, HEAD, PLAIN)
    with pytest.raises(Tampered):
        OperatorKeys(KEYS, b"two").decrypt(NAME, len(HEAD), kept)
    with pytest.raises(Tampered):
        OperatorKeys(KEYS, b"one").decrypt(b"another", len(HEAD), kept)


def test_every_bit_counts() -> None:
    keys = OperatorKeys(KEYS, b"one")
    kept = keys.encrypt(NAME, HEAD, PLAIN)
    for at in range(len(kept)):
        damaged = bytearray(kept)
        damaged[at] ^= 1
        in_id = len(HEAD) <= at < len(HEAD) + KEY_ID_BYTES
        with pytest.raises(UnknownKey if in_id else Tampered):
            keys.decrypt(NAME, len(HEAD), bytes(damaged))
    for length in range(len(HEAD) + KEY_ID_BYTES, len(kept)):
        with pytest.raises(Tampered):
            keys.decrypt(NAME, len(HEAD), kept[:length])


def test_a_key_is_not_shown() -> None:
    assert KEYS[0].hex() not in repr(OperatorKeys(KEYS, b"one"))
