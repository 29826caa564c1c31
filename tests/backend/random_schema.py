"""Random JSON schemas of what is supported, whose texts tend to end soon, and the check of such a text."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema

NAMES = ["id", "name", "tags", "größe", 'a "b"', "x-y", "1"]
Schema = dict[str, Any]


def random_schema(rng: random.Random, depth: int = 2) -> Schema:
    kinds = [_integer, _number, _string, _choice, _constant]
    if depth:
        kinds += [_object, _object, _array, _either]
    return rng.choice(kinds)(rng, depth - 1)


def check(text: str, schema: Schema) -> None:
    """Raises where a finished text is no JSON, or not of the schema."""
    jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).validate(json.loads(text))


def _integer(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(-1000, 1000)
    return {"type": "integer", "minimum": low, "maximum": low + rng.choice([0, 1, 9, 12345])}


def _number(rng: random.Random, depth: int) -> Schema:
    return {"type": "number", "exclusiveMinimum": -1, "maximum": rng.choice([0.5, 3, 17.25]), "multipleOf": 0.25}


def _string(rng: random.Random, depth: int) -> Schema:
    return rng.choice(
        [
            {"type": "string", "minLength": 1, "maxLength": 4},
            {"type": "string", "maxLength": 2},
            {"type": "string", "pattern": "^[a-c]{2}-[0-9]?$"},
            {"type": "string", "format": "date"},
            {"type": "string", "format": "ipv4"},
        ]
    )


def _choice(rng: random.Random, depth: int) -> Schema:
    return {"enum": rng.sample(["red", "grün", None, True, 7, -0.5, {"a": [1]}, [], ""], 3)}


def _constant(rng: random.Random, depth: int) -> Schema:
    return rng.choice([{"const": {"z": 1, "a": [None, "é"]}}, {"type": "boolean"}, {"type": "null"}])


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(NAMES, rng.randint(0, 3))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(0, 2)
    return {"type": "array", "items": random_schema(rng, depth), "minItems": low, "maxItems": low + rng.randint(0, 2)}


def _either(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [random_schema(rng, depth), random_schema(rng, depth)]}
