"""The server under test, the tools that the scripted model calls, and what it must say in the end."""

from __future__ import annotations

import asyncio
import json
import os
import traceback
from collections.abc import Awaitable, Callable

from pydantic import BaseModel

URL = os.environ["CAUSEWAY_URL"]
MODEL = os.environ["CAUSEWAY_MODEL"]
KEY = os.environ.get("CAUSEWAY_API_KEY", "none")
ASK = "What is the weather in Paris and in Rome, and together?"
TEXT = "Good day."
LOOP = "Paris 21 degrees, Rome 25 degrees, together 46, kept 46."


class Report(BaseModel):
    """The weather of the first city."""

    city: str
    celsius: int


REPORT = Report(city="Paris", celsius=21)
Flow = Callable[[], Awaitable[None]]
_flows: dict[str, Flow] = {}


class Tools:
    """The implementations, which note their calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def get_weather(self, city: str) -> str:
        """Get the weather of a city."""
        self.calls.append("get_weather")
        return f"{21 if city == 'Paris' else 25} degrees"

    def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        self.calls.append("add")
        return str(a + b)

    def keep(self, sum: int) -> str:  # noqa: A002 -- the model's name for it
        """Keep a sum."""
        self.calls.append("keep")
        return f"kept {sum}"

    def check(self, text: str) -> None:
        """Check the last text and that four calls came in three turns."""
        assert text == LOOP, text
        assert sorted(self.calls) == ["add", "get_weather", "get_weather", "keep"], self.calls
        self.calls.clear()


def flow(name: str) -> Callable[[Flow], Flow]:
    def register(run: Flow) -> Flow:
        _flows[name] = run
        return run

    return register


def run_all() -> None:
    """Run the flows one after the other in one event loop, and print a line of JSON for each."""
    asyncio.run(_run_all())


async def _run_all() -> None:
    for name, run in _flows.items():
        fault = ""
        try:
            await asyncio.wait_for(run(), 60)
        except Exception:
            fault = traceback.format_exc()
        print(json.dumps({"flow": name, "fault": fault}), flush=True)
