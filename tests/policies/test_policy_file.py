"""A policy file that changes under a running gateway."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from pathlib import Path

import pytest

from policies.policy_file import MAX_BYTES, PolicyFile, read_policy
from policies.sections import FileMistakes

MINIMAL = "version: 1\nanonymous: a\ntenants: {a: }\n"
JWT = MINIMAL + "jwt: {issuer: i, audience: a, tenant_claim: t, jwks_file: keys.json}\n"


def seeded(seed: int) -> str:
    return MINIMAL + f"defaults: {{seed: {{default: {seed}}}}}\n"


def seed_in_force(file: PolicyFile) -> object:
    return file.current.defaults.values.get("seed.default")


def overwrite(path: Path, text: str) -> None:
    path.write_bytes(text.encode(errors="surrogateescape"))


def remove(path: Path) -> None:
    path.unlink()


def replace_file(path: Path, text: str) -> None:
    beside = path.with_suffix(".new")
    beside.write_text(text)
    os.replace(beside, path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "policy.yaml"
    path.write_text(seeded(1))
    return path


async def test_a_change_is_taken_and_a_wrong_one_is_not(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = PolicyFile(path)
    overwrite(path, seeded(2))
    await file.reload()
    assert (seed_in_force(file), file.reloads, file.failures) == (2, 1, 0)
    before = file.current
    for wrong in (seeded(3).replace("seed", "sead"), "version: 1\nx: [", "", "\udcff"):
        overwrite(path, wrong)
        await file.reload()
        assert file.current is before
    remove(path)
    await file.reload()
    assert file.current is before
    assert (file.reloads, file.failures) == (1, 5)
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 5
    assert f"{path}:4: defaults.sead: unknown key; did you mean 'seed'?" in caplog.text
    overwrite(path, seeded(4))
    await file.reload()
    assert (seed_in_force(file), file.reloads) == (4, 2)


async def test_not_even_a_mistake_of_ours_ends_the_watch(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = PolicyFile(path)
    with monkeypatch.context() as patch:
        patch.setattr("policies.policy_file.read_policy", lambda path: 1 // 0)
        await file.reload()
    assert (file.reloads, file.failures) == (0, 1)
    assert "ZeroDivisionError" in caplog.text
    await file.reload()
    assert file.reloads == 1


class Stepped(PolicyFile):
    """Looks at its file when it is told to."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._may_look, self._waits = asyncio.Semaphore(0), asyncio.Semaphore(0)

    async def _pause(self) -> bool:
        self._waits.release()
        await self._may_look.acquire()
        return False

    async def looks(self, count: int) -> None:
        for _ in range(count):
            await self._waits.acquire()
            self._may_look.release()
        await self._waits.acquire()
        self._waits.release()


async def test_watching_takes_a_change_once_it_stands_still(path: Path) -> None:
    file = Stepped(path)
    polls = file.looks
    watching = asyncio.create_task(file.watch())
    await polls(2)
    assert (file.reloads, file.failures) == (0, 0)
    replace_file(path, seeded(2))
    await polls(1)
    assert seed_in_force(file) == 1  # it may be half written
    replace_file(path, seeded(3))
    await polls(1)
    assert seed_in_force(file) == 1
    await polls(1)
    assert seed_in_force(file) == 3
    replace_file(path, "broken: [")
    await polls(4)
    assert (seed_in_force(file), file.reloads, file.failures) == (3, 1, 1)  # said once
    remove(path)
    await polls(4)
    assert (seed_in_force(file), file.failures) == (3, 2)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


class Telling(PolicyFile):
    """Says when it has reloaded."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.reloaded = asyncio.Event()

    async def reload(self) -> None:
        await super().reload()
        self.reloaded.set()


async def test_who_asks_need_not_wait_for_the_file_to_stand_still(path: Path) -> None:
    file = Telling(path)
    watching = asyncio.create_task(file.watch())
    overwrite(path, seeded(2))
    file.ask()
    await file.reloaded.wait()
    assert seed_in_force(file) == 2
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_the_key_set_belongs_to_the_policy(tmp_path: Path, path: Path) -> None:
    overwrite(path, JWT)
    with pytest.raises(FileNotFoundError):
        read_policy(path)
    keys = tmp_path / "keys.json"
    for wrong in ("", "[]", "{}", '{"keys": 1}', '{"keys": [1]}', "[" * 100_000):
        overwrite(keys, wrong)
        with pytest.raises(FileMistakes, match=r"keys.json:1: must be a JSON Web Key Set"):
            read_policy(path)
    overwrite(keys, json.dumps({"keys": []}))
    file = PolicyFile(path)
    assert file.current.jwt is not None
    assert file.current.jwt.jwks == '{"keys": []}'
    replace_file(keys, json.dumps({"keys": [{}]}))
    await file.reload()
    assert file.current.jwt.jwks == '{"keys": [{}]}'


def test_what_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    with pytest.raises(FileNotFoundError):
        PolicyFile(path)
    path.write_bytes(b"version: 1 # \xff")
    with pytest.raises(FileMistakes, match="is not UTF-8"):
        PolicyFile(path)
    with path.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(FileMistakes, match="is longer than"):
        PolicyFile(path)
