"""Server-sent events: how one piece of a stream is written. Knows nothing of what is in them."""

from __future__ import annotations

import msgspec

MEDIA_TYPE = "text/event-stream"
DONE = b"data: [DONE]\n\n"


def event(data: object) -> bytes:
    """An event of JSON. JSON holds no raw line break, so it fits one data line."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def comment(text: str) -> bytes:
    """A line clients ignore."""
    assert "\n" not in text
    return f": {text}\n\n".encode()
