"""What an operator asks for: from a body to a valid wish, with errors that name the field at fault."""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

from gateway.commit_log.key import KEY_BYTES, fingerprint_tag, reader_tag
from gateway.commit_log.selection import Selection
from gateway.errors import ModelNotFound, RequestError
from gateway.models import Models
from gateway.openai_api import chat_request
from gateway.openai_api.ask import Ask
from gateway.openai_api.body import Rules, read_body, take_rest
from gateway.openai_api.parsers import PARSERS

_DIGITS = re.compile(f"[0-9a-f]{{1,{2 * KEY_BYTES}}}")


class FindBody(msgspec.Struct, forbid_unknown_fields=True):
    request: dict[str, object]
    tenant: str | None = None
    route: str = chat_request.ROUTE
    determinism: str | None = None


class PurgeBody(msgspec.Struct, forbid_unknown_fields=True):
    tenant: str | None = None
    shared: bool = False
    model: str | None = None
    fingerprint: str | None = None
    prefix: str | None = None
    everything: bool = False


@dataclass(frozen=True, slots=True)
class Find:
    """The logs of a request, had this tenant made it; None for who shows no credentials."""

    ask: Ask
    tenant: str | None


def parse_find(content: bytes) -> Find:
    """Raises `RequestError`."""
    body = take_rest(read_body(content, Rules(free=frozenset({"request"}))), FindBody)
    if body.route not in PARSERS:
        raise RequestError(f"route must be one of {', '.join(PARSERS)}", param="route")
    return Find(PARSERS[body.route](msgspec.json.encode(body.request), body.determinism), body.tenant)


def parse_purge(content: bytes, models: Models) -> Selection:
    """Raises `RequestError`; also for a body that chooses nothing: only one that says so means all logs."""
    body = take_rest(read_body(content, Rules()), PurgeBody)
    if body.tenant is not None and body.shared:
        raise RequestError("shared logs are no tenant's: give tenant or shared", param="shared")
    if body.model is not None and body.fingerprint is not None:
        raise RequestError("model means the fingerprint that it has now: give one of the two", param="fingerprint")
    if body.prefix is not None and not _DIGITS.fullmatch(body.prefix):
        raise RequestError("prefix must be the first digits of keys, in lower-case hexadecimal", param="prefix")
    fingerprint = body.fingerprint if body.model is None else _fingerprint(models, body.model)
    selection = Selection(
        reader_tag=reader_tag(body.tenant) if body.tenant is not None or body.shared else b"",
        fingerprint_tag=b"" if fingerprint is None else fingerprint_tag(fingerprint),
        prefix=body.prefix or "",
    )
    if body.everything == (selection != Selection()):
        raise RequestError(
            "say which logs: tenant or shared, model or fingerprint, prefix; or everything, by itself",
            param="everything",
        )
    return selection


def parse_key(text: str) -> bytes:
    """The key of a log; raises `RequestError`."""
    if len(text) != 2 * KEY_BYTES or not _DIGITS.fullmatch(text):
        raise RequestError(f"a key has {2 * KEY_BYTES} hexadecimal digits, in lower case", param="key")
    return bytes.fromhex(text)


def _fingerprint(models: Models, name: str) -> str:
    for group in models.groups:
        if group.model == name:
            return group.fingerprint
    served = ", ".join(repr(group.model) for group in models.groups)
    raise ModelNotFound(f"no logs are kept for a model {name!r}, but for {served or 'none'}", param="model")
