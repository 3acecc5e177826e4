"""The doctor's checks: each problem is created for real where a test can, and has an advice."""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import msgspec
import pytest

from causeway_server.edge_node.cli.doctor import Finding, network, packages, policy_and_models, report, worst
from causeway_server.edge_node.cli.doctor.report import examine
from causeway_server.edge_node.config.schema import (
    CloudConfig,
    CloudServer,
    Config,
    EngineConfig,
    KeyConfig,
    ServerConfig,
)
from causeway_server.models.catalog.artifact import SHIPPED, find_artifact, save_manifest
from causeway_server.models.catalog.fit import estimate_memory
from causeway_server.models.catalog.gguf import read_gguf
from causeway_server.models.llama_cpp.native.resources import Gpu, GpuReport
from causeway_server.router.bundle.settings import ResponseCacheConfig
from causeway_server.router.policy.compiled import parse_policy
from causeway_server.router.types import DeviceSignals

from .devices import plant

POLICY = Path(__file__).parents[3] / "policies" / "default.yaml"
MIB = 2**20


def levels(findings: Iterator[Finding] | list[Finding]) -> list[tuple[str, str]]:
    return [(finding.check, finding.level) for finding in findings]


# --- packages --------------------------------------------------------------------------------------------------------


def distribution(site: Path, name: str, version: str = "1.0", top: str = "", requires: tuple[str, ...] = ()) -> None:
    """Add a distribution as pip installs it, with one module."""
    at = f"{name.replace('-', '_')}-{version}.dist-info"
    metadata = "\n".join([f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}", *requires])
    files = {f"{at}/METADATA": metadata, f"{at}/RECORD": f"{top}/__init__.py,,\n{at}/METADATA,,"}
    plant(site, files, {f"{top}/__init__.py": ""})


OURS = ("Requires-Dist: aiohttp>=3.11", "Requires-Dist: llama-cpp-python==0.3.36; extra == 'engine'")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """An environment without problems."""
    distribution(tmp_path, "causeway-router", top="causeway_server", requires=OURS)
    distribution(tmp_path, "aiohttp", "3.12", top="aiohttp")
    distribution(tmp_path, "llama_cpp_python", "0.3.36", top="llama_cpp")
    return tmp_path


def test_a_complete_environment_is_ok(site: Path) -> None:
    installed = packages.read_installed([str(site)])
    assert levels(packages.check_requirements(installed, needs_engine=True)) == [("packages", "ok")]
    assert levels(packages.check_owners(installed, lambda name: site / name)) == [("import names", "ok")]


def test_missing_and_old_packages_are_named(site: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """With the command to install them; the engine's requirements only if there is an engine."""
    bare = tmp_path_factory.mktemp("bare")
    distribution(bare, "causeway-router", top="causeway_server", requires=OURS)
    distribution(bare, "aiohttp", "3.8", top="aiohttp")
    installed = packages.read_installed([str(bare)])
    old, missing = packages.check_requirements(installed, needs_engine=True)
    assert (old.level, missing.level) == ("fail", "fail")
    assert old.found == "aiohttp is 3.8, but >=3.11 is required."
    assert "pip install 'llama-cpp-python==0.3.36'" in missing.advice
    assert len(list(packages.check_requirements(installed, needs_engine=False))) == 1


def test_a_source_tree_that_is_not_installed_fails(tmp_path: Path) -> None:
    """It has no metadata with requirements."""
    findings = packages.check_requirements(packages.read_installed([str(tmp_path)]), needs_engine=True)
    assert levels(findings) == [("packages", "fail")]


def test_two_distributions_of_onnxruntime_fail(site: Path) -> None:
    """The CPU and the GPU distribution share an import name."""
    distribution(site, "onnxruntime", top="onnxruntime")
    distribution(site, "onnxruntime-gpu", top="onnxruntime")
    (finding,) = packages.check_owners(packages.read_installed([str(site)]), lambda name: site / name)
    assert finding.level == "fail"
    assert "onnxruntime and onnxruntime-gpu" in finding.found
    assert finding.advice.startswith(
        "Run `pip uninstall -y onnxruntime onnxruntime-gpu && pip install onnxruntime-gpu`"
    )


def test_another_distribution_with_one_of_our_import_names_fails(site: Path) -> None:
    distribution(site, "some-server", top="causeway_server")
    (finding,) = packages.check_owners(packages.read_installed([str(site)]), lambda name: site / name)
    assert (finding.level, finding.found) == ("fail", "The import name `causeway_server` also belongs to some-server")


def test_a_folder_that_shadows_one_of_our_packages_fails(site: Path, tmp_path: Path) -> None:
    """A folder of our name in the working directory takes precedence."""
    locations = {"causeway_server.models": tmp_path / "elsewhere" / "models"}
    installed = packages.read_installed([str(site)])
    (finding,) = packages.check_owners(installed, lambda name: locations.get(name, site / name))
    assert finding.level == "fail"
    assert str(locations["causeway_server.models"]) in finding.found


def test_our_packages_are_located_in_this_tree() -> None:
    home = packages.locate("causeway_server.edge_node")
    assert home is not None
    assert packages.locate("causeway_server.router") == home.parent / "router"
    assert packages.locate("no_such_module_of_ours") is None


def fake_python(tmp_path: Path, script: str) -> str:
    """Write a `python` that runs a shell script."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("script", "level", "message"),
    [
        ("printf 0.3.36", "ok", "llama-cpp-python 0.3.36 loads"),
        ("kill -ILL $$", "fail", "Illegal instruction"),
        ("kill -SEGV $$", "fail", "ended with SIGSEGV"),
        ("echo \"ModuleNotFoundError: No module named 'llama_cpp'\" >&2; exit 1", "fail", "No module named"),
        ("exit 3", "fail", "no message"),
    ],
)
def test_a_library_that_does_not_load_fails_with_the_cause(
    tmp_path: Path, script: str, level: str, message: str
) -> None:
    finding = packages.check_llama(fake_python(tmp_path, script))
    assert finding.level == level
    assert message in finding.found
    assert bool(finding.advice) == (level != "ok")


def test_a_library_that_hangs_and_a_missing_interpreter_fail(tmp_path: Path) -> None:
    assert "did not load within" in packages.check_llama(fake_python(tmp_path, "sleep 60"), timeout_s=0.05).found
    assert packages.check_llama(str(tmp_path / "none")).level == "fail"


GPU = Gpu("CUDA0", "Orin", 4 << 30, 8 << 30)


@pytest.mark.parametrize(
    ("layers", "report", "has_gpu", "level", "words"),
    [
        ("auto", GpuReport((GPU,), ("CUDA", "CPU")), True, "ok", "finds CUDA0 (Orin), 4.0 GiB free"),
        ("auto", GpuReport((), ("CUDA", "CPU")), False, "warn", "compiled for CUDA, but finds no GPU"),
        (
            "auto",
            GpuReport((), ("CPU",)),
            True,
            "warn",
            "This device has an NVIDIA GPU, but llama.cpp is compiled only for the",
        ),
        (-1, GpuReport((), ("CPU",)), False, "warn", "engine.gpu_layers is -1, but llama.cpp is compiled only for"),
        (0, GpuReport((), ("CUDA", "CPU")), True, "ok", "engine.gpu_layers is 0"),
        ("auto", GpuReport(), False, "ok", "finds no GPU"),
    ],
)
def test_why_the_cpu_decodes_is_said_on_a_device_with_a_gpu(
    layers: int | Literal["auto"], report: GpuReport, has_gpu: bool, level: str, words: str
) -> None:
    """A driver that is not loaded, and a llama.cpp that was compiled without CUDA, have different remedies."""
    finding = packages.check_gpus(EngineConfig(gpu_layers=layers), report, has_gpu)
    assert finding.level == level
    assert words in finding.found


def test_what_runs_the_learned_signals_is_named_with_the_measured_times(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    from causeway_server.models.signals import providers

    times, cuda = tmp_path / "times.json", "CUDAExecutionProvider"
    (finding,) = packages.check_providers([providers.CPU], times)
    assert (finding.level, finding.found) == (
        "ok",
        "ONNX Runtime runs learned signals: encoder on CPU; edge-quality on CPU.",
    )
    encoder, clock = find_artifact("encoder").path, iter(range(10_000))
    session = SimpleNamespace(get_inputs=list, run=lambda *_: None)
    providers.fastest(encoder, lambda _: session, times, [cuda, providers.CPU], lambda: 1e-6 * next(clock))
    (finding,) = packages.check_providers([cuda, providers.CPU], times)
    assert "encoder on CPU (CPU 1 us, CUDA 1 us); edge-quality on CPU." in finding.found


def test_python_3_10_is_the_oldest_supported() -> None:
    assert packages.check_python((3, 10)).level == "fail"
    assert packages.check_python((3, 11)).level == "ok"


# --- policy, models and host -----------------------------------------------------------------------------------------


def test_the_shipped_policy_and_models_are_ok() -> None:
    policy, finding = policy_and_models.read_policy(POLICY)
    assert finding.level == "ok"
    assert policy is not None
    artifacts, findings = policy_and_models.check_models(policy, EngineConfig())
    assert levels(findings) == [("model", "ok")]
    assert levels(policy_and_models.check_memory(artifacts, EngineConfig(), DeviceSignals(memory_free_mb=4000))) == [
        ("memory", "ok")
    ]
    assert levels(policy_and_models.check_targets(policy, EngineConfig(), "http://c/v1")) == []


@pytest.mark.parametrize("content", [None, b"\xff", b"version: 1\nname: x\nroutes: nonsense\n"])
def test_an_invalid_policy_fails(tmp_path: Path, content: bytes | None) -> None:
    """Missing, binary or invalid: the file is named."""
    path = tmp_path / "p.yaml"
    if content is not None:
        path.write_bytes(content)
    policy, finding = policy_and_models.read_policy(path)
    assert policy is None
    assert finding.level == "fail"
    assert str(path) in finding.found


def test_a_missing_model_and_one_with_a_wrong_hash_fail(tmp_path: Path) -> None:
    policy, _ = policy_and_models.read_policy(POLICY)
    assert policy is not None
    real = find_artifact("assistant")
    folder = tmp_path / "assistant"
    folder.mkdir()
    (folder / "manifest.json").write_bytes((real.folder / "manifest.json").read_bytes())
    engine = EngineConfig(model_dirs=(str(tmp_path),))
    _, (missing,) = policy_and_models.check_models(policy, engine)
    (folder / real.manifest.file).write_bytes(real.path.read_bytes()[:-1] + b"!")
    _, (altered,) = policy_and_models.check_models(policy, engine)
    assert (missing.level, altered.level) == ("fail", "fail")
    assert "sha256" in altered.found
    assert policy_and_models.check_models(policy, EngineConfig(enabled=False)) == ([], [])


QUALITY = POLICY.read_text().replace("request.prompt_tokens < 48", "edge.quality > 0.6")


def test_signals_are_checked_only_if_the_policy_uses_them() -> None:
    """A handoff uses a calibrator, a rule on `edge.quality` an estimator; without an engine neither is needed."""
    without_quality, with_quality = parse_policy(POLICY.read_text()), parse_policy(QUALITY)
    assert levels(policy_and_models.check_signals(without_quality, EngineConfig())) == [("signals", "ok")]
    assert levels(policy_and_models.check_signals(with_quality, EngineConfig())) == [
        ("signals", "ok"),
        ("signals", "ok"),
    ]
    assert list(policy_and_models.check_signals(with_quality, EngineConfig(enabled=False))) == []


def test_signals_of_another_model_version_and_altered_signals_are_warnings(tmp_path: Path) -> None:
    """Other weights of the same name have no estimator, and hand off by the engine's raw score."""
    policy = parse_policy(QUALITY)
    real = find_artifact("assistant")
    manifest = msgspec.structs.replace(real.manifest, sha256="0" * 64)
    (tmp_path / "assistant").mkdir()
    (tmp_path / "assistant" / manifest.file).write_bytes(b"other weights")
    save_manifest(manifest, tmp_path / "assistant")
    quality, calibrator = policy_and_models.check_signals(policy, EngineConfig(model_dirs=(str(tmp_path),)))
    assert (quality.level, calibrator.level) == ("warn", "ok")
    assert "another version" in quality.found
    assert "raw score" in calibrator.found
    for name in ("edge-quality", "calibrator"):
        shutil.copytree(SHIPPED / name, tmp_path / "altered" / name)
        path = next((tmp_path / "altered" / name).glob("model.*"))
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    altered = list(policy_and_models.check_signals(policy, EngineConfig(model_dirs=(str(tmp_path / "altered"),))))
    assert [finding.level for finding in altered] == ["warn", "warn"]
    assert all("sha256" in finding.found for finding in altered)


@pytest.mark.parametrize(("share", "level"), [(0.5, "fail"), (1.1, "warn"), (10.0, "ok"), (None, "warn")])
def test_free_memory_is_compared_with_the_models_need(share: float | None, level: str) -> None:
    """Too little, little, plenty, unknown."""
    artifact = find_artifact("assistant")
    need_mb = estimate_memory(read_gguf(artifact.path), context=256, batch=1).total_bytes / MIB
    device = DeviceSignals(memory_free_mb=None if share is None else share * need_mb)
    assert levels(policy_and_models.check_memory([artifact], EngineConfig(), device)) == [("memory", level)]


def test_a_state_folder_that_cannot_be_written_fails(tmp_path: Path) -> None:
    """A file in its place fails for root too."""
    (tmp_path / "state").write_text("a file")
    (finding,) = report.check_state_dir(tmp_path / "state" / "causeway", ResponseCacheConfig())
    assert finding.level == "fail"
    assert "state_dir" in finding.advice


@pytest.mark.parametrize(("free", "level"), [(10 * MIB, "fail"), (200 * MIB, "warn"), (2000 * MIB, "ok")])
def test_a_nearly_full_disk_is_reported(tmp_path: Path, free: int, level: str) -> None:
    """The check creates nothing."""
    findings = report.check_state_dir(tmp_path / "a" / "b", ResponseCacheConfig(), free_bytes_of=lambda _: free)
    assert levels(findings) == [("state folder", level)]
    assert not (tmp_path / "a").exists()
    assert levels(report.check_state_dir(tmp_path, ResponseCacheConfig(disk_bytes=0))) == [("state folder", "ok")]


def test_more_threads_than_cores_is_a_warning() -> None:
    """Threads wait for the slowest one at each barrier."""
    assert report.check_threads(EngineConfig(threads=8), cores=2).level == "warn"
    assert report.check_threads(EngineConfig(threads=2), cores=2).level == "ok"
    assert report.check_threads(EngineConfig()).level == "ok"


def test_only_missing_sensors_that_the_policy_needs_are_warnings() -> None:
    policy, _ = policy_and_models.read_policy(POLICY)
    assert policy is not None
    without_sensors = levels(report.check_sensors(policy, DeviceSignals(memory_free_mb=1.0)))
    assert set(without_sensors) == {("sensors", "warn")}
    assert len(without_sensors) == len({"device.temperature_c", "device.throttled"} & policy.needs)
    with_sensors = DeviceSignals(temperature_c=50.0, throttled=False, memory_free_mb=1.0, power_w=5.0, battery=None)
    assert levels(report.check_sensors(policy, with_sensors)) == [("sensors", "ok")]
    assert levels(report.check_sensors(None, DeviceSignals())) == [("sensors", "ok")]


def test_unreachable_targets_are_warnings() -> None:
    policy, _ = policy_and_models.read_policy(POLICY)
    assert policy is not None
    assert levels(policy_and_models.check_targets(policy, EngineConfig(enabled=False), "")) == [
        ("engine", "warn"),
        ("cloud", "warn"),
    ]


@pytest.mark.parametrize(("regions", "found"), [(["EU", ""], []), (["us", ""], [("cloud", "warn")])])
def test_a_constraint_that_no_cloud_satisfies_is_a_warning(regions: list[str], found: list[tuple[str, str]]) -> None:
    constraints = "constraints:\n  - {name: home, keep: in_region, regions: [eu, ch]}"
    policy = parse_policy(POLICY.read_text().replace("constraints:", constraints, 1))
    assert levels(policy_and_models.check_regions(policy, regions)) == found


# --- network ---------------------------------------------------------------------------------------------------------


class Answer(msgspec.Struct, frozen=True):
    status: int = 200
    body: bytes = b"{}"
    date: str | None = None
    content_type: str = "application/json"


@pytest.fixture
def served() -> Iterator[tuple[dict[str, Answer], int]]:
    """A real HTTP server: the responses by path, and its port. `date` sets the Date header."""
    answers: dict[str, Answer] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = answers.get(self.path, Answer(404))
            self.send_response_only(answer.status)
            if answer.date is not None:
                self.send_header("date", answer.date)
            self.send_header("content-length", str(len(answer.body)))
            self.end_headers()
            self.wfile.write(answer.body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield answers, server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_free_port_and_port_0_are_ok() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
    assert network.check_port(ServerConfig(port=port)).level == "ok"
    assert network.check_port(ServerConfig(port=0)).level == "ok"


@pytest.mark.slow
def test_a_taken_port_fails_and_names_its_holder() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        finding = network.check_port(ServerConfig(port=holder.getsockname()[1]))
    assert finding.level == "fail"
    assert "is used by" in finding.found


@pytest.mark.slow
def test_a_port_taken_by_a_running_daemon_is_ok(served: tuple[dict[str, Answer], int]) -> None:
    answers, port = served
    answers["/readyz"] = Answer(503, b'{"ready":false,"waiting_for":["engine"],"policy":{"name":"default"}}')
    assert network.check_port(ServerConfig(port=port)) == Finding(
        "port", "ok", f"127.0.0.1:{port} is used by a running Causeway daemon."
    )
    for other_program in (b"hello", b"[]", b"{}", b"\xff"):
        answers["/readyz"] = Answer(body=other_program)
        assert network.check_port(ServerConfig(port=port)).level == "fail"


def test_an_address_of_another_machine_fails() -> None:
    """192.0.2.1 is in TEST-NET-1."""
    finding = network.check_port(ServerConfig(host="192.0.2.1", port=8080))
    assert (finding.level, finding.advice) == ("fail", "Set server.host.")


def test_the_unix_sockets_path_is_checked(tmp_path: Path) -> None:
    """Free, missing folder, too long, a regular file, left behind by an ended daemon."""
    assert levels(network.check_socket("")) == []
    assert levels(network.check_socket(str(tmp_path / "s"))) == [("socket", "ok")]
    assert levels(network.check_socket(str(tmp_path / "none" / "s"))) == [("socket", "fail")]
    assert levels(network.check_socket(str(tmp_path / ("s" * 110)))) == [("socket", "fail")]
    (tmp_path / "file").write_text("")
    assert levels(network.check_socket(str(tmp_path / "file"))) == [("socket", "fail")]
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(tmp_path / "stale"))
    (stale_finding,) = network.check_socket(str(tmp_path / "stale"))
    assert "the next daemon replaces it" in stale_finding.found


def test_listening_beyond_loopback_without_api_keys_fails() -> None:
    key = KeyConfig(name="a", sha256="0" * 64)
    assert levels(network.check_exposure(Config(server=ServerConfig()))) == []
    assert levels(network.check_exposure(Config(server=ServerConfig(host="0.0.0.0")))) == [("exposure", "fail")]
    assert levels(network.check_exposure(Config(server=ServerConfig(host="0.0.0.0", keys=(key,))))) == []


@pytest.mark.parametrize(
    ("status", "level", "message"),
    [(200, "ok", "answers in"), (401, "fail", "rejects the token"), (404, "warn", "ends in /v1"), (500, "warn", "500")],
)
def test_the_cloud_is_checked_with_its_token(
    served: tuple[dict[str, Answer], int], status: int, level: str, message: str
) -> None:
    answers, port = served
    answers["/v1/models"] = Answer(status)
    finding = next(network.check_cloud(CloudConfig(url=f"http://127.0.0.1:{port}/v1", key="t")))
    assert finding.level == level
    assert message in finding.found + finding.advice


@pytest.mark.parametrize(("skew", "level"), [(0.0, "ok"), (60.0, "warn"), (-60.0, "warn"), (4000.0, "fail")])
def test_the_clock_is_compared_with_the_clouds(served: tuple[dict[str, Answer], int], skew: float, level: str) -> None:
    """More than 30 s is a warning, more than 5 minutes a failure."""
    answers, port = served
    answers["/v1/models"] = Answer(date=formatdate(1_700_000_000, usegmt=True))
    config = CloudConfig(url=f"http://127.0.0.1:{port}/v1")
    findings = levels(network.check_cloud(config, unix_time=lambda: 1_700_000_000 + skew))
    assert findings == [("cloud", "ok"), ("clock", level)]


@pytest.mark.parametrize("date", [None, "", "yesterday"])
def test_without_a_valid_date_header_the_clock_is_not_checked(
    served: tuple[dict[str, Answer], int], date: str | None
) -> None:
    answers, port = served
    answers["/v1/models"] = Answer(date=date)
    assert levels(network.check_cloud(CloudConfig(url=f"http://127.0.0.1:{port}/v1"))) == [("cloud", "ok")]


def test_an_unreachable_cloud_is_a_warning() -> None:
    """The device answers alone."""
    assert levels(network.check_cloud(CloudConfig(url="http://127.0.0.1:9/v1"))) == [("cloud", "warn")]
    assert levels(network.check_clouds(())) == [("cloud", "ok")]
    assert levels(network.check_cloud(CloudConfig(url="http://x/v1", ca_file="/none.pem"))) == [("cloud", "fail")]


# --- all together ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_warning_and_failure_has_an_advice(tmp_path: Path) -> None:
    """All checks, on a device with many problems."""
    config = Config(
        state_dir=str(tmp_path),
        server=ServerConfig(host="192.0.2.1", socket="/nowhere/s"),
        engine=EngineConfig(enabled=False, threads=999),
        clouds={"eu": CloudServer(url="http://127.0.0.1:9/v1")},
    )
    findings = list(examine(config, tmp_path / "none.yaml", DeviceSignals()))
    assert worst(findings) == "fail"
    assert all(finding.advice for finding in findings if finding.level != "ok")
    assert {"python", "policy", "port", "socket", "exposure", "cloud", "threads"} <= {
        finding.check for finding in findings
    }


def test_the_worst_level_is_reported() -> None:
    fine = Finding("a", "ok", "x")
    assert worst([]) == worst([fine]) == "ok"
    assert worst([fine, Finding("b", "warn", "x", "y")]) == "warn"
    assert worst([Finding("c", "fail", "x", "y"), Finding("b", "warn", "x", "y")]) == "fail"
