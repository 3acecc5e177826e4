"""The clients and their pinned versions, each in an environment of its own: their requirements exclude one another."""

from __future__ import annotations

import shutil
import subprocess
import venv
from collections.abc import Sequence
from pathlib import Path

PROGRAMS = Path(__file__).with_name("programs")
PYTHON_CLIENTS = {
    "pydantic_ai": ("pydantic-ai-slim[openai]==2.68.0", "openai==3.57.0", "pydantic==2.14.4"),
    "instructor": ("instructor==1.17.0", "openai==3.3.0", "pydantic==2.14.4"),
    "langgraph": ("langgraph==1.2.24", "langchain-openai==1.7.4", "openai==3.57.0", "pydantic==2.14.4"),
    "openai_agents": ("openai-agents==0.24.0", "openai==3.57.0", "pydantic==2.14.4"),
}
NPM_CLIENTS = {
    "ai_sdk": ("ai@6.0.326", "@ai-sdk/openai-compatible@2.0.92", "zod@4.6.7"),
    "typescript": (
        *("ai@6.0.326", "@ai-sdk/anthropic@3.0.140", "@ai-sdk/openai@3.0.141"),
        *("@anthropic-ai/sdk@1.14.0", "openai@6.49.0", "zod@4.6.7"),
    ),
}
CLIENTS = (*PYTHON_CLIENTS, *NPM_CLIENTS)


def command(client: str, folder: Path) -> list[str]:
    """Install a client below `folder`, unless it is there, and return the command of its program.

    Raises subprocess.CalledProcessError if it cannot be installed.
    """
    environment = folder / client
    if client in NPM_CLIENTS:
        return _node(client, environment)
    return [str(install_python(PYTHON_CLIENTS[client], environment)), str(PROGRAMS / f"with_{client}.py")]


def install_python(pins: Sequence[str], environment: Path) -> Path:
    """Install packages into an environment of their own, unless it has them, and return its Python.

    Raises subprocess.CalledProcessError if they cannot be installed.
    """
    python, installed = environment / "bin" / "python", environment / "installed"
    wanted = "\n".join(pins)
    if not installed.exists() or installed.read_text() != wanted:
        venv.create(environment, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *pins], check=True)
        installed.write_text(wanted)
    return python


def _node(client: str, environment: Path) -> list[str]:
    install_npm(NPM_CLIENTS[client], environment)
    # Node looks for packages beside the program.
    return ["node", str(shutil.copy(PROGRAMS / f"with_{client}.mjs", environment))]


def install_npm(pins: Sequence[str], environment: Path) -> Path:
    """Install packages of npm into a folder, and return the folder of their programs.

    Raises subprocess.CalledProcessError if they cannot be installed.
    """
    environment.mkdir(parents=True, exist_ok=True)
    subprocess.run(["npm", "install", "--silent", "--no-save", *pins], cwd=environment, check=True)
    return environment / "node_modules" / ".bin"
