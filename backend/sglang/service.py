"""The window protocol on SGLang's HTTP side: what the routes call.

Owns the start-up (probe, fingerprint) and the answers. SGLang's own endpoints are none of its business.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from backend.protocol import (
    PROTOCOL_VERSION,
    DraftRequest,
    DraftResponse,
    Health,
    Info,
    StreamRequest,
    StreamToken,
    TokenizerFiles,
    VerifyRequest,
    VerifyResponse,
    VerifyShape,
)
from backend.server.errors import CallError
from backend.sglang import generation
from backend.sglang.door import Door
from backend.sglang.fingerprint import fingerprint
from backend.sglang.model_folder import digest_folder, tokenizer_files
from backend.sglang.passes import ServerFacts
from backend.sglang.probe import InvarianceError, probe
from backend.sglang.verify_queue import VerifyQueue

log = logging.getLogger(__name__)


class Service:
    """One SGLang server as a backend. Ready after `start`."""

    def __init__(self, manager: Any, door: Door, facts: ServerFacts):
        self._manager = manager
        self._door = door
        self._facts = facts
        self._shape = VerifyShape(groups=facts.groups, window=facts.window)
        self._queue = VerifyQueue(door.run, facts.groups, facts.max_context, facts.pool_tokens)
        self._refusal: str | None = None
        self._info: Info | None = None
        self._tokenizer: TokenizerFiles | None = None

    @property
    def health(self) -> Health:
        if self._info is None:
            return Health(status="loading", loaded=0.9)
        return Health(status="ready", loaded=1.0)

    @property
    def info(self) -> Info:
        """Raises CallError until the service is ready."""
        if self._info is None:
            raise CallError("unavailable", "the backend is loading")
        return self._info

    @property
    def tokenizer(self) -> TokenizerFiles:
        """Raises CallError until the service is ready."""
        if self._tokenizer is None:
            raise CallError("unavailable", "the backend is loading")
        return self._tokenizer

    async def run(self) -> None:
        """Start up, then serve verify calls until cancelled."""
        folder = Path(self._manager.model_path)
        digest = await asyncio.to_thread(digest_folder, folder)
        self._tokenizer = tokenizer_files(self._manager.tokenizer, self._manager.model_config.hf_eos_token_id)
        facts, probe_digest = self._facts, ""
        try:
            probe_digest = await probe(self._door.run, self._shape, facts.vocab_size, facts.max_context)
        except InvarianceError as error:
            log.error("the verify role is refused: %s", error)
            self._refusal = str(error)
        self._info = Info(
            protocol=PROTOCOL_VERSION,
            model=self._manager.served_model_name,
            fingerprint=fingerprint(digest, facts, probe_digest),
            roles=["draft"] if self._refusal else ["draft", "verify"],
            verify=self._shape,
            max_context=facts.max_context,
            vocab_size=facts.vocab_size,
            dtype=facts.dtype,
            device=facts.device,
        )
        log.info("serving the window protocol as %s", self._info.fingerprint)
        await self._queue.serve()

    async def draft(self, call: DraftRequest) -> DraftResponse:
        """Raises CallError."""
        count = min(call.count, self.info.max_context - len(call.context))
        tokens = await generation.draft(self._manager, call, count)
        return DraftResponse(tokens=tokens, fingerprint=self.info.fingerprint)

    def check_verifies(self) -> None:
        """Raises CallError where the verify role is refused."""
        if self._refusal is not None:
            raise CallError("role_refused", f"this backend does not verify: {self._refusal}")

    async def verify(self, call: VerifyRequest) -> VerifyResponse:
        """Raises CallError."""
        replay = await self._queue.verify(call)
        return VerifyResponse(
            agreed=replay.agreed, tokens=replay.tokens, finish=replay.finish, fingerprint=self.info.fingerprint
        )

    def stream(self, call: StreamRequest) -> AsyncGenerator[list[StreamToken], None]:
        """Raises CallError."""
        count = min(call.max_tokens, self.info.max_context - len(call.context))
        return generation.stream(self._manager, call, count)
