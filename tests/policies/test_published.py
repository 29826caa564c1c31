"""What is published beside the code says what the code does: schema, documentation, examples."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest

from policies.json_schema import policy_schema
from policies.loader import load_policy
from policies.policy import Decision, Mode, RequestFacts, Serving, resolve
from policies.policy_file import read_policy
from policies.reference import precedence_table, settings_table
from policies.settings import KEYS, Key

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "policies/examples").glob("*.yaml"))
SERVING = Serving(31)
DOWN = Serving(31, verifier=False)


@pytest.mark.parametrize("table", [precedence_table, settings_table])
def test_the_documentation_has_the_codes_tables(table: Callable[[], str]) -> None:
    assert f"-->\n\n{table()}\n\n" in (ROOT / "docs/policies.md").read_text()


def test_the_schema_file_is_what_the_code_makes() -> None:
    assert json.loads((ROOT / "policies/policy.schema.json").read_text()) == policy_schema()
    jsonschema.Draft202012Validator.check_schema(policy_schema())


def valid(document: object) -> bool:
    return jsonschema.Draft202012Validator(policy_schema()).is_valid(document)


MINIMAL = {"version": 1, "anonymous": "a", "tenants": {"a": None}}


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.path)
def test_schema_and_loader_agree_on_each_setting(key: Key[object]) -> None:
    def document(value: object) -> dict[str, object]:
        for part in reversed(key.path.split(".")):
            value = {part: value}
        return {**MINIMAL, "defaults": value}

    for value in (
        None,
        True,
        0,
        1,
        -1,
        0.5,
        2.0,
        61,
        10**6,
        2**63,
        "off",
        "verified",
        "refuse",
        "unlimited",
        "always",
        "digest",
        [],
        ["off"],
        ["a*"],
        ["a*b"],
    ):
        text = json.dumps(document(value))
        try:
            load_policy(text, "p")
            loads = True
        except ValueError:
            loads = False
        # JSON Schema takes 2.0 for a whole number, and knows no order among min, default and max.
        if isinstance(value, float) and value.is_integer():
            continue
        assert valid(document(value)) == loads, (key.path, value)


def test_schema_refuses_unknown_keys_and_names() -> None:
    assert valid(MINIMAL)
    for wrong in (
        {**MINIMAL, "cache": {}},
        {**MINIMAL, "defaults": {"limit": {}}},
        {**MINIMAL, "defaults": {"limits": {"tokens": 1}}},
        {**MINIMAL, "routes": {"/v2": {}}},
        {**MINIMAL, "models": {"a*b": {}}},
        {**MINIMAL, "tenants": {"a b": {}}},
        {**MINIMAL, "version": 2},
        {"anonymous": "a"},
    ):
        assert not valid(wrong)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_right_and_name_their_schema(path: Path) -> None:
    read_policy(path)
    first = path.read_text().splitlines()[0]
    schema = first.removeprefix("# yaml-language-server: $schema=")
    assert (path.parent / schema).resolve() == ROOT / "policies/policy.schema.json"


def decide(example: str, tenant: str, facts: RequestFacts, serving: Serving = SERVING) -> Decision:
    return resolve(read_policy(ROOT / f"policies/examples/{example}.yaml"), tenant, facts, serving)


def test_compliance_is_verified_whatever_is_asked_for() -> None:
    model = "smollm2-135m-instruct"
    decision = decide("compliance", "claims-desk", RequestFacts(seed=1, model=model))
    assert (decision.mode, decision.seed, decision.sampling["temperature"]) == (Mode.VERIFIED, 42, 0.0)
    assert decision.receipt is not None and decision.receipt.holds_prompt
    for weaker in (RequestFacts(False, model=model), RequestFacts(header="batch_invariant", model=model)):
        with pytest.raises(ValueError, match="allowed are: verified"):
            decide("compliance", "claims-desk", weaker)
    with pytest.raises(ValueError, match="temperature must be 0 here"):
        decide("compliance", "claims-desk", RequestFacts(sampling={"temperature": 0.1}, model=model))
    with pytest.raises(ValueError, match="does not exist"):
        decide("compliance", "claims-desk", RequestFacts(model="gpt"))
    assert not decide("compliance", "claims-desk", RequestFacts(model=model), DOWN).degraded


def test_chat_is_off_unless_asked_and_goes_on_without_a_verifier() -> None:
    assert decide("chat", "visitors", RequestFacts()).mode is Mode.OFF
    assert decide("chat", "visitors", RequestFacts(True)).mode is Mode.VERIFIED
    assert decide("chat", "visitors", RequestFacts(True), DOWN).degraded
    assert decide("chat", "visitors", RequestFacts()).limits.concurrency is not None
    assert decide("chat", "staff", RequestFacts()).limits.concurrency is None


def test_evaluation_is_verified_in_long_windows_and_may_compare() -> None:
    decision = decide("evaluation", "lab", RequestFacts(model="llama"))
    assert (decision.mode, decision.windows, decision.sampling["temperature"]) == (Mode.VERIFIED, (31,), 0.0)
    assert decide("evaluation", "lab", RequestFacts(model="smollm2-135m")).windows == (16, 31)
    assert decision.cache is not None
    assert (decision.cache.tenant, decision.cache.ttl_s) == (None, 30 * 86_400)
    for mode in Mode:
        assert decide("evaluation", "lab", RequestFacts(header=mode)).mode is mode
    for own in (Mode.OFF, Mode.BATCH_INVARIANT, Mode.BATCH_OF_ONE):
        assert decide("evaluation", "lab", RequestFacts(header=own)).cache is None


def test_ci_repeats_itself() -> None:
    decision = decide("ci", "ci", RequestFacts(route="/v1/completions"))
    assert (decision.mode, decision.seed, decision.limits.max_tokens) == (Mode.VERIFIED, 7, 64)
    assert decide("ci", "ci", RequestFacts(seed=3, route="/v1/chat/completions")).limits.max_tokens == 256
