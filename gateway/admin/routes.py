"""The routes of the operator, `/admin/v1/...`. None of them answers without the admin key."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from gateway.admin.access import AdminAccess
from gateway.admin.statistics import statistics
from gateway.commit_log.commit_log import CommitLog
from gateway.models import Models

PREFIX = "/admin/v1"


def build_admin_router(access: AdminAccess, models: Models, commit_log: CommitLog) -> APIRouter:
    """The routes over the parts of a running gateway."""

    async def admitted(request: Request) -> None:
        access.check(request.headers.get("authorization"))

    router = APIRouter(prefix=PREFIX, dependencies=[Depends(admitted)])

    @router.get("/statistics")
    async def get_statistics() -> Response:
        return JSONResponse(statistics(models, commit_log))

    return router
