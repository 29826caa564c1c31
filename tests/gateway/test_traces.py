"""Spans of requests that were really made, as OpenTelemetry exports them, in memory and over its own wire."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from launched import Gateway, launch_models
from mock_upstream import MockUpstream, plain
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from toy_backend import Status, ToyBackend, on

from gateway.app import open_tracing
from gateway.errors import ConfigError
from gateway.models_file import ModelConfig, UpstreamConfig
from gateway.telemetry.otel import Otel
from policies.document import FixedPolicy
from policies.loader import load_policy

ROOT = Path(__file__).parents[2]
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
SECRET = "a question that nobody else should read"
CACHING = "version: 1\nanonymous: all\ntenants: {all: {determinism: {allow: [verified]}, cache: {scope: tenant}}}\n"
KEY = "nobody-should-read-this-either"


class Spans(InMemorySpanExporter):
    """What was exported, and whether a request was."""

    def __init__(self) -> None:
        super().__init__()
        self.request_ended = asyncio.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        exported = super().export(spans)
        if any(span.kind is SpanKind.SERVER for span in spans):
            self.request_ended.set()
        return exported


@pytest.fixture
async def spans() -> Spans:
    return Spans()


@pytest.fixture
async def upstream() -> AsyncIterator[MockUpstream]:
    async with MockUpstream(plain(b"{}")) as running:
        yield running


@pytest.fixture
async def gateway(toy: ToyBackend, upstream: MockUpstream, spans: Spans) -> AsyncIterator[Gateway]:
    configs = (
        ModelConfig("toy", (toy.url,)),
        ModelConfig("mocked", upstreams=(UpstreamConfig(upstream.url, "mocked", f"up-{KEY}"),)),
    )
    otel = Otel(SimpleSpanProcessor(spans))
    async with launch_models(configs, tracing=otel) as running:
        yield running
    otel.close()


async def ask(gateway: Gateway, **more: Any) -> Any:
    headers = {"traceparent": TRACEPARENT, "authorization": f"Bearer sk-{KEY}", "x-request-id": "mine-1"}
    return await gateway.chat(headers, messages=[{"role": "user", "content": SECRET}], **more)


def finished(spans: Spans) -> dict[str, list[ReadableSpan]]:
    by_name: dict[str, list[ReadableSpan]] = {}
    for span in spans.get_finished_spans():
        by_name.setdefault(span.name, []).append(span)
    return by_name


def span_id(span: ReadableSpan) -> str:
    return f"{span.get_span_context().span_id:016x}"


async def test_a_verified_answer_is_a_tree_of_spans(gateway: Gateway, toy: ToyBackend, spans: Spans) -> None:
    answer = await ask(gateway, is_deterministic=True, max_tokens=20, temperature=0.5, seed=7, stream=True)
    assert answer.status_code == 200
    found = finished(spans)
    (request,) = found.pop("chat toy")
    assert request.kind is SpanKind.SERVER
    assert request.status.status_code is StatusCode.UNSET
    assert request.parent is not None
    assert f"{request.parent.span_id:016x}" == PARENT
    attributes = dict(request.attributes or {})
    assert attributes.pop("gen_ai.response.time_to_first_chunk") > 0
    assert attributes.pop("gen_ai.usage.input_tokens") > 0
    assert attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "verbatim",
        "gen_ai.request.model": "toy",
        "gen_ai.response.model": "toy",
        "gen_ai.request.stream": True,
        "gen_ai.request.max_tokens": 20,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.seed": 7,
        "gen_ai.request.choice.count": 1,
        "gen_ai.usage.output_tokens": 20,
        "verbatim.request_id": "mine-1",
        "verbatim.tenant": "anonymous",
        "verbatim.mode": "verified",
        "verbatim.via": "backend",
        "verbatim.cache": "off",
        "verbatim.fingerprint": toy.fingerprint,
    }
    assert set(found) == {"policy", "draft", "verify"}
    inner = [span for some in found.values() for span in some]
    assert {f"{span.parent.span_id:016x}" for span in inner if span.parent} == {span_id(request)}
    assert {f"{span.get_span_context().trace_id:032x}" for span in inner} == {TRACE}
    assert len(found["verify"]) == toy.calls["/v1/verify"]
    assert sum(dict(span.attributes or {})["verbatim.tokens"] for span in found["verify"]) == 20
    assert {span.kind for span in found["verify"]} == {SpanKind.CLIENT}


async def test_a_backend_is_told_of_the_call_that_it_answers(gateway: Gateway, toy: ToyBackend, spans: Spans) -> None:
    await ask(gateway, is_deterministic=True, max_tokens=9)
    verify = finished(spans)["verify"]
    told = [headers["traceparent"] for path, headers in toy.heads if path == "/v1/verify"]
    assert told == [f"00-{TRACE}-{span_id(span)}-01" for span in verify]


async def test_an_upstream_is_told_once(gateway: Gateway, upstream: MockUpstream, spans: Spans) -> None:
    await ask(gateway, model="mocked")
    found = finished(spans)
    (request,), (call,) = found["chat mocked"], found["upstream"]
    assert request.attributes is not None
    assert request.attributes["verbatim.via"] == "upstream"
    told = [value for name, value in upstream.received[0].headers if name == "traceparent"]
    assert told == [f"00-{TRACE}-{span_id(call)}-01"]


async def test_the_commit_log_has_a_span(toy: ToyBackend, spans: Spans) -> None:
    policy = load_policy(CACHING, "policy.yaml")
    otel = Otel(SimpleSpanProcessor(spans))
    async with launch_models((ModelConfig(None, (toy.url,)),), policies=FixedPolicy(policy), tracing=otel) as gateway:
        for _ in range(2):
            await gateway.chat(is_deterministic=True, max_tokens=5)
    otel.close()
    assert [dict(span.attributes or {})["verbatim.cache"] for span in finished(spans)["log"]] == ["lead", "hit"]


async def test_errors_are_told_apart_from_what_clients_do_wrong(
    gateway: Gateway, toy: ToyBackend, spans: Spans
) -> None:
    toy.faults = on("/v1/verify", Status(500))
    assert (await ask(gateway, is_deterministic=True)).status_code == 502
    assert (await ask(gateway, temperature="hot")).status_code == 400
    found = finished(spans)
    (failed,), (call, *_) = found["chat toy"], found["verify"]
    for span in (failed, call):
        assert span.status.status_code is StatusCode.ERROR
        assert dict(span.attributes or {})["error.type"] == "backend_failed"
    (refused,) = found["POST /v1/chat/completions"]
    assert refused.status.status_code is StatusCode.UNSET
    assert dict(refused.attributes or {})["http.response.status_code"] == 400


async def test_every_span_ends_when_a_client_leaves_a_stream(gateway: Gateway, spans: Spans, toy: ToyBackend) -> None:
    body = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 500}
    toy.faults = lambda path, nth: None
    async with gateway.http.stream("POST", "/v1/chat/completions", json=body) as response:
        await anext(response.aiter_bytes())
    await spans.request_ended.wait()
    assert set(finished(spans)) == {"policy", "stream", "chat toy"}


async def test_no_span_has_a_prompt_or_a_key(gateway: Gateway, toy: ToyBackend, spans: Spans) -> None:
    await ask(gateway, is_deterministic=True, max_tokens=9)
    await ask(gateway, max_tokens=9)
    await ask(gateway, model="mocked")
    await ask(gateway, model=SECRET)
    toy.faults = on("/v1/verify", Status(500))
    await ask(gateway, is_deterministic=True, max_tokens=9)
    said = "\n".join(span.to_json() for span in spans.get_finished_spans())
    assert said.count('"verbatim.request_id"') == 5
    assert SECRET not in said
    assert KEY not in said


async def test_without_tracing_a_clients_own_trace_goes_through(toy: ToyBackend, upstream: MockUpstream) -> None:
    configs = (ModelConfig("mocked", upstreams=(UpstreamConfig(upstream.url, "mocked", None),)),)
    async with launch_models(configs) as gateway:
        await ask(gateway, model="mocked")
    assert [value for name, value in upstream.received[0].headers if name == "traceparent"] == [TRACEPARENT]


async def test_the_command_exports_over_otlp_as_the_environment_says(toy: ToyBackend) -> None:
    """The process, the exporter and the wire are the real ones; what receives is the test."""
    async with MockUpstream(plain(b"")) as collector:
        env = {
            "PYTHONPATH": str(ROOT),
            "PATH": "/usr/bin:/bin",
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
            "OTEL_SERVICE_NAME": "front door",
            "VERBATIM_LOG_FORMAT": "json",
        }
        argv = [sys.executable, "-m", "gateway.cli", "gateway", "--backend", toy.url, "--port", "0", "--traces", "otlp"]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*argv, env=env, cwd=ROOT, stdout=pipe, stderr=pipe)
        assert process.stdout is not None
        try:
            url = (await process.stdout.readline()).decode().removeprefix("Serving on ").strip()
            async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
                body = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
                assert (await client.post("chat/completions", json=body)).status_code == 200
            process.terminate()
            _, logged = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    (received,) = collector.received
    assert received.line == "POST /base/v1/traces HTTP/1.1"
    sent = ExportTraceServiceRequest.FromString(received.body)
    (resource,) = sent.resource_spans
    named = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert named["service.name"] == "front door"
    assert {span.name for scope in resource.scope_spans for span in scope.spans} == {"chat toy", "policy", "stream"}
    lines = [json.loads(line) for line in logged.decode().splitlines()]
    assert [line["message"] for line in lines] == ["POST /v1/chat/completions"]


async def test_a_gateway_without_the_extra_says_which_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "gateway.telemetry.otel")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"traces: .* install Verbatim with the extra 'otel'"):
        async with open_tracing("otlp"):
            pass
