"""The window protocol over real HTTP: what calls return, how bad ones are refused, and what a lost client leaves."""

from __future__ import annotations

import json
import math
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import msgspec
import pytest
import torch
import uvicorn

from backend.engine.lane_costs import Advice
from backend.kernels.attention import Layout
from backend.kernels.ops import CPU_FAST, CPU_FIXED, Ops
from backend.protocol import (
    DecodeEvent,
    DraftResponse,
    ErrorBody,
    Info,
    Sampling,
    StreamEvent,
    TokenizerFiles,
    VerifiedToken,
    VerifyResponse,
)
from backend.server.app import Backend, create_app
from tests.backend.harness import Calls, running_engine, tiny_checkpoint

PROMPT = [7, 300, 21, 21, 5]


def _slow(ops: Ops) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Layout], torch.Tensor]:
    def attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layout: Layout) -> torch.Tensor:
        time.sleep(0.005)
        return ops.attention(q, keys, values, layout)

    return attention


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Calls, httpx.Client, Backend]]:
    # Slowed down, so that a client can leave in the middle of a call.
    fast, fixed = replace(CPU_FAST, attention=_slow(CPU_FAST)), replace(CPU_FIXED, attention=_slow(CPU_FIXED))
    with running_engine(tiny_checkpoint(), "bfloat16", fast=fast, fixed=fixed) as calls:
        backend = Backend()
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(create_app(backend), log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        with httpx.Client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=60) as client:
            while not server.started:
                time.sleep(0.01)
            loading = client.get("/healthz")
            assert loading.status_code == 503 and loading.json()["status"] == "loading"
            early = client.get("/v1/info")
            assert early.status_code == 503 and early.json()["error"]["type"] == "unavailable"
            backend.ready(calls.engine, TokenizerFiles("{}", None, [2], {}))
            yield calls, client, backend
        server.should_exit = True
        thread.join()


@pytest.fixture
def client(served: tuple[Calls, httpx.Client, Backend]) -> httpx.Client:
    return served[1]


def test_info_tokenizer_and_health(client: httpx.Client) -> None:
    info = msgspec.json.decode(client.get("/v1/info").content, type=Info)
    assert (info.protocol, info.model, info.vocab_size, info.dtype) == (1, "tiny", 331, "bfloat16")
    assert msgspec.json.decode(client.get("/v1/tokenizer").content, type=TokenizerFiles).eos_ids == [2]
    assert client.get("/healthz").json() == {"status": "ready", "loaded": 1.0}


def test_draft_verify_and_stream_agree_on_a_completion(client: httpx.Client) -> None:
    sampling = {"temperature": 0.0}
    call = {"context": PROMPT, "generated": 0, "sampling": sampling}
    first = msgspec.json.decode(client.post("/v1/verify", json=call | {"draft": []}).content, type=VerifyResponse)
    assert first.agreed == 0 and len(first.tokens) == 1
    context = [*PROMPT, first.tokens[0].id]
    call = {"context": context, "generated": 1, "sampling": sampling}
    reply = client.post("/v1/draft", json=call | {"count": 6, "top_logits": 3})
    draft = msgspec.json.decode(reply.content, type=DraftResponse)
    assert len(draft.tokens) == 6
    for token in draft.tokens:
        assert token.top[0].id == token.id
        assert math.isclose(token.top[0].score - token.top[1].score, token.margin, rel_tol=1e-4, abs_tol=1e-6)
        assert token.logprob <= 0
    ids = [token.id for token in draft.tokens]
    reply = client.post("/v1/verify", json=call | {"draft": [*ids, 0], "top_logprobs": 2})
    verified = msgspec.json.decode(reply.content, type=VerifyResponse)
    assert [token.id for token in verified.tokens[: verified.agreed]] == [*ids, 0][: verified.agreed]
    assert len(verified.tokens) == verified.agreed + 1 and all(len(token.top) == 2 for token in verified.tokens)
    again = client.post("/v1/verify", json=call | {"draft": [*ids, 0], "top_logprobs": 2})
    assert again.content == reply.content, "a repeated call gives the same bytes"
    body = {"context": PROMPT, "max_tokens": 5, "sampling": sampling, "top_logprobs": 2}
    with client.stream("POST", "/v1/stream", json=body) as response:
        events = [msgspec.json.decode(line, type=StreamEvent) for line in response.iter_lines()]
    tokens = [token for event in events for token in event.tokens]
    assert len(tokens) == 5 and events[-1].finish == "length"
    assert all(token.top[0].score == token.logprob for token in tokens)


DRAFT = {"context": PROMPT, "generated": 0, "count": 3}
VERIFY = {"context": PROMPT, "generated": 0, "draft": [1]}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/draft", {k: v for k, v in DRAFT.items() if k != "count"}, "count"),
        ("/v1/draft", DRAFT | {"count": 0}, "count"),
        ("/v1/draft", DRAFT | {"count": "3"}, "count"),
        ("/v1/draft", DRAFT | {"context": []}, "context"),
        ("/v1/draft", DRAFT | {"context": [1, -4]}, "context"),
        ("/v1/draft", DRAFT | {"context": [1, 331]}, "context"),
        ("/v1/draft", DRAFT | {"context": [1, "a"]}, "context[1]"),
        ("/v1/draft", DRAFT | {"context": [1] * 512}, "context"),
        ("/v1/draft", DRAFT | {"generated": 5}, "generated"),
        ("/v1/draft", DRAFT | {"generated": -1}, "generated"),
        ("/v1/draft", DRAFT | {"top_logits": 21}, "top_logits"),
        ("/v1/draft", DRAFT | {"sampling": {"min_tokens": 1}, "stop_ids": [-332]}, "stop_ids"),
        ("/v1/verify", VERIFY | {"stop_ids": [-1]}, "stop_ids"),
        ("/v1/decode", {"context": PROMPT, "generated": 0, "max_tokens": 1, "stop_ids": [-1]}, "stop_ids"),
        ("/v1/stream", {"context": PROMPT, "max_tokens": 1, "stop_ids": [-1]}, "stop_ids"),
        ("/v1/draft", DRAFT | {"surprise": 1}, "surprise"),
        ("/v1/draft", DRAFT | {"sampling": {"temperature": -1}}, "sampling.temperature"),
        ("/v1/draft", DRAFT | {"sampling": {"top_p": 0}}, "sampling.top_p"),
        ("/v1/draft", DRAFT | {"sampling": {"top_k": -1}}, "sampling.top_k"),
        ("/v1/draft", DRAFT | {"sampling": {"min_p": 2}}, "sampling.min_p"),
        ("/v1/draft", DRAFT | {"sampling": {"seed": 2**63}}, "sampling.seed"),
        ("/v1/draft", DRAFT | {"sampling": {"top_k": 1.5}}, "sampling.top_k"),
        ("/v1/draft", DRAFT | {"sampling": {"heat": 1}}, "sampling.heat"),
        ("/v1/draft", DRAFT | {"sampling": {"presence_penalty": 2.1}}, "sampling.presence_penalty"),
        ("/v1/draft", DRAFT | {"sampling": {"frequency_penalty": -2.1}}, "sampling.frequency_penalty"),
        ("/v1/draft", DRAFT | {"sampling": {"repetition_penalty": 0}}, "sampling.repetition_penalty"),
        ("/v1/draft", DRAFT | {"sampling": {"repetition_penalty": 101}}, "sampling.repetition_penalty"),
        ("/v1/draft", DRAFT | {"sampling": {"min_tokens": -1}}, "sampling.min_tokens"),
        ("/v1/draft", DRAFT | {"sampling": {"logit_bias": [[-1, 1]]}}, "sampling.logit_bias"),
        ("/v1/draft", DRAFT | {"sampling": {"logit_bias": [[3, 1], [3, 1]]}}, "sampling.logit_bias"),
        ("/v1/draft", DRAFT | {"sampling": {"logit_bias": [[4, 1], [3, 1]]}}, "sampling.logit_bias"),
        ("/v1/draft", DRAFT | {"sampling": {"logit_bias": [[3, 101]]}}, "sampling.logit_bias"),
        ("/v1/draft", DRAFT | {"sampling": {"logit_bias": [[i, 1] for i in range(1025)]}}, "sampling.logit_bias"),
        ("/v1/draft", DRAFT | {"sampling": {"logit_bias": [[3]]}}, "sampling.logit_bias[0]"),
        ("/v1/draft", DRAFT | {"sampling": {"logit_bias": [[331, 1]]}}, "sampling.logit_bias"),
        (
            "/v1/draft",
            DRAFT | {"sampling": {"min_tokens": 1}, "stop_ids": list(range(331))},
            "sampling.min_tokens",
        ),
        ("/v1/verify", VERIFY | {"draft": [331]}, "draft"),
        ("/v1/verify", VERIFY | {"draft": [-1]}, "draft"),
        ("/v1/verify", VERIFY | {"draft": [1] * 507}, "draft"),
        ("/v1/verify", VERIFY | {"draft": None}, "draft"),
        ("/v1/stream", {"context": PROMPT, "max_tokens": 0}, "max_tokens"),
        ("/v1/stream", {"context": PROMPT}, "max_tokens"),
        ("/v1/stream", {"context": [9999], "max_tokens": 1}, "context"),
    ],
)
def test_a_bad_call_is_refused_with_its_field(
    client: httpx.Client, path: str, body: dict[str, object], field: str
) -> None:
    response = client.post(path, json=body)
    assert response.status_code == 400
    error = msgspec.json.decode(response.content, type=ErrorBody).error
    assert (error.type, error.field) == ("invalid_request", field)
    assert error.message


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"[1]", b"null", b'{"context": NaN}', b"[" * 100_000])
def test_a_body_that_is_no_call_is_refused(client: httpx.Client, body: bytes) -> None:
    response = client.post("/v1/draft", content=body)
    assert response.status_code == 400 and response.json()["error"]["type"] == "invalid_request"


def test_other_errors_have_the_envelope_too(client: httpx.Client) -> None:
    for response, status in [
        (client.get("/v1/nothing"), 404),
        (client.get("/v1/draft"), 405),
        (client.post("/v1/draft", content=b" " * ((16 << 20) + 1)), 413),
    ]:
        assert response.status_code == status
        assert msgspec.json.decode(response.content, type=ErrorBody).error.message


def test_a_client_that_leaves_before_its_body_is_there_is_no_error_of_ours(
    client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection((client.base_url.host, client.base_url.port or 0)) as half:
        half.sendall(b'POST /v1/verify HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{"context": [1,')
        time.sleep(0.2)  # Until the handler waits for the rest.
    time.sleep(0.2)
    assert client.get("/healthz").status_code == 200
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize("read_first", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/draft", DRAFT | {"count": 400}),
        ("/v1/verify", {"context": [3] * 500, "generated": 0, "draft": []}),
        ("/v1/stream", {"context": PROMPT, "max_tokens": 400}),
    ],
)
def test_a_client_that_leaves_takes_its_work_along(
    served: tuple[Calls, httpx.Client, Backend], path: str, body: dict[str, object], read_first: bool
) -> None:
    calls, client, _ = served
    engine = calls.engine
    deadline = time.monotonic() + 60
    payload = json.dumps(body).encode()
    address = (client.base_url.host, client.base_url.port)
    with socket.create_connection(address) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}\r\n\r\n"
        connection.sendall(head.encode() + payload)
        if read_first and path == "/v1/stream":
            connection.recv(1)
        else:
            while engine._cache.leased_calls == 0:
                assert time.monotonic() < deadline, "the call never reached the engine"
                time.sleep(0.001)
    while engine._cache.leased_calls or engine._listeners:
        assert time.monotonic() < deadline, "the call is still in the engine"
        time.sleep(0.01)
    engine._cache.check_integrity()


def test_metrics_are_served_and_documented(client: httpx.Client) -> None:
    client.post("/v1/verify", json={"context": PROMPT, "generated": 0, "draft": [1, 2]})
    page = client.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    names = set(re.findall(r"^(verbatim_engine_\w+)", page.text, re.MULTILINE))
    documented = set(re.findall(r"^\| `(verbatim_engine_\w+)`", Path("docs/metrics.md").read_text(), re.MULTILINE))
    assert names == documented
    assert 'verbatim_engine_advice_total{reason="cheaper",way=' in page.text
    assert 'verbatim_engine_windows_total{outcome="rolled_back"}' in page.text


def test_decoded_tokens_are_the_verified_ones(served: tuple[Calls, httpx.Client, Backend]) -> None:
    calls, client, _ = served
    sampling = Sampling(temperature=0.9, seed=3, presence_penalty=0.5)
    expected = calls.complete(PROMPT, 40, sampling)
    body = {"context": PROMPT, "generated": 0, "sampling": msgspec.to_builtins(sampling)}
    tokens: list[VerifiedToken] = []
    ends = []
    while len(tokens) < 40:
        context = [*PROMPT, *(token.id for token in tokens)]
        call = body | {
            "context": context,
            "generated": len(tokens),
            "max_tokens": 40 - len(tokens),
            "top_logprobs": 2,
            "yields": True,
        }
        events = [
            msgspec.json.decode(line, type=DecodeEvent)
            for line in client.post("/v1/decode", json=call).text.splitlines()
        ]
        tokens += [token for event in events for token in event.tokens]
        ends.append((events[-1].finish, events[-1].wants_draft))
        assert {event.fingerprint for event in events} == {calls.engine.info.fingerprint}
        assert all((event.finish, event.wants_draft) == (None, False) for event in events[:-1])
    assert [(token.id, token.logprob) for token in tokens] == expected
    assert all(len(token.top) == 2 for token in tokens)
    assert ends == [(None, True)] * (len(ends) - 1) + [("length", False)]


def test_decoding_yields_where_drafts_are_cheaper(
    served: tuple[Calls, httpx.Client, Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, client, _ = served
    call = {"context": PROMPT, "generated": 0, "max_tokens": 40}
    for drafts, yields, count in ((True, True, 1), (False, True, 40), (True, False, 40)):
        monkeypatch.setattr(calls.engine._costs, "_settled", Advice(drafts, "cheaper"))
        lines = client.post("/v1/decode", json=call | {"yields": yields}).text.splitlines()
        events = [msgspec.json.decode(line, type=DecodeEvent) for line in lines]
        assert sum(len(event.tokens) for event in events) == count
        assert (events[-1].wants_draft, events[-1].finish) == (count == 1, None if count == 1 else "length")


def test_a_port_that_is_taken_ends_the_start_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        argv = [sys.executable, "-m", "backend.server", "--port", str(taken.getsockname()[1])]
        ended = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (3, "")
    (line,) = ended.stderr.splitlines()
    assert "Address already in use" in line
