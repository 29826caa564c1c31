"""`verbatim policy` and `verbatim keys`."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner, Result
from toy_backend import ToyBackend

from gateway.cli import main
from gateway.cli.policy import PARSERS
from gateway.openai_api.sampling import BOUNDS
from policies.api_keys import KeyRing
from policies.json_schema import policy_schema
from policies.loader import ROUTES, load_policy
from policies.settings import LEAST_POSITIVE, SAMPLING

EXAMPLES = Path(__file__).parents[2] / "policies/examples"
MODEL = "smollm2-135m-instruct"


def run(*argv: str | Path, code: int = 0) -> str:
    result: Result = CliRunner().invoke(main, list(map(str, argv)))
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def request_file(tmp_path: Path) -> Path:
    path = tmp_path / "request.json"
    message = {"role": "user", "content": "hi"}
    path.write_text(json.dumps({"model": MODEL, "messages": [message], "top_p": 0.5, "seed": 9}))
    return path


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_check_a_right_file(path: Path) -> None:
    assert f"{path}: right" in run("policy", "check", path)


def test_check_names_every_mistake(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("version: 1\ntenant: {}\ndefaults: {seed: {defualt: 1}}\n")
    said = run("policy", "check", path, code=1)
    assert f"{path}:2: tenant: unknown key; did you mean 'tenants'?" in said
    assert f"{path}:3: defaults.seed.defualt: unknown key; did you mean 'default'?" in said


def explained(output: str) -> dict[str, tuple[str, str]]:
    lines = (re.split(r" {2,}", line.strip()) for line in output.splitlines())
    return {line[0]: (line[1], line[2]) for line in lines if len(line) == 3}


def test_explain_names_the_rule_behind_each_part(request_file: Path) -> None:
    argv = ("policy", "explain", "--policy", EXAMPLES / "compliance.yaml", "--tenant", "claims-desk", "--request")
    parts = explained(run(*argv, request_file))
    assert parts["mode"] == ("verified", "defaults.determinism.mode")
    assert parts["seed"] == ("42", "defaults.seed.default")
    assert parts["temperature"] == ("0", "defaults.sampling.temperature.default")
    assert parts["top_p"] == ("0.5", "request")
    assert parts["limits.concurrency"] == ("32", "tenants.claims-desk.limits.concurrency")
    assert parts["limits.burst_s"] == ("1", "built-in.limits.burst_s")
    refused = run(*argv, request_file, "--determinism", "off", code=1)
    assert "refused: mode off may not be asked for here; allowed are: verified" in refused


def test_explain_takes_the_anonymous_tenant_or_asks_for_one(request_file: Path) -> None:
    chat = ("policy", "explain", "--request", request_file, "--policy", EXAMPLES / "chat.yaml")
    assert explained(run(*chat))["seed"] == ("9", "request")
    assert explained(run(*chat[:-2]))["mode"] == ("off", "built-in.determinism.mode")
    assert "there is no tenant 'x'" in run(*chat, "--tenant", "x", code=2)
    assert "give --tenant" in run(*chat[:-1], EXAMPLES / "ci.yaml", code=2)
    assert "refused: messages: is unknown" in run(*chat, "--route", "/v1/completions", code=1)


def test_a_new_key_opens_the_door_its_hash_is_put_in() -> None:
    said = run("keys", "new")
    (key,) = re.findall(r"vb_\S+", said)
    entry = said[said.index("  - id") :]
    policy = load_policy("version: 1\ntenants:\n a:\n  keys:\n" + entry, "p.yaml")
    assert policy.key_ring.tenant_of(key, 0.0) == "a"
    assert KeyRing().tenant_of(key, 0.0) is None
    assert said.count(key.split("_", 2)[2]) == 1


def test_the_schema_is_printed() -> None:
    assert json.loads(run("policy", "schema")) == policy_schema()


def test_a_policy_speaks_of_the_routes_and_parameters_there_are() -> None:
    assert tuple(PARSERS) == ROUTES
    assert set(SAMPLING) == set(BOUNDS)
    for name, keys in SAMPLING.items():
        bounds = BOUNDS[name]
        assert (keys.least.built_in, keys.most.built_in) == (bounds.least, bounds.most)
        assert keys.default.kind.schema()["minimum"] == (LEAST_POSITIVE if bounds.above else bounds.least)


# --- the gateway as a process ----------------------------------------------------------------------------------------


async def test_a_gateway_takes_a_changed_policy_on_sighup_and_without(toy: ToyBackend, tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    write_seed(path, 1)
    argv = [sys.executable, "-m", "gateway.cli", "gateway", "--backend", toy.url, "--policy", str(path), "--port", "0"]
    env = {**os.environ, "PYTHONPATH": str(EXAMPLES.parents[1])}
    gateway = await asyncio.create_subprocess_exec(*argv, env=env, stdout=asyncio.subprocess.PIPE)
    try:
        assert gateway.stdout is not None
        url = (await gateway.stdout.readline()).decode().rpartition("Serving on ")[2].strip()
        body = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:

            async def seed() -> str:
                response = await client.post(f"{url}/chat/completions", json=body)
                return str(response.headers["x-verbatim-seed"])

            assert await seed() == "1"
            for wanted, hang_up in ((2, True), (3, False)):
                write_seed(path, wanted)
                if hang_up:
                    gateway.send_signal(signal.SIGHUP)
                while await seed() != str(wanted):
                    pass
    finally:
        gateway.terminate()
    assert await gateway.wait() == 0


def write_seed(path: Path, seed: int) -> None:
    path.write_text(
        f"version: 1\nanonymous: a\ntenants: {{a: {{seed: {{default: {seed}}}, determinism: {{mode: verified}}}}}}"
    )


@pytest.mark.parametrize("command", [["up"], ["gateway", "--backend", "http://127.0.0.1:1"]])
def test_a_wrong_policy_stops_the_start_with_every_mistake(tmp_path: Path, command: list[str]) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("version: 1\nanonymous: a\ntenants: {a: {limit: {}, seed: 1}}\n")
    said = run(*command, "--policy", path, code=2)
    assert f"{path}:3: tenants.a.limit: unknown key; did you mean 'limits'?" in said
    assert f"{path}:3: tenants.a.seed: must be a mapping" in said
    assert f"policy: cannot read {tmp_path}/none: No such file" in run(*command, "--policy", tmp_path / "none", code=2)


def test_what_is_no_url_of_a_redis_is_not_repeated() -> None:
    argv = ("gateway", "--backend", "http://127.0.0.1:1", "--port", "0", "--redis")
    said = run(*argv, "http://:secret@x", code=2)
    assert "--redis: redis must be a URL that begins with redis://, rediss://, unix://" in said
    assert "secret" not in said
    said = run(*argv, "redis://:secret@x:port", code=1)
    assert "redis: not a URL of a Redis" in said
    assert "secret" not in said
