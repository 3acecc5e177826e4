"""The clients and their pinned versions, each in an environment of its own: their requirements exclude one another."""

from __future__ import annotations

import shutil
import subprocess
import venv
from pathlib import Path

PROGRAMS = Path(__file__).with_name("programs")
PYTHON_CLIENTS = {
    "pydantic_ai": ("pydantic-ai-slim[openai]==2.68.0", "openai==3.57.0", "pydantic==2.14.4"),
    "instructor": ("instructor==1.17.0", "openai==3.3.0", "pydantic==2.14.4"),
    "langgraph": ("langgraph==1.2.24", "langchain-openai==1.7.4", "openai==3.57.0", "pydantic==2.14.4"),
    "openai_agents": ("openai-agents==0.24.0", "openai==3.57.0", "pydantic==2.14.4"),
}
NPM_PACKAGES = ("ai@6.0.326", "@ai-sdk/openai-compatible@2.0.92", "zod@4.6.7")
CLIENTS = (*PYTHON_CLIENTS, "ai_sdk")


def command(client: str, folder: Path) -> list[str]:
    """Install a client below `folder`, unless it is there, and return the command of its program.

    Raises subprocess.CalledProcessError if it cannot be installed.
    """
    environment = folder / client
    return _node(environment) if client == "ai_sdk" else _python(client, environment)


def _python(client: str, environment: Path) -> list[str]:
    python = environment / "bin" / "python"
    pins = "\n".join(PYTHON_CLIENTS[client])
    installed = environment / "installed"
    if not installed.exists() or installed.read_text() != pins:
        venv.create(environment, with_pip=True, clear=True)
        install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *PYTHON_CLIENTS[client]]
        subprocess.run(install, check=True)
        installed.write_text(pins)
    return [str(python), str(PROGRAMS / f"with_{client}.py")]


def _node(environment: Path) -> list[str]:
    environment.mkdir(parents=True, exist_ok=True)
    subprocess.run(["npm", "install", "--silent", "--no-save", *NPM_PACKAGES], cwd=environment, check=True)
    # Node looks for packages beside the program.
    return ["node", str(shutil.copy(PROGRAMS / "with_ai_sdk.mjs", environment))]
