"""Ways to a Redis: over TLS, with a user and a password, and by asking sentinels, over real servers."""

from __future__ import annotations

import datetime
import ipaddress
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from redis.asyncio import Redis
from redis.asyncio.sentinel import SentinelConnectionPool
from redis_process import READY, SERVER, free_port, ready_process, redis_process
from toy_model import float32

from gateway.commit_log.purges import Purges
from gateway.commit_log.redis import Lease, RedisLogs
from gateway.commit_log.selection import Selection
from gateway.domain import Token
from gateway.limits.redis import RedisStore
from gateway.limits.store import Charge
from gateway.limits.store import Lease as Places
from gateway.redis_connection import RedisConnection, StoreUnavailable
from gateway.redis_url import SENTINEL_PORT, open_pool

KEY = bytes(range(40))
TOKENS = [Token(1, float32(-0.5)), Token(2, float32(-1.5))]
PASSWORD = "se/cr@t"
QUOTED = "se%2Fcr%40t"
RIGHTS = "~verbatim:* +@read +@write +@scripting +@connection +@fast -@dangerous +info"
"""What docs/policies.md says a gateway needs."""


@asynccontextmanager
async def logs_at(url: str) -> AsyncIterator[RedisLogs]:
    connection = RedisConnection(url, deadline_s=10)
    yield RedisLogs(connection, lambda: 0.0)
    await connection.aclose()


async def keep_and_read(url: str) -> None:
    async with logs_at(url) as logs:
        await logs.append(KEY, 0, TOKENS, 60, Lease("me", 0))
        assert list((await logs.look(KEY, 0, None)).tokens) == TOKENS
        await logs.release(KEY, Lease("me", 0))


# --- TLS and users ---------------------------------------------------------------------------------------------------


def test_the_rights_are_those_of_the_documentation() -> None:
    assert RIGHTS in (Path(__file__).parents[2] / "docs/policies.md").read_text(encoding="utf-8")


def certificate(folder: Path) -> None:
    """A key, and a certificate of 127.0.0.1 that it signed itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a test")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem, none = serialization.Encoding.PEM, serialization.NoEncryption()
    (folder / "cert.pem").write_bytes(made.public_bytes(pem))
    (folder / "key.pem").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, none))


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """The port of a server that speaks TLS alone and knows one user, and the certificate that proves it."""
    server = shutil.which("redis-server")
    if server is None:
        pytest.skip("needs redis-server: the embedded one has no TLS")
    folder, port = tmp_path_factory.mktemp("tls"), free_port()
    certificate(folder)
    conf = f"""
port 0
tls-port {port}
bind 127.0.0.1
save ""
dir {folder}
tls-cert-file {folder}/cert.pem
tls-key-file {folder}/key.pem
tls-ca-cert-file {folder}/cert.pem
tls-auth-clients no
user default off
user gateway on >{PASSWORD} {RIGHTS}
"""
    (folder / "redis.conf").write_text(conf)
    with ready_process([server, str(folder / "redis.conf")], READY):
        yield port, folder / "cert.pem"


async def test_over_tls_with_a_user_of_few_rights(secured: tuple[int, Path]) -> None:
    port, ca = secured
    url = f"rediss://gateway:{QUOTED}@127.0.0.1:{port}/0?ssl_ca_certs={ca}"
    await keep_and_read(url)
    connection = RedisConnection(url, deadline_s=10)
    store, lease = RedisStore(connection), Places("verbatim:{a}:places:x", ("1",), 1, 1000)
    charge = Charge("verbatim:{a}:requests:x", "requests", 1, 60, 1)
    assert (await store.take([charge], lease)).refused is None
    await store.give_back([], lease)
    async with connection.answering():
        assert await connection.redis.dbsize() >= 1 and await connection.redis.info("memory")
    assert (await Purges(lambda selects: 0, connection, 0.01).purge(Selection())).shared == 1
    with pytest.raises(StoreUnavailable):
        async with connection.answering():
            await connection.redis.set("somebody:else", 1)
    await connection.aclose()


@pytest.mark.parametrize(
    "wrong",
    [
        "rediss://gateway:wrong@127.0.0.1:{port}/0?ssl_ca_certs={ca}",
        "rediss://127.0.0.1:{port}/0?ssl_ca_certs={ca}",
        "rediss://gateway:{password}@127.0.0.1:{port}/0",
        "rediss://gateway:{password}@localhost:{port}/0?ssl_ca_certs={ca}",
        "redis://gateway:{password}@127.0.0.1:{port}/0",
    ],
    ids=["password", "nobody", "unknown certificate", "another name's certificate", "no TLS"],
)
async def test_who_cannot_get_in_is_told_nothing_secret(secured: tuple[int, Path], wrong: str) -> None:
    port, ca = secured
    async with logs_at(wrong.format(port=port, ca=ca, password=QUOTED)) as logs:
        with pytest.raises(StoreUnavailable) as error:
            await logs.look(KEY, 0, None)
        for said in (str(error.value), repr(logs.connection), repr(logs)):
            assert PASSWORD not in said and QUOTED not in said


# --- sentinels -------------------------------------------------------------------------------------------------------


async def test_sentinels_say_where_redis_is_now(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("first", "second", "sentinel")]
    for folder in folders:
        folder.mkdir()
    first, second, watcher = (free_port() for _ in range(3))
    conf = folders[2] / "sentinel.conf"
    conf.write_text(
        f"port {watcher}\nbind 127.0.0.1\ndir {folders[2]}\nsentinel monitor main 127.0.0.1 {first} 1\n"
        "sentinel down-after-milliseconds main 300\nsentinel failover-timeout main 3000\n"
    )
    url = f"redis+sentinel://127.0.0.1:{watcher}/main/0"
    with (
        redis_process(folders[0], first) as leader,
        redis_process(folders[1], second, "--replicaof", f"127.0.0.1 {first}"),
        ready_process([SERVER, str(conf), "--sentinel"], f"+slave slave 127.0.0.1:{second}"),
    ):
        async with (
            logs_at(url) as logs,
            Redis.from_url(f"redis://127.0.0.1:{watcher}") as sentinel,
            sentinel.pubsub() as news,
        ):
            await logs.append(KEY, 0, TOKENS, 60, None)
            assert await logs.connection.redis.execute_command("WAIT", 1, 10_000) == 1
            await news.subscribe("+switch-master")
            leader.stop()
            switched = None
            while switched is None or switched["type"] != "message":
                switched = await news.get_message(timeout=60)
            assert list((await logs.look(KEY, 0, None)).tokens) == TOKENS
            await logs.append(KEY, 2, TOKENS, 60, None)
            assert len((await logs.look(KEY, 0, None)).tokens) == 4


def test_a_url_of_sentinels_says_who_they_are_and_how_to_get_in() -> None:
    pool = open_pool(
        f"rediss+sentinel://gateway:{QUOTED}@one:1,[::1]:2,three/main/5?sentinel_password=other&ssl_ca_certs=/ca", 8, 1
    )
    assert isinstance(pool, SentinelConnectionPool)
    manager = pool.sentinel_manager
    asked = [sentinel.connection_pool.connection_kwargs for sentinel in manager.sentinels]
    assert [(one["host"], one["port"]) for one in asked] == [("one", 1), ("::1", 2), ("three", SENTINEL_PORT)]
    assert {(one.get("username"), one.get("password"), one["ssl_ca_certs"]) for one in asked} == {
        (None, "other", "/ca")
    }
    assert pool.service_name == "main"
    said = pool.connection_kwargs
    assert (said["username"], said["password"], said["db"]) == ("gateway", PASSWORD, 5)
    assert "SSL" in pool.connection_class.__name__
    assert all("SSL" in sentinel.connection_pool.connection_class.__name__ for sentinel in manager.sentinels)


@pytest.mark.parametrize("url", ["redis://one/first", "rediss://one:1/0x", "redis+sentinel://one:1/main/first"])
def test_a_database_that_is_no_number_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="database"):
        open_pool(url, 8, 1)


@pytest.mark.parametrize("url", ["redis://one?foo=1", "redis+sentinel://one:1/main?foo=1"])
def test_a_query_that_redis_does_not_know_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="query"):
        open_pool(url, 8, 1)


@pytest.mark.parametrize("url", ["redis+sentinel://one:1", "redis+sentinel:///main", "http+sentinel://one:1/main"])
def test_what_is_no_url_of_sentinels_is_refused(url: str) -> None:
    with pytest.raises(ValueError):
        open_pool(url, 8, 1)
