"""Run files of Node's own test runner beside the event loop of a test."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping
from pathlib import Path


async def run_node_tests(node: str, file: Path, environ: Mapping[str, str] = {}) -> int:
    """Run a file, and return the number of its tests that passed; none may fail or be skipped."""
    command = (node, "--test", "--test-reporter=tap", str(file))
    child = await asyncio.create_subprocess_exec(
        *command, env=os.environ | environ, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        output = (await child.communicate())[0].decode()
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    counts = {name: int(number) for name, number in re.findall(r"^# (\w+) (\d+)$", output, flags=re.MULTILINE)}
    assert child.returncode == 0, output
    assert counts["tests"] == counts["pass"], output
    return counts["pass"]
