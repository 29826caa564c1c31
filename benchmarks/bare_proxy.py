"""The proxy one would write first: FastAPI in front of httpx as installed. `bare_proxy UPSTREAM PORT`."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse


def build(upstream: str) -> FastAPI:
    app = FastAPI()
    client = httpx.AsyncClient(base_url=upstream, timeout=None, limits=httpx.Limits(max_connections=None))

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await request.json()
        if not body.get("stream"):
            answer = await client.post("/chat/completions", json=body)
            return Response(answer.content, answer.status_code, media_type="application/json")
        sent = client.build_request("POST", "/chat/completions", json=body)
        streamed = await client.send(sent, stream=True)

        async def events() -> AsyncIterator[bytes]:
            async for chunk in streamed.aiter_bytes():
                yield chunk
            await streamed.aclose()

        return StreamingResponse(events(), media_type="text/event-stream")

    return app


if __name__ == "__main__":
    uvicorn.run(build(sys.argv[1]), port=int(sys.argv[2]), log_level="warning")
