"""`resolve`: the cases by hand, then its laws under hypothesis."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from policies import settings
from policies.decision import Cache, NoSuchModel, NotAllowed, Quota, Rate, Receipt
from policies.document import ANONYMOUS, Policy, Rule, Tenant
from policies.loader import load_policy
from policies.policy import (
    BODY_FIELD,
    DEFAULT_POLICY,
    HEADER,
    PRECEDENCE,
    RECEIPT_HEADER,
    Chosen,
    Decision,
    Mode,
    PolicyError,
    RequestFacts,
    Serving,
    demands_receipts,
    resolve,
    window_schedule,
)

# However busy the machine is: no time is asserted.
UNHURRIED = hypothesis_settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

SERVING = Serving(15)
CHAT = "/v1/chat/completions"


def decide(
    facts: RequestFacts,
    values: dict[str, object] | None = None,
    policy: Policy = DEFAULT_POLICY,
    tenant: str = ANONYMOUS,
) -> Decision:
    """What a request gets under the default policy with other defaults."""
    if values is not None:
        policy = replace(policy, defaults=Rule("defaults", values))
    return resolve(policy, tenant, facts, SERVING)


@pytest.mark.parametrize(
    ("body", "header", "mode"),
    [
        (None, None, Mode.OFF),
        (True, None, Mode.VERIFIED),
        (False, None, Mode.OFF),
        (None, "verified", Mode.VERIFIED),
        (None, " Verified ", Mode.VERIFIED),
        (None, "off", Mode.OFF),
        (True, "verified", Mode.VERIFIED),
        (False, "off", Mode.OFF),
        (None, "batch_invariant", Mode.BATCH_INVARIANT),
        (None, "batch_of_one", Mode.BATCH_OF_ONE),
    ],
)
def test_mode(body: bool | None, header: str | None, mode: Mode) -> None:
    assert decide(RequestFacts(body, header)).mode is mode


@pytest.mark.parametrize(("body", "header"), [(True, "off"), (False, "verified"), (True, "batch_invariant")])
def test_contradiction_is_refused(body: bool, header: str) -> None:
    with pytest.raises(PolicyError) as caught:
        decide(RequestFacts(body, header))
    assert caught.value.field == BODY_FIELD


@pytest.mark.parametrize("header", ["", "yes", "true", "verified,off", "calibrated"])
def test_unknown_mode_names_the_header(header: str) -> None:
    with pytest.raises(PolicyError, match="must be one of off, verified, batch_invariant, batch_of_one") as caught:
        decide(RequestFacts(None, header))
    assert caught.value.field == HEADER


def test_a_mode_that_may_not_be_asked_for_is_refused_and_the_one_that_holds_may_be() -> None:
    values: dict[str, object] = {"determinism.mode": Mode.VERIFIED, "determinism.allow": (Mode.VERIFIED,)}
    assert decide(RequestFacts(), values).mode is Mode.VERIFIED
    assert decide(RequestFacts(True), values).rule == "defaults.determinism.mode"
    with pytest.raises(NotAllowed, match=r"allowed are: verified$") as caught:
        decide(RequestFacts(False), values)
    assert caught.value.field == BODY_FIELD
    with pytest.raises(NotAllowed) as caught:
        decide(RequestFacts(header="batch_of_one"), values)
    assert caught.value.field == HEADER
    # What holds without being asked for need not be in the list.
    assert decide(RequestFacts(header="off"), {"determinism.allow": (Mode.VERIFIED,)}).mode is Mode.OFF


def test_the_rule_that_gave_or_allowed_the_mode_is_named() -> None:
    assert decide(RequestFacts()).rule == "built-in.determinism.mode"
    assert decide(RequestFacts(True)).rule == "defaults.determinism.allow"


@pytest.mark.parametrize("asked", [True, False, None])
@pytest.mark.parametrize("seed", [0, -7, 42])
def test_a_seed_that_is_given_is_taken(asked: bool | None, seed: int) -> None:
    decision = decide(RequestFacts(asked, seed=seed))
    assert (decision.seed, decision.seed_rule) == (seed, "request")


def test_a_seed_that_is_not_given_is_drawn_unless_the_answer_is_to_repeat() -> None:
    assert decide(RequestFacts()).seed is None
    assert decide(RequestFacts(False)).seed is None
    assert decide(RequestFacts(True)).seed == 42
    assert decide(RequestFacts(header="verified")).seed == 42
    assert decide(RequestFacts(header="batch_invariant")).seed == 42
    assert (
        decide(RequestFacts(False), {"determinism.mode": Mode.VERIFIED, "determinism.allow": (Mode.OFF,)}).seed is None
    )


def test_a_policy_may_set_the_seed_and_ignore_the_requests() -> None:
    values: dict[str, object] = {"determinism.allow": (Mode.VERIFIED,), "seed.default": 7, "seed.from_client": False}
    decision = decide(RequestFacts(True, seed=1), values)
    assert (decision.seed, decision.seed_rule) == (7, "defaults.seed.default")
    assert decide(RequestFacts(seed=1), values).seed is None


def test_windows_follow_the_policy_within_what_the_verifier_takes() -> None:
    assert decide(RequestFacts(), {"windows.first": 4}).windows == (4, 8, 15)
    assert decide(RequestFacts(), {"windows.first": 4, "windows.largest": 10}).windows == (4, 8, 10)
    assert decide(RequestFacts(), {"windows.largest": 64}).windows == (8, 15)
    assert decide(RequestFacts(), {"windows.largest": None}).windows == (8, 15)


@pytest.mark.parametrize(
    ("max_draft", "windows"),
    [(0, (0,)), (1, (1,)), (7, (7,)), (8, (8,)), (15, (8, 15)), (31, (8, 16, 31)), (63, (8, 16, 32, 63))],
)
def test_windows_double_up_to_what_the_verifier_takes(max_draft: int, windows: tuple[int, ...]) -> None:
    assert window_schedule(8, max_draft) == windows


def test_without_a_verifier_a_verified_request_keeps_its_mode_or_is_degraded_and_says_so() -> None:
    down = Serving(15, verifier=False)
    kept = resolve(DEFAULT_POLICY, ANONYMOUS, RequestFacts(True), down)
    assert (kept.mode, kept.degraded) == (Mode.VERIFIED, False)  # the gateway refuses it
    values: dict[str, object] = {
        "determinism.allow": (Mode.VERIFIED,),
        "determinism.no_verifier": settings.WithoutVerifier.DEGRADE,
    }
    policy = replace(DEFAULT_POLICY, defaults=Rule("defaults", values))
    degraded = resolve(policy, ANONYMOUS, RequestFacts(True), down)
    assert (degraded.mode, degraded.degraded, degraded.seed) == (Mode.OFF, True, 42)
    assert degraded.rule == "defaults.determinism.no_verifier"
    assert not resolve(policy, ANONYMOUS, RequestFacts(False), down).degraded
    assert not resolve(policy, ANONYMOUS, RequestFacts(True), SERVING).degraded


def test_sampling_that_the_request_leaves_open_is_the_policys() -> None:
    built_in = {name: keys.default.built_in for name, keys in settings.SAMPLING.items()}
    assert decide(RequestFacts()).sampling == built_in
    assert decide(RequestFacts(sampling={"top_p": 0.5})).sampling == {k: v for k, v in built_in.items() if k != "top_p"}
    assert decide(RequestFacts(), {"sampling.temperature.default": 0.2}).sampling["temperature"] == 0.2
    # A default that the bounds of another section leave outside is moved, a request's value never.
    assert decide(RequestFacts(), {"sampling.temperature.max": 0.5}).sampling["temperature"] == 0.5
    assert decide(RequestFacts(), {"sampling.presence_penalty.min": 1.0}).sampling["presence_penalty"] == 1.0


@pytest.mark.parametrize("given", [0.1, 0.6, float("nan")])
def test_sampling_out_of_bounds_is_refused_by_name(given: float) -> None:
    values: dict[str, object] = {"sampling.temperature.min": 0.2, "sampling.temperature.max": 0.5}
    assert "temperature" not in decide(RequestFacts(sampling={"temperature": 0.5}), values).sampling
    with pytest.raises(NotAllowed, match=r"temperature must be between 0.2 and 0.5 here") as caught:
        decide(RequestFacts(sampling={"temperature": given}), values)
    assert caught.value.field == "temperature"


def test_a_model_that_is_not_allowed_does_not_exist() -> None:
    values: dict[str, object] = {"allowed_models": ("smol*", "exact")}
    for model in ("smol", "smollm2", "exact"):
        decide(RequestFacts(model=model), values)
    for model in ("", "exacter", "Smol", "asmol"):
        with pytest.raises(NoSuchModel) as caught:
            decide(RequestFacts(model=model), values)
        assert caught.value.field == "model"


def test_limits_are_counted_for_what_the_rule_covers_that_sets_them() -> None:
    policy = replace(
        DEFAULT_POLICY,
        defaults=Rule("defaults", {"limits.requests_per_minute": 60, "limits.tokens_per_minute": 1000}),
        models={"big*": Rule('models."big*"', {"limits.tokens_per_minute": 10, "limits.concurrency": 2})},
    )
    limits = resolve(policy, ANONYMOUS, RequestFacts(model="big-1"), SERVING).limits
    assert limits.requests == Rate(60, 1.0, "defaults")
    assert limits.tokens == Rate(10, 1.0, 'models."big*"')
    assert limits.concurrency == Quota(2, 'models."big*"')
    limits = resolve(policy, ANONYMOUS, RequestFacts(model="small"), SERVING).limits
    assert limits.tokens == Rate(1000, 1.0, "defaults")
    assert limits.concurrency is None


def test_the_narrowest_model_rule_holds() -> None:
    names = ("*", "smol*", "smollm2*", "smollm2")
    policy = replace(DEFAULT_POLICY, models={name: Rule(name, {"seed.default": i}) for i, name in enumerate(names)})
    seeds = [
        resolve(policy, ANONYMOUS, RequestFacts(header="verified", model=model), SERVING).seed
        for model in ("other", "smolvlm", "smollm2-135m", "smollm2")
        if policy.defaults
    ]
    assert seeds == [0, 1, 2, 3]


def test_a_tenant_that_is_not_in_the_policy_gets_nothing() -> None:
    with pytest.raises(NotAllowed):
        decide(RequestFacts(), tenant="stranger")


# --- laws ------------------------------------------------------------------------------------------------------------

TENANTS, MODELS, ROUTES = ("acme", "other"), ("m", "m1", "m*", "*"), (CHAT, "/v1/other")

_number = st.floats(0.0, 2.0)
_limited = st.none() | st.integers(1, 10**9)
VALUES = st.fixed_dictionaries(
    {},
    optional={
        "determinism.mode": st.sampled_from(Mode),
        "determinism.allow": st.lists(st.sampled_from(Mode), min_size=1, unique=True).map(tuple),
        "determinism.no_verifier": st.sampled_from(settings.WithoutVerifier),
        "seed.default": st.integers(settings.MIN_SEED, settings.MAX_SEED),
        "seed.from_client": st.booleans(),
        "windows.first": st.integers(1, 4096),
        "windows.largest": _limited,
        "allowed_models": st.lists(st.sampled_from(MODELS)).map(tuple),
        "limits.requests_per_minute": _limited,
        "limits.max_tokens": _limited,
        "limits.concurrency": _limited,
        "receipts.mode": st.sampled_from(settings.ReceiptMode),
        **{key.path: _number for keys in settings.SAMPLING.values() for key in (keys.default, keys.least, keys.most)},
    },
)


def rules(prefix: str, names: tuple[str, ...]) -> st.SearchStrategy[dict[str, Rule]]:
    return st.dictionaries(st.sampled_from(names), VALUES).map(
        lambda found: {name: Rule(f"{prefix}.{name}", values) for name, values in found.items()}
    )


POLICIES = st.builds(
    lambda tenants, defaults, models, routes: Policy(
        {name: Tenant(name, rule) for name, rule in tenants.items()}, Rule("defaults", defaults), models, routes
    ),
    rules("tenants", TENANTS),
    VALUES,
    rules("models", MODELS),
    rules("routes", ROUTES),
)
FACTS = st.builds(
    RequestFacts,
    is_deterministic=st.none() | st.booleans(),
    header=st.none() | st.sampled_from([*Mode, " OFF ", "nonsense", ""]),
    seed=st.none() | st.integers(settings.MIN_SEED, settings.MAX_SEED),
    sampling=st.dictionaries(st.sampled_from(list(settings.SAMPLING)), st.floats()),
    model=st.sampled_from(["m", "m1", "m12", "x", ""]),
    route=st.sampled_from([*ROUTES, ""]),
    receipt=st.none() | st.sampled_from(["true", "False", " TRUE ", "1", ""]),
)
SERVINGS = st.builds(Serving, st.integers(0, 100), st.booleans())


def outcome(policy: Policy, tenant: str, facts: RequestFacts, serving: Serving) -> Decision | tuple[type, str, str]:
    try:
        return resolve(policy, tenant, facts, serving)
    except PolicyError as error:
        return type(error), str(error), error.field


@UNHURRIED
@given(POLICIES, st.sampled_from([*TENANTS, "stranger"]), FACTS, SERVINGS)
def test_resolve_is_total_and_deterministic(policy: Policy, tenant: str, facts: RequestFacts, serving: Serving) -> None:
    first = outcome(policy, tenant, facts, serving)
    assert outcome(policy, tenant, facts, serving) == first
    if not isinstance(first, Decision):
        assert first[2] in {BODY_FIELD, HEADER, RECEIPT_HEADER, "model", "authorization", *settings.SAMPLING}
        return
    assert first.windows and all(0 <= window <= serving.max_draft for window in first.windows)
    assert set(first.sampling).isdisjoint(facts.sampling)
    assert set(first.sampling) | set(facts.sampling) == set(settings.SAMPLING)
    assert first.degraded <= (first.mode is Mode.OFF and not serving.verifier)
    assert (first.seed is None) == (first.seed_rule == "drawn")
    chosen = Chosen(policy, policy.tenants[tenant], facts)
    assert first.mode in {Mode.OFF, chosen[settings.MODE], *chosen[settings.ALLOW]}
    asked = None if facts.receipt is None else facts.receipt.strip().lower() == "true"
    mode = chosen[settings.RECEIPTS]
    if first.mode is not Mode.VERIFIED:
        assert first.receipt is None and not asked
    else:
        assert (first.receipt is not None) == (mode is settings.ReceiptMode.ALWAYS or asked is True)
        assert not (mode is settings.ReceiptMode.NEVER and first.receipt)


@UNHURRIED
@given(st.sampled_from(settings.KEYS), st.sets(st.integers(0, 3)))
def test_the_first_section_in_the_order_of_precedence_decides(key: settings.Key[object], saying: set[int]) -> None:
    """Whatever the setting, and whichever of the sections make it."""
    made = [{key.path: f"by {index}"} if index in saying else {} for index in range(4)]
    tenant = Tenant("acme", Rule("tenants.acme", made[0]))
    policy = Policy(
        {"acme": tenant},
        routes={CHAT: Rule("routes", made[1])},
        models={"m*": Rule("models", made[2])},
        defaults=Rule("defaults", made[3]),
    )
    assert [layer.name.partition(".")[0] for layer in PRECEDENCE] == ["tenants", "routes", "models", "defaults"]
    chosen = Chosen(policy, tenant, RequestFacts(model="m1", route=CHAT))
    assert chosen[key] == (f"by {min(saying)}" if saying else key.built_in)
    names = ["tenants.acme", "routes", "models", "defaults"]
    assert chosen.scope(key) == (names[min(saying)] if saying else "built-in")


# --- the commit log --------------------------------------------------------------------------------------------------


def cached(cache: str, *, mode: str = "verified", cache_control: str = "", verifier: bool = True) -> Cache | None:
    rule = f"{{determinism: {{mode: {mode}, no_verifier: degrade}}, cache: {cache}}}"
    text = f"version: 1\nanonymous: t\ntenants: {{t: {rule}}}\n"
    facts = RequestFacts(model="m", cache_control=cache_control)
    return resolve(load_policy(text, "p.yaml"), "t", facts, Serving(31, verifier=verifier)).cache


def test_there_is_no_log_unless_the_policy_says_so() -> None:
    assert cached("{}") is None
    assert cached("{ttl_s: 5}") is None
    assert cached("{scope: tenant}", mode="off") is None
    assert cached("{scope: tenant}", verifier=False) is None, "degraded answers are not verified"
    assert cached("{scope: tenant}") == Cache("t", True, True, 86_400, None)
    assert cached("{scope: shared, ttl_s: 5, max_tokens: 9}") == Cache(None, True, True, 5, 9)


@pytest.mark.parametrize(
    ("cache", "said", "may"),
    [
        ("", "", (True, True)),
        ("", "no-cache", (False, True)),
        ("", "NO-CACHE , max-age=0", (False, True)),
        ("", 'private="a", no-store', None),
        ("", "x-no-store", (True, True)),
        (", from_client: false", "no-cache, no-store", (True, True)),
        (", read: false", "", (False, True)),
        (", write: false", "", (True, False)),
        (", write: false", "no-cache", None),
        (", read: false, write: false", "", None),
    ],
)
def test_cache_control_takes_away_and_gives_nothing(cache: str, said: str, may: tuple[bool, bool] | None) -> None:
    got = cached(f"{{scope: tenant{cache}}}", cache_control=said)
    assert (None if got is None else (got.read, got.write)) == may


# --- receipts --------------------------------------------------------------------------------------------------------


def wanted(
    receipts: str, said: str | None, *, mode: str = "verified", verifier: bool = True, no_verifier: str = "degrade"
) -> tuple[Receipt | None, Decision]:
    rule = f"{{determinism: {{mode: {mode}, no_verifier: {no_verifier}}}, receipts: {receipts}}}"
    policy = load_policy(f"version: 1\nanonymous: t\ntenants: {{t: {rule}}}\n", "p.yaml")
    decision = resolve(policy, "t", RequestFacts(model="m", receipt=said), Serving(31, verifier=verifier))
    return decision.receipt, decision


@pytest.mark.parametrize(
    ("receipts", "said", "expected"),
    [
        ("{}", None, None),
        ("{}", "false", None),
        ("{mode: always}", None, Receipt(2_592_000, True)),
        ("{mode: always}", "true", Receipt(2_592_000, True)),
        ("{mode: on_request}", None, None),
        ("{mode: on_request}", "false", None),
        ("{mode: on_request, ttl_s: 5, prompt: digest}", " True", Receipt(5, False)),
    ],
)
def test_who_gets_a_receipt(receipts: str, said: str | None, expected: Receipt | None) -> None:
    assert wanted(receipts, said)[0] == expected


@pytest.mark.parametrize(
    ("receipts", "said", "mode", "kind", "message"),
    [
        ("{}", "true", "verified", NotAllowed, "no receipts are made here"),
        ("{mode: never}", "true", "verified", NotAllowed, "no receipts are made here"),
        ("{mode: always}", "false", "verified", NotAllowed, "of every verified answer"),
        ("{mode: always}", "true", "off", PolicyError, "mode off verifies nothing"),
        ("{mode: on_request}", "true", "batch_invariant", PolicyError, "mode batch_invariant verifies nothing"),
        ("{mode: on_request}", "yes", "verified", PolicyError, "must be true or false"),
        ("{mode: on_request}", "", "off", PolicyError, "must be true or false"),
    ],
)
def test_a_receipt_that_cannot_be_is_refused_by_name(
    receipts: str, said: str, mode: str, kind: type[PolicyError], message: str
) -> None:
    with pytest.raises(kind, match=message) as caught:
        wanted(receipts, said, mode=mode)
    assert caught.value.field == RECEIPT_HEADER


def test_an_answer_without_a_guarantee_has_no_receipt_to_promise() -> None:
    assert wanted("{mode: always}", None, mode="off")[0] is None
    assert wanted("{mode: always}", "false", mode="off")[0] is None
    degraded = wanted("{mode: always}", None, verifier=False)[1]
    assert degraded.degraded and degraded.receipt is None
    # Who asks for a receipt is not given less: the request fails for want of a verifier.
    held = wanted("{mode: on_request}", "true", verifier=False)[1]
    assert held.mode is Mode.VERIFIED and not held.degraded and held.receipt is not None


def test_a_policy_that_promises_receipts_says_where() -> None:
    def demanding(text: str) -> str | None:
        return demands_receipts(load_policy(f"version: 1\nanonymous: t\n{text}", "p.yaml"))

    assert demanding("tenants: {t: {receipts: {mode: never, ttl_s: 5}}}") is None
    assert demanding("tenants: {t: {receipts: {mode: on_request}}}") == "tenants.t.receipts.mode"
    always = "receipts: {mode: always}"
    assert demanding(f"tenants: {{t: }}\ndefaults: {{{always}}}") == "defaults.receipts.mode"
    assert demanding(f"tenants: {{t: }}\nmodels: {{m*: {{{always}}}}}") == 'models."m*".receipts.mode'
    assert demanding(f"tenants: {{t: }}\nroutes: {{{CHAT}: {{{always}}}}}") == f'routes."{CHAT}".receipts.mode'
    assert demands_receipts(DEFAULT_POLICY) is None
