"""The gateway's settings: read once at start, then frozen.

Owns names, defaults, checks and what each setting is for: the flags (cli/flags.py), the keys of the configuration file
(config_file.py) and the reference (docs/settings.md) are made of it. Does not know what the settings are used for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal, get_args, get_type_hints

from gateway.base_url import parse_base_url
from gateway.errors import ConfigError
from policies.api_keys import parse_hash

ENV_PREFIX = "VERBATIM_"
REDIS_SCHEMES = ("redis://", "rediss://", "unix://", "redis+sentinel://", "rediss+sentinel://")
REDIS_TIMEOUT_S = 0.1
MAX_CHOICES = 8
"""The largest `n` of one request, and so the least room admission must have."""

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
Traces = Literal["off", "otlp"]


def setting(default: Any, said: str, *, secret: bool = False) -> Any:
    """A field that says what it is for; a secret one is in no repr."""
    return field(default=default, repr=not secret, metadata={"said": said})


@dataclass(frozen=True, slots=True)
class Settings:
    """Each field is the flag `--some-field`, the variable `VERBATIM_SOME_FIELD` and the file's `gateway.some_field`."""

    backend: str | None = setting(
        None, "Base URL of the one backend, such as http://127.0.0.1:8043; or else `models` says who serves what."
    )
    models: str | None = setting(None, "YAML file of models and who serves each; instead of a backend.")
    policy: str | None = setting(
        None,
        "YAML file that says who gets which guarantee; read again when it changes. Without one everybody is welcome.",
    )
    redis: str | None = setting(
        None,
        "URL of the Redis where limits are counted, and answers kept, for all gateways; without one each does so for"
        " itself. May hold a password, so it is better not given as a flag.",
        secret=True,
    )
    redis_timeout_s: float = setting(
        REDIS_TIMEOUT_S, "How long one call to it may take, connecting included; then the request goes on without it."
    )
    admin_key: str | None = setting(
        None,
        "Hash of the key that opens /admin/v1 and /metrics, as `verbatim keys new` prints it. Without one they are"
        " closed.",
        secret=True,
    )
    cache_bytes: int = setting(
        64 * 1024 * 1024,
        "How much memory the answers take that a policy has kept here. Those used longest ago go first.",
    )
    cache_keys: str | None = setting(
        None,
        "What answers and receipts in Redis are encrypted with: keys of 32 bytes in base64, with commas between them."
        " The first one encrypts, all of them decrypt. Better not given as a flag.",
        secret=True,
    )
    receipt_keys: str | None = setting(
        None, "Folder of the keys that receipts are signed with (`verbatim receipts new-key`), or one key's file."
    )
    receipt_bytes: int = setting(
        64 * 1024 * 1024,
        "How much memory receipts take that are kept here: all without a Redis, else those it did not take.",
    )
    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(8042, "Port to listen on.")
    max_concurrent: int = setting(256, "Choices generated at a time; beyond it requests get 429.")
    max_body_bytes: int = setting(4 * 1024 * 1024, "Largest request body.")
    connect_timeout_s: float = setting(5.0, "For connecting to a backend.")
    first_byte_timeout_s: float = setting(
        300.0, "How long a backend may stay silent: a verify call waits here for its place in the batch."
    )
    call_timeout_s: float = setting(
        900.0, "How long one call to a backend may take in all; for mode off that is the whole answer."
    )
    answer_timeout_s: float = setting(
        3600.0, "How long a whole answer may take, whatever its calls. What came until then stays with the client."
    )
    start_timeout_s: float = setting(300.0, "How long to wait at start for a backend to become ready.")
    health_interval_s: float = setting(2.0, "How long to wait before each replica is asked again how it is.")
    health_timeout_s: float = setting(
        5.0, "How long it may take to say so. When it failed to twice in a row, its calls are made elsewhere."
    )
    drain_timeout_s: float = setting(30.0, "How long requests in flight may run on after SIGTERM.")
    log_format: LogFormat = setting("text", "How log lines are written: for people, or as one JSON object each.")
    log_level: LogLevel = setting("info", "What is logged at least.")
    access_log: bool = setting(True, "Whether each request is logged when it has ended.")
    log_prompts: bool = setting(
        False, "Whether the access log says what was asked: the body of each request as it came. Keys are in no body."
    )
    traces: Traces = setting(
        "off", "Whether OpenTelemetry traces are exported, with OTLP over HTTP, as the OTEL_* variables say where to."
    )

    def __post_init__(self) -> None:
        if self.backend is not None:
            try:
                parse_base_url(self.backend)
            except ValueError as error:
                raise ConfigError(f"backend {error}", param="backend") from error
        if self.backend is not None and self.models is not None:
            raise ConfigError("backend and models exclude each other", param="models")
        if self.redis is not None and not self.redis.startswith(REDIS_SCHEMES):
            raise ConfigError(f"redis must be a URL that begins with {', '.join(REDIS_SCHEMES)}", param="redis")
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
        for one in fields(self):
            if one.name.endswith("_s"):
                value = getattr(self, one.name)
                if not (value > 0 and math.isfinite(value)):
                    raise ConfigError(f"{one.name} must be a number above 0", param=one.name)

    @property
    def base_url(self) -> str:
        """Where clients find the gateway, without the `/v1`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class SettingInfo:
    """One setting as its flag, its variable and the reference need it. `choices` are all it may be, none for any."""

    name: str
    type: type
    choices: tuple[str, ...]
    default: object
    said: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.name.upper()


def _info(one: Field[Any], hint: Any) -> SettingInfo:
    parts = get_args(hint)
    choices = parts if parts and all(isinstance(part, str) for part in parts) else ()
    type_ = str if choices else next((part for part in parts if part is not type(None)), hint)
    return SettingInfo(one.name, type_, choices, one.default, one.metadata["said"])


SETTINGS: Mapping[str, SettingInfo] = {
    one.name: _info(one, hint) for one, hint in zip(fields(Settings), get_type_hints(Settings).values(), strict=True)
}
