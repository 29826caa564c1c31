"""The operator's API: who is let in, and what it says and does."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from answers import error
from click.testing import CliRunner, Result
from launched import Gateway, launch_gateway, launch_models
from redis_process import RedisProcess, redis_process
from served import served
from toy_backend import ToyBackend, Wait, on

from gateway.admin.access import AdminAccess
from gateway.cli import main
from gateway.commit_log.commit_log import CommitLog
from gateway.commit_log.memory import MemoryLogs
from gateway.commit_log.purges import Purges
from gateway.commit_log.redis import RedisLogs
from gateway.errors import ConfigError, NotAllowed, Unauthenticated
from gateway.models_file import ModelConfig, UpstreamConfig
from gateway.redis_connection import RedisConnection
from gateway.settings import Settings
from policies.api_keys import new_key
from policies.document import FixedPolicy
from policies.loader import load_policy

KEY, KEPT = new_key()
ADMIN = {"authorization": f"Bearer {KEY}"}
STATISTICS = "/admin/v1/statistics"
POLICY = FixedPolicy(
    load_policy(
        "version: 1\nanonymous: a\n"
        "defaults: {cache: {scope: tenant}}\n"
        "tenants:\n"
        "  a: {determinism: {mode: verified}}\n"
        "  b: {determinism: {mode: verified}}\n"
        "  c: {determinism: {mode: verified}, cache: {scope: none}}\n",
        "policy.yaml",
    )
)
CHAT = {"model": "toy", "messages": [{"role": "user", "content": "hi"}]}


@asynccontextmanager
async def sharing(backend_url: str, redis_url: str, look_every_s: float = 0.05) -> AsyncIterator[Gateway]:
    """A gateway that shares its logs, and purges in no time."""
    connection = RedisConnection(redis_url, deadline_s=10)
    memory, shared = MemoryLogs(1 << 20, time.monotonic), RedisLogs(connection, time.monotonic)
    commit_log = CommitLog(memory, shared)
    commit_log.purges = Purges(commit_log.forget, connection, look_every_s)
    try:
        async with launch_gateway(backend_url, policies=POLICY, commit_log=commit_log, admin_key=KEPT.hash) as gateway:
            yield gateway
    finally:
        await connection.aclose()


# --- access


def test_the_admin_key_opens() -> None:
    access = AdminAccess(KEPT.hash)
    access.check(f"Bearer {KEY}")
    access.check(f"bearer  {KEY} ")
    assert repr(access) == "<AdminAccess by key>"


@pytest.mark.parametrize(
    "authorization", [None, "", "Bearer", "Bearer ", f"Basic {KEY}", KEY, f"Bearer {KEY}x", f"Bearer {new_key()[0]}"]
)
def test_nothing_else_does(authorization: str | None) -> None:
    with pytest.raises(Unauthenticated) as caught:
        AdminAccess(KEPT.hash).check(authorization)
    assert KEY not in str(caught.value)


def test_without_a_key_nobody_is_let_in() -> None:
    with pytest.raises(NotAllowed, match="verbatim keys new"):
        AdminAccess(None).check(f"Bearer {KEY}")


def test_the_setting_is_a_hash_and_is_never_shown() -> None:
    settings = Settings("http://x", admin_key=KEPT.hash)
    assert KEPT.hash not in repr(settings)
    with pytest.raises(ConfigError) as caught:
        Settings("http://x", admin_key=KEY)
    assert caught.value.param == "admin_key"
    assert KEY not in str(caught.value)


async def test_a_gateway_without_an_admin_key_says_how_to_set_one(gateway: Gateway) -> None:
    said = error(await gateway.http.get(STATISTICS, headers=ADMIN), 403)
    assert said["code"] == "not_allowed"
    assert "--admin-key" in said["message"]


async def test_the_admin_key_is_no_tenants_key(toy: ToyBackend) -> None:
    async with launch_gateway(toy.url, admin_key=KEPT.hash) as gateway:
        assert (await gateway.http.get(STATISTICS, headers=ADMIN)).status_code == 200
        refused = await gateway.http.get(STATISTICS)
        assert error(refused, 401)["code"] == "invalid_api_key"
        assert refused.headers["www-authenticate"] == "Bearer"
        assert error(await gateway.chat(headers=ADMIN), 401)["code"] == "invalid_api_key"


# --- statistics


async def test_statistics(toy: ToyBackend) -> None:
    configs = (
        ModelConfig(None, (toy.url,)),
        ModelConfig("far", (), upstreams=(UpstreamConfig("http://127.0.0.1:1", "far", "secret"),)),
    )
    async with launch_models(configs, policies=POLICY, admin_key=KEPT.hash) as gateway:
        assert (await gateway.chat(max_tokens=4)).status_code == 200
        assert (await gateway.chat(max_tokens=3)).status_code == 200
        said = (await gateway.http.get(STATISTICS, headers=ADMIN)).json()
        memory = said["logs"].pop("memory")
        assert memory["logs"] == 1 and 0 < memory["bytes"] < memory["max_bytes"]
        served = {"hit": 1, "follow": 0, "lead": 1}
        assert said["logs"] == {"served": served, "in_flight": 0, "conflicts": 0, "shared": None}
        assert said["requests"] == {"choices_in_flight": 0, "most_choices": 256, "by_tenant": {}, "draining": False}
        model, far = said["models"]
        assert (model["model"], model["fingerprint"], model["trouble"]) == ("toy", "toy-1", None)
        assert model["replicas"] == [
            {
                "url": toy.url,
                "roles": ["draft", "verify"],
                "fingerprint": "toy-1",
                "belongs": True,
                "well": True,
                "trouble": None,
                "breaker": "closed",
                "in_flight": 0,
            }
        ]
        assert (far["model"], far["replicas"]) == ("far", [])
        assert far["upstreams"] == [{"url": "http://127.0.0.1:1", "breaker": "closed", "in_flight": 0}]


async def test_statistics_of_a_request_under_way(toy: ToyBackend) -> None:
    release = asyncio.Event()
    toy.faults = on("/v1/verify", Wait(release), nth=1)
    async with launch_gateway(toy.url, policies=POLICY, admin_key=KEPT.hash) as gateway:
        running = asyncio.create_task(gateway.chat(max_tokens=20))
        await toy.hung.acquire()
        said = (await gateway.http.get(STATISTICS, headers=ADMIN)).json()
        assert (said["requests"]["choices_in_flight"], said["requests"]["by_tenant"]) == (1, {"a": 1})
        assert said["logs"]["in_flight"] == 1
        assert said["models"][0]["replicas"][0]["in_flight"] == 1
        release.set()
        assert (await running).status_code == 200


async def test_statistics_of_a_shared_store_and_of_one_that_is_gone(toy: ToyBackend, tmp_path: Path) -> None:
    with redis_process(tmp_path) as server:
        async with sharing(toy.url, server.url) as gateway:
            assert (await gateway.chat(max_tokens=4)).status_code == 200
            shared = (await gateway.http.get(STATISTICS, headers=ADMIN)).json()["logs"]["shared"]
            assert (shared["answers"], shared["breaker"], shared["keys"], shared["damaged"]) == (True, "closed", 1, 0)
            assert shared["bytes"] > 0
            server.stop()
            shared = (await gateway.http.get(STATISTICS, headers=ADMIN)).json()["logs"]["shared"]
            assert (shared["answers"], shared["keys"]) == (False, None)


# --- looking up


async def find(gateway: Gateway, request: object, **more: object) -> httpx.Response:
    return await gateway.http.post("/admin/v1/logs/find", json={"request": request, **more}, headers=ADMIN)


async def test_the_logs_of_a_request(toy: ToyBackend) -> None:
    body = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "n": 2, "max_tokens": 6}
    async with launch_gateway(toy.url, policies=POLICY, admin_key=KEPT.hash) as gateway:
        before = (await find(gateway, body)).json()["logs"]
        assert [log["memory"] for log in before] == [{"tokens": 0}, {"tokens": 0}]
        answered = (await gateway.http.post("/v1/chat/completions", json=body | {"temperature": 1})).json()
        logs = (await find(gateway, body | {"temperature": 1})).json()["logs"]
        assert [log["text"] for log in logs] == [choice["message"]["content"] for choice in answered["choices"]]
        assert {(log["model"], log["fingerprint"], log["memory"]["tokens"]) for log in logs} == {("toy", "toy-1", 6)}
        assert all(len(log["token_ids"]) == 6 and log["shared"] is None for log in logs)
        one = await gateway.http.get(f"/admin/v1/logs/{logs[1]['key']}", headers=ADMIN)
        assert one.json() == logs[1]
        text = {"model": "toy", "prompt": "hi", "max_tokens": 3}
        assert (await find(gateway, text, route="/v1/completions", tenant="a")).json()["logs"][0]["token_ids"] == []
        # Another tenant's log is another one.
        (other,) = (await find(gateway, body | {"n": 1, "temperature": 1}, tenant="b")).json()["logs"]
        assert other["key"] != logs[0]["key"] and other["token_ids"] == []


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({}, "request", "is required"),
        ({"request": []}, "request", "Expected"),
        ({"request": {}}, "messages", "is required"),
        ({"request": {"model": "toy", "messages": []}}, "messages", ""),
        ({"request": {"model": "toy", "prompt": "x"}, "route": "/v1/x"}, "route", "must be one of"),
        ({"request": CHAT, "tenant": "nobody"}, "tenant", "there is no tenant"),
        ({"request": CHAT, "tenants": "a"}, "tenants", "unknown"),
        ({"request": CHAT, "determinism": "off"}, "request", "mode off, which has no log"),
        ({"request": CHAT, "tenant": "c"}, "request", "keeps no log"),
        ({"request": CHAT | {"model": "x"}}, "model", "does not exist"),
    ],
)
async def test_what_cannot_be_found_says_why(toy: ToyBackend, body: object, param: str, said: str) -> None:
    async with launch_gateway(toy.url, policies=POLICY, admin_key=KEPT.hash) as gateway:
        response = await gateway.http.post("/admin/v1/logs/find", json=body, headers=ADMIN)
        found = error(response, 404 if param == "model" else 400)
        assert found["param"] == param
        assert said in found["message"]


async def test_a_key_that_is_none_and_one_of_no_log(toy: ToyBackend) -> None:
    async with launch_gateway(toy.url, policies=POLICY, admin_key=KEPT.hash) as gateway:
        for text in ("x", "A" * 80, "0" * 79):
            assert error(await gateway.http.get(f"/admin/v1/logs/{text}", headers=ADMIN), 400)["param"] == "key"
        found = error(await gateway.http.get(f"/admin/v1/logs/{'0' * 80}", headers=ADMIN), 404)
        assert (found["code"], found["param"]) == ("log_not_found", "key")


# --- purging


async def purge(gateway: Gateway, **wish: object) -> httpx.Response:
    return await gateway.http.post("/admin/v1/logs/purge", json=wish, headers=ADMIN)


async def test_purging_chooses(toy: ToyBackend) -> None:
    async with launch_gateway(toy.url, policies=POLICY, admin_key=KEPT.hash) as gateway:

        async def ask() -> str:
            response = await gateway.chat(max_tokens=4)
            assert response.status_code == 200
            return str(response.headers["x-verbatim-cache"])

        (key,) = [log["key"] for log in (await find(gateway, CHAT)).json()["logs"]]
        assert (await ask(), await ask()) == ("lead", "hit")
        for wish in ({"tenant": "b"}, {"shared": True}, {"fingerprint": "toy-2"}, {"tenant": "b", "model": "toy"}):
            assert (await purge(gateway, **wish)).json() == {"purged": {"memory": 0, "shared": None}}
        assert await ask() == "hit"
        for wish in (
            {"tenant": "a"},
            {"model": "toy"},
            {"fingerprint": "toy-1"},
            {"prefix": key[:20]},
            {"tenant": "a", "model": "toy", "prefix": key},
            {"everything": True},
        ):
            assert (await purge(gateway, **wish)).json() == {"purged": {"memory": 1, "shared": None}}
            assert await ask() == "lead", wish


@pytest.mark.parametrize(
    ("wish", "status", "param"),
    [
        ({}, 400, "everything"),
        ({"everything": True, "tenant": "a"}, 400, "everything"),
        ({"everything": 1}, 400, "everything"),
        ({"tenant": "a", "shared": True}, 400, "shared"),
        ({"model": "toy", "fingerprint": "toy-1"}, 400, "fingerprint"),
        ({"model": "other"}, 404, "model"),
        ({"prefix": "*"}, 400, "prefix"),
        ({"prefix": ""}, 400, "prefix"),
        ({"tenant": 1}, 400, "tenant"),
        ({"tennant": "a"}, 400, "tennant"),
    ],
)
async def test_a_purge_that_is_not_clear_is_refused(
    toy: ToyBackend, wish: dict[str, object], status: int, param: str
) -> None:
    async with launch_gateway(toy.url, policies=POLICY, admin_key=KEPT.hash) as gateway:
        assert error(await purge(gateway, **wish), status)["param"] == param


async def test_a_purge_reaches_another_gateway(toy: ToyBackend, server: RedisProcess) -> None:
    async with sharing(toy.url, server.url) as here, sharing(toy.url, server.url) as there:
        await here.chat(max_tokens=4)
        assert (await there.chat(max_tokens=4)).headers["x-verbatim-cache"] == "hit"
        watching = asyncio.create_task(there.log.purges.watch())
        try:
            assert (await purge(here, tenant="a")).json() == {"purged": {"memory": 1, "shared": 1}}
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        assert len(there.log.stores.memory) == 0
        assert (await there.chat(max_tokens=4)).headers["x-verbatim-cache"] == "lead"


async def test_what_is_asked_for_during_a_purge_brings_nothing_back(toy: ToyBackend, server: RedisProcess) -> None:
    """Redis still has the log when the other gateway has forgotten it, and whoever reads it must not remember it."""
    async with sharing(toy.url, server.url, look_every_s=1.0) as here, sharing(toy.url, server.url) as there:
        first = await here.chat(max_tokens=4)
        assert (await there.chat(max_tokens=4)).headers["x-verbatim-cache"] == "hit"
        purges = there.log.purges
        connection = RedisConnection(server.url, deadline_s=10)
        purging = asyncio.create_task(purge(here, tenant="a"))
        while len(there.log.stores.memory):
            await purges.catch_up(connection)
        for gateway in (here, there):
            meanwhile = await gateway.chat(max_tokens=4)
            assert meanwhile.headers["x-verbatim-cache"] == "lead"
            assert meanwhile.json()["choices"] == first.json()["choices"]
        assert (await purging).json() == {"purged": {"memory": 1, "shared": 1}}
        await purges.catch_up(connection)
        assert len(here.log.stores.memory) == len(there.log.stores.memory) == 0
        for expected in ("lead", "hit"):
            assert (await there.chat(max_tokens=4)).headers["x-verbatim-cache"] == expected
        assert (await here.chat(max_tokens=4)).headers["x-verbatim-cache"] == "hit"
        await connection.aclose()


async def test_a_purge_without_the_shared_store_is_said_to_be_half_done(toy: ToyBackend, tmp_path: Path) -> None:
    with redis_process(tmp_path) as server:
        async with sharing(toy.url, server.url) as gateway:
            await gateway.chat(max_tokens=4)
            server.stop()
            assert error(await purge(gateway, everything=True), 503)["code"] == "logs_unavailable"
            assert len(gateway.log.stores.memory) == 0
            said = error(await gateway.http.get(f"/admin/v1/logs/{'0' * 80}", headers=ADMIN), 503)
            assert said["code"] == "logs_unavailable"


# --- the command line


def admin(url: str, *argv: str, key: str | None = KEY) -> Result:
    env = {"VERBATIM_ADMIN_SECRET": key} if key is not None else {}
    return CliRunner().invoke(main, ["admin", "--url", url, *argv], env=env)


def test_the_commands(tmp_path: Path) -> None:
    request = tmp_path / "request.json"
    request.write_text(json.dumps(CHAT | {"max_tokens": 4}))
    with served(ToyBackend(), policies=POLICY, admin_key=KEPT.hash) as gateway:
        httpx.post(f"{gateway.url}/v1/chat/completions", content=request.read_bytes(), trust_env=False)
        assert json.loads(admin(gateway.url, "statistics").output)["logs"]["memory"]["logs"] == 1
        (log,) = json.loads(admin(f"{gateway.url}/v1/", "find", "--request", str(request)).output)["logs"]
        assert log["memory"] == {"tokens": 4}
        assert json.loads(admin(gateway.url, "log", log["key"]).output) == log
        purged = admin(gateway.url, "purge", "--tenant", "a", "--model", "toy")
        assert json.loads(purged.output) == {"purged": {"memory": 1, "shared": None}}
        gone = admin(gateway.url, "log", log["key"])
        assert (gone.exit_code, "404: there is no log with the key" in gone.output) == (1, True)
        refused = admin(gateway.url, "statistics", key=new_key()[0])
        assert (refused.exit_code, "401: the admin key is needed" in refused.output) == (1, True)


def test_the_help_of_a_command_needs_no_key() -> None:
    result = admin("http://127.0.0.1:1", "purge", "--help", key=None)
    assert (result.exit_code, "--everything" in result.output) == (0, True)


@pytest.mark.parametrize(
    ("url", "key", "argv", "status", "said"),
    [
        ("http://127.0.0.1:1", KEY, ("statistics",), 1, "no gateway answers at http://127.0.0.1:1"),
        ("localhost", KEY, ("statistics",), 1, "no gateway answers at localhost"),
        ("http://127.0.0.1:1", None, ("statistics",), 2, "VERBATIM_ADMIN_SECRET"),
        ("http://127.0.0.1:1", KEPT.hash, ("statistics",), 2, "this is the hash"),
        ("http://127.0.0.1:1", "vb_é", ("statistics",), 2, "--admin-key: this is no key"),
        ("http://127.0.0.1:1", f"{KEY}\n", ("statistics",), 2, "--admin-key: this is no key"),
        ("http://127.0.0.1:1", KEY, ("find", "--request", __file__), 2, "is not valid JSON"),
    ],
)
def test_a_command_that_cannot_be_done_says_why(
    url: str, key: str | None, argv: tuple[str, ...], status: int, said: str
) -> None:
    result = admin(url, *argv, key=key)
    assert result.exit_code == status
    assert said in result.output
    assert KEY not in result.output
