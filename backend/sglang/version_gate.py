"""Which versions of SGLang the adapter knows. It hooks into internals, so that every other version is refused."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

SUPPORTED = ("0.5.23",)
"""Versions whose hook points were read and whose server passed the contract tests."""


class UnsupportedVersionError(Exception):
    """No SGLang, or one the adapter was not written for."""


def check_version() -> str:
    """The installed version. Raises UnsupportedVersionError."""
    try:
        installed = version("sglang")
    except PackageNotFoundError as error:
        raise UnsupportedVersionError("SGLang is not installed; see docs/sglang.md") from error
    if installed not in SUPPORTED:
        raise UnsupportedVersionError(
            f"SGLang {installed} is installed; the adapter hooks into internals and knows {', '.join(SUPPORTED)} only"
        )
    return installed
