"""The daemon's log: one line per event, as text or JSON. Prompts and answers are never logged."""

from __future__ import annotations

import datetime as dt
import json
import logging
import sys
import traceback
from typing import TextIO

from ..config.schema import Config

# Libraries that log every request, connection or call at `info` or `debug`.
_QUIET = ("aiohttp", "asyncio", "grpc", "httpcore", "httpx", "opentelemetry", "redis", "urllib3")


class JsonFormatter(logging.Formatter):
    """Format a record as ``{"time", "level", "logger", "message"}``, with a traceback in ``exception``."""

    def format(self, record: logging.LogRecord) -> str:
        time = dt.datetime.fromtimestamp(record.created, dt.UTC)
        line = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def start_log(config: Config, stream: TextIO = sys.stderr) -> None:
    """Log everything from level `config.log` up to `stream`. A second call replaces the first."""
    handler = logging.StreamHandler(stream)
    if config.log_format == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logging.basicConfig(level=config.log.upper(), handlers=[handler], force=True)
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLevelName(config.log.upper())))


def redacted(error: BaseException) -> str:
    """An exception as type and source line, without its message, which may quote a request."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    return f"{type(error).__name__}{place}"
