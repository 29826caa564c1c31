"""The HTTP process's way to the schedulers: SGLang's RPC channel, one verification pass at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import zmq
import zmq.asyncio
from sglang.srt.managers.io_struct import RpcReqInput, RpcReqOutput, async_sock_recv, async_sock_send
from sglang.srt.utils.network import get_zmq_socket

from backend.sglang.passes import Done, PassFailedError, PassReply, PassRequest, Span
from backend.sglang.plugin import RUN_PASS


class Door:
    """Sends passes, in order. SGLang's HTTP server leaves the channel's near end unbound; we bind it."""

    def __init__(self, rpc_name: str):
        self._socket = get_zmq_socket(zmq.asyncio.Context(1), zmq.DEALER, rpc_name, True)
        self._turn = asyncio.Lock()

    async def run(self, spans: Sequence[Span]) -> list[Done]:
        """Run one pass. Raises PassFailedError."""
        request = RpcReqInput(
            method=RUN_PASS, parameters={"request": msgspec.json.encode(PassRequest(list(spans))).decode()}
        )
        async with self._turn:
            # Whoever gives up waiting must not leave the answer to the next caller.
            reply = await asyncio.shield(asyncio.ensure_future(self._exchange(request)))
        if reply.failure:
            raise PassFailedError(reply.failure)
        return reply.done

    async def _exchange(self, request: RpcReqInput) -> PassReply:
        await async_sock_send(self._socket, request)
        answer = await async_sock_recv(self._socket)
        assert isinstance(answer, RpcReqOutput)
        return msgspec.json.decode(answer.message, type=PassReply)

    def close(self) -> None:
        """Drop the channel; what is in flight is never answered."""
        self._socket.close(linger=0)
