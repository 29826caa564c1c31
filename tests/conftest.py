"""What holds for all tests: what one does to the process's logging is undone behind it."""

from __future__ import annotations

import logging
from collections.abc import Generator

import pytest


def _loggers() -> list[logging.Logger]:
    named = list(logging.Logger.manager.loggerDict.values())
    return [logging.root, *(logger for logger in named if isinstance(logger, logging.Logger))]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Servers and commands that run in this process set up logging for all of it, those of module fixtures too."""
    before = {logger: (logger.level, logger.propagate, list(logger.handlers)) for logger in _loggers()}
    try:
        return (yield)
    finally:
        for logger in _loggers():
            level, logger.propagate, logger.handlers = before.get(logger, (logging.NOTSET, True, []))
            logger.setLevel(level)
