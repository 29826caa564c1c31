"""The `verbatim` command."""

from gateway.cli.commands import main

__all__ = ["main"]
