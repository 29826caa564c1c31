from __future__ import annotations

import hashlib

import pytest

from policies.api_keys import ApiKey, KeyRing, new_key, parse_hash, parse_id


def test_a_key_finds_its_tenant_until_it_expires() -> None:
    first, kept = new_key()
    second, also_kept = new_key()
    dated = ApiKey(also_kept.id, also_kept.salt, also_kept.digest, expires_at=1000.0)
    ring = KeyRing([("acme", kept), ("acme", dated)])
    assert ring.tenant_of(first, 5e9) == "acme"
    assert ring.tenant_of(second, 999.9) == "acme"
    assert ring.tenant_of(second, 1000.0) is None


def test_nothing_else_does() -> None:
    key, kept = new_key()
    other, _ = new_key()
    ring = KeyRing([("acme", kept)])
    id_, secret = key[: len("vb_") + 16], key[len("vb_") + 17 :]
    wrong = "A" * 43 if secret != "A" * 43 else "B" * 43
    for presented in (
        "",
        "none",
        "vb_",
        other,
        f"{id_}_{wrong}",
        key + "A",
        key[:-1],
        key.upper(),
        f" {key}",
        key + "\n",
    ):
        assert ring.tenant_of(presented, 0.0) is None
    assert KeyRing().tenant_of(key, 0.0) is None


def test_what_is_kept_is_a_salted_hash_and_shows_nothing() -> None:
    key, kept = new_key()
    assert kept.digest == hashlib.sha256(kept.salt + key.encode()).digest()
    assert (kept.salt, kept.digest) == parse_hash(kept.hash)
    assert parse_id(kept.id) == kept.id
    for shown in (repr(kept), repr(KeyRing([("acme", kept)]))):
        assert kept.digest.hex() not in shown and str(kept.digest) not in shown
    assert kept.hash != new_key()[1].hash


@pytest.mark.parametrize("value", [None, 1, "", "sha256", "sha256:00:00", "md5:" + "0" * 32 + ":" + "0" * 64, "0" * 17])
def test_what_is_no_id_and_no_hash(value: object) -> None:
    for parse in (parse_id, parse_hash):
        with pytest.raises(ValueError, match=r"must be the (id|hash) that"):
            parse(value)


def test_a_look_up_compares_one_hash_whatever_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that timing tells neither how many keys there are nor whether an id exists."""
    compared = []
    monkeypatch.setattr("policies.api_keys.hmac.compare_digest", lambda a, b: compared.append((a, b)) or a == b)
    key, kept = new_key()
    ring = KeyRing([("acme", kept), *(("acme", new_key()[1]) for _ in range(20))])
    for presented in (key, new_key()[0], "none"):
        compared.clear()
        ring.tenant_of(presented, 0.0)
        assert [len(a) for a, _ in compared] == [32]
