"""docs/api.md cannot fall behind: every field and every code of an error stands in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastapi.routing import APIRoute

from gateway.admin.access import AdminAccess
from gateway.admin.bodies import FindBody, PurgeBody
from gateway.admin.routes import build_admin_router
from gateway.commit_log.commit_log import CommitLog
from gateway.commit_log.memory import MemoryLogs
from gateway.errors import ConfigError, GatewayError, StartError
from gateway.openai_api import chat_request, completion_request, tokenization
from gateway.openai_api.body import VIEWS

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "api.md").read_text()


def test_every_field_is_documented() -> None:
    fields = set(VIEWS)
    for module in (chat_request, completion_request):
        fields |= set(module.RULES.neutral) | module.RULES.refused
        fields |= {name for part in module.PARTS for name in part.__struct_fields__}
    assert not {name for name in fields if f"`{name}`" not in DOCS}


def test_every_path_is_documented() -> None:
    paths = (chat_request.ROUTE, completion_request.ROUTE, tokenization.TOKENIZE_ROUTES[0], "/v1/models", "/healthz")
    assert not {path for path in paths if path not in DOCS}


def test_every_path_and_field_of_the_operators_is_documented() -> None:
    nobody: Any = None
    said = (ROOT / "docs" / "admin.md").read_text()
    router = build_admin_router(AdminAccess(None), nobody, nobody, CommitLog(MemoryLogs(0, lambda: 0.0)), 1)
    paths = {route.path for route in router.routes if isinstance(route, APIRoute)}
    assert len(paths) >= 4 and not {path for path in paths if f"{path}`" not in said}
    assert not {name for name in PurgeBody.__struct_fields__ if f"--{name}" not in said}
    assert not {name for name in FindBody.__struct_fields__ if f"--{name}" not in said}


def below(kind: type[GatewayError]) -> Iterator[type[GatewayError]]:
    yield kind
    for sub in kind.__subclasses__():
        yield from below(sub)


def test_every_code_is_documented() -> None:
    codes = {kind.code for kind in below(GatewayError) if kind not in (ConfigError, StartError)} - {None}
    assert codes and not {code for code in codes if f"`{code}`" not in DOCS}
