"""The routes of the operator, `/admin/v1/...`. None of them answers without the admin key."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from gateway.admin.access import AdminAccess
from gateway.admin.bodies import parse_find, parse_key, parse_purge
from gateway.admin.logs import Logs
from gateway.admin.statistics import statistics
from gateway.authentication import Authenticator
from gateway.commit_log.commit_log import CommitLog
from gateway.errors import LogNotFound, LogsUnavailable
from gateway.http.json_body import read_json_body
from gateway.models import Models
from gateway.redis_connection import StoreUnavailable

PREFIX = "/admin/v1"


def build_admin_router(
    access: AdminAccess, models: Models, authenticator: Authenticator, commit_log: CommitLog, max_body_bytes: int
) -> APIRouter:
    """The routes over the parts of a running gateway."""

    async def admitted(request: Request) -> None:
        access.check(request.headers.get("authorization"))

    router = APIRouter(prefix=PREFIX, dependencies=[Depends(admitted)])
    logs = Logs(models, authenticator, commit_log)

    @router.get("/statistics")
    async def get_statistics() -> Response:
        return JSONResponse(await statistics(models, commit_log))

    @router.get("/logs/{key}")
    async def get_log(key: str) -> Response:
        log = await logs.describe(parse_key(key))
        if not log["token_ids"]:
            raise LogNotFound(f"there is no log with the key {key}", param="key")
        return JSONResponse(log)

    @router.post("/logs/find")
    async def find_logs(request: Request) -> Response:
        content = await read_json_body(request, max_body_bytes)
        wish = await asyncio.to_thread(parse_find, content)
        return JSONResponse({"logs": [await logs.describe(key) for key in await logs.find(wish)]})

    @router.post("/logs/purge")
    async def purge_logs(request: Request) -> Response:
        selection = parse_purge(await read_json_body(request, max_body_bytes), models)
        try:
            purged = await commit_log.purges.purge(selection)
        except StoreUnavailable as error:
            raise LogsUnavailable(
                "the Redis of the commit logs does not answer: only what this gateway remembers was purged"
            ) from error
        return JSONResponse({"purged": {"memory": purged.memory, "shared": purged.shared}})

    return router
