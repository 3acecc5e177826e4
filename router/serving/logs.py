"""The log of a process: one line per event, as text or as JSON. Prompts and answers are never logged.

In JSON each line that belongs to a request of the gateway has the request's id (`x-request-id`).

1. What a line says of a request is its id and words of ours, such as an error's code: never an error's message, which
   may come from Triton or from a library and quote the request.
2. Of an exception it has class and source lines, never the message (`redacted`): in a traceback of any logger, of an
   error that the event loop found, and of one that ends the process or a thread.
3. Libraries log warnings and errors only: at lower levels some of them log what they send.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import logging
import sys
import threading
import traceback
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Literal, TextIO

REQUEST: ContextVar[str] = ContextVar("REQUEST", default="")
"""The id of the request that this task serves; "" for none."""
OURS = "causeway_server"
"""Our logger: it and those below it log what is below a warning."""

_LogFormat = Literal["text", "json"]
_log = logging.getLogger(__name__)


def redacted(error: BaseException) -> str:
    """Return class and source lines of an exception, of what caused it and of a group's members, without messages."""
    frames = [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in traceback.extract_tb(error.__traceback__)]
    described = " < ".join([type(error).__name__, *reversed(frames)])
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    members = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    caused_by = () if cause is None else (f"  after: {redacted(cause)}",)
    return "\n".join([described, *(f"  of: {redacted(each)}" for each in members), *caused_by])


class TextFormatter(logging.Formatter):
    """One line; below it the exception, redacted."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatException(self, ei: Any) -> str:  # noqa: N802 -- logging's name
        return redacted(ei[1]) if ei[1] is not None else ""


class JsonFormatter(TextFormatter):
    """``{"time", "level", "logger", "message"}``, with ``request`` if there is one and ``exception`` for a failure."""

    def format(self, record: logging.LogRecord) -> str:
        time = dt.datetime.fromtimestamp(record.created, dt.UTC)
        line = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request := REQUEST.get():
            line["request"] = request
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def start_log(level: str, log_format: _LogFormat, stream: TextIO = sys.stderr) -> None:
    """Log everything of ours from `level` up to `stream`. A second call replaces the first."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    wanted = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(level=max(wanted, logging.WARNING), handlers=[handler], force=True)
    logging.getLogger(OURS).setLevel(wanted)


def log_crashes() -> None:
    """Log what ends this process or one of its threads, instead of Python's traceback, which has messages."""
    sys.excepthook = lambda _, error, __: _log_crash("the process failed", error)
    threading.excepthook = lambda hook: _log_crash("a thread failed", hook.exc_value or hook.exc_type())
    sys.unraisablehook = lambda hook: _log_crash("an error could not be raised", hook.exc_value or hook.exc_type())


def log_loop_errors(loop: asyncio.AbstractEventLoop) -> None:
    """Log what no task handles, instead of asyncio's message, which has the representation of arguments."""
    loop.set_exception_handler(_log_loop_error)


def _log_loop_error(_: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
    error = context.get("exception")
    what = str(context.get("message", "")).partition("(")[0][:80]
    _log.error("the event loop: %s", what, exc_info=error if isinstance(error, BaseException) else None)


def _log_crash(what: str, error: BaseException) -> None:
    if isinstance(error, KeyboardInterrupt):
        return
    _log.critical("%s", what, exc_info=error)
