"""The command line as processes: they start, say what is wrong, and leave nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner
from served import served
from toy_backend import Hang, ToyBackend, Wait, on

from gateway.cli import main
from gateway.cli.commands import bind
from gateway.settings import Settings

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "300"}
VERBATIM = [sys.executable, "-m", "gateway.cli"]
READY = "Stop with Ctrl-C."


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


@contextmanager
def process(argv: list[str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(argv, env=ENV, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as started:
        try:
            yield started
        finally:
            started.kill()


def read_until(started: subprocess.Popen[str], text: str) -> str:
    """The output up to a line that contains `text`."""
    assert started.stdout is not None
    seen = ""
    for line in started.stdout:
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"ended without {text!r}: {seen}")


def toy_up(*flags: str) -> tuple[list[str], list[int]]:
    ports = free_ports(2)
    return [sys.executable, str(ROOT / "tests/gateway/toy_up.py"), *map(str, ports), *flags], ports


def descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children]


def wait_gone(pids: list[int]) -> None:
    """Return once none of the processes runs any more; each says so itself through its pidfd."""
    for pid in pids:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        with os.fdopen(pidfd, closefd=True, mode="rb", buffering=0) as file:
            poll = select.poll()
            poll.register(file.fileno())
            poll.poll()


def chat(port: int, **fields: object) -> httpx.Response:
    body = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "is_deterministic": True} | fields
    return httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, trust_env=False, timeout=60)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_serves_and_stops_cleanly(number: signal.Signals) -> None:
    argv, (port, _) = toy_up()
    with process(argv) as up:
        said = read_until(up, READY)
        assert f"Verbatim is ready: http://127.0.0.1:{port}/v1\n" in said
        assert f"curl http://127.0.0.1:{port}/v1/chat/completions" in said
        assert chat(port, max_tokens=3).status_code == 200
        children = descendants(up.pid)
        assert len(children) == 2
        up.send_signal(number)
        assert up.wait() == 0
        wait_gone(children)


def test_up_draws_an_admin_key_and_shows_it() -> None:
    argv, (port, _) = toy_up()
    with process(argv) as up:
        said = read_until(up, READY)
        (key,) = re.findall(rf"http://127.0.0.1:{port}/ui#key=(vb_\S+)", said)
        url = f"http://127.0.0.1:{port}/admin/v1/statistics"
        assert httpx.get(url, trust_env=False).status_code == 401
        assert httpx.get(url, headers={"authorization": f"Bearer {key}"}, trust_env=False).status_code == 200
        up.terminate()
        assert up.wait() == 0


def test_up_under_a_policy_that_asks_for_a_key() -> None:
    argv, _ = toy_up("--policy", str(ROOT / "policies/examples/ci.yaml"))
    with process(argv) as up:
        said = read_until(up, READY)
        assert "-H 'authorization: Bearer YOUR_KEY'" in said
        assert '"model": "toy"' in said
        up.terminate()
        assert up.wait() == 0


def test_up_says_that_it_is_ready_on_standard_output() -> None:
    """So that who drops it, as the demo does, is not told to try things and press Ctrl-C."""
    argv, _ = toy_up()
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, env=ENV, text=True, stdout=pipe, stderr=pipe) as up:
        try:
            said = read_until(up, READY)
            up.terminate()
            rest, on_stderr = up.communicate()
        finally:
            up.kill()
    assert said.startswith("Verbatim is ready: ")
    assert said.endswith(f"{READY}\n")
    assert rest == ""
    assert "Loading the model" in on_stderr
    assert READY not in on_stderr


def test_the_curl_line_is_one_that_works() -> None:
    argv, _ = toy_up()
    with process(argv) as up:
        line = next(line for line in read_until(up, READY).splitlines() if "curl" in line)
        body = json.loads(line.split(" -d ")[1].strip().strip("'"))
        assert body["model"] == "toy"
        assert body["is_deterministic"] is True


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a child's life to its parent's")
def test_no_child_outlives_a_killed_parent() -> None:
    argv, _ = toy_up()
    with process(argv) as up:
        read_until(up, READY)
        children = descendants(up.pid)
        up.kill()
        up.wait()
        wait_gone(children)


@pytest.mark.parametrize("which", [0, 1])
def test_a_child_that_dies_ends_the_other(which: int) -> None:
    argv, _ = toy_up()
    with process(argv) as up:
        read_until(up, READY)
        children = descendants(up.pid)
        os.kill(children[which], signal.SIGKILL)
        read_until(up, "stopped by itself, with status -9")
        assert up.wait() == 1
        wait_gone(children)


def test_an_engine_that_cannot_start_ends_all() -> None:
    argv, _ = toy_up("--fail")
    with process(argv) as up:
        read_until(up, "The engine stopped by itself, with status 3")
        assert up.wait() == 1


async def serving(toy: ToyBackend, *flags: str) -> tuple[asyncio.subprocess.Process, int]:
    """A gateway process that answers, and its port: any that was free when it bound it."""
    argv = [*VERBATIM, "gateway", "--backend", toy.url, "--port", "0", *flags]
    gateway = await asyncio.create_subprocess_exec(*argv, env=ENV, stdout=asyncio.subprocess.PIPE)
    assert gateway.stdout is not None
    said = await gateway.stdout.readline()
    found = re.search(rb"Serving on http://127\.0\.0\.1:(\d+)", said)
    assert found is not None, said
    return gateway, int(found[1])


async def test_the_gateway_drains(toy: ToyBackend) -> None:
    """A request in flight at SIGTERM is finished, one that comes after is refused, and then the process ends."""
    release = asyncio.Event()
    toy.faults = on("/v1/verify", Wait(release), nth=1)
    gateway, port = await serving(toy)
    body = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "is_deterministic": True, "max_tokens": 20}
    path = "/v1/chat/completions"
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as client:
        in_flight = asyncio.create_task(client.post(path, json=body))
        await toy.hung.acquire()
        gateway.terminate()
        while (refused := await client.post(path, json=body)).status_code == 200:
            pass
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        assert refused.headers["connection"] == "close", "for the client's next request to go elsewhere"
        assert refused.headers["retry-after"] == "1"
        assert (await client.get("/healthz")).json() == {"status": "draining"}
        release.set()
        assert (await in_flight).json()["usage"]["completion_tokens"] == 20
    assert await gateway.wait() == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_drain_has_an_end(toy: ToyBackend, stream: bool) -> None:
    """What is still in flight then is told so, in a way that cannot be mistaken for a complete answer."""
    toy.faults = on("/v1/verify", Hang(), nth=1)
    gateway, port = await serving(toy, "--drain-timeout-s", "0.2")
    in_flight = asyncio.create_task(asyncio.to_thread(chat, port, stream=stream, max_tokens=20))
    await toy.hung.acquire()
    gateway.terminate()
    response = await in_flight
    await toy.left.acquire()
    last = response.text.strip().split("\n\n")[-1].removeprefix("data: ")
    assert json.loads(last)["error"]["code"] == "shutting_down"
    assert response.status_code == (200 if stream else 503)
    assert await gateway.wait() == 0


def test_a_port_in_use_is_said_plainly() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for command in (["up"], ["gateway", "--backend", "http://127.0.0.1:1"]):
            result = CliRunner().invoke(main, [*command, "--port", str(port)])
            assert result.exit_code == 1
            assert f"cannot listen on 127.0.0.1:{port}" in result.output
            assert "--port" in result.output


def test_a_backend_that_never_comes() -> None:
    (nobody,) = free_ports(1)
    flags = ["--backend", f"http://127.0.0.1:{nobody}", "--port", "0", "--start-timeout-s", "0.3"]
    said = f"http://127.0.0.1:{nobody}: the backend cannot be reached"
    with process([*VERBATIM, "gateway", *flags]) as gateway:
        read_until(gateway, f"waiting for a backend to be ready: {said}")
        read_until(gateway, f"Error: no backend is ready after 0.3 s: {said}")
        assert gateway.wait() == 1


async def test_a_redis_that_is_not_there_is_said_and_stops_nothing(toy: ToyBackend) -> None:
    (nobody,) = free_ports(1)
    argv = [*VERBATIM, "gateway", "--backend", toy.url, "--port", "0", "--redis", f"redis://127.0.0.1:{nobody}"]
    pipe = asyncio.subprocess.PIPE
    gateway = await asyncio.create_subprocess_exec(*argv, env=ENV, stdout=pipe, stderr=pipe)
    assert gateway.stdout is not None
    assert b"Serving on" in await gateway.stdout.readline()
    gateway.terminate()
    _, said = await gateway.communicate()
    assert b"the Redis does not answer (ConnectionError)" in said
    assert gateway.returncode == 0


@pytest.mark.parametrize(
    ("argv", "env", "said"),
    [
        (["gateway"], {}, "--backend URL"),
        (["gateway", "--backend", "localhost"], {}, "--backend: backend must be"),
        (["gateway", "--backend", "http://me:secret@x"], {}, "--backend: backend must not hold a user or a password"),
        (["gateway", "--backend", "http://x"], {"VERBATIM_PORT": "many"}, "VERBATIM_PORT: 'many' is no whole number"),
        (
            ["gateway", "--backend", "http://x"],
            {"VERBATIM_ADMIN_KEY": "vb_x"},
            "VERBATIM_ADMIN_KEY: admin_key must be the",
        ),
        (["up"], {"VERBATIM_MAX_CONCURRENT": "1"}, "VERBATIM_MAX_CONCURRENT: max_concurrent must be at least 8"),
        (["up", "--dtype", "int8"], {}, "--dtype"),
    ],
)
def test_a_wrong_setting_is_named(argv: list[str], env: dict[str, str], said: str) -> None:
    result = CliRunner().invoke(main, argv, env=env)
    assert result.exit_code == 2
    assert said in result.output


@pytest.mark.parametrize("command", ["up", "demo"])
@pytest.mark.parametrize(
    ("flag", "value"),
    [("--kv-bytes", "0"), ("--threads", "0"), ("--verify-groups", "0"), ("--verify-window", "1"), ("--threads", "x")],
)
def test_a_flag_that_the_engine_would_refuse_is_refused_before_it_starts(command: str, flag: str, value: str) -> None:
    result = CliRunner().invoke(main, [command, flag, value])
    assert result.exit_code == 2
    assert f"'{flag}'" in result.output


@pytest.mark.parametrize(
    ("argv", "status", "said"),
    [
        ([], 1, "no gateway answers at http://127.0.0.1:1"),
        (["--api-key", "é"], 2, "--api-key: this is no key"),
        (["--json", "nowhere/figures.json"], 2, "there is no directory nowhere"),
    ],
)
def test_a_demo_that_cannot_be_shown_says_why(argv: list[str], status: int, said: str) -> None:
    result = CliRunner().invoke(main, ["demo", "--url", "http://127.0.0.1:1", *argv])
    assert (result.exit_code, said in result.output) == (status, True), result.output


def test_a_demo_whose_requests_are_refused_says_why() -> None:
    with served(ToyBackend()) as gateway:
        result = CliRunner().invoke(main, ["demo", "--url", gateway.url, "--tokens", "1000000"])
    assert (result.exit_code, "Error: status 400: " in result.output) == (1, True), result.output


@pytest.mark.parametrize(
    ("flag", "content", "said"),
    [
        ("--policy", None, "policy: cannot read {file}: No such file or directory"),
        ("--policy", "version: 2", "{file}:1: version: must be 1"),
        ("--models", None, "models: cannot read {file}: No such file or directory"),
        ("--models", "version: 1", "{file}:1: names no model"),
        ("--receipt-keys", None, "receipt_keys: cannot read {file}: No such file or directory"),
        ("--receipt-keys", "x", "receipt_keys: {file}: is no key in PEM"),
        ("--config", None, "{file}"),
    ],
)
def test_a_file_that_is_missing_or_wrong_is_named(tmp_path: Path, flag: str, content: str | None, said: str) -> None:
    file = tmp_path / "file"
    if content is not None:
        file.write_text(content)
    backend = [] if flag == "--models" else ["--backend", "http://x"]
    result = CliRunner().invoke(main, ["gateway", *backend, flag, str(file)])
    assert result.exit_code == 2
    assert said.format(file=file) in result.output


def test_a_model_that_is_missing_is_named(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    with process([*VERBATIM, "up", "--model", str(file), "--port", "0"]) as up:
        said = read_until(up, "The engine stopped by itself, with status 1")
        assert f"Error: {file}: " in said
        assert up.wait() == 1


def flags_in_help(text: str) -> dict[str, tuple[str, str]]:
    """Each flag with the kind of its value, and its default and range as click shows them."""
    flags = {}
    for block in re.split(r"\n  (?=--)", text)[1:]:
        name, kind, *words = block.split()
        told = re.search(r"\[default: (.*)\]", " ".join(words))
        # click puts a default that is only shown in parentheses.
        flags[name] = kind, re.sub(r"[()]", "", told[1]) if told else ""
    return flags


@pytest.mark.parametrize("command", ["up", "demo"])
def test_the_engines_flags_are_shown_as_the_engine_has_them(command: str) -> None:
    argv = [sys.executable, "-m", "backend.server", "--help"]
    engine = flags_in_help(subprocess.run(argv, env=ENV, text=True, capture_output=True, check=True).stdout)
    shown = flags_in_help(CliRunner().invoke(main, [command, "--help"]).output)
    ours = {name: flag for name, flag in engine.items() if name not in ("--host", "--port", "--log-format", "--help")}
    assert len(ours) >= 6
    assert all(default for _, default in ours.values())
    assert {name: shown.get(name) for name in ours} == ours


async def test_accepted_connections_do_not_delay_small_writes() -> None:
    """asyncio sees to that only where the listening socket names its protocol."""
    accepted: asyncio.Queue[int] = asyncio.Queue()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.put_nowait(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    with bind(Settings("http://127.0.0.1:1", port=0)) as listener:
        async with await asyncio.start_server(connected, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            assert await accepted.get() == 1
            writer.close()
            await writer.wait_closed()
