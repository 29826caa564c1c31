"""Policy files: what they say, and how each mistake in one is named."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policies.api_keys import new_key
from policies.document import Jwt, Unavailable
from policies.loader import load_policy
from policies.policy import Mode
from policies.sections import FileMistakes
from policies.settings import KEYS

# However busy the machine is: no time is asserted.
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

_, KEY = new_key()
MINIMAL = "version: 1\nanonymous: public\ntenants: {public: }\n"
WHOLE = f"""\
version: 1
anonymous: public
limits_unavailable: allow
jwt:
  issuer: https://issuer.example
  audience: verbatim
  tenant_claim: org
  algorithms: [ES256]
  leeway_s: 5
  jwks_url: https://issuer.example/keys
defaults:
  determinism: {{mode: off, allow: [off, verified], no_verifier: degrade}}
  seed: {{default: 7, from_client: false}}
  sampling:
    temperature: {{default: 0, min: 0, max: 1}}
  windows: {{first: 4, largest: unlimited}}
models:
  smol*:
    limits: {{max_tokens: 100, prompt_tokens: 1000}}
routes:
  /v1/chat/completions:
    limits: {{requests_per_minute: 60, burst_s: 5}}
tenants:
  public:
    limits: {{tokens_per_minute: 1000, concurrency: 2, queue_share: 0.5}}
    allowed_models: [smol*]
  acme:
    jwt_claims: [org_1, org_2]
    keys:
      - id: "{KEY.id}"
        hash: {KEY.hash}
        expires: 2030-01-31
"""


def test_a_whole_file() -> None:
    policy = load_policy(WHOLE, "policy.yaml")
    assert policy.anonymous == "public"
    assert policy.limits_unavailable is Unavailable.ALLOW
    assert policy.jwt == Jwt(
        "https://issuer.example", "verbatim", "org", ("ES256",), 5, jwks_url="https://issuer.example/keys"
    )
    assert policy.defaults.name == "defaults"
    assert policy.defaults.values["determinism.allow"] == (Mode.OFF, Mode.VERIFIED)
    assert policy.defaults.values["windows.largest"] is None
    assert policy.defaults.values["sampling.temperature.max"] == 1.0
    assert policy.models["smol*"].name == 'models."smol*"'
    assert policy.models["smol*"].values == {"limits.max_tokens": 100, "limits.prompt_tokens": 1000}
    assert policy.routes["/v1/chat/completions"].values == {"limits.requests_per_minute": 60, "limits.burst_s": 5.0}
    assert policy.tenants["public"].rule.values["allowed_models"] == ("smol*",)
    (key,) = policy.tenants["acme"].keys
    assert (key.id, key.salt, key.digest) == (KEY.id, KEY.salt, KEY.digest)
    assert key.expires_at == datetime(2030, 1, 31, tzinfo=UTC).timestamp()
    assert policy.tenant_by_claim == {"org_1": "acme", "org_2": "acme"}
    assert load_policy(WHOLE, "other.yaml") == policy
    assert load_policy(WHOLE + "\n", "policy.yaml").version != policy.version


def mistakes(text: str) -> list[str]:
    with pytest.raises(FileMistakes) as caught:
        load_policy(text, "p.yaml")
    return str(caught.value).splitlines()


def test_every_mistake_is_named_in_one_go() -> None:
    text = """\
version: 2
anonymos: public
defaults:
  determinism: {mode: of, alow: [off]}
  sed: {}
  sampling:
    temperature: {min: 2, max: 1}
tenants:
  public:
    limits:
      burst_s: 0
      max_tokens: 12.5
    allowed_models: ["a*b"]
"""
    assert mistakes(text) == [
        "p.yaml:1: version: must be 1",
        "p.yaml:1: lets nobody in: give a tenant keys or jwt_claims, or name one in the key 'anonymous'",
        "p.yaml:2: anonymos: unknown key; did you mean 'anonymous'?",
        "p.yaml:4: defaults.determinism.mode: must be one of off, verified, batch_invariant, batch_of_one",
        "p.yaml:4: defaults.determinism.alow: unknown key; did you mean 'allow'?",
        "p.yaml:5: defaults.sed: unknown key; did you mean 'seed'?",
        "p.yaml:6: defaults.sampling: min, default and max of temperature must be in ascending order",
        "p.yaml:11: tenants.public.limits.burst_s: must be a number between 0.1 and 60",
        "p.yaml:12: tenants.public.limits.max_tokens: must be a whole number of at least 1, or the word unlimited",
        "p.yaml:13: tenants.public.allowed_models: must be a list of names; a * may stand at the end of a name only",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "p.yaml:1: the key 'version' is missing"),
        ("- 1", "p.yaml:1: must be a mapping of keys to values"),
        (MINIMAL.replace("public: ", "public: 3"), "tenants.public: must be a mapping"),
        (MINIMAL.replace("anonymous: public", "anonymous: nobody"), "anonymous: there is no tenant 'nobody'"),
        (MINIMAL.replace("anonymous: public", "anonymous: 3"), "anonymous: must be text"),
        (MINIMAL.replace("public: ", "public: {}, 'b d': {}"), 'tenants."b d": the name must be'),
        (MINIMAL + "models: {a*b: {}}", 'models."a*b": the name must be a model'),
        (
            MINIMAL + "routes: {/v1/chat: {}}",
            'routes."/v1/chat": the name must be one of /v1/chat/completions, /v1/completions',
        ),
        (MINIMAL + "cache: {}", "cache: unknown key"),
        (MINIMAL + "defaults: {determinism: {allow: []}}", "allow: must be a list of different words"),
        (MINIMAL + "defaults: {determinism: {allow: [off, off]}}", "allow: must be a list of different words"),
        (MINIMAL + "defaults: {determinism: {allow: [[off]]}}", "allow: must be a list of different words"),
        (MINIMAL + "defaults: {seed: {from_client: yes}}", "from_client: must be true or false"),
        (MINIMAL + "defaults: {seed: {default: 9223372036854775808}}", "default: must be a whole number"),
        (MINIMAL + "defaults: {seed: {default: true}}", "default: must be a whole number"),
        (MINIMAL + "defaults: {sampling: {top_p: {default: 0}}}", "default: must be a number between 1e-06 and 1"),
        (MINIMAL + "defaults: {sampling: {top_k: {default: 0}}}", "sampling.top_k: unknown key; did you mean 'top_p'?"),
        (
            MINIMAL + "defaults: {limits: {max_tokens: 0}}",
            "must be a whole number of at least 1, or the word unlimited",
        ),
        (MINIMAL + "defaults: {keys: []}", "defaults.keys: unknown key"),
        (MINIMAL.replace("public: ", "public: {jwt_claims: [a]}"), "jwt_claims: needs a section jwt"),
        (MINIMAL.replace("public: ", "public: {keys: 3}"), "tenants.public.keys: must be a list"),
        (MINIMAL.replace("public: ", "public: {keys: [3]}"), "tenants.public.keys[0]: must be a mapping"),
        (MINIMAL.replace("public: ", "public: {keys: [{}]}"), "tenants.public.keys[0]: the key 'hash' is missing"),
        (WHOLE.replace("2030-01-31", "2030-02-31"), "tenants.acme.keys[0].expires: must be a date"),
        (WHOLE.replace("2030-01-31", "2030-01-31T12:00:00"), "expires: must be a date"),
        (WHOLE.replace("2030-01-31", "12"), "expires: must be a date"),
        (
            WHOLE.replace("https://issuer.example/keys", "http://issuer.example/keys"),
            "jwks_url: must be an https:// URL",
        ),
        (
            WHOLE.replace("https://issuer.example/keys", "https://a:b@issuer.example/"),
            "jwks_url: must be an https:// URL",
        ),
        (WHOLE.replace("https://issuer.example/keys", "https://[/"), "jwks_url: must be an https:// URL"),
        (WHOLE.replace("jwks_url: ", "jwks_file: keys.json\n  jwks_url: "), "jwt: must have just one of"),
        (WHOLE.replace("ES256", "HS256"), "jwt.algorithms: must be a list of different words out of RS256"),
        (WHOLE.replace("ES256", "none"), "jwt.algorithms: must be a list of different words out of RS256"),
        (
            WHOLE.replace("    limits: {tokens", "    jwt_claims: [org_1]\n    limits: {tokens"),
            "also stands for public",
        ),
    ],
)
def test_one_mistake(text: str, said: str) -> None:
    found = mistakes(text)
    assert any(said in line for line in found), found


def test_a_key_belongs_to_one_tenant_and_stands_there_once() -> None:
    entry = f'{{id: "{KEY.id}", hash: "{KEY.hash}"}}'
    said = mistakes(f"version: 1\ntenants: {{a: {{keys: [{entry}, {entry}]}}, b: {{keys: [{entry}]}}}}")
    assert [line.partition(": tenants.")[2] for line in said] == [
        "a.keys: holds an id twice",
        f"b.keys: the key {KEY.id} is also a's",
    ]


def test_a_key_written_where_its_hash_belongs_is_not_repeated() -> None:
    key, kept = new_key()
    said = mistakes(f'version: 1\ntenants: {{a: {{keys: [{{id: "{kept.id}", hash: "{key}"}}]}}}}')
    assert "hash: must be the hash that `verbatim keys new` printed" in said[-1]
    assert key.split("_", 2)[2] not in "".join(said)


def test_bounds_of_two_sections_that_leave_nothing_between_them() -> None:
    text = MINIMAL + "models: {m: {sampling: {temperature: {min: 1}}}}\ndefaults: {sampling: {temperature: {max: 0.5}}}"
    (said,) = mistakes(text)
    assert "tenants.public: no temperature would be allowed where both hold: models.m.sampling" in said
    assert load_policy(text.replace("public: ", "public: {sampling: {temperature: {max: 2}}}"), "p.yaml")


def test_the_text_is_refused_whole_where_it_is_no_yaml() -> None:
    assert mistakes("version: 1\na: [") == ["p.yaml:3: not YAML: did not find expected node content"]


def test_each_setting_has_a_kind_that_takes_its_built_in_value_back() -> None:
    for key in KEYS:
        said = "unlimited" if key.built_in is None else key.built_in
        assert key.kind.parse(list(said) if isinstance(said, tuple) else said) == key.built_in


WORDS = st.sampled_from(
    [word for line in WHOLE.splitlines() for word in line.replace(":", " ").replace(",", " ").split()]
    + [part for key in KEYS for part in key.path.split(".")]
)
LEAVES = WORDS | st.text() | st.none() | st.booleans() | st.integers() | st.floats()
TREES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(WORDS | st.text(), inner))


@UNHURRIED
@given(st.dictionaries(st.sampled_from(["version", "anonymous", "jwt", "defaults", "models", "tenants"]), TREES))
def test_any_document_is_a_policy_or_a_list_of_mistakes(tree: object) -> None:
    try:
        load_policy(json.dumps(tree), "p.yaml")
    except FileMistakes as error:
        assert error.mistakes
