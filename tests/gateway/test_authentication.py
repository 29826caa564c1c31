"""JSON web tokens: what is taken, what is refused, and when keys are fetched."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import jwt
import pytest
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

from gateway.authentication import MAX_TOKEN_CHARS, Authenticator
from gateway.errors import IssuerUnavailable, NotAllowed, Unauthenticated
from gateway.http.client import HttpClient
from gateway.token_keys import (
    FETCH_TIMEOUT_S,
    MAX_AGE_S,
    MAX_BYTES,
    RETRY_EVERY_S,
    UNKNOWN_ID_EVERY_S,
    KeySet,
    TokenKeys,
)
from policies.document import FixedPolicy, Jwt, Policy, Rule, Tenant

RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)
OTHER_RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)
EC = ec.generate_private_key(ec.SECP256R1())
ISSUER, AUDIENCE = "https://issuer.example/", "verbatim"


def rsa_jwk(key: rsa.RSAPrivateKey = RSA, **more: object) -> dict[str, object]:
    return RSAAlgorithm.to_jwk(key.public_key(), as_dict=True) | {"kid": "r"} | more


def ec_jwk(**more: object) -> dict[str, object]:
    return ECAlgorithm.to_jwk(EC.public_key(), as_dict=True) | {"kid": "e"} | more


def jwks(*keys: object) -> str:
    return json.dumps({"keys": keys})


def claims(**more: object) -> dict[str, object]:
    wanted = {"iss": ISSUER, "aud": AUDIENCE, "exp": time.time() + 600, "org": "org_acme", **more}
    return {name: value for name, value in wanted.items() if value is not None}


def token(algorithm: str = "RS256", key: object = RSA, kid: str | None = "r", **more: object) -> str:
    headers = {} if kid is None else {"kid": kid}
    return jwt.encode(claims(**more), key, algorithm=algorithm, headers=headers)  # type: ignore[arg-type]


def rules(jwks: str | None = None, url: str | None = None) -> Jwt:
    return Jwt(ISSUER, AUDIENCE, "org", ("RS256", "ES256"), 5, jwks_url=url, jwks_file=jwks and "keys.json", jwks=jwks)


def policy(rules: Jwt) -> Policy:
    acme = Tenant("acme", Rule("tenants.acme"), jwt_claims=("org_acme", "org_acme_eu"))
    return Policy(
        {"acme": acme, "visitors": Tenant("visitors", Rule("tenants.visitors"))}, jwt=rules, anonymous="visitors"
    )


@asynccontextmanager
async def authenticator(rules: Jwt, clock: Callable[[], float] = time.monotonic) -> AsyncIterator[Authenticator]:
    async with HttpClient(connect_timeout_s=5.0, silence_timeout_s=5.0) as http:
        yield Authenticator(FixedPolicy(policy(rules)), TokenKeys(http, clock), time.time)


async def tenant(asked: Authenticator, credential: str) -> str:
    return (await asked.caller(f"Bearer {credential}")).tenant


async def test_a_token_stands_for_the_tenant_that_lists_its_claim() -> None:
    async with authenticator(rules(jwks(rsa_jwk(), ec_jwk()))) as asked:
        assert await tenant(asked, token()) == "acme"
        assert await tenant(asked, token("ES256", EC, "e")) == "acme"
        assert await tenant(asked, token(org="org_acme_eu", aud=["else", AUDIENCE])) == "acme"
        assert await tenant(asked, token(exp=time.time() - 2)) == "acme"  # clocks differ
        for claim in ("acme", "visitors", "ORG_ACME", "", None, ["org_acme"], {"org_acme": 1}, 7):
            with pytest.raises(NotAllowed, match="stands for no tenant here"):
                await tenant(asked, token(org=claim))
        assert await tenant(asked, "none") == "visitors"


def forged(header: dict[str, object], key: bytes = b"") -> str:
    """A token signed with a shared secret, or not at all."""

    def part(raw: bytes) -> str:
        return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()

    signed = f"{part(json.dumps(header).encode())}.{part(json.dumps(claims()).encode())}"
    return f"{signed}.{part(hmac.digest(key, signed.encode(), hashlib.sha256)) if key else ''}"


PUBLIC_PEM = RSA.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
PUBLIC_DER = RSA.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
WRONG = {
    "expired": lambda: token(exp=time.time() - 60),
    "without end": lambda: token(exp=None),
    "not yet": lambda: token(nbf=time.time() + 60),
    "issued in the future": lambda: token(iat=time.time() + 60),
    "another audience": lambda: token(aud="else"),
    "no audience": lambda: token(aud=None),
    "another issuer": lambda: token(iss="https://issuer.example"),
    "no issuer": lambda: token(iss=None),
    "another key": lambda: token(key=OTHER_RSA),
    "another key's id": lambda: token(kid="e"),
    "an unknown id": lambda: token(kid="x"),
    "no id among several": lambda: token(kid=None),
    "an algorithm the policy has not": lambda: token("RS512"),
    "a way to use the key that the policy has not": lambda: token("PS256"),
    "cut": lambda: token()[:-10],
    "payload changed": lambda: ".".join((token().split(".")[0], token(sub="x").split(".")[1], token().split(".")[2])),
    "too long": lambda: token(sub="x" * MAX_TOKEN_CHARS),
    "no algorithm": lambda: forged({"alg": "none", "kid": "r"}),
    "NoNe": lambda: forged({"alg": "NoNe", "kid": "r"}),
    "algorithm missing": lambda: forged({"kid": "r"}),
    "algorithm no text": lambda: forged({"alg": ["RS256"], "kid": "r"}),
    "public key as a shared secret": lambda: forged({"alg": "HS256", "kid": "r"}, PUBLIC_PEM),
    "public key as a shared secret, in binary": lambda: forged({"alg": "HS256", "kid": "r"}, PUBLIC_DER),
    "shared secret said to be RSA": lambda: forged({"alg": "RS256", "kid": "r"}, PUBLIC_PEM),
    "id no text": lambda: forged({"alg": "RS256", "kid": {"a": 1}}),
    "key in the token": lambda: (
        token(key=OTHER_RSA, kid=None)
        and jwt.encode(
            claims(), OTHER_RSA, "RS256", {"kid": "r", "jwk": rsa_jwk(OTHER_RSA), "jku": "https://evil.example/"}
        )
    ),
    "not base64": lambda: "a.b.c",
    "empty": lambda: "..",
    "not ASCII": lambda: "\xff.\xff.\xff",
    "nested": lambda: forged({"alg": "RS256", "kid": "r", "crit": ["x"], "x": 1}, b"x"),
}


@pytest.mark.parametrize("name", WRONG)
async def test_a_token_that_does_not_hold_is_refused_and_not_taken_for_a_visitors(name: str) -> None:
    async with authenticator(rules(jwks(rsa_jwk(), ec_jwk()))) as asked:
        wrong = WRONG[name]()
        with pytest.raises(Unauthenticated) as caught:
            await tenant(asked, wrong)
        assert caught.value.message == "the token is not valid"


async def test_without_a_section_jwt_a_token_is_no_credential() -> None:
    async with HttpClient(connect_timeout_s=5.0, silence_timeout_s=5.0) as http:
        open_to_all = Policy({"a": Tenant("a", Rule("tenants.a"))}, anonymous="a")
        asked = Authenticator(FixedPolicy(open_to_all), TokenKeys(http), time.time)
        assert await tenant(asked, token()) == "a"


def test_a_key_set_gives_out_what_fits_the_token_and_nothing_else() -> None:
    keys = KeySet(
        jwks(rsa_jwk(alg="RS256"), ec_jwk(), rsa_jwk(kid="enc", use="enc"), {"kty": "oct", "k": "AAAA", "kid": "o"})
    )
    assert keys.find("r", "RS256") is not None
    assert keys.find("e", "ES256") is not None
    for id_, algorithm in (
        ("r", "PS256"),
        ("r", "ES256"),
        ("e", "RS256"),
        ("enc", "RS256"),
        ("o", "RS256"),
        (None, "RS256"),
    ):
        assert keys.find(id_, algorithm) is None, (id_, algorithm)
    assert KeySet(jwks(rsa_jwk())).find(None, "RS256") is not None
    assert KeySet(jwks(rsa_jwk(), rsa_jwk(OTHER_RSA))).find("r", "RS256") is None  # which one?
    assert KeySet(jwks({"kid": "r", "kty": "RSA"}, 3, None)).find("r", "RS256") is None
    for text in ("", "[]", "{}", '{"keys": {}}'):
        with pytest.raises(ValueError):
            KeySet(text)


# --- fetching --------------------------------------------------------------------------------------------------------


@dataclass
class Issuer:
    """Publishes what it is told to."""

    body: str = ""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    calls: int = 0
    url: str = ""
    answers: asyncio.Event = field(default_factory=asyncio.Event)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    before: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.answers.set()

    async def answer(self, request: web.Request) -> web.Response:
        self.calls += 1
        self.before()
        self.asked.set()
        await self.answers.wait()
        return web.Response(text=self.body, status=self.status, headers=self.headers)


@pytest.fixture
async def issuer() -> AsyncIterator[Issuer]:
    issuer = Issuer(jwks(rsa_jwk()))
    app = web.Application()
    app.router.add_get("/keys", issuer.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    issuer.url = f"http://127.0.0.1:{runner.addresses[0][1]}/keys"
    yield issuer
    issuer.answers.set()
    await runner.cleanup()


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


async def test_keys_are_fetched_once_and_again_when_they_are_old(issuer: Issuer) -> None:
    clock = Clock()
    async with authenticator(rules(url=issuer.url), clock) as asked:
        for _ in range(3):
            assert await tenant(asked, token()) == "acme"
        assert issuer.calls == 1
        clock.now += MAX_AGE_S + 1
        issuer.body = jwks(ec_jwk())  # the old key is revoked
        with pytest.raises(Unauthenticated):
            await tenant(asked, token())
        assert await tenant(asked, token("ES256", EC, "e")) == "acme"
        assert issuer.calls == 2


async def test_an_unknown_id_makes_us_look_again_but_seldom(issuer: Issuer) -> None:
    clock = Clock()
    async with authenticator(rules(url=issuer.url), clock) as asked:
        assert await tenant(asked, token()) == "acme"
        clock.now += UNKNOWN_ID_EVERY_S + 1
        issuer.body = jwks(rsa_jwk(), ec_jwk())
        assert await tenant(asked, token("ES256", EC, "e")) == "acme"
        assert issuer.calls == 2
        for index in range(5):
            with pytest.raises(Unauthenticated):
                await tenant(asked, token(kid=f"invented-{index}"))
        assert issuer.calls == 2


async def test_an_issuer_that_cannot_be_reached(issuer: Issuer, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    async with authenticator(rules(url=issuer.url), clock) as asked:
        good = issuer.body
        wrongs = (
            (503, good, {}),
            (200, "<html>", {}),
            (200, "{}", {}),
            (200, " " * (MAX_BYTES + 1), {}),
            (200, "[" * 10**5, {}),
        )
        for status, body, headers in (*wrongs, (302, good, {"location": "/keys"})):
            issuer.status, issuer.body, issuer.headers = status, body, headers
            calls = issuer.calls
            for _ in range(2):
                with pytest.raises(IssuerUnavailable) as caught:
                    await tenant(asked, token())
                assert caught.value.headers == {"retry-after": "5"}
            assert issuer.calls == calls + 1  # the second one did not ask again
            clock.now += RETRY_EVERY_S + 1
        issuer.status, issuer.body, issuer.headers = 200, good, {}
        assert await tenant(asked, token()) == "acme"
        # What is there stays in use.
        clock.now += MAX_AGE_S + 1
        issuer.status = 500
        assert await tenant(asked, token()) == "acme"
    assert token() not in caplog.text


async def test_a_policy_that_names_other_keys_has_them(issuer: Issuer) -> None:
    async with HttpClient(connect_timeout_s=5.0, silence_timeout_s=5.0) as http:
        keys = TokenKeys(http)
        assert await keys.find(rules(url=issuer.url), "r", "RS256") is not None
        assert await keys.find(rules(jwks(ec_jwk())), "r", "RS256") is None
        assert await keys.find(rules(jwks(ec_jwk())), "e", "ES256") is not None
        assert await keys.find(rules(url=issuer.url), "r", "RS256") is not None
        assert issuer.calls == 2


async def test_an_issuer_that_hangs_holds_up_nobody_whose_keys_are_here(issuer: Issuer) -> None:
    clock = Clock()
    async with authenticator(rules(url=issuer.url), clock) as asked:
        assert await tenant(asked, token()) == "acme"
        clock.now += MAX_AGE_S + 1
        issuer.asked.clear()
        issuer.answers.clear()
        first = asyncio.create_task(tenant(asked, token()))
        await issuer.asked.wait()
        async with asyncio.timeout(FETCH_TIMEOUT_S / 2):
            assert await tenant(asked, token()) == "acme"
        assert not first.done()
        issuer.answers.set()
        assert await first == "acme"


async def test_those_who_waited_for_an_issuer_that_hangs_do_not_wait_for_it_one_by_one(issuer: Issuer) -> None:
    clock = Clock()

    def take_long() -> None:
        clock.now += FETCH_TIMEOUT_S + 1

    issuer.status, issuer.before = 503, take_long
    async with authenticator(rules(url=issuer.url), clock) as asked:
        outcomes = await asyncio.gather(*(tenant(asked, token()) for _ in range(5)), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [IssuerUnavailable] * 5
        assert issuer.calls == 1


async def test_keys_that_come_late_are_not_those_of_the_next_policy(issuer: Issuer) -> None:
    async with HttpClient(connect_timeout_s=5.0, silence_timeout_s=5.0) as http:
        keys = TokenKeys(http)
        issuer.answers.clear()
        late = asyncio.create_task(keys.find(rules(url=issuer.url), "r", "RS256"))
        await issuer.asked.wait()
        assert await keys.find(rules(jwks(ec_jwk())), "r", "RS256") is None
        issuer.answers.set()
        assert await late is not None
        assert await keys.find(rules(jwks(ec_jwk())), "r", "RS256") is None
        assert await keys.find(rules(jwks(ec_jwk())), "e", "ES256") is not None


async def test_whoever_leaves_while_keys_are_fetched_says_nothing_of_the_issuer(issuer: Issuer) -> None:
    async with authenticator(rules(url=issuer.url), Clock()) as asked:
        issuer.answers.clear()
        leaving = asyncio.create_task(tenant(asked, token()))
        await issuer.asked.wait()
        leaving.cancel()
        await asyncio.wait([leaving])
        issuer.answers.set()
        assert await tenant(asked, token()) == "acme"
