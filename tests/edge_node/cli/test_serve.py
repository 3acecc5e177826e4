"""`serve` as a process: output, systemd notifications, exit codes. Without an engine, so that it starts at once."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import urllib3
from click.testing import CliRunner

from causeway_sdk import Causeway
from causeway_server.edge_node.cli.main import main
from causeway_server.edge_node.config.loader import config_keys, load_config
from causeway_server.edge_node.config.schema import Config, KeyConfig, ServerConfig

ROOT = Path(__file__).parents[3]
CLOUD = ("--cloud-url", "http://127.0.0.1:9/v1")  # unreachable, but configured: the daemon becomes ready

QUESTION = {"model": "auto", "messages": [{"role": "user", "content": "hello"}]}
A_KEY = f"server.keys=[{{name: kiosk, sha256: '{'0' * 64}'}}]"


def serve(tmp_path: Path, *flags: str, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "causeway_server.edge_node",
            "serve",
            "--port",
            "0",
            "--set",
            "engine.enabled=false",
            *CLOUD,
            *flags,
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "STATE_DIRECTORY": str(tmp_path / "state"), **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ready_line(daemon: subprocess.Popen[str]) -> tuple[str, list[str]]:
    """Return the URL of the ready line, and the lines before it."""
    assert daemon.stdout is not None
    lines: list[str] = []
    for line in daemon.stdout:
        if line.startswith("ready url="):
            return line.strip().removeprefix("ready url="), lines
        lines.append(line.strip())
    raise AssertionError(daemon.communicate()[1])


@pytest.mark.slow
def test_the_daemon_prints_a_summary_and_drains_on_sigterm(tmp_path: Path) -> None:
    """systemd is notified of ready and stopping; the exit code is 0."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(120)
        sock = str(tmp_path / "edge.sock")
        with serve(tmp_path, "--socket", sock, "--log-format", "json", NOTIFY_SOCKET=systemd.getsockname()) as daemon:
            url, lines = ready_line(daemon)
            assert systemd.recv(4096).startswith(b"READY=1\nSTATUS=policy default@")
            assert f"listening  {url}/v1" in lines
            assert any(line.startswith("policy     default@") for line in lines)
            assert "device     small: assistant  (engine is off)" in lines
            assert "cloud      main: http://127.0.0.1:9/v1" in lines
            with Causeway(f"unix://{sock}") as causeway:
                assert "auto" in [model.id for model in causeway.models()]
            daemon.send_signal(signal.SIGTERM)
            _, log = daemon.communicate(timeout=120)
            assert systemd.recv(4096).startswith(b"STOPPING=1")
    assert daemon.returncode == 0
    records = [json.loads(line) for line in log.splitlines()]
    assert all({"time", "level", "logger", "message"} <= record.keys() for record in records)
    assert not Path(sock).exists()


@pytest.mark.slow
def test_a_background_task_that_fails_ends_the_process_with_a_status_and_a_line(tmp_path: Path) -> None:
    """Else it would answer on without repairing anything, and systemd would wait for READY."""
    config, state = tmp_path / "edge.yaml", tmp_path / "state"
    (state / "fleet").mkdir(parents=True)
    config.write_text(
        f"state_dir: {state}\nserver: {{port: 0}}\nengine: {{enabled: false}}\nclouds: {{main: {{url: {CLOUD[1]}}}}}\n"
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(120)
        daemon = subprocess.run(
            [sys.executable, "-m", "tests.edge_node.cli.failing_daemon", str(config)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "NOTIFY_SOCKET": systemd.getsockname()},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        messages = [systemd.recv(4096)]
        while not messages[-1].startswith(b"STOPPING=1"):
            messages.append(systemd.recv(4096))
    assert daemon.returncode == 1
    (line,) = [line for line in daemon.stderr.splitlines() if " CRITICAL " in line]
    assert "A background task failed, and the daemon ends: RuntimeError" in line
    assert "Stopped." in daemon.stderr.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--set", "server.prot=1"], "Did you mean `server.port`?"),
        (["--set", "nonsense"], "Write KEY=VALUE"),
        (["--port", "many"], "server.port: Must be an integer"),
        (["--config", "/none.yaml"], "Cannot read the config file"),
        (["--policy", "/none.yaml"], "/none.yaml"),
        (["--host", "192.0.2.1", "--port", "1234", "--set", A_KEY], "192.0.2.1:1234"),
        (["--host", "192.0.2.1", "--port", "1234"], "server.host: The daemon would answer other machines"),
    ],
)
def test_a_configuration_error_is_exit_code_2_and_one_line(tmp_path: Path, flags: list[str], message: str) -> None:
    """The line names the key or the file; there is no traceback."""
    with serve(tmp_path, *flags) as daemon:
        _, log = daemon.communicate(timeout=120)
    assert daemon.returncode == 2
    last = log.strip().splitlines()[-1]
    assert last.startswith("causeway-edge: ")
    assert message in last
    assert "Traceback" not in log


def test_config_shows_every_key_and_the_effective_values() -> None:
    """The token is hidden."""
    keys = CliRunner().invoke(main, ["config", "--keys"]).output
    listed = [line.split()[0] for line in keys.splitlines() if "[]" not in line]
    assert [key for key in listed if key != "clouds"] == config_keys()
    of_cloud = {"CAUSEWAY_CLOUDS__EU__KEY": "secret-token", "CAUSEWAY_CLOUDS__EU__URL": "http://c/v1"}
    environ = of_cloud | {"CAUSEWAY_SERVER__PORT": "9"}
    output = CliRunner().invoke(main, ["config", "--set", "server.drain_s=5s"], env=environ).output
    assert "secret-token" not in output
    assert "port: 9" in output
    assert "drain_s: 5.0" in output


def test_the_output_of_config_is_a_valid_configuration_file(tmp_path: Path) -> None:
    path = tmp_path / "edge.yaml"
    path.write_text(CliRunner().invoke(main, ["config", "--port", "7"]).output)
    assert load_config(path, {}, {}).server.port == 7


@pytest.mark.slow
def test_doctor_exits_with_1_if_a_check_fails(tmp_path: Path) -> None:
    """As text with advice, and as JSON."""
    flags = ["--set", "engine.enabled=false", "--policy", "/none.yaml", "--port", "0", "--state-dir", str(tmp_path)]
    result = CliRunner().invoke(main, ["doctor", *flags])
    assert result.exit_code == 1
    assert "fail  policy" in result.output
    assert "→" in result.output
    document = json.loads(CliRunner().invoke(main, ["doctor", "--format", "json", *flags]).output)
    assert document["worst"] == "fail"
    assert {"check", "level", "found", "advice"} == document["findings"][0].keys()


@pytest.mark.slow
def test_a_model_that_is_not_on_the_device_is_a_red_line_at_the_start(tmp_path: Path) -> None:
    """The daemon listens, and does not claim to be ready: nothing can answer."""
    policy = tmp_path / "policy.yaml"
    policy.write_text(
        "version: 1\nname: t\ntargets: {small: {at: edge, model: gone}}\nroutes: [{name: r, use: [small]}]\n"
    )
    terminal, end = os.openpty()
    daemon = subprocess.Popen(
        [sys.executable, "-m", "causeway_server.edge_node", "serve", "--port", "0", "--policy", str(policy)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "STATE_DIRECTORY": str(tmp_path / "state"), "TERM": "xterm"},
        stdout=end,
        stderr=subprocess.PIPE,
    )
    os.close(end)
    with daemon, os.fdopen(terminal, encoding="utf-8", errors="replace") as output:
        lines = []
        for line in output:
            lines.append(line.strip())
            if line.startswith("waiting"):
                break
        daemon.send_signal(signal.SIGTERM)
        daemon.wait(60)
    assert any(line.startswith("\x1b[31mproblem    there is no model named 'gone'") for line in lines), lines
    assert lines[-1] == "waiting    no target can answer yet: target small"
    assert not any(line.startswith("ready") for line in lines)
    assert daemon.returncode == 0


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.1", "::ffff:0.0.0.0"])
def test_a_daemon_that_would_answer_other_machines_without_a_key_does_not_start(tmp_path: Path, host: str) -> None:
    flags = ["--port", "0", "--state-dir", str(tmp_path / "state"), "--set", f"server.host={host}"]
    result = CliRunner().invoke(main, ["serve", *flags, "--set", "engine.enabled=false"])
    assert result.exit_code == 2
    assert "Set server.keys, identity.issuers or server.tls.client_ca_file, or listen on 127.0.0.1." in result.output
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    Config(server=ServerConfig(host=host)).check_clients()


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_with_a_key_any_address_is_allowed(host: str) -> None:
    Config(server=ServerConfig(host=host, keys=(KeyConfig("kiosk", "0" * 64),))).check_clients()


@pytest.mark.slow
def test_no_other_account_can_read_the_state(tmp_path: Path) -> None:
    """Neither the folder nor any file, side files of the databases included, whatever the umask of the service."""
    state, umask = tmp_path / "state", os.umask(0o022)
    try:
        daemon = serve(tmp_path, "--set", "cloud.connect_timeout_s=0.2")
    finally:
        os.umask(umask)
    with daemon:
        assert daemon.stdout is not None
        url = next(line for line in daemon.stdout if line.startswith("ready ")).split("url=")[1].strip()
        response = urllib3.request("POST", f"{url}/v1/chat/completions", json=QUESTION, retries=False)
        assert response.status == 503  # The cloud is away; the decision is recorded.
        daemon.send_signal(signal.SIGTERM)
        daemon.communicate(timeout=120)
    names = {path.name for path in state.iterdir()}
    assert {"decisions-2.sqlite", "cache-2.sqlite", "policy.last-good.yaml", "lock"} <= names
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (state, *state.rglob("*"))}
    assert {name: oct(mode) for name, mode in modes.items() if mode & 0o077} == {}
