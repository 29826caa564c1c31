"""Settings out of a file: what wins over what, and how mistakes are said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from gateway.cli import main
from gateway.cli.flags import engine_environment, gateway_argv, load_config
from gateway.config_file import ConfigFile, read_settings
from gateway.errors import ConfigError
from gateway.settings import SETTINGS, Settings
from policies.sections import FileMistakes

FILE = """
version: 1
gateway:
  backend: http://file
  port: 1
  max_concurrent: 11
  drain_timeout_s: 2
  access_log: false
  log_format: json
engine:
  model: ./some model
  kv_bytes: 1024
  port: 9000
"""


def load(tmp_path: Path, text: str) -> ConfigFile:
    path = tmp_path / "verbatim.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path)


def test_a_flag_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = load(tmp_path, FILE)
    env = {"VERBATIM_PORT": "2", "VERBATIM_MAX_CONCURRENT": "12"}
    expected = Settings(
        "http://file", port=3, max_concurrent=12, drain_timeout_s=2.0, access_log=False, log_format="json"
    )
    assert read_settings({"port": 3}, env, file) == expected
    assert read_settings({}, {"VERBATIM_ACCESS_LOG": "true"}, file).access_log is True
    assert read_settings({"access_log": True}, {"VERBATIM_ACCESS_LOG": "0"}, file).access_log is True


def test_every_setting_can_be_given_in_each_of_the_three_ways(tmp_path: Path) -> None:
    """One value that is not the default, three times over."""
    special = {"models": "m.yaml", "redis": "redis://r", "admin_key": None, "backend": None}
    for name, info in SETTINGS.items():
        if info.choices:
            value: Any = info.choices[-1] if info.choices[-1] != info.default else info.choices[0]
        elif info.type is bool:
            value = not info.default
        elif info.type is str:
            value = special.get(name, "x")
        else:
            value = info.type(info.default) + 1
        if value is None:
            continue
        base = {} if name == "models" else {"backend": "http://b"}
        text = {True: "true", False: "false"}.get(value, str(value)) if info.type is bool else str(value)
        in_file = load(tmp_path, f"version: 1\ngateway: {{{name}: {text if info.type is not str else repr(text)}}}\n")
        found = [
            read_settings(base | {name: value}, {}),
            read_settings(base, {info.variable: text}),
            read_settings(base, {}, in_file),
        ]
        assert all(getattr(settings, name) == value for settings in found), name
        assert len(set(map(repr, found))) == 1


def test_all_mistakes_are_said_with_their_places(tmp_path: Path) -> None:
    text = "version: 1\ngateway:\n  prot: 1\n  port: many\n  access_log: 1\n  log_format: xml\nengine:\n  kv_bytes: 0\n"
    with pytest.raises(FileMistakes) as caught:
        load(tmp_path, text)
    name = tmp_path / "verbatim.yaml"
    assert str(caught.value).splitlines() == [
        f"{name}:3: gateway.prot: unknown key; did you mean 'port'?",
        f"{name}:4: gateway.port: must be a whole number of at least 0",
        f"{name}:5: gateway.access_log: must be true or false",
        f"{name}:6: gateway.log_format: must be one of text, json",
        f"{name}:8: engine.kv_bytes: 0 is not in the range x>=1.",
    ]


def test_a_value_out_of_range_names_the_key_and_its_file(tmp_path: Path) -> None:
    file = load(tmp_path, "version: 1\ngateway: {backend: http://x, max_concurrent: 1}\n")
    with pytest.raises(ConfigError, match=r"verbatim\.yaml: gateway\.max_concurrent: max_concurrent must be at least"):
        read_settings({}, {}, file)


@pytest.mark.parametrize("command", [["gateway"], ["up"], ["backend", "engine"]])
@pytest.mark.parametrize("by_flag", [True, False])
def test_commands_say_what_is_wrong_with_the_file(tmp_path: Path, command: list[str], by_flag: bool) -> None:
    path = tmp_path / "verbatim.yaml"
    path.write_text("version: 1\nengine: {thread: 1}\n")
    flag, env = (["--config", str(path)], {}) if by_flag else ([], {"VERBATIM_CONFIG": str(path)})
    result = CliRunner().invoke(main, [*command, *flag], env=env)
    assert result.exit_code == 2
    assert f"{path}:2: engine.thread: unknown key; did you mean 'threads'?" in result.output
    missing = CliRunner().invoke(main, [*command, "--config", str(tmp_path / "no.yaml")])
    assert missing.exit_code == 2
    assert "cannot read" in missing.output


def test_the_engine_is_told_by_environment_what_no_variable_says(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("VERBATIM_ENGINE_KV_BYTES", "4096")
    environment = engine_environment(load(tmp_path, FILE))
    found = {name: value for name, value in environment.items() if name.startswith("VERBATIM_ENGINE_")}
    assert found == {
        "VERBATIM_ENGINE_MODEL": "./some model",
        "VERBATIM_ENGINE_KV_BYTES": "4096",
        "VERBATIM_ENGINE_PORT": "9000",
    }


FLAGS = st.fixed_dictionaries(
    {},
    optional={
        "port": st.integers(0, 65535),
        "access_log": st.booleans(),
        "drain_timeout_s": st.floats(0.001, 1e6),
        "policy": st.text("abc/ -", min_size=1).filter(lambda text: not text.startswith("-")),
    },
)


@given(FLAGS)
def test_flags_that_are_passed_on_mean_the_same(values: dict[str, Any]) -> None:
    """What `verbatim up` was told is what its gateway is told."""
    found: dict[str, Any] = {}
    command = next(command for name, command in main.commands.items() if name == "gateway")
    with command.make_context("gateway", gateway_argv(values)) as context:
        found = {name: value for name, value in context.params.items() if value is not None and name != "file"}
    assert found == values
