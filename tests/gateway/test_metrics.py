"""What /metrics says of requests that were really made, to whom it says it, and what docs/metrics.md says of it."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launched import Gateway, launch_gateway, launch_models
from mock_upstream import MockUpstream, chunked
from prometheus_client.parser import text_string_to_metric_families
from toy_backend import Status, ToyBackend, on

from gateway.commit_log.commit_log import CommitLog
from gateway.commit_log.memory import MemoryLogs
from gateway.commit_log.redis import RedisLogs
from gateway.models_file import ModelConfig, UpstreamConfig
from gateway.redis_connection import RedisConnection
from gateway.telemetry.histogram import Histogram
from policies.api_keys import new_key
from policies.document import FixedPolicy
from policies.loader import load_policy
from policies.policy_file import PolicyFile

KEY, KEPT = new_key()
PREFIX = "verbatim_gateway_"
ROOT = Path(__file__).parents[2]

POLICY = FixedPolicy(
    load_policy(
        """
version: 1
anonymous: visitors
tenants:
  visitors:
    determinism: {allow: [verified, "off"]}
    cache: {scope: tenant}
    limits: {requests_per_minute: 600}
models:
  mocked: {cache: {scope: none}}
""",
        "policy.yaml",
    )
)


@dataclass
class Page:
    """The samples of a page, by name and labels."""

    samples: dict[tuple[str, frozenset[tuple[str, str]]], float]
    families: dict[str, str]

    def __getitem__(self, wanted: tuple[str, dict[str, str]]) -> float:
        """The sum of the samples of a name that have these labels."""
        name, labels = wanted
        return sum(
            value
            for (sample, found), value in self.samples.items()
            if sample == PREFIX + name and labels.items() <= dict(found).items()
        )


async def page(gateway: Gateway) -> Page:
    answer = await gateway.http.get("/metrics", headers={"authorization": f"Bearer {KEY}"})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    families = list(text_string_to_metric_families(answer.text))
    samples = {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}
    return Page(samples, {family.name: family.type for family in families})


@pytest.fixture
async def upstream() -> AsyncIterator[MockUpstream]:
    async with MockUpstream() as running:
        yield running


@pytest.fixture
async def gateway(toy: ToyBackend, upstream: MockUpstream) -> AsyncIterator[Gateway]:
    configs = (
        ModelConfig("toy", (toy.url,)),
        ModelConfig("mocked", upstreams=(UpstreamConfig(upstream.url, "mocked", None),)),
    )
    async with launch_models(configs, policies=POLICY, admin_key=KEPT.hash) as running:
        yield running


async def test_the_page_is_the_admins_alone(gateway: Gateway, toy: ToyBackend) -> None:
    assert (await gateway.http.get("/metrics")).status_code == 401
    async with launch_gateway(toy.url) as closed:
        assert (await closed.http.get("/metrics")).status_code == 403


async def test_requests_are_counted_by_what_became_of_them(gateway: Gateway) -> None:
    assert (await gateway.chat(is_deterministic=True, max_tokens=5)).status_code == 200
    assert (await gateway.chat(max_tokens=5, stream=True)).status_code == 200
    assert (await gateway.chat(temperature="warm")).status_code == 400
    assert (await gateway.chat(model="x" * 50)).status_code == 404
    assert (await gateway.http.get("/v1/nowhere/at/all")).status_code == 404
    found = await page(gateway)
    route = {"route": "/v1/chat/completions", "tenant": "visitors"}
    good = {"model": "toy", "via": "backend", "status": "2xx", "code": ""}
    for mode in ("verified", "off"):
        assert found["requests_total", route | good | {"mode": mode}] == 1
        assert found["request_seconds_count", {"model": "toy", "mode": mode}] == 1
        assert found["first_token_seconds_count", {"model": "toy", "mode": mode}] == 1
        assert found["own_seconds_count", {"model": "toy", "mode": mode}] == 1
        assert found["tokens_total", {"model": "toy", "mode": mode, "tenant": "visitors", "kind": "completion"}] == 5
    own, whole = (found[f"{name}_sum", {}] for name in ("own_seconds", "request_seconds"))
    assert 0 < own < whole
    assert found["requests_total", route | {"model": "", "status": "4xx", "code": "invalid_type"}] == 1
    assert found["requests_total", route | {"model": "", "status": "4xx", "code": "model_not_found"}] == 1
    assert found["requests_total", {"route": "other", "code": "unknown_url"}] == 1
    assert found["requests_total", {}] == 5
    assert found["requests_in_flight", {}] == 1, "that for the page itself"
    assert not any("x" * 50 in value for _, labels in found.samples for _, value in labels)


async def test_windows_and_tokens_are_counted_where_they_are_generated(gateway: Gateway, toy: ToyBackend) -> None:
    toy.drafter = lambda truth, count: truth[: count - 1] + [truth[-1] + 1] * (len(truth) == count)
    answer = await gateway.chat(is_deterministic=True, max_tokens=20, seed=3)
    generated = answer.json()["usage"]["completion_tokens"]
    once = await page(gateway)
    windows = {
        outcome: once["windows_total", {"outcome": outcome}] for outcome in ("agreed", "rolled_back", "undrafted")
    }
    assert sum(windows.values()) == int(answer.headers["x-verbatim-windows"])
    assert windows["rolled_back"] == int(answer.headers["x-verbatim-rollbacks"]) > 0
    assert windows["undrafted"] > 0, "the prompt's own, and one where there is room for no draft"
    assert once["rollback_position_tokens_count", {"model": "toy"}] == windows["rolled_back"]
    assert once["committed_tokens_total", {}] == generated
    drafted = once["committed_tokens_total", {"source": "drafted"}]
    assert 0 < drafted == once["drafted_tokens_total", {"outcome": "agreed"}]
    assert once["drafted_tokens_total", {"outcome": "rolled_back"}] > 0
    again = await gateway.chat(is_deterministic=True, max_tokens=20, seed=3)
    assert again.headers["x-verbatim-cache"] == "hit"
    twice = await page(gateway)
    assert twice["committed_tokens_total", {"source": "log"}] == generated
    assert twice["committed_tokens_total", {}] == 2 * generated
    assert twice["windows_total", {}] == once["windows_total", {}]
    assert [twice["log_readings_total", {"source": source}] for source in ("lead", "hit", "follow")] == [1, 1, 0]


async def test_decoded_tokens_are_told_apart(toy: ToyBackend) -> None:
    toy.roles = ("draft", "verify", "decode")
    toy.wants_draft = False
    async with launch_gateway(toy.url, admin_key=KEPT.hash) as gateway:
        await gateway.chat(is_deterministic=True, max_tokens=7)
        found = await page(gateway)
    assert found["committed_tokens_total", {"source": "decoded"}] == 7 == found["committed_tokens_total", {}]
    assert found["windows_total", {"outcome": "undrafted"}] == 1 == found["windows_total", {}]
    assert found["time_per_output_token_seconds_count", {"mode": "verified"}] == 1


async def test_what_is_handed_on_is_counted(gateway: Gateway, upstream: MockUpstream) -> None:
    events = [b"data: {}\n\n"] * 4
    upstream.answer = chunked(events, "content-type: text/event-stream")
    await gateway.chat(model="mocked", stream=True)
    upstream.answer = [b"HTTP/1.1 418 Teapot\r\ncontent-length: 0\r\n\r\n"]
    await gateway.chat(model="mocked")
    upstream.answer = [b"gibberish\r\n\r\n"]
    await gateway.chat(model="mocked")
    found = await page(gateway)
    handed = {"model": "mocked", "mode": "off", "via": "upstream", "tenant": "visitors"}
    assert found["requests_total", handed | {"status": "2xx", "code": ""}] == 1
    assert found["requests_total", handed | {"status": "4xx", "code": "upstream"}] == 1
    assert found["requests_total", handed | {"status": "5xx", "code": "backend_failed"}] == 1
    assert found["own_seconds_count", {"via": "upstream"}] == 1
    assert found["first_token_seconds_count", {"via": "upstream"}] == 1
    assert found["time_per_output_token_seconds_count", {"via": "upstream"}] == 1
    calls = {answer: found["upstream_calls_total", {"model": "mocked", "answer": answer}] for answer in ("2xx", "4xx")}
    assert calls == {"2xx": 1, "4xx": 1}
    assert found["upstream_calls_total", {"answer": "failed"}] == 1


async def test_a_full_gateway_says_for_want_of_what_it_refused(toy: ToyBackend) -> None:
    async with (
        launch_gateway(toy.url, admin_key=KEPT.hash, max_concurrent=8) as gateway,
        gateway.models.admission.admit(8, "anonymous", 1.0),
    ):
        assert (await gateway.chat()).status_code == 429
        found = await page(gateway)
    assert found["refusals_total", {"tenant": "anonymous", "reason": "places"}] == 1
    assert found["places_taken", {"tenant": "anonymous"}] == 8 == found["places", {}]


async def test_a_limit_says_which_one_it_was(toy: ToyBackend) -> None:
    text = "version: 1\nanonymous: all\ntenants: {all: {limits: {requests_per_minute: 1}}}\n"
    policies = FixedPolicy(load_policy(text, "policy.yaml"))
    configs = (ModelConfig(None, (toy.url,)),)
    async with launch_models(configs, policies=policies, admin_key=KEPT.hash) as gateway:
        assert [(await gateway.chat()).status_code for _ in range(2)] == [200, 429]
        found = await page(gateway)
    assert found["refusals_total", {"tenant": "all", "reason": "requests"}] == 1


async def test_replicas_are_told_by_their_state(gateway: Gateway, toy: ToyBackend) -> None:
    replica = {"model": "toy", "replica": toy.url}
    well = await page(gateway)
    assert well["replica_up", replica] == 1 == well["replica_breaker", replica | {"state": "closed"}]
    assert well["fingerprint_info", {"model": "toy", "fingerprint": toy.fingerprint}] == 1
    toy.faults = on("/healthz", Status(500))
    await gateway.check()
    gateway.models.groups[0].replicas[0].quarantine()
    for _ in range(3):
        gateway.models.groups[0].replicas[0].blame()
    ill = await page(gateway)
    assert ill["replica_up", replica] == 0
    assert ill["replica_quarantined", replica] == 1 == ill["replica_breaker", replica | {"state": "open"}]


async def test_every_metric_is_documented_and_the_other_way_round(toy: ToyBackend, tmp_path: Path) -> None:
    """Of a gateway with all that a gateway may have."""
    file = tmp_path / "policy.yaml"
    file.write_text("version: 1\nanonymous: all\ntenants: {all: {}}\n")
    redis = RedisConnection("redis://127.0.0.1:1")
    log = CommitLog(MemoryLogs(0, time.monotonic), RedisLogs(redis, time.monotonic))
    configs = (ModelConfig("toy", (toy.url,), upstreams=(UpstreamConfig(toy.url, "toy", None),)),)
    async with launch_models(configs, policies=PolicyFile(file), commit_log=log, admin_key=KEPT.hash) as gateway:
        families = (await page(gateway)).families
    await redis.aclose()
    ours = {
        name + ("_total" if kind == "counter" else "") for name, kind in families.items() if name.startswith(PREFIX)
    }
    documented = re.findall(r"^\| `(verbatim_gateway_\w+)`", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE)
    assert len(documented) == len(set(documented))
    assert set(documented) == ours


@given(st.lists(st.floats(0, 100)), st.floats(0, 1))
def test_a_histogram_counts_every_value_in_one_bucket(values: list[float], share: float) -> None:
    bounds = (0.5, 1.0, 10.0)
    histogram = Histogram(bounds)
    for value in values:
        histogram.observe(value)
    below = dict(histogram.buckets())
    assert below == {str(b): sum(v <= b for v in values) for b in bounds} | {"+Inf": len(values)}
    assert histogram.sum == pytest.approx(sum(values))
    estimate = histogram.quantile(share)
    assert (estimate is None) == (not values)
    if estimate is not None:
        assert 0 <= estimate <= bounds[-1]
        if estimate < bounds[-1]:
            assert sum(v <= next(b for b in bounds if b >= estimate) for v in values) >= share * len(values) - 1e-9
