"""A real daemon process with a real engine: a restart in place, kills during a trial, models that are replaced."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest

from causeway_server.edge_node.agent.journal import Journal, JournalRow
from causeway_server.edge_node.agent.store import Disk
from causeway_server.edge_node.backends.engine.backend import EngineBackend, EngineModel
from causeway_server.edge_node.config.schema import EngineConfig
from causeway_server.edge_node.daemon.fleet import golden_answer
from causeway_server.models.catalog.artifact import Manifest, save_manifest, sha256_of
from causeway_server.models.llama_cpp.protocol import AdapterFile, SoftTokens
from causeway_server.router.bundle.protocol import DeviceState
from causeway_server.router.types import Target
from tests.models.llama_cpp.tiny_adapter import write_tiny_adapter
from tests.models.llama_cpp.tiny_gguf import write_tiny_gguf
from tests.models.llama_cpp.tiny_mmproj import LANGUAGE, MARKS, needs_mtmd, write_tiny_mmproj
from tests.models.parts.test_decoding import needs_pillow
from tests.ports import free_port

from .fleet import FACTORY, POLICY, Publisher

pytestmark = [pytest.mark.slow, pytest.mark.engine]

CONFIG = """\
policy: policy.yaml
state_dir: state
server: {{port: {port}, drain_s: 5s}}
engine: {{model_dirs: [models], sequences: 1, threads: 1, context_tokens: 256}}
"""
PROMPT = "turn on the light"
PATIENCE_S = 120.0


class DaemonProcess:
    """The daemon, its folder, and a client that sends requests all the time."""

    def __init__(self, folder: Path, publisher: Publisher) -> None:
        self.folder = folder
        (folder / "state" / "fleet").mkdir(parents=True)
        self.port = free_port()
        (folder / "edge.yaml").write_text(CONFIG.format(port=self.port))
        (folder / "policy.yaml").write_text(FACTORY)
        model = folder / "models" / "m-small"
        model.mkdir(parents=True)
        write_tiny_gguf(model / "model.gguf", seed=1)
        save_manifest(manifest_of(model / "model.gguf"), model)
        self._command = [
            sys.executable,
            "-m",
            "tests.edge_node.agent.daemon_process",
            str(publisher.path),
            str(folder / "edge.yaml"),
        ]
        self.start()

    def start(self) -> None:
        with (self.folder / "log.txt").open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def get(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30.0) as response:
            return dict(json.load(response))

    def ask(self, tokens: int = 20, model: str = "auto", content: object = PROMPT) -> tuple[str, str]:
        """Return the answer, and the policy that routed it."""
        body = {"model": model, "messages": [{"role": "user", "content": content}], "temperature": 0}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/chat/completions",
            json.dumps({**body, "max_tokens": tokens}).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60.0) as response:
            answer = json.load(response)["choices"][0]["message"]["content"]
            return answer, response.headers["x-causeway-policy"].partition("@")[0]

    @property
    def row(self) -> JournalRow:
        return Journal(self.folder / "state" / "fleet" / "journal.jsonl", Disk()).last

    def wait(self, what: str, is_so: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            with contextlib.suppress(URLError, ConnectionError, TimeoutError):
                if is_so():
                    return
            time.sleep(0.05)
        raise AssertionError(f"not {what}: {self.row}\n{(self.folder / 'log.txt').read_text()[-3000:]}")

    def wait_ready(self) -> None:
        self.wait("ready", lambda: bool(self.get("/readyz")["ready"]))

    def wait_row(self, state: DeviceState, running: str | None) -> None:
        self.wait(
            f"{state} with {running}",
            lambda: (self.row.state, self.row.bundles[:1]) == (state, () if running is None else (running,)),
        )

    def prove(self, bundle: str) -> None:
        self.wait_row(DeviceState.TRIAL, bundle)
        self.wait_ready()
        self.wait("answered", lambda: len([self.ask() for _ in range(6)]) == 6)
        self.wait_row(DeviceState.IDLE, bundle)


def manifest_of(weights: Path) -> Manifest:
    return Manifest(
        name="m-small",
        file=weights.name,
        sha256=sha256_of(weights),
        size_bytes=weights.stat().st_size,
        format="gguf",
        architecture="llama",
        quantisation="F32",
        context_length=512,
        licence="MIT",
        answer_tokens=24,
    )


@pytest.fixture
def daemon(tmp_path: Path, publisher: Publisher) -> Iterator[DaemonProcess]:
    daemon = DaemonProcess(tmp_path / "device", publisher)
    try:
        daemon.wait_ready()
        yield daemon
    finally:
        daemon.process.terminate()
        daemon.process.wait()


async def answer_of(weights: Path, adapter: Path | None = None, soft: SoftTokens | None = None) -> str:
    """What a model answers to the prompt, from an engine of its own."""
    files = () if adapter is None else (AdapterFile("night", str(adapter)),)
    config = EngineConfig(sequences=1, threads=1, context_tokens=256)
    engine = EngineBackend(weights, config, EngineModel(answer_tokens=24, adapters=files))
    await engine.start()
    try:
        target = Target("m-small", "edge", "m-small", adapter="" if adapter is None else "night")
        return await golden_answer(engine, target, PROMPT, soft)
    finally:
        await engine.close()


def model(publisher: Publisher, answer: str) -> str:
    golden = json.dumps([{"prompt": PROMPT, "answer": answer}])
    return f"    models:\n      m-small: {{file: model.gguf, golden: {golden}}}\n"


def test_settings_are_taken_by_a_restart_in_place(publisher: Publisher, daemon: DaemonProcess) -> None:
    pid = daemon.process.pid
    bundle = publisher.release(extra="    settings: {engine.sequences: 3, log_format: json}\n")
    daemon.prove(bundle)
    assert daemon.process.poll() is None
    assert daemon.process.pid == pid
    assert '{"' in (daemon.folder / "log.txt").read_text().splitlines()[-1]
    assert daemon.ask()[1] == "kiosk-1"
    assert daemon.row.boots == 0


def test_a_daemon_that_is_killed_in_every_trial_returns_to_its_own_files(
    publisher: Publisher, daemon: DaemonProcess
) -> None:
    bundle = publisher.release()
    daemon.wait_row(DeviceState.TRIAL, bundle)
    for boots in range(1, 4):
        daemon.kill()
        daemon.start()
        daemon.wait("counted", lambda boots=boots: daemon.row.boots == boots)  # type: ignore[misc]
    daemon.kill()
    daemon.start()
    daemon.wait_row(DeviceState.IDLE, None)
    daemon.wait_ready()
    assert daemon.ask()[1] == "kiosk-0"
    assert daemon.row.quarantined[bundle].startswith("boots_failed")


async def test_a_model_is_replaced_under_requests(publisher: Publisher, daemon: DaemonProcess) -> None:
    """No answer is cut or mixed: each is the old model's or the new one's, and a golden prompt is asked before.

    One sequence at a time: noise has near ties, which a batch may break the other way.
    """
    old = daemon.ask()[0]
    write_tiny_gguf(publisher.path / "model.gguf", seed=2)
    right = await answer_of(publisher.path / "model.gguf")
    answers: list[str] = []
    failures: list[Exception] = []
    done = threading.Event()

    def ask_all_the_time() -> None:
        while not done.is_set():
            try:
                answers.append(daemon.ask()[0])
            except Exception as error:
                failures.append(error)

    users = [threading.Thread(target=ask_all_the_time) for _ in range(3)]
    for user in users:
        user.start()
    try:
        bundle = publisher.release(extra=model(publisher, right))
        daemon.wait_row(DeviceState.IDLE, bundle)
    finally:
        done.set()
        for user in users:
            user.join()
    assert failures == []
    new = daemon.ask()[0]
    assert new != old
    assert set(answers) == {old, new}
    assert answers.index(new) > 0


async def test_a_model_that_answers_nonsense_never_answers_a_user(publisher: Publisher, daemon: DaemonProcess) -> None:
    old = daemon.ask()[0]
    write_tiny_gguf(publisher.path / "model.gguf", seed=3)
    bundle = publisher.release(extra=model(publisher, "The light is on."))
    daemon.wait("undone", lambda: daemon.row.state is DeviceState.IDLE and bundle in daemon.row.quarantined)
    assert daemon.row.quarantined[bundle].startswith("golden_answer_differs")
    assert daemon.ask() == (old, "kiosk-0")


async def test_a_bundle_brings_adapters(publisher: Publisher, daemon: DaemonProcess) -> None:
    """One that the engine cannot use, or that answers something else, never answers a user."""
    write_tiny_gguf(publisher.path / "model.gguf", seed=1)

    def release(golden: str = "", **lies: Any) -> str:
        write_tiny_adapter(publisher.path / "night.gguf", **lies)
        prompts = json.dumps([{"prompt": PROMPT, "answer": golden}] if golden else [])
        adapters = f"{{night: {{file: night.gguf, golden: {prompts}}}}}"
        return publisher.release(extra=f"    models:\n      m-small: {{file: model.gguf, adapters: {adapters}}}\n")

    for lies, code in (
        ({"architecture": "qwen2"}, "model_unusable: m-small+night is an adapter for qwen2 models"),
        ({"name": "blk.9.attn_q.weight"}, "model_unusable: m-small+night: The adapter night cannot be used"),
        ({"golden": "The light is on."}, "golden_answer_differs: m-small+night answers"),
    ):
        bundle = release(**lies)
        daemon.wait("refused", lambda bundle=bundle: bundle in daemon.row.quarantined)  # type: ignore[misc]
        assert daemon.row.quarantined[bundle].startswith(code)
        assert daemon.ask()[1] == "kiosk-0"
    right = await answer_of(publisher.path / "model.gguf", write_tiny_adapter(publisher.path / "night.gguf"))
    bundle = release(right)
    daemon.prove(bundle)
    adapted, plain = (daemon.ask(24, model)[0][:20] for model in ("small+night", "small"))
    assert right.startswith(adapted)
    assert adapted != plain
    assert "small+night" in {model["id"] for model in daemon.get("/v1/models")["data"]}


@needs_mtmd
@needs_pillow
async def test_a_bundle_brings_a_vision_model(publisher: Publisher, daemon: DaemonProcess) -> None:
    """Its golden prompt has an image: a model that sees something else in it never answers a user."""
    marks, architecture = MARKS["gemma3"], LANGUAGE["gemma3"]
    write_tiny_gguf(publisher.path / "model.gguf", architecture=architecture, marks=marks, window=512)
    write_tiny_mmproj(publisher.path / "mmproj.gguf", "gemma3")
    (publisher.path / "white.png").write_bytes(white_image())
    right = await answer_of(publisher.path / "model.gguf", soft=white_tokens(publisher.path))
    policy = POLICY.format(number=1, model="m-small").replace("use: [small]", "fusion: early, use: [small]")

    def release(answer: str) -> str:
        golden = json.dumps([{"prompt": PROMPT, "answer": answer, "image": "white.png"}])
        model = f"{{file: model.gguf, projector: {{file: mmproj.gguf}}, golden: {golden}}}"
        return publisher.release(policy=policy, extra=f"    models:\n      m-small: {model}\n")

    blind = release("The light is on.")
    daemon.wait("refused", lambda: blind in daemon.row.quarantined)
    assert daemon.row.quarantined[blind].startswith("golden_answer_differs: m-small answers")
    assert daemon.ask()[1] == "kiosk-0"
    bundle = release(right)
    daemon.prove(bundle)
    url = f"data:image/png;base64,{base64.b64encode(white_image()).decode()}"
    image = {"type": "image_url", "image_url": {"url": url}}
    answer, route = daemon.ask(24, content=[{"type": "text", "text": PROMPT}, image])
    assert (right.startswith(answer[:20]), route) == (True, "kiosk-1")


def white_image() -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (32, 16), "white").save(file, "PNG")
    return file.getvalue()


def white_tokens(folder: Path) -> SoftTokens:
    from causeway_server.models.llama_cpp.native.mtmd import VisionEncoder

    encoder = VisionEncoder(folder / "mmproj.gguf", folder / "model.gguf", threads=1)
    try:
        vectors, runs = encoder.encode(b"\xff" * (32 * 16 * 3), 32, 16)
    finally:
        encoder.close()
    return SoftTokens(vectors.tobytes(), runs)


def test_a_state_folder_on_a_full_disk(publisher: Publisher, daemon: DaemonProcess, tmp_path: Path) -> None:
    """A real file system of 3 MB, which a model does not fit in: the device says so and answers."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a file system")
    daemon.process.terminate()
    daemon.process.wait()
    state = daemon.folder / "state"
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(state)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this machine does not let tests mount a file system")
    try:
        (state / "fleet").mkdir()
        write_tiny_gguf(publisher.path / "model.gguf", width=256)
        assert (publisher.path / "model.gguf").stat().st_size > 3 << 20
        publisher.release(extra=model(publisher, ""))
        daemon.start()
        daemon.wait_ready()
        daemon.wait("refused", lambda: daemon.row.code == "disk_full")
        assert daemon.ask()[1] == "kiosk-0"
        daemon.process.terminate()
        daemon.process.wait()
    finally:
        subprocess.run(["umount", "-l", str(state)], check=True)
