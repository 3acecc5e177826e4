"""MCP's own conformance suite, at revision 2026-07-28, against `causeway-edge mcp`. `make test-clients` runs this.

The suite and the Node.js that it needs are installed once into the user's cache (240 MB). Its scenarios are written for
a fixture with tools, prompts and resources of given names. Those in NOT_SERVED need what the daemon does not serve;
each other one must be green, and one that turns green is taken off the list.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from causeway_server.edge_node.config.schema import OutboxConfig
from tests.bed.clients.environments import install_npm
from tests.edge_node.cli.test_mcp import serving_http
from tests.edge_node.device import running
from tests.prepare.places import find_places

PINS = ("@modelcontextprotocol/conformance@0.2.0-alpha.12", "node@22.23.3")
NOT_SERVED = {
    "argument completion": ("completion-complete",),
    "prompts": tuple(f"prompts-get-{kind}" for kind in ("simple", "with-args", "embedded-resource", "with-image")),
    "resources": ("resources-read-text", "resources-read-binary", "resources-templates-read"),
    "tools with other content than text": tuple(
        f"tools-call-{kind}" for kind in ("image", "audio", "embedded-resource", "mixed-content")
    ),
    "tools with progress": ("tools-call-with-progress",),
    "tools with $ref in their schemas": ("json-schema-2020-12",),
    "tools with headers of their own": ("http-custom-header-server-validation",),
    "tools that ask the client": tuple(
        f"input-required-result-{kind}"
        for kind in (
            *("basic-elicitation", "basic-sampling", "basic-list-roots", "request-state", "multiple-input-requests"),
            *("multi-round", "non-tool-request", "result-type", "tampered-state", "capability-check"),
        )
    ),
    "tasks, an extension": tuple(
        f"tasks-{kind}"
        for kind in (
            *("lifecycle", "capability-negotiation", "wire-fields", "request-state-removal", "mrtr-input"),
            *("request-headers", "dispatch-and-envelope", "required-task-error", "mrtr-composition"),
        )
    ),
}
# Of `server-stateless`: they need the tool `test_missing_capability`.
FIXTURE_CHECKS = {"sep-2575-server-rejects-undeclared-capability", "sep-2575-missing-capability-http-400"}


@pytest.mark.timeout(600)
async def test_what_is_served_conforms(tmp_path: Path) -> None:
    programs = install_npm(PINS, find_places(os.environ).cache / "clients" / "mcp_conformance")
    async with running(tmp_path, jobs=OutboxConfig()) as device, serving_http(device) as url:
        suite = await asyncio.create_subprocess_exec(
            *(programs / "node", programs / "conformance", "server", "--url", url),
            *("--requirements", "2026-07-28", "--output-dir", tmp_path / "checks"),
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await suite.communicate()
    failed: dict[str, set[str]] = {}
    for file in (tmp_path / "checks").glob("*/checks.json"):
        scenario = file.parent.name.removeprefix("server-").rpartition("-20")[0]
        failed[scenario] = {check["id"] for check in json.loads(file.read_text()) if check["status"] == "FAILURE"}
    print({scenario: checks for scenario, checks in failed.items() if checks})
    assert len(failed) >= 50, output.decode()
    assert failed.pop("server-stateless") == FIXTURE_CHECKS
    expected = {scenario for scenarios in NOT_SERVED.values() for scenario in scenarios}
    assert {scenario for scenario, checks in failed.items() if checks} == expected
