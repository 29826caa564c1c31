"""`verbatim admin`: operate a running gateway over its admin API. Prints JSON, for other tools to go on with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click
import httpx

from gateway.admin.routes import PREFIX
from gateway.cli.bearer import bearer
from gateway.openai_api import chat_request
from gateway.openai_api.parsers import PARSERS

TIMEOUT_S = 60.0
"""A purge waits for all gateways, then for Redis to look at all its names."""


@dataclass(frozen=True, slots=True)
class _Gateway:
    url: str
    key: str | None

    def ask(self, method: str, path: str, body: object = None) -> None:
        """Print the answer; raises `ClickException` with what went wrong."""
        # Checked here, for a command's --help to need no key.
        if self.key is None:
            raise click.UsageError("give the admin key: --admin-key or VERBATIM_ADMIN_SECRET")
        if self.key.startswith("sha256:"):
            raise click.UsageError("--admin-key: this is the hash, which the gateway is given; the key begins with vb_")
        headers = bearer(self.key, "--admin-key")
        base = self.url.rstrip("/").removesuffix("/v1")
        try:
            response = httpx.request(
                method, base + PREFIX + path, headers=headers, json=body, timeout=TIMEOUT_S, trust_env=False
            )
        except (httpx.TransportError, httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise click.ClickException(f"no gateway answers at {base}: {error}") from error
        try:
            said: Any = response.json()
        except ValueError:
            said = None
        if not response.is_success:
            message = said["error"]["message"] if isinstance(said, dict) and "error" in said else response.text[:200]
            raise click.ClickException(f"{response.status_code}: {message}")
        click.echo(json.dumps(said, indent=2, ensure_ascii=False))


@click.group()
@click.option("--url", default="http://127.0.0.1:8042", show_default=True, help="Base URL of the gateway.")
@click.option(
    "--admin-key",
    envvar="VERBATIM_ADMIN_SECRET",
    help="The admin key itself, of which the gateway has the hash; better in VERBATIM_ADMIN_SECRET.",
)
@click.pass_context
def admin(context: click.Context, url: str, admin_key: str | None) -> None:
    """Look at a running gateway, and look up and purge the answers it keeps.

    \b
    verbatim admin statistics
    verbatim admin find --tenant audit --request request.json
    verbatim admin purge --tenant audit
    """
    context.obj = _Gateway(url, admin_key)


@admin.command()
@click.pass_obj
def statistics(gateway: _Gateway) -> None:
    """Print the logs kept, hits, conflicts, requests in flight, and the replicas with fingerprint and health."""
    gateway.ask("GET", "/statistics")


@admin.command()
@click.argument("key")
@click.pass_obj
def log(gateway: _Gateway, key: str) -> None:
    """Print the commit log with this KEY: its tokens, its text and where it is kept."""
    gateway.ask("GET", f"/logs/{quote(key, safe='')}")


@admin.command()
@click.option(
    "--request",
    "body",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    required=True,
    help="The request's JSON body.",
)
@click.option("--tenant", help="Whose request it is; without it, of who shows no credentials.")
@click.option(
    "--route", type=click.Choice(list(PARSERS)), default=chat_request.ROUTE, show_default=True, help="Where it is sent."
)
@click.option("--determinism", help="The request's header X-Verbatim-Determinism.")
@click.pass_obj
def find(gateway: _Gateway, body: Path, tenant: str | None, route: str, determinism: str | None) -> None:
    """Print the commit logs that a request would read, without running it."""
    try:
        request = json.loads(body.read_bytes())
    except ValueError as error:
        raise click.BadParameter(f"{body} is not valid JSON: {error}", param_hint="--request") from error
    wish = {"request": request, "tenant": tenant, "route": route, "determinism": determinism}
    gateway.ask("POST", "/logs/find", wish)


@admin.command()
@click.option("--tenant", help="Logs of this tenant.")
@click.option("--shared", is_flag=True, help="Logs that all tenants share whose policy says so.")
@click.option("--model", help="Logs of the fingerprint that this model has now.")
@click.option("--fingerprint", help="Logs of this fingerprint.")
@click.option("--prefix", help="Logs whose keys begin with these hexadecimal digits.")
@click.option("--everything", is_flag=True, help="All logs.")
@click.pass_obj
def purge(gateway: _Gateway, /, **chosen: object) -> None:
    """Throw commit logs away, here and in all gateways that share the Redis. Of several choices all must hold."""
    gateway.ask("POST", "/logs/purge", {name: value for name, value in chosen.items() if value})
