"""Policy files: YAML text in, a `Policy` out, or every mistake in it with file, line and path.

Owns the sections of the file; what stands in them is settings.py's and credentials.py's. Reads no file itself.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from policies.bounds import contradictions
from policies.credentials import read_jwt, read_keys
from policies.document import Policy, Rule, Tenant, Unavailable
from policies.kinds import Name, Names, Whole, Word, is_pattern
from policies.sections import Mistakes, Section, open_document
from policies.settings import SAMPLING, TREE, Key, Tree

VERSION = 1
ROUTES = ("/v1/chat/completions", "/v1/completions")
"""The paths a rule may speak of: those that generate."""
TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
DIGEST_CHARS = 12


def load_policy(text: str, file: str) -> Policy:
    """The policy that a text says; `file` is what mistakes call it. Raises `FileMistakes`."""
    mistakes = Mistakes(file)
    root = open_document(text, mistakes)
    root.require("version", Whole(VERSION, VERSION).parse)
    anonymous = root.take("anonymous", Name().parse)
    unavailable = root.take("limits_unavailable", Word(Unavailable).parse)
    jwt_section, defaults_section = root.section("jwt"), root.section("defaults")
    models = _named(root, "models", is_pattern, "must be a model's name; a * may stand at its end only")
    routes = _named(root, "routes", ROUTES.__contains__, f"must be one of {', '.join(ROUTES)}")
    tenants = _named(root, "tenants", _is_tenant, "must be at most 64 letters, digits, dots, dashes or underscores")
    root.close()
    policy = Policy(
        tenants={name: _tenant(name, section) for name, section in tenants.items()},
        defaults=Rule("defaults") if defaults_section is None else _rule(defaults_section),
        models={name: _rule(section) for name, section in models.items()},
        routes={path: _rule(section) for path, section in routes.items()},
        anonymous=anonymous,
        jwt=None if jwt_section is None else read_jwt(jwt_section),
        limits_unavailable=unavailable or Unavailable.DENY,
        version=hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARS],
    )
    if anonymous is not None and anonymous not in tenants:
        root.mistake(f"there is no tenant {anonymous!r}", "anonymous")
    _check_credentials(policy, root, tenants)
    mistakes.raise_any()
    for name, message in contradictions(policy):
        tenants[name].mistake(message)
    mistakes.raise_any()
    return policy


def _named(root: Section, key: str, is_right: Callable[[str], bool], must: str) -> dict[str, Section]:
    """The sections under a key whose own keys are names."""
    section = root.section(key)
    if section is None:
        return {}
    entries = dict(section.entries())
    for name in entries:
        if not is_right(name):
            section.mistake(f"the name {must}", name)
    return entries


def _is_tenant(name: str) -> bool:
    return TENANT.fullmatch(name) is not None


def _tenant(name: str, section: Section) -> Tenant:
    keys = read_keys(section)
    jwt_claims = section.take("jwt_claims", Names().parse)
    return Tenant(name, _rule(section), keys, jwt_claims or ())


def _rule(section: Section) -> Rule:
    """The settings in a section, which is closed: whatever else it may hold has been taken before."""
    values: dict[str, object] = {}
    _read(section, TREE, values)
    for name, keys in SAMPLING.items():
        found = (values.get(key.path) for key in (keys.least, keys.default, keys.most))
        known = [value for value in found if isinstance(value, float)]
        if known != sorted(known):
            section.mistake(f"min, default and max of {name} must be in ascending order", "sampling")
    return Rule(section.path, values)


def _read(section: Section, tree: Tree, values: dict[str, object]) -> None:
    for name, entry in tree.items():
        if isinstance(entry, Key):
            section.take(name, partial(_store, values, entry))
        elif (below := section.section(name)) is not None:
            _read(below, entry, values)
    section.close()


def _store(values: dict[str, object], key: Key[Any], value: object) -> None:
    values[key.path] = key.kind.parse(value)


def _check_credentials(policy: Policy, root: Section, tenants: Mapping[str, Section]) -> None:
    """Credentials belong to one tenant each, claims need tokens, and somebody must be let in."""
    key_owners, claim_owners = dict[str, str](), dict[str, str]()
    for tenant in policy.tenants.values():
        section = tenants[tenant.name]
        for key in tenant.keys:
            if (owner := key_owners.setdefault(key.id, tenant.name)) != tenant.name:
                section.mistake(f"the key {key.id} is also {owner}'s", "keys")
        if len({key.id for key in tenant.keys}) < len(tenant.keys):
            section.mistake("holds an id twice", "keys")
        for claim in tenant.jwt_claims:
            if (owner := claim_owners.setdefault(claim, tenant.name)) != tenant.name:
                section.mistake(f"{claim!r} also stands for {owner}", "jwt_claims")
        if tenant.jwt_claims and "jwt" not in root:
            section.mistake("needs a section jwt, which says how tokens are checked", "jwt_claims")
    if policy.anonymous is None and not key_owners and not claim_owners:
        root.mistake("lets nobody in: give a tenant keys or jwt_claims, or name one in the key 'anonymous'")
