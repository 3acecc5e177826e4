"""The TypeScript SDK in Node: by itself, against the daemon, and as types."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from causeway_server.edge_node.backends.backend import BackendRequest
from causeway_server.edge_node.config.schema import DeviceFilesConfig, ServerConfig
from causeway_server.router.types import Chunk
from tests.edge_node.device import POLICY, running
from tests.edge_node.scripted import FAULTS, ScriptedEngine
from tests.node import run_node_tests
from tests.waiting import until

from .conftest import HERE, SDK


class ToldEngine(ScriptedEngine):
    """It fails as the text of the last message says."""

    async def _answer(self, call: BackendRequest) -> AsyncIterator[Chunk]:
        text = call.request.messages[-1].content if call.request.messages else ""
        self.fault = next((fault for fault in FAULTS if fault == text), "none")
        try:
            async for chunk in super()._answer(call):
                yield chunk
        finally:
            self.fault = "none"


@pytest.mark.parametrize(("file", "least"), [("client.test.mjs", 30), ("outbox.test.mjs", 15)])
@pytest.mark.slow
async def test_it_keeps_its_promises_in_node(node: str, file: str, least: int) -> None:
    assert await run_node_tests(node, HERE / file) >= least


@pytest.mark.slow
async def test_it_and_the_daemon_mean_the_same(node: str, tmp_path: Path) -> None:
    server = ServerConfig(port=0, drain_s=1.0, default_deadline_s=60.0)
    files = DeviceFilesConfig(accept=True)
    policy = POLICY.replace("can: [chat,", "can: [file, chat,")
    async with running(tmp_path, engine=ToldEngine(), server=server, files=files, policy=policy) as device:
        environ = {"CAUSEWAY_URL": f"http://127.0.0.1:{device.app.port}"}
        assert await run_node_tests(node, HERE / "daemon.test.mjs", environ) >= 10
        await until(lambda: device.engine.running == 0)
        texts = [call.request.messages[-1].content for call in device.engine.calls if call.request.messages]
        assert "drip" in texts
        assert "never run" not in texts
        device.assert_nothing_leaks()


@pytest.mark.slow
def test_its_types_hold_for_its_users(node: str) -> None:
    """The programs of the tests are checked against the declarations, all strict."""
    command: list[str | Path] = [node, SDK / "node_modules/typescript/bin/tsc", "-p", HERE]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout) == (0, "")


def test_it_depends_on_nothing_and_only_its_part_for_node_needs_node() -> None:
    package = json.loads((SDK / "package.json").read_text())
    assert [name for name in package if name.endswith("ependencies")] == ["devDependencies"]
    foreign = {
        path.name: names
        for path in sorted((SDK / "src").glob("*.ts"))
        if (names := re.findall(r'from "([^.][^"]*)"', re.sub(r"^ \*.*$", "", path.read_text(), flags=re.MULTILINE)))
    }
    assert foreign.keys() == {"node.ts"}
    assert all(name.startswith("node:") for name in foreign["node.ts"])


def test_everything_exported_is_documented() -> None:
    """Each exported class and interface has a comment right before it."""
    exported = re.compile(r"([^\n]*)\nexport (?:class|interface) (\w+)")
    bare = [
        f"{path.name}: {name}"
        for path in sorted((SDK / "src").glob("*.ts"))
        for before, name in exported.findall(path.read_text())
        if not before.endswith("*/")
    ]
    assert bare == []


@pytest.mark.slow
def test_the_programs_of_its_page_have_the_types_of_the_package(node: str, tmp_path: Path) -> None:
    """Each block that imports begins a program; one without goes on with the program before it."""
    blocks = re.findall(r"```ts\n(.*?)```", (SDK / "README.md").read_text(), flags=re.DOTALL)
    programs: list[str] = []
    for block in blocks:
        if "import" in block:
            programs.append(block.replace("./dist/index.js", "causeway-sdk"))
        else:
            programs[-1] += block
    assert len(programs) == 3
    for number, program in enumerate(programs):
        (tmp_path / f"program{number}.mts").write_text(program)
    (tmp_path / "node_modules").mkdir()
    (tmp_path / "node_modules" / "causeway-sdk").symlink_to(SDK)
    types = str(SDK / "node_modules" / "@types")
    options = {"module": "nodenext", "target": "es2022", "strict": True, "noEmit": True, "typeRoots": [types]}
    config = {"compilerOptions": {**options, "types": ["node"], "lib": ["es2022", "dom", "dom.asynciterable"]}}
    (tmp_path / "tsconfig.json").write_text(json.dumps(config))
    command: list[str | Path] = [node, SDK / "node_modules/typescript/bin/tsc", "-p", tmp_path]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout) == (0, "")
