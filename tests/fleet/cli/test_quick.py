"""`causeway-fleet quick` with real processes: a git repository, a control plane and three daemons."""

from __future__ import annotations

import asyncio
import fcntl
import json
import re
import shlex
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
import yaml
from click.testing import CliRunner

from causeway_server.fleet.cli.commands import main
from causeway_server.fleet.cli.quick import _ControlPlane, _names
from causeway_server.fleet.trust import quick_folder
from causeway_server.router.serving.tls.contexts import read_certificate
from tests.bed.fleet.demo import CAUSEWAY_EDGE, CAUSEWAY_FLEET, Program, ProgramFailed, run_command, use_device
from tests.ports import free_port

from ..repository.fleets import POLICY

CASES = """\
policy: ../kiosk.yaml
cases:
  - {name: a command is answered on the device, request: {prompt_tokens: 12}, expect: {targets: [small]}}
"""
PACE = {"stages": [100], "first_look": "1s", "silence": "5s", "least": "6s", "most": "10m", "soak": "1s"}
DEVICE = (
    *("server.port=0", "server.socket=", "engine.threads=1", "engine.sequences=1"),
    *("fleet.trial_s=1s", "fleet.trial_requests=2", "fleet.trial_max_s=5s"),
    *("fleet.telemetry_interval_s=1s", "fleet.records_per_hour=100000"),
)
NAMES = ("kiosk-1", "kiosk-2", "kiosk-3")
WAIT_S = 240.0


class Repository:
    """A git repository with a policy, and `quick` on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.policy = folder / "kiosk.yaml"
        (folder / "cases").mkdir(parents=True)
        (folder / "cases" / "kiosk.yaml").write_text(CASES)
        self.git("init", "--quiet")
        self.write("first")
        self.arguments = ["quick", str(self.policy), "--devices", ",".join(NAMES)]
        self.arguments += ["--listen", f"127.0.0.1:{free_port()}"]

    def git(self, *arguments: str) -> None:
        identity = ("-c", "user.name=Anna", "-c", "user.email=anna@example.com")
        subprocess.run(["git", "-C", str(self.folder), *identity, *arguments], check=True, capture_output=True)

    def write(self, name: str) -> None:
        self.policy.write_text(POLICY.format(name=name))

    def commit(self, name: str) -> None:
        self.write(name)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", name)

    @contextmanager
    def quick(self, name: str = "quick") -> Iterator[Output]:
        """Run it until the end of the block, which interrupts it as Ctrl-C does."""
        log = self.folder.with_name(f"{name}.log")
        with log.open("wb") as file:
            process = subprocess.Popen([*CAUSEWAY_FLEET, *self.arguments], stdout=file, stderr=subprocess.STDOUT)
        try:
            yield Output(log, process)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


class Output:
    def __init__(self, log: Path, process: subprocess.Popen[bytes]) -> None:
        self._log, self.process = log, process

    async def until(self, text: str) -> str:
        """Return the output once it has this text."""
        await until(lambda: text in self._log.read_text() or self.process.poll() is not None)
        assert text in self._log.read_text(), self._log.read_text()
        return self._log.read_text()


async def until(holds: Callable[[], object]) -> None:
    ends = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < ends
        await asyncio.sleep(0.2)


def join_and_start(line: str, folder: Path) -> Program:
    """Run a printed line, and start the device's daemon."""
    command, _, token = line.partition(" < ")
    arguments = shlex.split(command)
    name, state = arguments[-1], ("--state-dir", str(folder / arguments[-1]))
    assert arguments[0] == "causeway-edge"
    run_command(*CAUSEWAY_EDGE, *arguments[1:], *state, "--token", Path(token).read_text())
    flags = [part for one in DEVICE for part in ("--set", one)]
    return Program(name, [*CAUSEWAY_EDGE, "serve", *flags, *state], folder / f"{name}.log")


@pytest.mark.slow
@pytest.mark.engine
async def test_a_policy_in_git_reaches_three_devices_and_one_key_becomes_two_of_three(tmp_path: Path) -> None:
    """Interrupted, it goes on; run again, it rolls a changed policy out; later two of three people sign."""
    repository = Repository(tmp_path / "shop")
    repository.commit("first")
    fleet = repository.folder / "fleet.yaml"
    with repository.quick() as first:
        await first.until("--name kiosk-3")
    assert first.process.returncode == 1
    assert is_free(repository)
    document = yaml.safe_load(fleet.read_text())
    document["cohorts"]["everyone"] |= {"rollout": PACE, "replay": {"records": 5, "records_per_day": 1_000_000}}
    fleet.write_text(json.dumps(document))
    programs: list[Program] = []
    answers: Counter[int] = Counter()
    applications: list[asyncio.Task[None]] = []
    with repository.quick() as serving:
        try:
            lines = re.findall("causeway-edge fleet join .*", await serving.until("--name kiosk-3"))
            programs = [await asyncio.to_thread(join_and_start, line, tmp_path) for line in lines]
            urls = [(await asyncio.to_thread(one.ready))["url"].removesuffix("/v1") for one in programs]
            applications = [asyncio.create_task(use_device(url, n, answers, 2.0)) for n, url in enumerate(urls)]
            output = await serving.until("serves until Ctrl-C")
            assert all(f"{name} has joined." in output for name in NAMES)
            assert await policies(urls) == {"first"}

            await until(lambda: sent_records(repository.folder) >= 5)
            repository.commit("second")
            again = await asyncio.to_thread(run_command, *CAUSEWAY_FLEET, *repository.arguments)
            assert "policy changed" in again
            assert "done, 100 %" in again
            assert await policies(urls) == {"second"}
            assert "no change" in await asyncio.to_thread(run_command, *CAUSEWAY_FLEET, *repository.arguments)

            people = tmp_path / "people"
            for name in ("anna", "ben", "carla"):
                run_command(*CAUSEWAY_FLEET, "keys", "new", name, "--keys", str(people))
            holders = [str(people / f"{name}.pub") for name in ("anna", "ben", "carla")]
            holders = ["keys", "holders", str(repository.folder), *holders]
            two = ["--key", str(people / "anna.pem"), "--key", str(people / "ben.pem")]
            owner = str(repository.folder / ".causeway" / "owner-key" / "owner.pem")
            changed = await asyncio.to_thread(run_command, *CAUSEWAY_FLEET, *holders, "--key", owner, *two)
            assert re.search("root version 2: published, signed by .*anna, ben", changed)
            repository.commit("third")
            with pytest.raises(ProgramFailed, match=r"(?s)0 of 2 signatures; may still sign: anna, ben, carla.*sign"):
                await asyncio.to_thread(run_command, *CAUSEWAY_FLEET, *repository.arguments)
            await asyncio.to_thread(run_command, *CAUSEWAY_FLEET, "sign", str(repository.folder), *two)
            third = await asyncio.to_thread(run_command, *CAUSEWAY_FLEET, *repository.arguments)
            assert "done, 100 %" in third
            assert await policies(urls) == {"third"}

            state = repository.folder / ".causeway"
            connection = ["--yes", "--url", (state / "control-plane.url").read_text()]
            connection += ["--token-file", str(state / "server" / "bootstrap-token")]
            await asyncio.to_thread(run_command, *CAUSEWAY_FLEET, "revoke", "kiosk-3", *connection)
            without = await asyncio.to_thread(run_command, *CAUSEWAY_FLEET, *repository.arguments)
            assert "kiosk-3 was revoked" in without
            assert "no change" in without
            other = [*repository.arguments, "--wait", "0s", "--devices", "kiosk-9"]
            assert "no change" in await asyncio.to_thread(run_command, *CAUSEWAY_FLEET, *other)
            await asyncio.to_thread(run_command, *CAUSEWAY_FLEET, "abort", "everyone", *connection)
            for said in ("revert(ed|ing)", "The rollout does not begin again by itself"):
                with pytest.raises(ProgramFailed, match=said):
                    await asyncio.to_thread(run_command, *CAUSEWAY_FLEET, *repository.arguments)
        finally:
            for task in applications:
                task.cancel()
            for one in programs:
                one.stop()
            for one in programs:
                await asyncio.to_thread(one.wait)
    assert serving.process.returncode == 0
    assert set(answers) == {200}


def is_free(repository: Repository) -> bool:
    """Return whether no control plane of this folder runs."""
    with (repository.folder / ".causeway" / "control-plane.lock").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


async def test_a_program_at_the_address_of_before_gets_no_token(tmp_path: Path) -> None:
    repository = Repository(tmp_path / "shop")
    repository.commit("first")
    state = repository.folder / ".causeway"
    (state / "server").mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        stranger.setblocking(False)
        (state / "control-plane.url").write_text(f"http://127.0.0.1:{stranger.getsockname()[1]}")
        with repository.quick() as run:
            await run.until("--name kiosk-3")
            with pytest.raises(BlockingIOError):
                stranger.accept()


async def test_two_runs_share_a_control_plane_that_ends_with_its_command(tmp_path: Path) -> None:
    """Beyond loopback, in a folder whose name has a blank; the second one gives no address."""
    repository = Repository(tmp_path / "my shop")
    repository.commit("first")
    listen, port = repository.arguments[:-1], free_port()
    repository.arguments = [*listen, f"127.0.0.2:{port}"]
    with repository.quick() as first, repository.quick("second") as second:
        lines = [(await one.until("--name kiosk-3")).splitlines()[-1] for one in (first, second)]
        repository.arguments = [*listen[:-1], "--wait", "0s"]
        with repository.quick("third") as third:
            assert "No device has joined" in await third.until("No device has joined")
        for one in (first, second):
            one.process.kill()
        await until(lambda: is_free(repository))
    for line in lines:
        words = shlex.split(line)
        assert words[3] == f"https://127.0.0.2:{port}"
        state = repository.folder / ".causeway"
        assert words[-4:] == ["--ca-file", str(state / "tls" / "ca.pem"), "<", str(state / "join-token")]


def test_a_certificate_that_ends_soon_or_is_missing_is_made_again(tmp_path: Path) -> None:
    """Interrupted between the two files, only the key is there."""
    quick_folder.state_of(tmp_path).mkdir()
    certificate, key = quick_folder.server_certificate(tmp_path, "fleet.local", time.time())
    old, content = read_certificate(certificate, ""), key.read_bytes()
    for days, stays in ((31, True), (29, False)):
        now = (old.not_valid_after_utc - timedelta(days=days)).timestamp()
        quick_folder.server_certificate(tmp_path, "fleet.local", now)
        assert (read_certificate(certificate, "") == old) is stays
        assert (key.read_bytes() == content) is stays
    certificate.unlink()
    quick_folder.server_certificate(tmp_path, "fleet.local", time.time())
    assert certificate.exists()


def test_printed_commands_can_be_pasted(tmp_path: Path) -> None:
    state = tmp_path / "my shop"
    words = shlex.split(_ControlPlane(state, "https://fleet.local:8090").connection)
    assert words == [
        *("--url", "https://fleet.local:8090"),
        *("--token-file", str(state / "server" / "bootstrap-token")),
        *("--ca-file", str(state / "tls" / "ca.pem")),
    ]


async def policies(urls: list[str]) -> set[str]:
    """Return the names of the policies that decide on these devices."""
    body = {"model": "auto", "messages": [{"role": "user", "content": "stop the music"}], "max_tokens": 4}
    async with httpx.AsyncClient(timeout=30.0) as http:
        answers = [await http.post(f"{url}/v1/chat/completions", json=body) for url in urls]
    return {answer.headers["x-causeway-policy"].partition("@")[0] for answer in answers}


def sent_records(folder: Path) -> int:
    """Return how many records the devices have sent."""
    state = folder / ".causeway"
    connection = ["--url", (state / "control-plane.url").read_text()]
    connection += ["--token-file", str(state / "server" / "bootstrap-token")]
    found = json.loads(run_command(*CAUSEWAY_FLEET, "status", "--format", "json", *connection))
    return int(found["fleet"]["cohorts"][0]["figures"]["records"])


def refusal(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["quick", *arguments, "--wait", "0s"])
    assert result.exit_code in (1, 2)
    return result.output


def test_a_policy_that_git_does_not_have_is_refused(tmp_path: Path) -> None:
    repository = Repository(tmp_path / "shop")
    repository.commit("first")
    repository.write("changed")
    assert "Not in git: kiosk.yaml. Commit it first" in refusal(*repository.arguments[1:])
    assert not (repository.folder / "fleet.yaml").exists()


@pytest.mark.parametrize("change", ["ignored", "untracked", "deleted", "staged"])
def test_test_cases_that_git_does_not_have_are_refused(tmp_path: Path, change: str) -> None:
    repository = Repository(tmp_path / "my shop")
    cases = repository.folder / "cases"
    repository.commit("first")
    if change == "deleted":
        (cases / "kiosk.yaml").unlink()
    else:
        (cases / "more cases.yaml").write_text(CASES)
    if change == "ignored":
        (repository.folder / ".git" / "info" / "exclude").write_text("more*\n")
    if change == "untracked":
        repository.git("config", "status.showUntrackedFiles", "no")
    if change == "staged":
        repository.git("add", "--all")
    name = "kiosk.yaml" if change == "deleted" else "more cases.yaml"
    assert re.search(f"Not in git: (cases/)?{name}. Commit it first", refusal(*repository.arguments[1:]))


def test_private_keys_stay_out_of_git(tmp_path: Path) -> None:
    """The repository has a .gitignore of its own. The folder's name is a number, which fleet.yaml has as text."""
    repository = Repository(tmp_path / "2026")
    (repository.folder / ".gitignore").write_text("*.log\n")
    with quick_folder.one_at_a_time(repository.folder):
        quick_folder.set_up(repository.folder, repository.policy)
    assert yaml.safe_load((repository.folder / "fleet.yaml").read_text())["name"] == "2026"
    for name in ("keys/anna.pem", "published/blobs/a", ".causeway/owner-key/owner.pem"):
        repository.git("check-ignore", "--quiet", name)
    with pytest.raises(subprocess.CalledProcessError):
        repository.git("check-ignore", "--quiet", "keys/owner.pub")


def test_a_lost_key_is_named(tmp_path: Path) -> None:
    repository = Repository(tmp_path / "shop")
    repository.commit("first")
    with quick_folder.one_at_a_time(repository.folder):
        quick_folder.set_up(repository.folder, repository.policy)
    repository.git("clean", "-ffdx", "--exclude", "keys", "--exclude", "*.yaml")
    output = refusal(*repository.arguments[1:])
    assert re.search(r"owner\.pem is missing.*git clean", output)
    assert re.search(r"server\.pem is missing.*git clean", output)


def test_devices_keep_their_names_when_there_are_more() -> None:
    assert _names("9") == _names("10")[:9]
    assert _names("1000")[0] == "device-0001"


@pytest.mark.parametrize("devices", ["0", "1001", "9" * 5000, "a,a", "a/b", ",", ""])
def test_wrong_devices_are_refused(tmp_path: Path, devices: str) -> None:
    path = tmp_path / "kiosk.yaml"
    path.write_text(POLICY.format(name="first"))
    assert "--devices" in refusal(str(path), "--devices", devices)


@pytest.mark.parametrize(
    "listen", ["8090", "0.0.0.0:8090", "fleet.local:99999", "[::]:8090", "a b:8090", "fleet.local:0"]
)
def test_an_address_that_no_device_can_reach_is_refused(tmp_path: Path, listen: str) -> None:
    path = tmp_path / "kiosk.yaml"
    path.write_text(POLICY.format(name="first"))
    assert "--listen" in refusal(str(path), "--devices", "3", "--listen", listen)


def test_a_policy_of_no_cohort_is_refused(tmp_path: Path) -> None:
    run = CliRunner().invoke(main, ["init", str(tmp_path)])
    assert run.exit_code == 0
    other = tmp_path / "policies" / "other.yaml"
    other.write_text(POLICY.format(name="other"))
    found = refusal(str(other), "--devices", "3")
    assert "0 of the cohorts everyone" in found
