"""Looks commit logs up: those that a request would read, and what stands in one.

Looking changes nothing and claims nothing; it does count as a use where logs are kept by when they were used last.
"""

from __future__ import annotations

from gateway.admin.bodies import Find
from gateway.authentication import Authenticator
from gateway.commit_log.commit_log import CommitLog
from gateway.commit_log.key import fingerprint_tag, fingerprint_tag_of, log_key
from gateway.errors import LogsUnavailable, RequestError
from gateway.models import Model, Models
from gateway.redis_connection import StoreUnavailable
from policies.policy import Mode


class Logs:
    """The logs that this gateway and those that share its store have."""

    def __init__(self, models: Models, authenticator: Authenticator, commit_log: CommitLog) -> None:
        self._models = models
        self._authenticator = authenticator
        self._stores = commit_log.stores

    async def find(self, wish: Find) -> list[bytes]:
        """The keys of the logs that a request would read, one for each choice; raises `RequestError`."""
        caller = self._authenticator.as_tenant(wish.tenant)
        order = wish.ask.order
        completion, decision = await self._models.service(order.model, caller.sees).foresee(order, caller)
        if completion.mode is not Mode.VERIFIED:
            raise RequestError(f"this request would get mode {completion.mode}, which has no log", param="request")
        if decision.cache is None:
            raise RequestError("the policy keeps no log for this request", param="request")
        return [log_key(decision.cache.tenant, completion.fingerprint, job) for job in completion.jobs]

    async def describe(self, key: bytes) -> dict[str, object]:
        """What stands in a log, as JSON; raises `LogsUnavailable`. A log that is nowhere has no tokens."""
        here = self._stores.memory.read(key)
        tokens, shared = here, None
        if self._stores.shared is not None:
            try:
                look = await self._stores.shared.look(key, 0, None)
            except StoreUnavailable as error:
                raise LogsUnavailable("the Redis of the commit logs does not answer") from error
            shared = {"tokens": len(look.tokens), "expires_in_s": look.ttl_s if look.tokens else None}
            tokens = max(here, look.tokens, key=len)
        ids = [token.id for token in tokens]
        model = self._model(key)
        service = None if model is None else model.service
        return {
            "key": key.hex(),
            "model": None if model is None else model.name,
            "fingerprint": None if service is None else service.info.fingerprint,
            "memory": {"tokens": len(here)},
            "shared": shared,
            "token_ids": ids,
            "text": None if service is None else service.text.decode(ids, special_tokens=True),
        }

    def _model(self, key: bytes) -> Model | None:
        """The model that a log is of, as far as it is served here."""
        tag = fingerprint_tag_of(key)
        served = (model for model in self._models if model.service is not None)
        return next((m for m in served if m.service and fingerprint_tag(m.service.info.fingerprint) == tag), None)
