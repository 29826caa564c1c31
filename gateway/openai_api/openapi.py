"""The gateway's own OpenAPI document, made from the very types that requests are read with.

Owns what is said of each path. Bounds of single fields are not in it: a request can fit and be refused, with 400. Null
is taken wherever a field may be left out, and not mentioned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any, TypeAlias

import msgspec

from gateway.openai_api import chat_request, completion_request, tokenization
from gateway.openai_api.body import VIEWS, Rules
from gateway.openai_api.shape import Json
from policies.policy import HEADER, RECEIPT_HEADER

_Body: TypeAlias = tuple[tuple[type[msgspec.Struct], ...], Rules]
_REFS = "#/components/schemas/{name}"
_ERROR: Json = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
            "additionalProperties": False,
        }
    },
    "required": ["error"],
    "additionalProperties": False,
}


def openapi_document(models: Sequence[str]) -> Json:
    """The document of a gateway that serves these models, in OpenAPI 3.1."""
    bodies: dict[str, _Body] = {
        chat_request.ROUTE: (chat_request.PARTS, chat_request.RULES),
        completion_request.ROUTE: (completion_request.PARTS, completion_request.RULES),
    }
    texts: _Body = ((tokenization.TextBody,), Rules())
    ids: _Body = ((tokenization.DetokenizeBody,), Rules())
    others = dict.fromkeys(tokenization.TOKENIZE_ROUTES, texts) | dict.fromkeys(tokenization.DETOKENIZE_ROUTES, ids)
    types = [part for parts, _ in (bodies | others).values() for part in parts]
    _, components = msgspec.json.schema_components(types, schema_hook=_anything, ref_template=_REFS)
    paths: dict[str, Json] = {"/v1/models": {"get": _get("object", "data")}, "/healthz": {"get": _get("status")}}
    paths["/v1/models/{model}"] = {
        "get": _get("id", "object", "created", "owned_by")
        | {"parameters": [{"name": "model", "in": "path", "required": True, "schema": _names(models)}]}
    }
    paths["/v1/receipts/{id}"] = {
        "get": _get("statement", "signature")
        | {"parameters": [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]}
    }
    paths["/.well-known/verbatim-receipts.json"] = {"get": _get("keys")}
    for path, (parts, rules) in bodies.items():
        answer = _ok("id", "object", "created", "model", "choices", "usage")
        answer["content"]["text/event-stream"] = {"schema": {"type": "string"}}
        post = _post(parts, rules, components, models, answer)
        headers = [{"name": name, "in": "header", "schema": {"type": "string"}} for name in (HEADER, RECEIPT_HEADER)]
        paths[path] = {"post": post | {"parameters": headers}}
    for path, (parts, rules) in others.items():
        paths[path] = {"post": _post(parts, rules, components, models, _ok())}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Verbatim", "version": version("verbatim")},
        "paths": paths,
        "components": {"schemas": components | {"Error": _ERROR}},
    }


def _post(
    parts: Sequence[type[msgspec.Struct]],
    rules: Rules,
    components: Mapping[str, Any],
    models: Sequence[str],
    answer: Json,
) -> Json:
    schemas = [components[part.__name__] for part in parts]
    properties: Json = {name: {} for name in sorted(VIEWS)}
    properties |= {name: {"enum": list(values)} for name, values in rules.neutral.items()}
    for schema in schemas:
        properties |= schema["properties"]
    properties["model"] = _names(models)
    body: Json = {
        "type": "object",
        "properties": properties,
        "required": [name for schema in schemas for name in schema.get("required", [])],
        "additionalProperties": False,
    }
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {"200": answer} | _errors(),
    }


def _get(*required: str) -> Json:
    return {"responses": {"200": _ok(*required)} | _errors()}


def _ok(*required: str) -> dict[str, Any]:
    schema = {"type": "object", "required": list(required)}
    return {"description": "The answer.", "content": {"application/json": {"schema": schema}}}


def _errors() -> Json:
    content = {"application/json": {"schema": {"$ref": _REFS.format(name="Error")}}}
    return {status: {"description": "OpenAI's error body.", "content": content} for status in ("4XX", "5XX")}


def _names(models: Sequence[str]) -> Json:
    return {"type": "string", "enum": list(models)}


def _anything(type_: type) -> dict[str, Any]:
    """The schema of what msgspec has none for: JSON of the client's own."""
    assert type_ is object
    return {"description": "Any JSON."}
