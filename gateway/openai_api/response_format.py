"""What an answer must look like: `response_format`, and the other spellings of the same thing.

Owns the spellings and the one form in which equal schemas look equal: JSON without white space, no escapes but the
necessary ones, keys in the client's order. The order stays because the answer's properties come in the order of the
schema's; keys whose order means nothing are not told apart from those. What a schema or an expression may contain is
the backend's to say.

`response_format` is OpenAI's; a schema is kept to whether or not `strict` says so. `regex` and `json_schema` are
SGLang's, `structured_outputs` and its forerunners `guided_json`, `guided_regex` and `guided_choice` vLLM's; there a
schema may be a text that holds it. Other members of these families, such as `ebnf` or `guided_grammar`, are refused by
name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

import msgspec

from backend.protocol import MAX_GRAMMAR_BYTES, Grammar
from gateway.errors import RequestError
from gateway.openai_api.body import check_nesting
from gateway.openai_api.sampling import require

FREE = frozenset({"response_format", "json_schema", "guided_json", "structured_outputs"})
"""Fields that may hold a schema, in which null is a value."""

ANY_OBJECT: dict[str, object] = {"type": "object"}

_META = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~]")
"""The characters with a meaning in the backend's regular expressions."""

Schema: TypeAlias = dict[str, object] | str
Choices: TypeAlias = Annotated[list[str], msgspec.Meta(min_length=1)]


class _Text(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    pass


class _JsonObject(msgspec.Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    pass


class _NamedSchema(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    schema: dict[str, object]
    description: str | None = None
    strict: bool | None = None


class _JsonSchema(msgspec.Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    json_schema: _NamedSchema


class _StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    json: Schema | None = None
    regex: str | None = None
    choice: Choices | None = None
    json_object: bool | None = None


class FormatFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """As the client wrote them."""

    response_format: _Text | _JsonObject | _JsonSchema | None = None
    regex: str | None = None
    json_schema: Schema | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    structured_outputs: _StructuredOutputs | None = None


@dataclass(frozen=True, slots=True)
class Format:
    """The grammar of the answer, None where it is free, and what the client calls it."""

    grammar: Grammar | None
    field: str


def format_of(fields: FormatFields) -> Format:
    """What the answer must look like; raises `RequestError` naming the field at fault."""
    formats = list(_formats(fields))
    require(len(formats) <= 1, formats[-1].field if formats else "", "is one format too many")
    return formats[0] if formats else Format(None, "response_format")


def _formats(fields: FormatFields) -> Iterator[Format]:
    match fields.response_format:
        case _JsonObject():
            yield schema_format(ANY_OBJECT, "response_format")
        case _JsonSchema(named):
            yield schema_format(named.schema, "response_format.json_schema.schema")
    outputs = fields.structured_outputs or _StructuredOutputs()
    for field, schema in (
        ("json_schema", fields.json_schema),
        ("guided_json", fields.guided_json),
        ("structured_outputs.json", outputs.json),
        ("structured_outputs.json_object", ANY_OBJECT if outputs.json_object else None),
    ):
        if schema is not None:
            yield schema_format(schema, field)
    for field, expression in (
        ("regex", fields.regex),
        ("guided_regex", fields.guided_regex),
        ("structured_outputs.regex", outputs.regex),
    ):
        if expression is not None:
            yield Format(_grammar("regex", expression, field), field)
    for field, choices in (("guided_choice", fields.guided_choice), ("structured_outputs.choice", outputs.choice)):
        if choices is not None:
            alternatives = "|".join(_META.sub(r"\\\g<0>", choice) for choice in choices)
            yield Format(_grammar("regex", f"(?:{alternatives})", field), field)


def schema_format(schema: Schema, field: str) -> Format:
    """The form of JSON that keeps to a schema; raises `RequestError` for `field`."""
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema, type=dict[str, object])
        except (msgspec.DecodeError, RecursionError) as error:
            raise RequestError(f"{field} is not a JSON object: {error}", param=field) from error
        check_nesting(schema, field)
    text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    return Format(_grammar("json_schema", text, field), field)


def _grammar(kind: Literal["json_schema", "regex"], text: str, field: str) -> Grammar:
    require(bool(text), field, "must not be empty")
    require(len(text.encode()) <= MAX_GRAMMAR_BYTES, field, f"must have at most {MAX_GRAMMAR_BYTES} bytes")
    return Grammar(kind, text)
