"""Log lines of requests that were really made: what they say, what they never say, and whose they are."""

from __future__ import annotations

import contextvars
import io
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from launched import Gateway, launch_gateway, launch_models
from mock_upstream import MockUpstream, chunked, plain
from toy_backend import Status, ToyBackend, on

from gateway.models_file import ModelConfig, UpstreamConfig
from gateway.telemetry import logs
from gateway.telemetry.logs import JsonLines, TextLines, configure_logs
from gateway.telemetry.record import Record, begin_recording

SECRET = "a question that nobody else should read"
KEY = "nobody-should-read-this-either"


@contextmanager
def captured(formatter: logging.Formatter) -> Iterator[io.StringIO]:
    """All that is logged meanwhile, as it would be written."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        yield stream
    finally:
        root.removeHandler(handler)
        root.setLevel(level)


@pytest.fixture
def lines() -> Iterator[Any]:
    with captured(JsonLines()) as stream:
        yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]


def access(lines: Any) -> list[dict[str, Any]]:
    return [line for line in lines() if line["logger"] == "gateway.access"]


async def ask(gateway: Gateway, **more: Any) -> Any:
    headers = {"x-request-id": "mine-1", "authorization": f"Bearer sk-{KEY}"}
    return await gateway.chat(headers, messages=[{"role": "user", "content": SECRET}], **more)


async def test_a_request_is_one_line(gateway: Gateway, lines: Any) -> None:
    answer = await ask(gateway, is_deterministic=True, max_tokens=5, stream=True)
    assert answer.headers["x-request-id"] == "mine-1"
    (line,) = access(lines)
    times = {name: line.pop(name) for name in ("duration_s", "first_token_s", "own_s")}
    assert 0 < times["first_token_s"] <= times["duration_s"]
    assert 0 < times["own_s"] < times["duration_s"]
    assert line.pop("time").endswith("Z")
    assert line.pop("prompt_tokens") > 0
    assert line == {
        "level": "info",
        "logger": "gateway.access",
        "message": "POST /v1/chat/completions",
        "request_id": "mine-1",
        "status": 200,
        "tenant": "anonymous",
        "model": "toy",
        "mode": "verified",
        "via": "backend",
        "cache": "off",
        "stream": True,
        "completion_tokens": 5,
    }


async def test_no_line_has_a_prompt_or_a_key(toy: ToyBackend) -> None:
    """Whatever becomes of the request, and down to the last detail of what is logged."""
    toy.faults = on("/v1/verify", Status(500))
    async with MockUpstream(plain(b"{}")) as upstream:
        configs = (
            ModelConfig("toy", (toy.url,)),
            ModelConfig("mocked", upstreams=(UpstreamConfig(upstream.url, "mocked", f"up-{KEY}"),)),
        )
        for formatter in (JsonLines(), TextLines()):
            with captured(formatter) as stream:
                async with launch_models(configs) as gateway:
                    assert (await ask(gateway, max_tokens=3)).status_code == 200
                    assert (await ask(gateway, is_deterministic=True)).status_code == 502
                    assert (await ask(gateway, temperature="hot")).status_code == 400
                    assert (await ask(gateway, model="mocked")).status_code == 200
                    assert (await ask(gateway, model=SECRET)).status_code == 404
            said = stream.getvalue()
            assert said.count("POST /v1/chat/completions") == 5
            assert SECRET not in said
            assert KEY not in said


async def test_the_body_is_said_where_that_is_asked_for(toy: ToyBackend, lines: Any) -> None:
    async with launch_gateway(toy.url, log_prompts=True) as gateway:
        await ask(gateway, max_tokens=3)
    (line,) = access(lines)
    assert json.loads(line["body"])["messages"][0]["content"] == SECRET
    assert KEY not in json.dumps(lines())


async def test_no_line_where_none_is_wanted(toy: ToyBackend, lines: Any) -> None:
    async with launch_gateway(toy.url, access_log=False) as gateway:
        await ask(gateway, max_tokens=3)
    assert access(lines) == []


async def test_what_machines_ask_all_the_time_is_for_debugging(gateway: Gateway, lines: Any) -> None:
    await gateway.http.get("/healthz")
    assert [line["level"] for line in access(lines)] == ["debug"]


async def test_a_stream_that_is_handed_on_is_told_as_one(lines: Any) -> None:
    async with MockUpstream(chunked([b"data: {}\n\n"] * 3, "content-type: text/event-stream")) as upstream:
        configs = (ModelConfig("mocked", upstreams=(UpstreamConfig(upstream.url, "mocked", None),)),)
        async with launch_models(configs) as gateway:
            await ask(gateway, model="mocked", stream=True)
            upstream.answer = plain(b"{}")
            await ask(gateway, model="mocked")
    assert [line["stream"] for line in access(lines)] == [True, False]
    assert all(line["via"] == "upstream" and line["first_token_s"] > 0 for line in access(lines))


async def test_a_path_that_there_is_none_of_is_said(gateway: Gateway, lines: Any) -> None:
    await gateway.http.get("/v2/models%0Ax" + "y" * 300)
    (line,) = access(lines)
    assert (line["message"], line["status"], line["code"]) == ("GET other", 404, "unknown_url")
    assert line["path"] == "/v2/models\nx" + "y" * (200 - 12)


async def test_an_exception_carries_the_id_of_its_request(
    gateway: Gateway, lines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = next(iter(gateway.models)).service
    assert service is not None
    monkeypatch.setattr(service, "open", None)
    # The test's server logs nothing below a critical error of its own.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    assert (await ask(gateway)).status_code == 500
    (broken,) = [line for line in lines() if "exception" in line]
    assert broken["request_id"] == "mine-1"
    assert "TypeError" in broken["exception"]
    (line,) = access(lines)
    assert (line["status"], line["code"]) == (500, "internal_error")


async def test_backends_and_upstreams_are_told_the_id(toy: ToyBackend) -> None:
    async with MockUpstream(plain(b"{}")) as upstream:
        configs = (
            ModelConfig("toy", (toy.url,)),
            ModelConfig("mocked", upstreams=(UpstreamConfig(upstream.url, "mocked", None),)),
        )
        async with launch_models(configs) as gateway:
            await ask(gateway, is_deterministic=True, max_tokens=9)
            assert {headers.get("x-request-id") for path, headers in toy.heads if path == "/v1/verify"} == {"mine-1"}
            assert {headers.get("x-request-id") for path, headers in toy.heads if path == "/v1/info"} == {None}
            await ask(gateway, model="mocked")
            drawn = await gateway.chat({"x-request-id": "x" * 129}, model="mocked")
    sent = [[value for name, value in received.headers if name == "x-request-id"] for received in upstream.received]
    assert sent == [["mine-1"], [drawn.headers["x-request-id"]]]
    assert len(drawn.headers["x-request-id"]) == 32


def test_a_line_is_a_line_whatever_is_in_it() -> None:
    def written(formatter: logging.Formatter) -> str:
        begin_recording(Record("a b"))
        with captured(formatter) as stream:
            logging.getLogger("x").warning("one\ntwo\x1b[31m", extra={logs.FIELDS: {"name": 'three\nfour "', "n": 5}})
        return stream.getvalue()

    for formatter in (JsonLines(), TextLines()):
        text = contextvars.copy_context().run(written, formatter)
        assert text.count("\n") == 1
        assert "\x1b" not in text
    assert text.endswith('WARNING x one\\ntwo\\u001b[31m request_id="a b" name="three\\nfour \\"" n=5\n')


def test_exceptions_are_said_in_both_formats() -> None:
    for formatter in (JsonLines(), TextLines()):
        with captured(formatter) as stream:
            try:
                raise KeyError("gone")
            except KeyError:
                logging.getLogger("x").exception("it broke")
        assert "KeyError: 'gone'" in stream.getvalue()


def test_a_process_logs_from_its_level_on(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    stream = io.StringIO()
    # So that the handlers of the test runner are not closed.
    monkeypatch.setattr(root, "handlers", [])
    for name in ("logThreads", "logProcesses", "logMultiprocessing"):
        monkeypatch.setattr(logging, name, True)
    try:
        configure_logs("json", "warning", stream)
        logging.getLogger("x").info("not this")
        logging.getLogger("x").warning("but this")
        assert [json.loads(line)["message"] for line in stream.getvalue().splitlines()] == ["but this"]
    finally:
        root.setLevel(before[1])
    assert sys.stderr is not stream
