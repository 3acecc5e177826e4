"""The demo `make demo-fleet`: a control plane, real devices and a daemon that is their cloud; weights with their
calibration and a promise are rolled out, and what lacks calibration, lacks records, leaks or fails is stopped by name.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import httpx
import msgspec
from rich.console import Console

from causeway_server.models.catalog.artifact import SHIPPED, sha256_of
from tests.tool import run_tool

READY_S = 120.0
STOP_S = 30.0
_READY_POLL_S = 0.05
CAUSEWAY_FLEET = (sys.executable, "-m", "causeway_server.fleet")
CAUSEWAY_EDGE = (sys.executable, "-m", "causeway_server.edge_node")
OFFLINE = ("anna", "ben", "carla")
ONLINE = "server"
COHORT = "kiosks"
_SHORT = ("turn on the light", "what time is it", "play some jazz", "stop the music")
_LONG = (
    "set an alarm for seven tomorrow morning and another one for half past eight on saturday",
    "remind me to call the dentist on monday at ten and to buy milk on the way home from work",
)
_REQUESTS_PER_S = 0.7  # requests of the application on each device
_LONG_SHARE = 0.3
_POLL_S = 1.0
_STARTING = 4  # devices that start at once
_DEVICES_OF_A_SITE = 4
_ROLLOUT_S = 900.0
_LATE_S = 60.0  # a rollout does not wait for silent devices, which follow later
_ENDED = ("done", "reverted", "draft")
ROLLOUTS = {"first": "done", "second": "done", "leaking": "draft", "bad": "reverted"}
"""The final state of the rollout of each policy."""
_SIGNALS = {"confidence": ("calibrator", "model.json"), "edge.quality": ("edge-quality", "model.onnx")}
_MANY = 10_000  # records that a cohort asks for before the demo's devices have sent them
_CLOUD = """\
version: 1
name: cloud
targets:
  assistant-large: {at: edge, model: assistant-large}
routes:
  - {name: all, use: [assistant-large]}
"""
# Trials take seconds instead of ten minutes, and telemetry is as frequent, to fit the short stages of the demo.
_DEVICE = {
    "server.port": 0,
    "server.socket": "",
    "engine.threads": 1,
    "engine.sequences": 1,
    "fleet.trial_s": "6s",
    "fleet.trial_requests": 20,
    "fleet.trial_max_s": "25s",
    "fleet.telemetry_interval_s": "3s",
    "fleet.records_per_hour": 100_000,
    "log": "info",
}


class ProgramFailed(Exception):
    """The program ended, or did not become ready. The message contains the end of its log."""


class Program:
    """A program, started as its users start it, with its own log file. It must print a line that begins with `ready
    `.
    """

    def __init__(self, name: str, command: list[str], log: Path) -> None:
        self.name = name
        self.log = log
        self._output = log.with_suffix(".out")
        with log.open("wb") as file, self._output.open("wb") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=file)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ready(self) -> dict[str, str]:
        """Return the fields of the ready line.

        Raises:
            ProgramFailed: The program ended, or took too long.
        """
        ends = time.monotonic() + READY_S
        while time.monotonic() < ends:
            has_ended = self._process.poll() is not None
            for line in self._output.read_text(encoding="utf-8").splitlines(keepends=True):
                if line.startswith("ready ") and line.endswith("\n"):
                    return dict(field.split("=", 1) for field in line.split()[1:])
            if has_ended:
                raise self._failed("ended before it was ready")
            time.sleep(_READY_POLL_S)
        raise self._failed(f"not ready after {READY_S:.0f} s")

    def stop(self) -> None:
        """Send SIGTERM and wait; then kill."""
        self._process.terminate()

    def wait(self) -> None:
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _failed(self, what: str) -> ProgramFailed:
        log = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-10:]
        return ProgramFailed("\n".join([f"{self.name}: {what}; the end of {self.log}:", *log]))


def run_command(*arguments: str, cwd: Path | None = None, environ: Mapping[str, str] | None = None) -> str:
    """Run a command to its end and return its standard output.

    Raises:
        ProgramFailed: The command ended with another status than 0; the message contains its output.
    """
    done = subprocess.run(
        list(arguments), cwd=cwd, env={**os.environ, **(environ or {})}, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise ProgramFailed(f"{' '.join(arguments[2:6])} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


_FLEET = """\
version: 1
name: demo
cohorts:
  {cohort}:
    policy: policies/kiosk.yaml
    replay: {{records: {records}, records_per_day: 1000000}}   # much, because the demo takes minutes
    models: {models}
    rollout:
      stages: {stages}
      # Short times and wide margins, so that few devices are judged within minutes. A fleet keeps the defaults: stages
      # of 20 minutes and more, margins of 2 and 5 points.
      first_look: {first_look}
      silence: {silence}
      least: {least}
      most: {most}
      soak: {soak}
      per_site: 20
      metrics: {{errors: {errors}, degraded: 20, latency: 30}}
"""
_TRUST = """\
version: 1
root: {{keys: [{offline}], threshold: 2, expires: 365d}}
artifacts: {{keys: [{offline}], threshold: 2, expires: 90d}}
rollout: {{keys: [{online}], expires: 7d}}
snapshot: {{keys: [{online}], expires: 7d}}
timestamp: {{keys: [{online}], expires: 2d}}
"""
_POLICY = """\
version: 1
name: {name}
targets:
  small: {{at: edge, model: assistant}}
  large: {{at: cloud, model: assistant-large, price: {{input: 0.1, output: 0.4}}}}
  hasty: {{at: edge, model: assistant, timeout: 5ms}}
{routes}
"""
_CASES = """\
policy: ../kiosk.yaml
cases:
  - name: a private command is answered on the device
    request: {prompt_tokens: 12, tags: [private]}
    expect: {targets: [small]}
"""
_KEPT = """\
constraints:
  - {name: private-stays, when: '"private" in request.tags', keep: on_device}
routes:
"""
_SHORT_ROUTE = "  - {name: short, when: request.prompt_tokens < 16, use: [small]}\n"
_PROMISED = """\
  - name: long
    use: [small, large]
    handoff: {after_tokens: 8, below: 0.05}
    promise: {of: large, keep: 0.95, risk: 0.05}
shadow: {share: 0.05}"""
_LEAKING = """\
routes:
  - {name: private, when: '"private" in request.tags && request.prompt_tokens < 64', use: [small]}
"""
_LARGE_FIRST = "  - {name: long, use: [large, small]}"
POLICIES = {
    "first": _KEPT + _SHORT_ROUTE + _LARGE_FIRST,
    "second": _KEPT + _SHORT_ROUTE + _PROMISED,
    # It passes lint and its cases, which have short prompts alone.
    "leaking": _LEAKING + _SHORT_ROUTE + _LARGE_FIRST,
    # Nothing more leaves, so it passes its proof and its replay; but no device answers longer prompts in time.
    "bad": _KEPT + _SHORT_ROUTE + "  - {name: long, use: [hasty]}",
}
"""Policies by name, in the order in which the demo rolls them out."""


class Pace(msgspec.Struct, frozen=True):
    """The settings of the demo's cohort in `fleet.yaml`. `errors`: margin in points; `records`: to replay. `models`: in
    YAML.
    """

    stages: tuple[int, ...] = (25, 50, 100)
    first_look: str = "15s"
    silence: str = "40s"
    least: str = "45s"
    most: str = "75s"
    soak: str = "20s"
    errors: int = 10
    records: int = 50
    models: str = "{}"


def write_fleet(folder: Path, pace: Pace) -> None:
    """Write `fleet.yaml`."""
    keys = msgspec.structs.asdict(pace) | {"stages": list(pace.stages)}
    (folder / "fleet.yaml").write_text(_FLEET.format(cohort=COHORT, **keys), encoding="utf-8")


def write_folder(folder: Path, pace: Pace | None = None) -> None:
    """Write `fleet.yaml`, `trust.yaml` and the cases. The keys are made by `causeway-fleet keys new`."""
    offline = ", ".join(f"keys/{name}.pub" for name in OFFLINE)
    folder.mkdir(parents=True, exist_ok=True)
    write_fleet(folder, pace or Pace())
    files = {
        "trust.yaml": _TRUST.format(offline=offline, online=f"keys/{ONLINE}.pub"),
        "policies/cases/kiosk.yaml": _CASES,
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def write_policy(folder: Path, name: str) -> None:
    """Make one of `POLICIES` the cohort's policy."""
    text = _POLICY.format(name=name, routes=POLICIES[name])
    (folder / "policies" / "kiosk.yaml").write_text(text, encoding="utf-8")


class Demo:
    """The demo.

    Args:
        folder: The demo's folder, which is deleted and created again.
        devices: The number of daemons.
        listen: Host:port of the control plane.
        pace: The cohort's rollout keys.
        device: Settings of the daemons, over those of the demo.
        requests_per_s: Requests per second on each device.
    """

    def __init__(
        self,
        folder: Path,
        devices: int,
        listen: str,
        *,
        pace: Pace | None = None,
        device: Mapping[str, object] | None = None,
        requests_per_s: float = _REQUESTS_PER_S,
    ) -> None:
        self._folder = folder
        self._fleet = folder / "stores"
        self._devices = devices
        self._listen = listen
        self._pace = pace or Pace()
        self._device = _DEVICE | dict(device or {})
        self._requests_per_s = requests_per_s
        self._console = Console(highlight=False)
        self._programs: list[Program] = []
        self._answers: Counter[int] = Counter()
        self._token = self._cloud = ""
        self._http: httpx.AsyncClient

    async def run(self, *, once: bool, rollouts: Mapping[str, str] = ROLLOUTS) -> None:
        """Run the demo.

        Args:
            once: Whether to end after the rollouts instead of running until cancelled.
            rollouts: The state in which the rollout of each policy ends, in this order.

        Raises:
            ProgramFailed: A program failed, or a rollout did not end as it should.
        """
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        applications: list[asyncio.Task[None]] = []
        try:
            await asyncio.to_thread(self._make_fleet)
            url = await asyncio.to_thread(self._start_control_plane)
            token = self._token = (self._folder / "data" / "bootstrap-token").read_text(encoding="utf-8").strip()
            self._say(f"the page: {url}/   sign in with the token of {self._folder / 'data' / 'bootstrap-token'}")
            bearer = {"authorization": f"Bearer {token}"}
            async with httpx.AsyncClient(base_url=url, headers=bearer, timeout=30.0) as self._http:
                addresses = await self._start_devices(url)
                applications = [
                    asyncio.create_task(use_device(address, seed, self._answers, self._requests_per_s))
                    for seed, address in enumerate(addresses)
                ]
                await self._tell(rollouts)
                if not once:
                    self._say("everything keeps running until Ctrl-C")
                    await asyncio.Event().wait()
        finally:
            for task in applications:
                task.cancel()
            await asyncio.to_thread(self._stop)

    async def _tell(self, rollouts: Mapping[str, str]) -> None:
        for policy, expected in rollouts.items():
            if policy == "second":
                await asyncio.to_thread(self._refuse_uncalibrated)
                write_fleet(self._fleet, msgspec.structs.replace(self._pace, records=_MANY))
            permission = ("--without-replay",) if policy == "first" else ()  # a new fleet has no records yet
            ended = await self._roll_out(policy, expected, *permission)
            reached = await self._reached(ended["to_bundle"], _LATE_S if expected == "done" else 0.0)
            why = f": {ended['reason']}" if ended["reason"] else ""
            self._say(f"  the policy {policy!r} reached {reached} of {self._devices} devices{why}")
            running = (await self._get("/v1/fleet"))["cohorts"][0]["running"]
            if expected == "reverted" and running.get(ended["to_bundle"]):
                raise ProgramFailed(f"{running[ended['to_bundle']]} devices still run {policy!r}")

    def _refuse_uncalibrated(self) -> None:
        """Put weights into the fleet, without their calibration, which is refused, and then with it."""
        weights = self._fleet / "models"
        weights.mkdir()
        for name, file in _SIGNALS.values():
            shutil.copy(SHIPPED / name / file, weights / f"{name}{Path(file).suffix}")
        shutil.copy(SHIPPED / "assistant" / "model.gguf", weights / "assistant.gguf")
        self._pace = msgspec.structs.replace(self._pace, models="{assistant: {file: models/assistant.gguf}}")
        write_fleet(self._fleet, self._pace)
        write_policy(self._fleet, "second")
        try:
            self._sign()
        except ProgramFailed as refused:
            found = next(line for line in str(refused).splitlines() if "without a signal" in line)
            self._say(f"weights without calibration are refused: {found}")
        else:
            raise ProgramFailed("weights without their calibration were signed")
        fitted = f"model_sha256: {sha256_of(weights / 'assistant.gguf')}"
        files = {kind: f"models/{name}{Path(file).suffix}" for kind, (name, file) in _SIGNALS.items()}
        signals = ", ".join(f"{kind}: {{file: {file}, {fitted}}}" for kind, file in files.items())
        models = f"{{assistant: {{file: models/assistant.gguf, signals: {{{signals}}}}}}}"
        self._pace = msgspec.structs.replace(self._pace, models=models)

    # --- the fleet's folder and its signatures ------------------------------------------------------------------------

    def _make_fleet(self) -> None:
        self._say("a fleet folder; two of three people sign, and the server has its own key")
        write_folder(self._fleet, self._pace)
        write_policy(self._fleet, "first")
        for name in (*OFFLINE, ONLINE):
            run_command(*CAUSEWAY_FLEET, "keys", "new", name, "--keys", str(self._fleet / "keys"))
        self._sign()
        server = self._folder / "server-keys"
        server.mkdir()
        for suffix in ("pem", "pub"):
            shutil.copy(self._fleet / "keys" / f"{ONLINE}.{suffix}", server)

    def _sign(self) -> None:
        run_command(*CAUSEWAY_FLEET, "test", str(self._fleet))
        keys = [part for name in ("anna", "ben", ONLINE) for part in ("--key", str(self._fleet / f"keys/{name}.pem"))]
        run_command(*CAUSEWAY_FLEET, "sign", str(self._fleet), *keys)

    # --- programs -----------------------------------------------------------------------------------------------------

    def _start_control_plane(self) -> str:
        command = [*CAUSEWAY_FLEET, "serve", str(self._fleet), "--keys", str(self._folder / "server-keys")]
        command += ["--state-dir", str(self._folder / "data"), "--listen", self._listen]
        program = self._start("control-plane", command)
        return program.ready()["url"]

    async def _start_devices(self, url: str) -> list[str]:
        join_token = (await self._command("enroll", "--uses", str(self._devices), "--expires", "1h")).strip()
        shutil.copy(self._fleet / "policies" / "kiosk.yaml", self._folder / "factory.yaml")
        policy = self._folder / "cloud.yaml"
        policy.write_text(_CLOUD, encoding="utf-8")
        cloud = [*CAUSEWAY_EDGE, "serve", "--state-dir", str(self._folder / "cloud"), "--set", f"policy={policy}"]
        cloud += ["--set", "server.port=0", "--set", "server.socket=", "--set", "engine.threads=1"]
        cloud_url = (await asyncio.to_thread(self._start("cloud", cloud).ready))["url"]
        self._cloud = f"{cloud_url.removesuffix('/v1')}/v1"
        self._say(f"{self._devices} devices enrol and start; a daemon with the larger model is their cloud")
        slots = asyncio.Semaphore(_STARTING)

        async def start(number: int) -> str:
            async with slots:
                return await asyncio.to_thread(self._start_device, number, url, join_token)

        return list(await asyncio.gather(*map(start, range(self._devices))))

    def _start_device(self, number: int, url: str, join_token: str) -> str:
        name, state = f"kiosk-{number:02}", ("--state-dir", str(self._folder / f"device-{number:02}"))
        join = [*CAUSEWAY_EDGE, "fleet", "join", url, "--token", join_token, "--name", name]
        run_command(*join, "--site", f"store-{number // _DEVICES_OF_A_SITE}", *state)
        settings = self._device | {
            "clouds.pool.url": self._cloud,
            "clouds.pool.key": "demo",
            "policy": self._folder / "factory.yaml",
        }
        flags = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        program = self._start(name, [*CAUSEWAY_EDGE, "serve", *flags, *state])
        return program.ready()["url"].removesuffix("/v1")

    def _start(self, name: str, command: list[str]) -> Program:
        program = Program(name, command, self._folder / f"{name}.log")
        self._programs.append(program)
        return program

    def _stop(self) -> None:
        for program in reversed(self._programs):
            program.stop()
        for program in reversed(self._programs):
            program.wait()

    # --- rollouts -----------------------------------------------------------------------------------------------------

    async def _roll_out(self, policy: str, expected: str, *permission: str) -> dict[str, Any]:
        """Sign a policy, roll it out with these options of `apply`, and watch until it ends as `expected`."""
        write_policy(self._fleet, policy)
        await asyncio.to_thread(self._sign)
        self._say((await self._command("apply", str(self._fleet), *permission, "--yes")).rstrip())
        found: dict[str, Any] = (await self._get(f"/v1/rollouts?cohort={COHORT}"))[0]
        began, shown = time.monotonic(), ""
        while True:
            found = await self._get(f"/v1/rollouts/{found['id']}")
            line = f"{found['state']} {found['stage'] + 1} of {len(found['stages'])}: {found['reason']}".rstrip(": ")
            members = ", ".join(f"{count} {state}" for state, count in sorted(found["members"].items()))
            if f"{line} {members}" != shown:
                self._say(f"  {time.monotonic() - began:5.0f} s  {line}   members: {members or 'none'}")
                shown = f"{line} {members}"
            if found["state"] == "paused" and not found["began"]:
                write_fleet(self._fleet, self._pace)
                await asyncio.sleep(_POLL_S)  # for more records
                await self._command("resume", found["id"], "--reason", "the devices have sent more")
            elif found["state"] == "paused":
                self._say("  so few devices do not allow a verdict, so the demo accepts the stage")
                await self._command("accept", found["id"], "--reason", "a demo of few devices")
            if found["state"] in _ENDED:
                break
            if time.monotonic() - began > _ROLLOUT_S:
                raise ProgramFailed(f"rollout {found['id']} of {policy!r} did not end: {line}")
            await asyncio.sleep(_POLL_S)
        if found["state"] != expected:
            raise ProgramFailed(f"rollout {found['id']} of {policy!r} ended as {found['state']}: {found['reason']}")
        for line in (await self._command("status", found["id"])).splitlines():
            if any(word in line for word in ("proved", "promises", "replayed", "predicted")):
                self._say(line)
        statuses = ", ".join(f"{count} × {status}" for status, count in sorted(self._answers.items()))
        self._say(f"  answers of the devices so far: {statuses}")
        return found

    async def _reached(self, bundle: str, within_s: float) -> int:
        """Return the number of devices that run a bundle, after waiting for those that do not run it yet."""
        ends = time.monotonic() + within_s
        while True:
            devices = (await self._get("/v1/devices?limit=1000"))["devices"]
            histories = [(await self._get(f"/v1/devices/{device['id']}"))["history"] for device in devices]
            count = sum(any(event.get("running") == bundle for event in events) for events in histories)
            if count == self._devices or time.monotonic() >= ends:
                return count
            await asyncio.sleep(_POLL_S)

    async def _get(self, path: str) -> Any:
        answer = await self._http.get(path)
        if answer.is_error:
            raise ProgramFailed(f"GET {path}: {answer.status_code} {answer.text}")
        return answer.json()

    async def _command(self, *arguments: str) -> str:
        """Run an operator's command and return its output."""
        connection = {"CAUSEWAY_FLEET_URL": str(self._http.base_url), "CAUSEWAY_FLEET_TOKEN": self._token}
        return await asyncio.to_thread(run_command, *CAUSEWAY_FLEET, *arguments, environ=connection)

    def _say(self, text: str) -> None:
        self._console.print(f"[{time.strftime('%H:%M:%S')}] {text}", markup=False, soft_wrap=True)


async def use_device(url: str, seed: int, answers: Counter[int], requests_per_s: float) -> None:
    """Send short and long commands, as an application on a device does, until cancelled.

    `answers` counts HTTP statuses; 0 stands for no answer.
    """
    rng = random.Random(seed)
    async with httpx.AsyncClient(base_url=url, timeout=20.0) as http:
        while True:
            await asyncio.sleep(rng.expovariate(requests_per_s))
            text = rng.choice(_LONG if rng.random() < _LONG_SHARE else _SHORT)
            body = {
                "model": "auto",
                "messages": [{"role": "user", "content": text}],
                "temperature": 0,
                "max_tokens": 64,  # a promise compares whole answers only
            }
            try:
                answer = await http.post("/v1/chat/completions", json=body)
                answers[answer.status_code] += 1
            except httpx.HTTPError:
                answers[0] += 1


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--devices", type=click.IntRange(4, 200), default=20, show_default=True, help="Number of edge daemons to start."
)
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(".run/fleet-demo"),
    show_default=True,
    help="Folder of the demo, which is deleted and created again.",
)
@click.option("--listen", default="127.0.0.1:8090", show_default=True, help="Address of the control plane.")
@click.option("--once", is_flag=True, help="Stop after the rollouts instead of serving until Ctrl-C.")
def main(devices: int, folder: Path, listen: str, once: bool) -> None:
    """Start a control plane and devices on this machine, roll out good policies and then bad ones.

    Exit code: 0 the good ones reached every device and the bad ones were stopped, 1 otherwise.
    """
    demo = Demo(folder.absolute(), devices, listen)
    try:
        asyncio.run(demo.run(once=once))
    except ProgramFailed as error:
        click.secho(str(error), fg="red", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    sys.exit(run_tool(main))
