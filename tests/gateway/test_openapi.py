"""The document says what the gateway does."""

from __future__ import annotations

import re
from typing import Any

from launched import Gateway
from starlette.routing import Route

from gateway.openai_api import chat_request, completion_request
from gateway.openai_api.openapi import openapi_document
from gateway.routes import build_router


async def test_every_path_is_in_it(gateway: Gateway) -> None:
    document = (await gateway.http.get("/openapi.json")).json()
    nobody: Any = None
    routes = [route for route in build_router(gateway.models, nobody, nobody, 1, 0).routes if isinstance(route, Route)]
    served = {
        (route.path.replace(":path}", "}"), method.lower())
        for route in routes
        if "{path:path}" not in route.path  # whatever else an upstream may have
        for method in (route.methods or set()) - {"HEAD"}
    }
    said = {(path, method) for path, methods in document["paths"].items() for method in methods}
    assert said == served - {("/openapi.json", "get")}


def test_every_field_is_in_it() -> None:
    paths: Any = openapi_document(["m"])["paths"]
    for module in (chat_request, completion_request):
        content = paths[module.ROUTE]["post"]["requestBody"]["content"]
        fields = {name for part in module.PARTS for name in part.__struct_fields__}
        assert fields | set(module.RULES.neutral) <= set(content["application/json"]["schema"]["properties"])


def test_its_references_lead_somewhere() -> None:
    document: Any = openapi_document(["m"])
    names = set(re.findall(r"#/components/schemas/(\w+)", str(document)))
    assert names and names <= set(document["components"]["schemas"])
