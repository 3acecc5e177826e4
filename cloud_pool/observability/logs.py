"""The log of gateway and worker: one line per event, as text or as JSON. Prompts and answers are never logged.

In JSON each line that belongs to a request has the request's id (`x-request-id`), at the edge the decision's id.
"""

from __future__ import annotations

import datetime as dt
import json
import logging
import sys
from contextvars import ContextVar
from typing import Literal, TextIO

REQUEST: ContextVar[str] = ContextVar("REQUEST", default="")
"""The id of the request that this task serves; "" for none."""


class JsonFormatter(logging.Formatter):
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


def start_log(level: str, log_format: Literal["text", "json"], stream: TextIO = sys.stderr) -> None:
    """Log everything from `level` up to `stream`. A second call replaces the first."""
    handler = logging.StreamHandler(stream)
    if log_format == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
