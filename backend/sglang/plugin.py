"""Entry point of `sglang.srt.plugins`: hooks the adapter into SGLang's processes.

SGLang calls `register` in each of its processes. Without the launcher's settings in the environment it does nothing, so
that a plain `sglang serve` beside an installed Verbatim is the plain server.

SGLang logs a hook or a plugin that fails and goes on without. So the scheduler checks that all hooks are in place, and
the HTTP side refuses to serve unless the scheduler's handshake carries our facts (http_side.py).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from sglang.srt.managers.io_struct import RpcReqInput, RpcReqOutput
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from backend.kernels.platform import open_platform
from backend.sglang import drafting, fixed_batch
from backend.sglang.facts import server_facts
from backend.sglang.fences import check_scheduler
from backend.sglang.passes import PassReply, PassRequest
from backend.sglang.settings import AdapterSettings
from backend.sglang.verifier import Verifier
from backend.sglang.version_gate import check_version

HANDSHAKE = "verbatim"
"""Key of our facts in the scheduler's handshake."""
RUN_PASS = "verbatim.run_pass"  # noqa: S105  # a pass, no password
"""Name of our method on SGLang's RPC channel."""

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"

log = logging.getLogger(__name__)


class HookError(Exception):
    """A hook point is not where it was; the message names it."""


def register() -> None:
    """Hook this process, if the launcher started it. Raises UnsupportedVersionError."""
    settings = AdapterSettings.from_environment(os.environ)
    if settings is None:
        return
    check_version()
    hooks: list[tuple[str, Callable[..., Any], HookType]] = [
        (f"{_SCHEDULER}.__init__", partial(_after_scheduler_init, settings), HookType.AFTER),
        (f"{_SCHEDULER}.get_init_info", _with_facts, HookType.AFTER),
        (f"{_SCHEDULER}.handle_rpc_request", _answer_pass, HookType.AROUND),
        ("sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation", _forward, HookType.AROUND),
        ("sglang.srt.managers.schedule_batch.Req._check_token_based_finish", drafting.ends, HookType.AROUND),
        ("sglang.srt.layers.sampler.Sampler.forward", drafting.sample, HookType.AROUND),
        ("sglang.srt.layers.radix_attention.RadixAttention.forward", fixed_batch.attend, HookType.AROUND),
        ("sglang.srt.layers.logits_processor.LogitsProcessor.forward", fixed_batch.to_logits, HookType.AROUND),
    ]
    for target, hook, kind in hooks:
        HookRegistry.register(target, hook, kind)


def _after_scheduler_init(settings: AdapterSettings, result: None, scheduler: Any, *rest: Any, **options: Any) -> None:
    for target in HookRegistry._hooks:
        if target not in HookRegistry._patched:
            raise HookError(f"SGLang has no {target}, or not as the adapter knows it")
    check_scheduler(scheduler)
    platform = open_platform("cuda" if scheduler.device.startswith("cuda") else "cpu")
    verifier = Verifier(scheduler, platform.fixed, settings.shape)
    scheduler.verbatim_verifier = verifier
    scheduler.verbatim_facts = server_facts(scheduler, platform, settings)
    scheduler.tp_worker.verbatim_drafter = drafting.Drafter(verifier.provenance, platform.fixed)


def _with_facts(info: dict[str, Any], scheduler: Any) -> dict[str, Any]:
    return info | {HANDSHAKE: msgspec.to_builtins(scheduler.verbatim_facts)}


def _forward(stock: Callable[..., Any], worker: Any, batch: Any, *rest: Any, **options: Any) -> Any:
    return worker.verbatim_drafter.forward(stock, worker, batch, *rest, **options)


def _answer_pass(stock: Callable[..., Any], scheduler: Any, request: RpcReqInput) -> Any:
    if request.method != RUN_PASS:
        return stock(scheduler, request)
    call = msgspec.json.decode(request.parameters["request"], type=PassRequest)
    try:
        reply = scheduler.verbatim_verifier.run(call)
    except (RuntimeError, MemoryError) as error:  # Out of memory is a RuntimeError of torch's.
        log.exception("a verification pass broke")
        reply = PassReply([], failure=str(error) or type(error).__name__)
    return RpcReqOutput(success=True, message=msgspec.json.encode(reply).decode())
