"""Python's agent frameworks, unmodified: all flows, at the edge and at a gateway. `make test-clients` runs this.

Each is installed once, with its pinned requirements, into an environment of its own in the user's cache (330 MB
together), since that is too much for `make test`.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from tests.bed.clients.environments import install_python
from tests.prepare.places import find_places
from tests.waiting import until

from .conftest import HERE, KEY, Place

PROGRAMS = HERE / "programs"
CLIENTS = {
    "pydantic_ai": (
        *("pydantic-ai-slim[openai,anthropic]==2.68.0", "openai==3.57.0", "anthropic==2.14.0"),
        "pydantic==2.14.4",
    ),
    "langgraph": (
        *("langgraph==1.2.24", "langchain-openai==1.7.4", "langchain-anthropic==1.7.7"),
        *("openai==3.57.0", "anthropic==2.14.0", "pydantic==2.14.4"),
    ),
}


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest) -> tuple[str, Path]:
    """Name and Python of a client."""
    name: str = request.param
    return name, install_python(CLIENTS[name], find_places(os.environ).cache / "clients" / name)


@pytest.mark.timeout(600)
async def test_each_flow_is_green(client: tuple[str, Path], place: Place) -> None:
    """The scripted model was given no history that a strict vendor would refuse, and nothing is left running."""
    name, python = client
    environ = {"CAUSEWAY_URL": place.url, "CAUSEWAY_MODEL": place.model, "LANGSMITH_TRACING": "false"}
    if place.name == "gateway":
        environ["CAUSEWAY_API_KEY"] = KEY
    program = await asyncio.create_subprocess_exec(
        python,
        str(PROGRAMS / f"with_{name}.py"),
        env=os.environ | environ,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await program.communicate()
    rows = [json.loads(line) for line in output.splitlines() if line.startswith(b"{")]
    assert program.returncode == 0, errors.decode()
    assert len(rows) == 15
    faults = {row["flow"]: row["fault"] for row in rows if row["fault"]}
    assert faults == {}, "\n".join(f"{flow}\n{fault}" for flow, fault in faults.items())
    assert place.played.faults == []
    await until(lambda: place.played.running == 0)
