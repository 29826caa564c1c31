"""A verifier that costs next to nothing, with a real model's tokenizer: for measuring what a gateway keeps.

`python -m benchmarks.cache_backend` prints its port and serves the window protocol's roles `verify` and `decode`, of
which the gateway uses `decode`. What comes next is drawn from the position and the token before: ids that stand for
text, float32 logprobs, and no end.
"""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Iterator

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from backend.engine.open_checkpoint import SMOLLM2, open_checkpoint
from backend.protocol import (
    PROTOCOL_VERSION,
    DecodeEvent,
    DecodeRequest,
    Health,
    Info,
    ScoredToken,
    VerifiedToken,
    VerifyShape,
)

VOCABULARY = 49_152
FINGERPRINT = "vb1-" + "0123456789abcdef" * 2
ORDINARY = range(100, 48_000)
"""Ids that stand for text."""
TOKENS_A_LINE = 64


def sequence(context: list[int], count: int, top: int) -> list[VerifiedToken]:
    """What comes behind a context."""
    made = []
    before = context[-1]
    for position in range(len(context), len(context) + count):
        chance = random.Random(before * 1_000_003 + position)
        before = chance.choice(ORDINARY)
        logprob = _float32(-chance.expovariate(1.5))
        others = [ScoredToken(chance.choice(ORDINARY), _float32(logprob - i * chance.random())) for i in range(top)]
        made.append(VerifiedToken(before, logprob, others))
    return made


def _float32(value: float) -> float:
    widened: float = struct.unpack("f", struct.pack("f", value))[0]
    return widened


def build_app() -> Starlette:
    """The window protocol."""
    tokenizer = msgspec.json.encode(open_checkpoint(SMOLLM2, lambda share: None).tokenizer)
    info = Info(
        protocol=PROTOCOL_VERSION,
        model=SMOLLM2,
        fingerprint=FINGERPRINT,
        roles=["verify", "decode"],
        verify=VerifyShape(8, 32),
        max_context=8192,
        vocab_size=VOCABULARY,
        dtype="float32",
        device="cpu",
    )

    def fixed(path: str, content: bytes) -> Route:
        async def answer(request: Request) -> Response:
            return Response(content, media_type="application/json")

        return Route(path, answer)

    async def decode(request: Request) -> Response:
        call = msgspec.json.decode(await request.body(), type=DecodeRequest)
        return StreamingResponse(_lines(sequence(call.context, call.max_tokens, call.top_logprobs)))

    return Starlette(
        routes=[
            fixed("/healthz", msgspec.json.encode(Health("ready", 1.0))),
            fixed("/v1/info", msgspec.json.encode(info)),
            fixed("/v1/tokenizer", tokenizer),
            Route("/v1/decode", decode, methods=["POST"]),
        ]
    )


def _lines(tokens: list[VerifiedToken]) -> Iterator[bytes]:
    for start in range(0, len(tokens), TOKENS_A_LINE):
        event = DecodeEvent(FINGERPRINT, tokens[start : start + TOKENS_A_LINE])
        yield msgspec.json.encode(event) + b"\n"
    yield msgspec.json.encode(DecodeEvent(FINGERPRINT, finish="length")) + b"\n"


def main() -> None:
    app = build_app()
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off")).run([listener])


if __name__ == "__main__":
    main()
