"""The header that shows a key, for commands that are clients of a gateway."""

from __future__ import annotations

import click


def bearer(key: str, flag: str) -> dict[str, str]:
    """The headers for `key`; raises `UsageError` naming `flag` for what no header can hold, and does not show it.

    It may well be the right key with a line's end behind it.
    """
    if not (key.isascii() and key.isprintable() and key.strip()):
        raise click.UsageError(f"{flag}: this is no key: it is empty, or holds more than printable ASCII")
    return {"authorization": f"Bearer {key}"}
