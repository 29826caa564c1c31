"""Ties the window protocol to SGLang's HTTP server at the moment the schedulers are up and before it listens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from sglang.srt.entrypoints.http_server import app

from backend.sglang.door import Door
from backend.sglang.passes import ServerFacts
from backend.sglang.plugin import HANDSHAKE
from backend.sglang.routes import add_routes
from backend.sglang.service import Service

START = "sglang.srt.entrypoints.http_server._setup_and_run_http_server"
"""Where SGLang starts its HTTP server."""


class AdapterMissingError(Exception):
    """A scheduler started without the adapter; its log says which hook failed."""


def start_with_protocol(
    stock: Callable[..., None],
    server_args: Any,
    manager: Any,
    templates: Any,
    port_args: Any,
    scheduler_infos: list[dict[str, Any]],
    *rest: Any,
    **options: Any,
) -> None:
    """Around `START`. Raises AdapterMissingError."""
    if not all(HANDSHAKE in info for info in scheduler_infos):
        raise AdapterMissingError("SGLang's scheduler runs without Verbatim's adapter; its log says why")
    facts = msgspec.convert(scheduler_infos[0][HANDSHAKE], ServerFacts)
    add_routes(app, Service(manager, Door(port_args.rpc_ipc_name), facts))
    stock(server_args, manager, templates, port_args, scheduler_infos, *rest, **options)
