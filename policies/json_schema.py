"""The JSON Schema of policy files, for editors: made from the same tables as the loader, so it cannot lag behind.

It is published as policies/policy.schema.json. It says less than the loader checks: what one value says of another
(that an anonymous tenant exists, that bounds leave something between them) is beyond it.
"""

from __future__ import annotations

from policies.credentials import JWT_SCHEMA, KEY_SCHEMA
from policies.document import Unavailable
from policies.kinds import UNLIMITED, Json, Names, Word
from policies.loader import ROUTES, TENANT, VERSION
from policies.settings import TREE, Key, Tree

SCHEMA_ID = "https://json-schema.org/draft/2020-12/schema"


def policy_schema() -> Json:
    """The schema as a JSON value."""
    rule = _section(TREE)
    properties = rule["properties"]
    assert isinstance(properties, dict)
    credentials = {
        "keys": {"type": "array", "items": KEY_SCHEMA, "description": "API keys; `verbatim keys new` makes one."},
        "jwt_claims": Names().schema() | {"description": "Values of jwt.tenant_claim that stand for this tenant."},
    }
    tenant = {**rule, "properties": {**credentials, **properties}}
    return {
        "$schema": SCHEMA_ID,
        "title": "Verbatim policy",
        "type": "object",
        "additionalProperties": False,
        "required": ["version"],
        "properties": {
            "version": {"const": VERSION},
            "anonymous": {
                "type": "string",
                "description": "The tenant of requests without credentials; none unless said.",
            },
            "limits_unavailable": Word(Unavailable).schema()
            | {"description": "What becomes of requests while Redis does not answer; deny unless said."},
            "jwt": JWT_SCHEMA,
            "defaults": {"$ref": "#/$defs/rule"},
            "models": _named("rule", r"^[^*]+\*?$|^\*$"),
            "routes": {
                "type": "object",
                "additionalProperties": False,
                "properties": {route: {"$ref": "#/$defs/rule"} for route in ROUTES},
            },
            "tenants": _named("tenant", f"^{TENANT.pattern}$"),
        },
        "$defs": {"rule": rule, "tenant": tenant},
    }


def _section(tree: Tree) -> Json:
    properties = {
        name: entry.kind.schema() | {"description": entry.doc, "default": _as_written(entry.built_in)}
        if isinstance(entry, Key)
        else _section(entry)
        for name, entry in tree.items()
    }
    # An empty section is null in YAML.
    return {"type": ["object", "null"], "additionalProperties": False, "properties": properties}


def _as_written(value: object) -> object:
    if isinstance(value, tuple):
        return [str(item) for item in value]
    return UNLIMITED if value is None else value


def _named(definition: str, pattern: str) -> Json:
    entries = {pattern: {"$ref": f"#/$defs/{definition}"}}
    return {"type": ["object", "null"], "additionalProperties": False, "patternProperties": entries}
