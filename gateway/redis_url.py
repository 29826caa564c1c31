"""What a URL says of a Redis: where it is, how to get in, and whether sentinels have to be asked for it.

    redis://[USER:PASSWORD@]HOST[:PORT][/DB]                     rediss:// over TLS, unix:// over a socket
    redis+sentinel://[USER:PASSWORD@]HOST[:PORT][,...]/NAME[/DB] NAME is the service; rediss+sentinel:// over TLS

User and password are the Redis's own; `sentinel_username` and `sentinel_password` in the query are the sentinels'. The
query may say what redis-py takes there, such as `ssl_ca_certs=FILE`. Certificates are checked unless it says otherwise.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit, urlunsplit

from redis.asyncio import BlockingConnectionPool, ConnectionPool, Sentinel, SSLConnection
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import SentinelConnectionPool
from redis.backoff import NoBackoff

_SENTINEL = "+sentinel"
SENTINEL_PORT = 26379


def open_pool(url: str, connections: int, wait_s: float) -> ConnectionPool:
    """Connections to the Redis at a URL; raises `ValueError` for what is none, which may show a part of the URL.

    Beyond so many one waits for another to be given back, `wait_s` at most; with sentinels there is no bound.
    """
    # One more try: a connection that idled may have been closed by the other side. No timeouts of the client's own:
    # it makes a task for each call to have one, and on Python 3.11 loses a cancellation that comes at its end.
    common: dict[str, Any] = {"socket_timeout": None, "socket_connect_timeout": None}
    retry = Retry(NoBackoff(), 1)
    parts = urlsplit(url)
    if not parts.scheme.endswith(_SENTINEL):
        if parts.scheme != "unix":
            _check_database(parts.path.strip("/"))
        return _checked(
            BlockingConnectionPool.from_url(url, max_connections=connections, timeout=wait_s, retry=retry, **common)
        )
    user, _, hosts = parts.netloc.rpartition("@")
    name, _, db = parts.path.strip("/").partition("/")
    if not name:
        raise ValueError("a URL of sentinels has to name the service: redis+sentinel://HOST:PORT/NAME")
    _check_database(db)
    alone = parts._replace(
        scheme=parts.scheme.removesuffix(_SENTINEL), netloc=f"{user}@" if user else "", path=f"/{db}" if db else ""
    )
    said: dict[str, Any] = dict(parse_url(urlunsplit(alone)))
    secure = said.pop("connection_class", None) is SSLConnection
    asked = {key: said.pop(f"sentinel_{key}") for key in ("username", "password") if f"sentinel_{key}" in said}
    asked |= {key: value for key, value in said.items() if key.startswith("ssl_")} | common | {"ssl": secure}
    sentinels = Sentinel([_address(host) for host in hosts.split(",")], sentinel_kwargs=asked)  # type: ignore[no-untyped-call]
    return _checked(SentinelConnectionPool(name, sentinels, ssl=secure, retry=retry, **said, **common))  # type: ignore[no-untyped-call]


async def close_sentinels(pool: ConnectionPool) -> None:
    """Close the connections to those who were asked where the pool's Redis is."""
    if isinstance(pool, SentinelConnectionPool):
        for sentinel in pool.sentinel_manager.sentinels:
            await sentinel.aclose()


def _checked(pool: ConnectionPool) -> ConnectionPool:
    # What the query says that redis-py does not take shows when there is a connection, which need not be open.
    try:
        pool.connection_class(**pool.connection_kwargs)
    except TypeError as error:
        raise ValueError("the query of a Redis's URL says something unknown") from error
    return pool


def _check_database(db: str) -> None:
    # redis-py takes what is no number for none, and goes on with database 0, which may be somebody else's.
    if db and not db.isdecimal():
        raise ValueError(f"the database of a Redis is a number, not {db!r}")


def _address(host: str) -> tuple[str, int]:
    parts = urlsplit(f"//{host}")
    if not parts.hostname:
        raise ValueError("a sentinel has no host")
    return parts.hostname, parts.port or SENTINEL_PORT
