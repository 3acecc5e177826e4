"""`causeway-models pull` as a process: the real huggingface_hub over real sockets to a server that breaks on demand."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("llama_cpp")
pytest.importorskip("huggingface_hub")

from causeway_server.models.catalog.artifact import load_artifact, verify_artifact
from causeway_server.models.pull.hub import HubListing, choose_mmproj
from causeway_server.models.pull.plan import PullError, RemoteFile
from tests.models.catalog.gguf_files import SHIPPED, network_header
from tests.models.llama_cpp.tiny_gguf import write_tiny_gguf
from tests.models.llama_cpp.tiny_mmproj import needs_mtmd, write_tiny_mmproj

from .hub_server import REPOSITORY, HubServer

pytestmark = [pytest.mark.slow, pytest.mark.engine]

ROOT = Path(__file__).parents[3]
WEIGHTS = SHIPPED.read_bytes()
SHA256 = hashlib.sha256(WEIGHTS).hexdigest()
MAIN = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), -1))
from causeway_server.models.cli.commands import main
main(["pull", *sys.argv[2:]], prog_name="causeway-models")
"""
LARGE, SMALL = "tiny-Q8_0.gguf", "tiny-Q4_K_M.gguf"


class Device:
    """An account with a home of its own, and a hub."""

    def __init__(self, home: Path, hub: HubServer) -> None:
        self.home, self.hub = home, hub
        self.largest_file = -1  # bytes; the file system refuses more
        self.models = home / ".local" / "share" / "causeway" / "models"
        self.environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_"))},
            "HOME": str(home),
            "HF_ENDPOINT": hub.url,
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "300",
        }

    def start(self, *arguments: object, **environ: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", MAIN, str(self.largest_file), *map(str, arguments)]
        return subprocess.Popen(
            command,
            env=self.environ | environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def pull(self, *arguments: object, answer: str = "", **environ: str) -> tuple[int, str]:
        process = self.start(*arguments, **environ)
        printed, _ = process.communicate(answer, timeout=120)
        return process.returncode, printed

    def files(self) -> set[str]:
        """Return the names of all files that are no lock and no link."""
        paths = [path for path in self.home.rglob("*") if path.is_file() and not path.is_symlink()]
        return {
            path.name for path in paths if path.suffix not in (".lock", ".TAG", ".tag") and "refs" not in path.parts
        }


@pytest.fixture
def hub() -> Iterator[HubServer]:
    server = HubServer({SMALL: WEIGHTS, LARGE: WEIGHTS + bytes(4096), "README.md": b"# tiny"})
    yield server
    server.close()


@pytest.fixture
def device(tmp_path: Path, hub: HubServer) -> Device:
    return Device(tmp_path, hub)


def test_a_pull_names_size_and_licence_asks_and_adds(device: Device) -> None:
    """A second pull transfers nothing; the weights take the space of one copy."""
    status, printed = device.pull(f"hf:{REPOSITORY}", "--name", "tiny", answer="y\n")
    assert status == 0, printed
    for text in (
        f"hf:{REPOSITORY}:{SMALL}",
        "3.8 MiB",
        "apache-2.0",
        "4 sequences of 2048 tokens",
        "Pull this model?",
        "added tiny",
    ):
        assert text in printed
    artifact = load_artifact(device.models / "tiny")
    verify_artifact(artifact)
    assert artifact.manifest.sha256 == SHA256
    assert artifact.manifest.licence == "apache-2.0"
    assert REPOSITORY in artifact.manifest.note
    blob = next(device.home.rglob(f"blobs/{SHA256}"))
    assert blob.stat().st_ino == artifact.path.stat().st_ino
    assert device.pull(f"hf:{REPOSITORY}", "--name", "tiny")[1].startswith("tiny is installed already")
    assert device.pull(f"hf:{REPOSITORY}:{SMALL}", "--name", "twin", "--yes")[0] == 0
    assert len(device.hub.ranges()) == 1


def test_without_consent_nothing_is_downloaded(device: Device) -> None:
    for answer in ("n\n", ""):
        status, printed = device.pull(f"hf:{REPOSITORY}", answer=answer)
        assert status == 1
        assert "Aborted" in printed
    assert device.hub.ranges() == []
    assert not device.models.exists()


@pytest.mark.parametrize("choice", ["Q8_0", "q8_0", LARGE])
def test_a_file_or_a_quantisation_can_be_named(device: Device, choice: str) -> None:
    status, printed = device.pull(f"hf:{REPOSITORY}:{choice}", answer="n\n")
    assert status == 1
    assert f"hf:{REPOSITORY}:{LARGE}" in printed


def test_a_transfer_that_is_cut_again_and_again_is_completed(device: Device) -> None:
    """By ranges, within one call."""
    device.hub.cut_after = 3 * len(WEIGHTS) // 4
    status, printed = device.pull(f"hf:{REPOSITORY}", "--yes")
    assert status == 0, printed
    assert len(device.hub.ranges()) == 2
    assert device.hub.ranges()[1].startswith("bytes=")


def test_a_killed_pull_resumes_where_it_stopped(device: Device) -> None:
    device.hub.stall_after = 2_000_000
    process = device.start(f"hf:{REPOSITORY}", "--yes")
    assert device.hub.stalled.wait(60)
    partial = device.home / ".cache/huggingface/hub/models--owner--tiny-GGUF/blobs" / f"{SHA256}.partial"
    while not partial.exists() or partial.stat().st_size < 1_000_000:
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    done = partial.stat().st_size
    device.hub.stall_after = 0
    status, printed = device.pull(f"hf:{REPOSITORY}", "--yes", "--name", "tiny")
    assert status == 0, printed
    assert "are downloaded already" in printed
    assert device.hub.ranges()[-1] == f"bytes={done}-"
    verify_artifact(load_artifact(device.models / "tiny"))


def test_a_server_without_ranges_sends_everything_again(device: Device) -> None:
    """A part is never glued to a whole."""
    device.hub.ignore_ranges = True
    target = device.home / ".cache/causeway/weights" / f"{SHA256}.gguf.partial"
    target.parent.mkdir(parents=True)
    target.write_bytes(WEIGHTS[:1000])
    status, printed = device.pull(f"{device.hub.url}/cdn/{SMALL}", "--sha256", SHA256, "--yes", "--name", "tiny")
    assert status == 0, printed
    verify_artifact(load_artifact(device.models / "tiny"))


def test_a_wrong_checksum_deletes_the_download_and_nothing_else(device: Device) -> None:
    assert device.pull(f"hf:{REPOSITORY}:{SMALL}", "--yes", "--name", "audio")[0] == 0
    before = device.files()
    device.hub.corrupt = True
    status, printed = device.pull(f"hf:{REPOSITORY}:{LARGE}", "--yes", "--name", "damaged")
    assert status == 1
    assert "sha256 is" in printed
    assert "the download was deleted, and nothing else was changed" in printed
    assert device.files() == before
    verify_artifact(load_artifact(device.models / "audio"))


def test_a_full_disk_is_said_and_the_part_is_kept(device: Device) -> None:
    """The file system refuses to write more: the next pull, with space, resumes."""
    device.largest_file = 2_000_000
    status, printed = device.pull(f"hf:{REPOSITORY}", "--yes")
    assert status == 1
    assert "free some space and repeat the command, which resumes" in printed
    device.largest_file = -1
    status, printed = device.pull(f"hf:{REPOSITORY}", "--yes")
    assert status == 0, printed
    assert device.hub.ranges()[-1].startswith("bytes=")


def test_what_does_not_fit_is_refused_with_figures_and_the_next_smaller_file(device: Device, hub: HubServer) -> None:
    """Before the first byte; the header alone is read."""
    big, medium = network_header() + bytes(3 * 2**20), network_header() + bytes(2**20)
    hub.files = {"x-Q8_0.gguf": big, "x-Q4_K_M.gguf": medium}
    flags = ("--device", "orin-nano-8gb", "--batch", "8")
    status, printed = device.pull("hf:owner/tiny-GGUF:Q8_0", *flags, "--context", 32768 * 2)
    assert status == 1
    assert "orin-nano-8gb has 5,734 MiB to use" in printed
    assert "does not fit either" in printed
    assert hub.ranges() == []


@pytest.mark.parametrize(
    ("break_it", "arguments", "complaint"),
    [
        (lambda hub: None, ("hf:owner/nothing",), "has no such repository, or it is private"),
        (lambda hub: setattr(hub, "gated", True), (f"hf:{REPOSITORY}",), "accept the model's licence at"),
        (lambda hub: setattr(hub, "token", "t"), (f"hf:{REPOSITORY}",), "or set HF_TOKEN"),
        (lambda hub: hub.files.clear(), (f"hf:{REPOSITORY}",), "the repository has no GGUF file"),
        (lambda hub: None, (f"hf:{REPOSITORY}:Q2_K",), f"no file matches 'Q2_K'; the files are: {LARGE}, {SMALL}"),
        (lambda hub: hub.close(), (f"hf:{REPOSITORY}",), "cannot be reached"),
        (lambda hub: None, ("hf:nonsense",), "write hf:OWNER/REPO"),
        (lambda hub: None, ("ftp://host/x.gguf",), "write hf:OWNER/REPO"),
        (lambda hub: None, ("http://127.0.0.1:1/x.gguf",), "a URL needs --sha256"),
        (lambda hub: None, ("http://127.0.0.1:1/x.gguf", "--sha256", "0" * 64), "cannot be reached"),
        (lambda hub: None, ("demo:nothing",), "the names are smol, smollm2-135m, qwen, qwen-05b, qwen-15b"),
    ],
)
def test_what_cannot_be_pulled_is_said_in_one_line(
    device: Device, break_it: Callable[[HubServer], object], arguments: tuple[str, ...], complaint: str
) -> None:
    break_it(device.hub)
    status, printed = device.pull(*arguments, "--yes")
    assert status == 1
    assert complaint in printed
    assert "Traceback" not in printed
    assert printed.startswith("Error: ")


def test_the_token_goes_to_the_hub(device: Device) -> None:
    device.hub.token = "secret"
    status, printed = device.pull(f"hf:{REPOSITORY}", "--yes", HF_TOKEN="secret")
    assert status == 0, printed
    assert "secret" not in printed


def test_two_pulls_of_one_file_do_not_write_into_each_other(device: Device) -> None:
    device.hub.stall_after = 1_000_000
    first = device.start(f"hf:{REPOSITORY}", "--yes", "--name", "one")
    assert device.hub.stalled.wait(60)
    status, printed = device.pull(f"hf:{REPOSITORY}", "--yes", "--name", "two")
    assert status == 1
    assert "another process is downloading this file" in printed
    device.hub.stall_after = 0
    device.hub.released.set()
    out, _ = first.communicate(timeout=60)
    assert first.returncode == 0, out


def test_a_url_is_pulled_by_its_checksum(device: Device) -> None:
    url = f"{device.hub.url}/cdn/{SMALL}"
    status, printed = device.pull(url, "--sha256", SHA256.upper(), "--yes")
    assert status == 0, printed
    assert load_artifact(device.models / "tiny-q4_k_m").manifest.sha256 == SHA256
    assert not any(device.home.rglob("*.partial"))
    status, printed = device.pull(url, "--sha256", "0" * 64, "--yes", "--name", "other")
    assert "the download was deleted" in printed
    assert not (device.models / "other").exists()


def test_a_file_that_is_no_gguf_is_refused_before_it_is_downloaded(device: Device) -> None:
    device.hub.files[SMALL] = b"<html>" * 1000
    status, printed = device.pull(f"hf:{REPOSITORY}:Q4_K_M", "--yes")
    assert status == 1
    assert "the file starts with b'<htm', not b'GGUF'" in printed
    assert device.hub.ranges() == []


def test_the_hub_is_not_asked_twice_at_once(device: Device) -> None:
    """Several pulls of different names in parallel give the same files."""
    results: list[tuple[int, str]] = []
    threads = [
        threading.Thread(target=lambda choice=choice: results.append(device.pull(f"hf:{REPOSITORY}:{choice}", "--yes")))
        for choice in ("Q4_K_M", "Q8_0")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [status for status, _ in results] == [0, 0], results


@needs_mtmd
def test_a_vision_model_comes_with_its_mmproj_file_when_asked(tmp_path: Path) -> None:
    model = write_tiny_gguf(tmp_path / "tiny.gguf").read_bytes()
    mmproj = write_tiny_mmproj(tmp_path / "mmproj.gguf").read_bytes()
    wrong = write_tiny_mmproj(tmp_path / "wrong.gguf", dimensions=96).read_bytes()
    hub = HubServer({SMALL: model, "mmproj-tiny-f32.gguf": wrong, "mmproj-tiny-f16.gguf": mmproj})
    device = Device(tmp_path / "home", hub)
    try:
        status, printed = device.pull(f"hf:{REPOSITORY}", "--name", "blind", "--yes")
        assert (status, "With --mmproj it accepts images" in printed) == (0, True), printed
        status, printed = device.pull(f"hf:{REPOSITORY}", "--name", "seeing", "--mmproj", answer="y\n")
        assert status == 0, printed
        assert "mmproj-tiny-f16.gguf, 0.2 MiB" in printed
        entry = load_artifact(device.models / "seeing").manifest.projector
        assert entry is not None
        assert entry.sha256 == hashlib.sha256(mmproj).hexdigest()
        verify_artifact(load_artifact(device.models / "seeing"))
    finally:
        hub.close()


def test_of_several_mmproj_files_the_usual_precision_is_taken() -> None:
    def listing(*names: str) -> HubListing:
        return HubListing("o/r", "main", (), tuple(RemoteFile(name, 1, "", "") for name in names))

    assert choose_mmproj(listing("mmproj-a-f32.gguf", "a-mmproj-F16.gguf", "mmproj-a-Q8_0.gguf")).name.endswith(
        "F16.gguf"
    )
    assert choose_mmproj(listing("mmproj.gguf")).name == "mmproj.gguf"
    for names, words in (((), "is not a vision model"), (("mmproj-x.gguf", "mmproj-y.gguf"), "several mmproj files")):
        with pytest.raises(PullError, match=words):
            choose_mmproj(listing(*names))
