"""Makes receipts of answers that have come to their end, signs and keeps them, and gives them to their tenants.

Owns the receipt's name, which is drawn: it says nothing of what it stands for, and cannot be guessed. It is known when
the answer begins, the receipt is there when the answer has ended. One that broke off, or whose client left, has none.

A receipt that the shared store does not take is kept in this process's memory, and whoever gets the answer is told so.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable
from typing import Literal, TypeAlias

from gateway.domain import ChoiceEvent, Completion
from gateway.errors import ReceiptsUnavailable
from gateway.receipts.key_files import KeyFolder
from gateway.receipts.receipt import VERSION, Issued, Request, Statement, encode
from gateway.receipts.recorder import Recorder
from gateway.receipts.sealing import Sealed
from gateway.receipts.stores import MemoryReceipts, RedisReceipts, name_of
from gateway.redis_connection import StoreUnavailable
from policies.decision import Receipt as Wanted

Kept: TypeAlias = Literal["kept", "local", "lost"]
"""What became of a receipt: it is where all are kept; in this gateway's memory alone, because the shared store is in
trouble; or nowhere, because it is too long for either."""

_ID = re.compile(r"vr_[0-9a-f]{32}")

log = logging.getLogger(__name__)


class PendingReceipt:
    """An answer under way, and what its receipt will say of it. `cache` is what the commit log did for it."""

    def __init__(self, completion: Completion, request: Request, cache: str, wanted: Wanted) -> None:
        self.id = f"vr_{secrets.token_hex(16)}"
        self.request = request
        self.cache = cache
        self.wanted = wanted
        self.recorder = Recorder(completion)

    def __repr__(self) -> str:
        return f"<PendingReceipt {self.id} {self.recorder!r}>"

    def add(self, event: ChoiceEvent) -> None:
        """The answer goes on."""
        self.recorder.add(event)


class Notary:
    """Everybody's receipts. `counts` says what became of them; `clock` counts seconds since 1970."""

    def __init__(
        self, keys: KeyFolder, memory: MemoryReceipts, shared: RedisReceipts | None, clock: Callable[[], float]
    ) -> None:
        self.keys = keys
        self.memory = memory
        self._shared = shared
        self._clock = clock
        self.counts: dict[Kept, int] = {"kept": 0, "local": 0, "lost": 0}

    def __repr__(self) -> str:
        return f"<Notary {self.keys!r} {self.memory!r} {self._shared!r} {self.counts}>"

    async def issue(self, pending: PendingReceipt) -> Kept:
        """Sign and keep the receipt of an answer that is complete."""
        signing = self.keys.current.signing
        assert signing is not None  # No policy that demands receipts is in force without one.
        counts, wanted = pending.recorder.counts, pending.wanted
        issued = Issued(pending.id, int(self._clock()), pending.cache, counts.windows, counts.rollbacks)
        answer = pending.recorder.answer(holds_prompt=wanted.holds_prompt)
        raw = encode(signing.sign(Statement(VERSION, answer, pending.request, issued)))
        kept = await self._keep(pending, raw)
        self.counts[kept] += 1
        return kept

    async def find(self, tenant: str, id_: str) -> bytes | None:
        """A tenant's receipt, None where it has none of this name. Raises `ReceiptsUnavailable`."""
        if not _ID.fullmatch(id_):
            return None
        name = name_of(tenant, id_)
        raw = self.memory.get(name)
        if raw is not None or self._shared is None:
            return raw
        try:
            return await self._shared.get(name)
        except StoreUnavailable as error:
            raise ReceiptsUnavailable("the store of receipts does not answer", retry_after_s="1") from error
        except Sealed as error:
            log.error("receipt %s cannot be read: %s", id_, error)
            raise ReceiptsUnavailable(f"the receipt cannot be read: {error}") from error

    async def _keep(self, pending: PendingReceipt, raw: bytes) -> Kept:
        name, ttl_s = name_of(pending.request.tenant, pending.id), pending.wanted.ttl_s
        if self._shared is not None:
            try:
                await self._shared.put(name, raw, ttl_s)
                return "kept"
            except StoreUnavailable as error:
                # Said for each of them: any of them may be looked for.
                log.error(
                    "receipt %s is in this gateway's memory alone: Redis does not take it (%s)", pending.id, error
                )
        if not self.memory.put(name, raw, ttl_s):
            log.error("receipt %s of %s bytes is lost: there is no room for one so long", pending.id, len(raw))
            return "lost"
        return "kept" if self._shared is None else "local"
