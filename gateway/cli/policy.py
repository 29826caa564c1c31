"""`verbatim policy` and `verbatim keys`: look at policy files, and make the keys that stand in them.

Owns what is printed. A key is printed once, on standard output, and kept nowhere.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import click

from gateway.errors import RequestError
from gateway.openai_api import chat_request
from gateway.openai_api.parsers import PARSERS
from policies.api_keys import new_key
from policies.explain import Line, explain
from policies.json_schema import policy_schema
from policies.policy import DEFAULT_POLICY, Policy, PolicyError, RequestFacts, Serving
from policies.policy_file import read_policy
from policies.sections import FileMistakes

SERVING = Serving(max_draft=0)
"""Explaining asks no backend; nothing that is shown depends on what one could do."""

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.group()
def policy() -> None:
    """Check a policy file, or explain what a request would get."""


@policy.command()
@click.argument("file", type=FILE)
def check(file: Path) -> None:
    """Say whether FILE is a policy, or name every mistake in it."""
    found = _read(file)
    click.echo(f"{file}: right ({found.version}), {len(found.tenants)} tenant{'s' * (len(found.tenants) != 1)}")


@policy.command("explain")
@click.option(
    "--policy", "file", type=FILE, envvar="VERBATIM_POLICY", help="The policy file; without it, what is built in."
)
@click.option("--tenant", help="Who asks; without it, who asks without credentials.")
@click.option("--request", "body", type=FILE, required=True, help="The request's JSON body.")
@click.option(
    "--route", type=click.Choice(list(PARSERS)), default=chat_request.ROUTE, show_default=True, help="Where it is sent."
)
@click.option("--determinism", help="The request's header X-Verbatim-Determinism.")
@click.option("--cache-control", default="", help="The request's header Cache-Control.")
@click.option("--receipt", help="The request's header X-Verbatim-Receipt.")
def explain_command(
    file: Path | None,
    tenant: str | None,
    body: Path,
    route: str,
    determinism: str | None,
    cache_control: str,
    receipt: str | None,
) -> None:
    """Print what a request gets and which rule made each part of it. Exits with status 1 where it is refused."""
    found = DEFAULT_POLICY if file is None else _read(file)
    tenant = found.anonymous if tenant is None else tenant
    if tenant is None:
        raise click.UsageError("this policy lets nobody in without credentials: give --tenant")
    if tenant not in found.tenants:
        raise click.BadParameter(f"there is no tenant {tenant!r} in the policy", param_hint="--tenant")
    try:
        facts: RequestFacts = PARSERS[route](body.read_bytes(), determinism).order.facts
        facts = replace(facts, cache_control=cache_control, receipt=receipt)
        parts, settings = explain(found, tenant, facts, SERVING)
    except (RequestError, PolicyError) as error:
        raise click.ClickException(f"refused: {error}") from error
    click.echo(f"{facts.model} at {facts.route} for {tenant}, policy {found.version}\n")
    _print("decision", parts)
    click.echo()
    _print("settings", settings)


@policy.command()
def schema() -> None:
    """Print the JSON Schema of policy files, for editors."""
    click.echo(json.dumps(policy_schema(), indent=2))


@click.group()
def keys() -> None:
    """API keys: of tenants, and of who operates a gateway."""


@keys.command()
def new() -> None:
    """Make a key: it is shown this once; what a policy file or --admin-key keeps of it is a salted hash."""
    key, kept = new_key()
    click.echo(f"The key, which is shown this once:\n\n  {key}\n")
    click.echo("For the policy file, under the tenant's `keys` (with `expires: 2030-01-31` if it shall end):\n")
    click.echo(f'  - id: "{kept.id}"\n    hash: "{kept.hash}"')


def _read(file: Path) -> Policy:
    try:
        return read_policy(file)
    except (FileMistakes, OSError) as error:
        raise click.ClickException(str(error)) from error


def _print(title: str, lines: list[Line]) -> None:
    widths = [
        max(len(column) for column in columns) for columns in zip(*((x.part, x.value) for x in lines), strict=True)
    ]
    click.echo(f"{title}:")
    for line in lines:
        click.echo(f"  {line.part:<{widths[0]}}  {line.value:<{widths[1]}}  {line.rule}")
