"""Ties the window protocol to SGLang's HTTP server at the moment the schedulers are up and before it listens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from sglang.srt.entrypoints.http_server import app
from sglang.srt.runtime_context import get_serving

from backend.sglang.door import Door
from backend.sglang.passes import ServerFacts
from backend.sglang.plugin import HANDSHAKE
from backend.sglang.routes import add_routes
from backend.sglang.service import Service

START = "sglang.srt.entrypoints.http_server._setup_and_run_http_server"
"""Where SGLang starts its HTTP server."""


_CHANGE_WEIGHTS = ("/update_weights", "/begin_weight_update", "/end_weight_update")
"""Beginnings of the paths of SGLang's that change the weights under the fingerprint: they are not served."""


class AdapterMissingError(Exception):
    """The protocol cannot be served by this process or by its schedulers; the message says why."""


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
    if get_serving().tokenizer_worker_num != 1:
        raise AdapterMissingError("--tokenizer-worker-num must be 1: other workers would serve without the protocol")
    app.router.routes[:] = [
        route for route in app.router.routes if not getattr(route, "path", "").startswith(_CHANGE_WEIGHTS)
    ]
    facts = msgspec.convert(scheduler_infos[0][HANDSHAKE], ServerFacts)
    add_routes(app, Service(manager, Door(port_args.rpc_ipc_name), facts))
    stock(server_args, manager, templates, port_args, scheduler_infos, *rest, **options)
