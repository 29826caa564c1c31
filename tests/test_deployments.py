"""The compose file, the manifests and what they mount say what the code understands, and keep every container small.

No container is run here. The Dockerfile is linted by `make audit`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import kubernetes_validate
import pytest
import yaml

from backend.server.__main__ import main as engine
from gateway.cli import main as verbatim
from gateway.models_file import load_models
from gateway.settings import Settings
from policies.policy_file import PolicyFile

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()
KUBERNETES = "1.34"
MANIFESTS = sorted(
    path
    for path in (DEPLOY / "kubernetes").rglob("*.yaml")
    if path.name not in ("kustomization.yaml", "policy.yaml", "models.yaml")
)
VARIABLES = {f"VERBATIM_{setting.name.upper()}" for setting in fields(Settings)}


def check_command(command: list[str]) -> None:
    """Raises `click.UsageError` for a flag that there is not."""
    match command:
        case ["backend", "engine", *flags]:
            engine.make_context("engine", flags)
        case ["backend", "sglang", *_]:
            pass  # all flags but three are SGLang's
        case [name, *flags]:
            verbatim.commands[name].make_context(name, flags)
        case _:
            raise AssertionError(command)


def interpolated(word: str) -> str:
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word)


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_each_service_is_confined_pinned_and_watched(name: str) -> None:
    service = COMPOSE["services"][name]
    assert service["read_only"] and service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"] and service["pids_limit"]
    _, _, tag = service["image"].partition(":")
    assert re.search(r"\d+\.\d+\.\d+$", tag), "an exact version"
    target = service.get("build", {}).get("target") or name.partition("-")[0]
    ours = service["image"].startswith("verbatim-")
    assert "healthcheck" in service or (ours and f"AS {target}\n" in DOCKERFILE)
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    if ours:
        check_command([interpolated(word) for word in service["command"]])
        assert {key for key in service.get("environment", ()) if key.startswith("VERBATIM_")} <= VARIABLES


def test_only_gateways_and_dashboards_leave_the_inner_network() -> None:
    outside = {name for name, service in COMPOSE["services"].items() if service["networks"] != ["backends"]}
    assert outside == {"gateway", "gateway-replicas", "gateway-sglang", "prometheus", "grafana"}
    assert COMPOSE["networks"]["backends"]["internal"]


def test_images_run_as_nobody_in_particular_and_say_how_they_are() -> None:
    stages = re.split(r"^FROM ", DOCKERFILE, flags=re.M)[1:]
    for stage in stages:
        *_, name = stage.splitlines()[0].split()
        if name in ("engine", "sglang", "gateway"):
            users = re.findall(r"^USER (\S+)$", stage, re.M)
            assert users[-1:] in ([], ["10001:10001"])  # none: the base's
            assert "\nHEALTHCHECK " in stage
            (command,) = re.findall(r"^CMD (\[.*\])$", stage, re.M)
            check_command(yaml.safe_load(command))


@pytest.mark.parametrize("folder", ["compose", "kubernetes/base", "kubernetes/overlays/production"])
def test_mounted_files_are_right(folder: str) -> None:
    models = DEPLOY / folder / "models.yaml"
    (model,) = load_models(models.read_text(), str(models), {})
    named = set(COMPOSE["services"]) if folder == "compose" else {"engine"}
    hosts = {re.sub(r"http://(.*):8043", r"\1", url).rpartition(".")[2] for url in model.backends}
    assert len(model.backends) > 1 and hosts <= named
    if (policy := DEPLOY / folder / "policy.yaml").exists():
        assert PolicyFile(policy)


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_keep_to_kubernetes_schemas(path: Path) -> None:
    for document in documents(path):
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in MANIFESTS:
        for document in documents(path):
            if document["kind"] in ("Deployment", "StatefulSet"):
                spec = document["spec"]
                assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
                yield document["metadata"]["name"], spec["template"]["spec"]


def test_pods_keep_to_the_restricted_standard_and_are_probed() -> None:
    names = []
    for name, pod in pods():
        names.append(name)
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["seccompProfile"]
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["readinessProbe"] and container["livenessProbe"]
            assert container["resources"]["requests"] and container["resources"]["limits"]["memory"]
            ports = {port["name"] for port in container["ports"]}
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                asked = container.get(probe, {})
                assert (asked.get("httpGet") or asked.get("tcpSocket") or {"port": None})["port"] in {None, *ports}
            assert {v["name"] for v in container.get("env", ())} <= VARIABLES
    assert sorted(names) == ["engine", "gateway", "redis"]


def test_a_pod_is_given_longer_to_end_than_the_gateway_takes() -> None:
    gateway = dict(pods())["gateway"]
    (container,) = gateway["containers"]
    drain_s = next(float(v["value"]) for v in container["env"] if v["name"] == "VERBATIM_DRAIN_TIMEOUT_S")
    pause_s = float(container["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert gateway["terminationGracePeriodSeconds"] > drain_s + pause_s
    assert float(COMPOSE["x-gateway"]["stop_grace_period"].rstrip("s")) > Settings("http://x").drain_timeout_s


@pytest.mark.parametrize("folder", ["base", "overlays/production"])
def test_kustomizations_render(folder: str) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl here")
    argv = [kubectl, "kustomize", str(DEPLOY / "kubernetes" / folder)]
    rendered = subprocess.run(argv, text=True, capture_output=True, check=True).stdout
    for document in yaml.safe_load_all(rendered):
        assert document["kind"] == "Namespace" or document["metadata"]["namespace"] == "verbatim"
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


@pytest.mark.parametrize("file", ["grafana/dashboards/verbatim.json", "prometheus/alerts.yml"])
def test_dashboards_and_alerts_ask_for_metrics_that_there_are(file: str) -> None:
    documented = set(re.findall(r"^\| `(verbatim_\w+)` \|", (ROOT / "docs" / "metrics.md").read_text(), re.M))
    asked = {
        re.sub(r"_bucket$", "", name)
        for name in re.findall(r"verbatim_(?:gateway|engine)_\w+", (DEPLOY / file).read_text())
    }
    assert asked and asked <= documented


def test_a_wrong_flag_would_be_seen() -> None:
    with pytest.raises(click.UsageError):
        check_command(["gateway", "--no-such-flag"])
