"""The gateway's settings: read once from flags and environment, then frozen.

Owns names, defaults and checks. A flag wins over its environment variable. An error names the flag or the variable at
fault. Does not know what the settings are used for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from gateway.errors import ConfigError
from policies.api_keys import parse_hash

ENV_PREFIX = "VERBATIM_"
MAX_CHOICES = 8
"""The largest `n` of one request, and so the least room admission must have."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Each field is the flag `--some-field` and the environment variable `VERBATIM_SOME_FIELD`."""

    backend: str | None = None
    """Base URL of the one backend; or else `models` says who serves what."""
    models: str | None = None
    """The models file."""
    policy: str | None = None
    """The policy file; without one everybody is welcome."""
    redis: str | None = field(default=None, repr=False)
    """URL of the Redis where limits are counted, and answers kept, for all gateways; without one each does so for
    itself. May hold a password, so it is better given in the environment than as a flag."""
    admin_key: str | None = field(default=None, repr=False)
    """The hash of the key that opens `/admin/v1` and `/metrics`, as `verbatim keys new` prints it. Without one they are
    closed."""
    cache_bytes: int = 64 * 1024 * 1024
    """How much memory the answers take that a policy has kept here. Those used longest ago go first."""
    receipt_keys: str | None = None
    """The folder of the keys that receipts are signed with (`verbatim receipts new-key`), or one key's file."""
    receipt_bytes: int = 64 * 1024 * 1024
    """How much memory receipts take that are kept here: all without a Redis, else those it did not take."""
    host: str = "127.0.0.1"
    port: int = 8042
    max_concurrent: int = 256
    """Choices generated at a time; beyond it requests get 429. Also the number of connections to the backend."""
    max_body_bytes: int = 4 * 1024 * 1024
    connect_timeout_s: float = 5.0
    first_byte_timeout_s: float = 300.0
    """How long a backend may stay silent: a verify call waits here for its place in the batch."""
    call_timeout_s: float = 900.0
    """How long one call to the backend may take in all; for mode off that is the whole answer."""
    start_timeout_s: float = 300.0
    """How long to wait at start for the backend to become ready."""
    health_interval_s: float = 2.0
    """How long to wait before each replica is asked again how it is."""
    health_timeout_s: float = 5.0
    """How long it may take to say so. When it failed to twice in a row, its calls are made elsewhere."""
    drain_timeout_s: float = 30.0
    """How long requests in flight may run on after SIGTERM."""

    def __post_init__(self) -> None:
        if self.backend is not None and not self.backend.startswith(("http://", "https://")):
            raise ConfigError("backend must be an http:// or https:// URL", param="backend")
        if self.backend is not None and self.models is not None:
            raise ConfigError("backend and models exclude each other", param="models")
        if self.redis is not None and not self.redis.startswith(("redis://", "rediss://", "unix://")):
            raise ConfigError("redis must be a redis://, rediss:// or unix:// URL", param="redis")
        if self.admin_key is not None:
            try:
                parse_hash(self.admin_key)
            except ValueError as error:
                raise ConfigError(f"admin_key {error}", param="admin_key") from None  # the cause may hold a key
        if not 0 <= self.port <= 65535:
            raise ConfigError("port must be between 0 and 65535", param="port")
        if self.max_concurrent < MAX_CHOICES:
            raise ConfigError(f"max_concurrent must be at least {MAX_CHOICES}", param="max_concurrent")
        if self.max_body_bytes < 1:
            raise ConfigError("max_body_bytes must be at least 1", param="max_body_bytes")
        for name in ("cache_bytes", "receipt_bytes"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be 0 or more", param=name)
        for setting in fields(self):
            if setting.name.endswith("_s"):
                value = getattr(self, setting.name)
                if not (value > 0 and math.isfinite(value)):
                    raise ConfigError(f"{setting.name} must be a number above 0", param=setting.name)

    @property
    def base_url(self) -> str:
        """Where clients find the gateway, without the `/v1`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


def read_settings(flags: Mapping[str, object], env: Mapping[str, str]) -> Settings:
    """Settings from flags (None where not given) and environment; raises `ConfigError` naming the key at fault."""
    values: dict[str, object] = {}
    sources: dict[str, str] = {}
    for setting in fields(Settings):
        flag = flags.get(setting.name)
        variable = ENV_PREFIX + setting.name.upper()
        if flag is not None:
            values[setting.name] = flag
            sources[setting.name] = "--" + setting.name.replace("_", "-")
        elif variable in env:
            values[setting.name] = _parse(env[variable], str(setting.type), variable)
            sources[setting.name] = variable
    if "backend" not in values and "models" not in values:
        raise ConfigError(
            f"no backend: give --backend URL or --models FILE, or set {ENV_PREFIX}BACKEND or {ENV_PREFIX}MODELS",
            param="backend",
        )
    try:
        return Settings(**values)  # type: ignore[arg-type]  # checked field by field above and in __post_init__
    except ConfigError as error:
        source = sources.get(error.param or "", error.param)
        raise ConfigError(f"{source}: {error.message}", param=error.param) from error


def _parse(text: str, type_: str, variable: str) -> object:
    if type_.startswith("str"):
        return text
    try:
        return int(text) if type_ == "int" else float(text)
    except ValueError:
        raise ConfigError(f"{variable}: {text!r} is no {'whole ' if type_ == 'int' else ''}number") from None
