"""The log of a process: one line per event, as text or as JSON. Prompts and answers are never logged.

JSON lines about a request of the gateway have its id (`x-request-id`). 1. A line about a request contains its id and
our own text, such as an error's code, but never an error's message, which may come from Triton or a library and quote
the request.
2. An exception is logged with its class and source lines, and the code of an error of the system, never its message
   (`redacted`). This covers tracebacks of any logger, errors found by the event loop, and errors that end the process
   or a thread.
3. Libraries log only warnings and errors, because at lower levels some of them log what they send.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import errno
import json
import logging
import re
import sys
import threading
import traceback
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Literal, TextIO

REQUEST: ContextVar[str] = ContextVar("REQUEST", default="")
"""The id of the request that this task serves; "" for none."""
OURS = "causeway_server"
"""The name of our root logger. Only it and its children log below the level of warnings."""

_LogFormat = Literal["text", "json"]
log = logging.getLogger(__name__)


def redacted(error: BaseException) -> str:
    """Return class and source lines of an exception, its causes and a group's members, without messages."""
    frames = [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in traceback.extract_tb(error.__traceback__)]
    described = " < ".join([_name_of(error), *reversed(frames)])
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    members = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    caused_by = () if cause is None else (f"  after: {redacted(cause)}",)
    return "\n".join([described, *(f"  of: {redacted(each)}" for each in members), *caused_by])


def _name_of(error: BaseException) -> str:
    """Return the class of an exception, and an error of the system with its code, such as ``OSError EMFILE``."""
    name = type(error).__name__
    if isinstance(error, OSError) and type(error).__module__ == "builtins":  # others, as SSLError, have other codes
        return f"{name} {errno.errorcode.get(error.errno or 0, '')}".rstrip()
    return name


class TextFormatter(logging.Formatter):
    """A formatter of text lines, followed by the redacted exception."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatException(self, ei: Any) -> str:  # noqa: N802 -- logging's name
        return redacted(ei[1]) if ei[1] is not None else ""


class JsonFormatter(TextFormatter):
    """A formatter of JSON lines: ``{"time", "level", "logger", "message"}``, perhaps ``request`` and ``exception``."""

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
    """Log to `stream` from `level` up. A second call replaces the first."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    wanted = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(level=max(wanted, logging.WARNING), handlers=[handler], force=True)
    logging.getLogger(OURS).setLevel(wanted)


def log_crashes() -> None:
    """Log exceptions that end this process or one of its threads, instead of Python's traceback, which has messages."""
    sys.excepthook = lambda _, error, __: _log_crash("The process failed.", error)
    threading.excepthook = lambda hook: _log_crash("A thread failed.", hook.exc_value or hook.exc_type())
    sys.unraisablehook = lambda hook: _log_crash("An error could not be raised.", hook.exc_value or hook.exc_type())


def log_loop_errors(loop: asyncio.AbstractEventLoop) -> None:
    """Log unhandled errors of the event loop, instead of asyncio's message, which contains arguments.

    Without free files asyncio's loop reports each client in a socket's queue, thousands at once: one a second is
    logged. uvloop reports none: libuv closes these connections.
    """
    loop.set_exception_handler(_log_loop_error)


_SCARCE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})  # which asyncio reports thus
_logged: dict[tuple[str, type, int], int] = {}  # in which second of the loop's clock such an error was logged last


def _log_loop_error(loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
    error = context.get("exception")
    what = re.split(r"\((?!\))", str(context.get("message", "")))[0][:80]  # "()" has no arguments
    if isinstance(error, OSError) and error.errno in _SCARCE:
        key, second = (what, type(error), error.errno), int(loop.time())
        if _logged.get(key) == second:
            return
        _logged[key] = second
    log.error(
        "The event loop reported a fault: %s.", what, exc_info=error if isinstance(error, BaseException) else None
    )


def _log_crash(what: str, error: BaseException) -> None:
    if isinstance(error, KeyboardInterrupt):
        return
    log.critical("%s", what, exc_info=error)
