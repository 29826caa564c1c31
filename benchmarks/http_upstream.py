"""A mock OpenAI server that costs next to nothing: `python -m benchmarks.http_upstream` prints its port and serves.

A request whose body holds `"stream":true` gets `CHUNKS` events with a `TOKEN` each, one every `INTERVAL_S`, then the
reason it ended and `[DONE]`; any other gets one JSON body.
"""

from __future__ import annotations

import asyncio

CHUNKS = 100
INTERVAL_S = 0.02
TOKEN = b'" token"'
DONE = b"data: [DONE]\n\n"
_FRAME = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"mock","choices":[{"index":0,'
    b'"delta":{%b},"finish_reason":%b}]}\n\n'
)
_EVENT = _FRAME % (b'"content":' + TOKEN, b"null")
# Some proxies add a reason where there is none.
_END = _FRAME % (b"", b'"stop"') + DONE
_WHOLE = (
    b'{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"mock","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"' + b"word " * 40 + b'"},"finish_reason":"stop"}],"usage":{"prompt_tokens":9,'
    b'"completion_tokens":40,"total_tokens":49}}'
)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class Upstream(asyncio.Protocol):
    """One connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._data = b""
        self._left = 0

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, found, rest = self._data.partition(b"\r\n\r\n")
        if not found:
            return
        names = (line.partition(b":") for line in head.lower().split(b"\r\n"))
        length = next((int(value) for name, _, value in names if name == b"content-length"), 0)
        if len(rest) < length:
            return
        self._data = rest[length:]
        if b'"stream":true' in rest[:length].replace(b": ", b":"):
            self._left = CHUNKS
            head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            self._transport.write(head)
            self._next()
        else:
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(_WHOLE)
            self._transport.write(head + _WHOLE)

    def _next(self) -> None:
        if self._transport.is_closing():
            return
        if self._left == 0:
            self._transport.write(_chunk(_END) + b"0\r\n\r\n")
            return
        self._left -= 1
        self._transport.write(_chunk(_EVENT))
        asyncio.get_running_loop().call_later(INTERVAL_S, self._next)


async def main() -> None:
    server = await asyncio.get_running_loop().create_server(Upstream, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
