"""`causeway-fleet quick` with real processes: a git repository, a control plane and three daemons."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml
from click.testing import CliRunner

from causeway_server.fleet.cli.commands import main
from tests.bed.fleet.demo import CAUSEWAY_EDGE, CAUSEWAY_FLEET, Program, ProgramFailed, run_command, use_device
from tests.ports import free_port

POLICY = """\
version: 1
name: {name}
targets:
  small: {{at: edge, model: assistant}}
routes:
  - {{name: on-device, use: [small]}}
"""
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
    def quick(self) -> Iterator[Output]:
        """Run it until the end of the block, which interrupts it as Ctrl-C does."""
        log = self.folder.with_suffix(".log")
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
    assert not (repository.folder / ".causeway" / "control-plane.url").exists()
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
        finally:
            for task in applications:
                task.cancel()
            for one in programs:
                one.stop()
            for one in programs:
                await asyncio.to_thread(one.wait)
    assert serving.process.returncode == 0
    assert set(answers) == {200}


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
    result = CliRunner().invoke(main, ["quick", *arguments])
    assert result.exit_code in (1, 2)
    return result.output


def test_a_policy_that_git_does_not_have_is_refused(tmp_path: Path) -> None:
    repository = Repository(tmp_path / "shop")
    repository.commit("first")
    repository.write("changed")
    assert "Not in git: kiosk.yaml. Commit it first" in refusal(*repository.arguments[1:])
    assert not (repository.folder / "fleet.yaml").exists()


@pytest.mark.parametrize("devices", ["0", "1001", "a,a", "a/b", ",", ""])
def test_wrong_devices_are_refused(tmp_path: Path, devices: str) -> None:
    path = tmp_path / "kiosk.yaml"
    path.write_text(POLICY.format(name="first"))
    assert "--devices" in refusal(str(path), "--devices", devices)


@pytest.mark.parametrize("listen", ["8090", "0.0.0.0:8090", "fleet.local:99999", "[::]:8090"])
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
