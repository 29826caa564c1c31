"""Log lines: for people, or as one JSON object each, with the id of the request that they belong to.

Owns both formats and what stands in the line of a request that has ended. No prompt and no key is in a line, unless the
settings ask for prompts: then the request's body is, in which keys are not.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from functools import lru_cache
from typing import Literal, TextIO

import msgspec

from gateway.telemetry.record import Record, recording

FIELDS = "fields"
"""The attribute of a log record that holds what a line says beside its words."""
QUIET_ROUTES = frozenset({"/healthz", "/metrics"})
"""Asked every few seconds by machines; their lines are for debugging."""

_PLAIN = re.compile(r"[\w.:/+-]+", re.ASCII)

log = logging.getLogger("gateway.access")


def configure_logs(form: Literal["text", "json"], level: str, stream: TextIO = sys.stderr) -> None:
    """Have this process's log lines written so, from `level` on."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    # Nothing in a line tells of them, and they are looked up for each.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    # Libraries that talk of each of their calls below a warning.
    for name in ("asyncio", "httpcore", "httpx", "urllib3", "opentelemetry"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))


class JsonLines(logging.Formatter):
    """One JSON object a line: `time`, `level`, `logger`, `message`, `request_id` where there is one, and fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= _fields(record)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


class TextLines(logging.Formatter):
    """The same for people: what stands in fields follows the message, as `name=value`."""

    def format(self, record: logging.LogRecord) -> str:
        said = [_time(record), f"{record.levelname:<7}", record.name, _one_line(record.getMessage())]
        said += [f"{name}={_word(value)}" for name, value in _fields(record).items()]
        if record.exc_info:
            said.append("\n" + self.formatException(record.exc_info))
        return " ".join(said)


def _time(record: logging.LogRecord) -> str:
    second, rest = divmod(record.created, 1)
    return f"{_second(second)}.{int(1000 * rest):03}Z"


@lru_cache(maxsize=4)
def _second(second: float) -> str:
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def _fields(record: logging.LogRecord) -> dict[str, object]:
    id_ = recording().request_id
    return ({"request_id": id_} if id_ else {}) | getattr(record, FIELDS, {})


def _one_line(text: str) -> str:
    """As it is, unless it would end the line or hide in it."""
    return text if text.isprintable() else json.dumps(text, ensure_ascii=False)[1:-1]


def _word(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def log_access(record: Record) -> None:
    """The line of a request that has ended: who asked for what, what became of it, how long it took."""
    level = logging.DEBUG if record.route in QUIET_ROUTES else logging.INFO
    if not log.isEnabledFor(level):
        return
    fields: dict[str, object] = {"status": record.status, "duration_s": round(record.duration_s, 6)}
    for name in ("path", "code", "tenant", "model", "mode", "via", "cache"):
        if value := getattr(record, name):
            fields[name] = value
    if record.mode:
        fields["stream"] = record.stream
    if record.prompt_tokens:
        fields["prompt_tokens"] = record.prompt_tokens
        fields["completion_tokens"] = record.completion_tokens
    if record.first_at is not None:
        fields["first_token_s"] = round(record.first_at - record.began, 6)
    if (own := record.own_s) is not None:
        fields["own_s"] = round(own, 6)
    if record.body is not None:
        fields["body"] = record.body.decode("utf-8", "replace")
    # Made by hand: to find out where in the code a line comes from is half of what `log.info` costs.
    words = (record.method, record.route)
    log.handle(log.makeRecord(log.name, level, "", 0, "%s %s", words, None, extra={FIELDS: fields}))
