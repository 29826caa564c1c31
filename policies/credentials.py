"""How the policy file says who is who: API keys with their expiry, and what JSON web tokens must be.

Owns these parts of the file and their JSON Schema. Never repeats a value: it may be a secret that went astray.
"""

from __future__ import annotations

from datetime import UTC, date, datetime, time
from enum import StrEnum
from urllib.parse import urlsplit

from policies.api_keys import ApiKey, parse_hash, parse_id
from policies.document import Jwt
from policies.kinds import Json, Name, Whole, Words
from policies.sections import Section


class Algorithm(StrEnum):
    """Signatures a token may have. All are asymmetric: what a gateway checks with must not be able to sign."""

    RS256 = "RS256"
    RS384 = "RS384"
    RS512 = "RS512"
    PS256 = "PS256"
    PS384 = "PS384"
    PS512 = "PS512"
    ES256 = "ES256"
    ES384 = "ES384"
    ES512 = "ES512"
    EDDSA = "EdDSA"


LEEWAY = Whole(0, 300)
LEEWAY_S = 30
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


def read_keys(tenant: Section) -> tuple[ApiKey, ...]:
    """The API keys in a tenant's section."""
    keys = (_key(section) for section in tenant.items("keys"))
    return tuple(key for key in keys if key is not None)


def _key(section: Section) -> ApiKey | None:
    id_ = section.require("id", parse_id)
    hash_ = section.require("hash", parse_hash)
    expires_at = section.take("expires", _moment)
    section.close()
    return None if id_ is None or hash_ is None else ApiKey(id_, *hash_, expires_at)


def _moment(value: object) -> float:
    """Seconds since 1970 of a date, which is its beginning in UTC, or of a time with its zone."""
    said = "must be a date such as 2030-01-31, or a time with its zone such as 2030-01-31T12:00:00Z"
    if not isinstance(value, str):
        raise ValueError(said)
    try:
        if len(value) == len("2030-01-31"):
            moment = datetime.combine(date.fromisoformat(value), time(), UTC)
        else:
            moment = datetime.fromisoformat(value)
    except ValueError:
        raise ValueError(said) from None
    if moment.tzinfo is None:
        raise ValueError(said)
    return moment.timestamp()


def read_jwt(section: Section) -> Jwt | None:
    """The section `jwt`."""
    issuer = section.require("issuer", Name().parse)
    audience = section.require("audience", Name().parse)
    tenant_claim = section.require("tenant_claim", Name().parse)
    algorithms = section.take("algorithms", Words(Algorithm).parse)
    leeway_s = section.take("leeway_s", LEEWAY.parse)
    url = section.take("jwks_url", _url)
    file = section.take("jwks_file", Name().parse)
    section.close()
    if ("jwks_url" in section) == ("jwks_file" in section):
        section.mistake("must have just one of jwks_url and jwks_file")
    if issuer is None or audience is None or tenant_claim is None:
        return None
    return Jwt(
        issuer=issuer,
        audience=audience,
        tenant_claim=tenant_claim,
        algorithms=tuple(algorithms or (Algorithm.RS256, Algorithm.ES256)),
        leeway_s=LEEWAY_S if leeway_s is None else leeway_s,
        jwks_url=url,
        jwks_file=file,
    )


def _url(value: object) -> str:
    """A URL whose answer cannot be tampered with on its way."""
    if isinstance(value, str):
        try:
            parts = urlsplit(value)
            safe = parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in LOOPBACK)
        except ValueError:
            safe = False
        if safe and parts.hostname and parts.username is None:
            return value
    raise ValueError("must be an https:// URL without a user name; http:// is for this machine only")


KEY_SCHEMA: Json = {
    "type": "object",
    "additionalProperties": False,
    "required": ["id", "hash"],
    "properties": {
        "id": {"type": "string", "pattern": "^[0-9a-f]{16}$"},
        "hash": {"type": "string", "pattern": "^sha256:[0-9a-f]{32}:[0-9a-f]{64}$"},
        "expires": {"type": "string", "description": "From then on the key is refused."},
    },
}
JWT_SCHEMA: Json = {
    "type": "object",
    "additionalProperties": False,
    "required": ["issuer", "audience", "tenant_claim"],
    "oneOf": [{"required": ["jwks_url"]}, {"required": ["jwks_file"]}],
    "properties": {
        "issuer": {"type": "string", "description": "What `iss` must be."},
        "audience": {"type": "string", "description": "What `aud` must be or hold."},
        "tenant_claim": {"type": "string", "description": "The claim whose value stands in a tenant's jwt_claims."},
        "algorithms": Words(Algorithm).schema() | {"description": "Signatures accepted; RS256 and ES256 unless said."},
        "leeway_s": LEEWAY.schema() | {"description": f"How far clocks may differ; {LEEWAY_S} unless said."},
        "jwks_url": {"type": "string", "description": "Where the issuer publishes its keys."},
        "jwks_file": {"type": "string", "description": "The same in a file, relative to the policy's."},
    },
}
