"""The command `causeway-fleet quick`: from a policy to a control plane and a rollout on a few devices, with one key."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn
from urllib.parse import urlsplit

import click
import msgspec

from causeway_server.router.numbers import seconds_of
from causeway_server.router.serving.folders import write_atomically
from causeway_server.router.serving.process import option

from ..operators.answers import JoinTokenAnswer, RolloutStatus
from ..repository.folder import CheckedFleet
from ..rollout.settings import OPEN
from .client import FleetClient
from .devices import every_device
from .rollout_output import notes, rollout_line, time_text
from .rollouts import begin
from .signing import readable_errors, sign_fleet, valid_fleet

if TYPE_CHECKING:
    from types import FrameType

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MOST = 1000
_POLL_S = 1.0
_JOIN_S = 86_400.0
_ENDED = ("done", "reverted", "draft")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@click.command()
@click.argument("policy", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@option(
    "--devices", "How many devices, such as 20, or their names: kiosk-1,kiosk-2,…", required=True, metavar="N|NAMES"
)
@option(
    "--listen",
    "Address at which devices reach the control plane; beyond this machine, HOST is in its certificate.",
    default="127.0.0.1:8090",
    metavar="HOST:PORT",
)
@option("--wait", "How long to wait for devices that have not joined, before the others get the policy.", default="10m")
def quick(policy: Path, devices: str, listen: str, wait: str) -> None:
    """Bring POLICY to a few devices: set up a fleet with one key, serve it, print how devices join, and roll out.

    The fleet's folder is the git checkout of POLICY, or the folder of its fleet.yaml; what is there already stays. In
    git, POLICY and its test cases must be committed. Run it again to go on where it was stopped, and after each change
    of the policy: while the first one serves, another one only rolls out. Ctrl-C stops it, and devices keep what they
    run.

    Exit code: 0 rolled out, 1 not, or refused, 2 bad arguments.
    """
    names, host = _names(devices), _host(listen)
    if (wait_s := seconds_of(wait)) is None:
        raise click.BadParameter(f"Expected a time such as 0s, 10m or 2h, not {wait!r}.", param_hint="--wait")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    with readable_errors():
        from ..trust import quick_folder as folders

        folder = folders.fleet_of(policy)
        commit = folders.committed(policy, folder)
        for path in folders.set_up(folder, policy):
            click.echo(f"Wrote {path}.")
        checked = valid_fleet(folder)
        cohort = _cohort(checked, policy)
        click.echo(f"{policy}{f' of commit {commit}' if commit else ''} is the policy of {cohort} in {folder}.")
        if not sign_fleet(checked, folders.signing_keys(folder), None):
            raise click.ClickException(
                f"These signatures are missing. Run `causeway-fleet sign {folder} --key KEY.pem` with those keys, "
                "then this command again."
            )
        with _control_plane(folders.state_of(folder), folder, listen, host) as plane:
            _enrol(plane, cohort, names, wait_s)
            is_done = _roll_out(plane, checked, cohort)
            if plane.process is not None:
                click.echo(
                    f"The control plane serves until Ctrl-C: {plane.url}/console, with the token in {plane.token}"
                )
                with suppress(KeyboardInterrupt):
                    plane.process.wait()
                    raise click.ClickException(f"The control plane ended: see {plane.log}.")
    raise SystemExit(0 if is_done else 1)


class _ControlPlane(msgspec.Struct, frozen=True):
    """A control plane that answers. `process`: None if another command started it."""

    state: Path
    client: FleetClient
    url: str
    process: subprocess.Popen[str] | None = None

    @property
    def token(self) -> Path:
        return self.state / "server" / "bootstrap-token"

    @property
    def log(self) -> Path:
        return self.state / "control-plane.log"


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _names(devices: str) -> list[str]:
    if devices.isdecimal():
        width = len(devices)
        names = [f"device-{number:0{width}}" for number in range(1, min(int(devices), _MOST + 1) + 1)]
    else:
        names = devices.split(",")
    wrong = next((one for one in names if not _NAME.fullmatch(one)), None)
    if not names or wrong is not None or len(set(names)) < len(names) or len(names) > _MOST:
        raise click.BadParameter(
            f"Expected a number from 1 to {_MOST}, or different names of letters, digits or . _ - with commas between, "
            f"not {devices[:100]!r}.",
            param_hint="--devices",
        )
    return names


def _host(listen: str) -> str:
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal() or int(port) > 65535 or host in ("0.0.0.0", "::"):
        message = (
            f"Expected HOST:PORT with the name by which devices reach it, such as fleet.local:8090, not {listen!r}."
        )
        raise click.BadParameter(message, param_hint="--listen")
    return host


def _cohort(checked: CheckedFleet, policy: Path) -> str:
    assert checked.fleet is not None
    cohorts = checked.fleet.cohorts
    found = [name for name, one in cohorts.items() if (checked.folder / one.policy).resolve() == policy.resolve()]
    if len(found) != 1:
        where = f"{len(found)} of the cohorts {', '.join(cohorts)} in {checked.path} have the policy {policy}"
        raise click.ClickException(f"{where}: give the policy of one cohort, or use `sign` and `apply`.")
    return found[0]


@contextmanager
def _control_plane(state: Path, folder: Path, listen: str, host: str) -> Iterator[_ControlPlane]:
    """Yield the control plane that runs, or start one, which ends with this command."""
    where, tls, options = state / "control-plane.url", state / "tls", list[str]()
    if host not in _LOOPBACK:
        if not (tls / f"{host}.pem").exists():
            from ..trust.certificates import init

            init(tls, (host,), time.time())
        options = ["--tls-cert-file", str(tls / f"{host}.pem"), "--tls-key-file", str(tls / f"{host}.key")]
    ca_file = tls / "ca.pem" if options else None
    known = where.read_text(encoding="utf-8") if where.exists() else ""
    if known and _answers(known):
        client = FleetClient(known, (state / "server" / "bootstrap-token").read_text(encoding="utf-8").strip(), ca_file)
        yield _ControlPlane(state, client, known)
        return
    command = [sys.executable, "-m", "causeway_server.fleet", "serve", str(folder), "--listen", listen, *options]
    command += ["--keys", str(state / "server-key"), "--state-dir", str(state / "server")]
    with (state / "control-plane.log").open("ab") as log:  # a session of its own: Ctrl-C reaches this command alone
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        line = next((line for line in process.stdout if line.startswith("ready url=")), "")
        if not line:
            raise click.ClickException(f"The control plane did not start: see {state / 'control-plane.log'}.")
        url = line.strip().removeprefix("ready url=")
        write_atomically(where, url.encode())
        client = FleetClient(url, (state / "server" / "bootstrap-token").read_text(encoding="utf-8").strip(), ca_file)
        yield _ControlPlane(state, client, url, process)
    finally:
        where.unlink(missing_ok=True)
        process.terminate()
        process.wait()


def _answers(url: str) -> bool:
    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 0), 5.0).close()
    except OSError:
        return False
    return True


def _enrol(plane: _ControlPlane, cohort: str, names: Sequence[str], wait_s: float) -> None:
    """Print how the devices join that have not, and wait for them. Raises ClickException if there is no device."""
    missing = set(names) - {device.id for device in every_device(plane.client)}
    if missing:
        request = {"cohort": cohort, "uses": len(missing), "expires_s": _JOIN_S, "labels": {}}
        made = plane.client.post("/v1/join-tokens", JoinTokenAnswer, request)
        token, ca = plane.state / "join-token", ""
        write_atomically(token, made.token.encode(), 0o600)
        if plane.url.startswith("https"):
            ca = f" --ca-file {plane.state / 'tls' / 'ca.pem'}"
        click.echo(f"To join, until {time_text(made.expires)}, each device runs its line with a copy of these files:")
        for name in sorted(missing):
            click.echo(f"  causeway-edge fleet join {plane.url} --name {name}{ca} < {token}")
    ends = time.monotonic() + wait_s
    while missing and time.monotonic() < ends:
        time.sleep(_POLL_S)
        joined = missing & {device.id for device in every_device(plane.client)}
        missing -= joined
        for name in sorted(joined):
            click.echo(f"{name} has joined.")
    if len(missing) == len(names):
        raise click.ClickException("No device has joined. Run the command again when one can.")
    if missing:
        click.echo(f"Not joined yet: {', '.join(sorted(missing))}. They get the policy when they join.")


def _roll_out(plane: _ControlPlane, checked: CheckedFleet, cohort: str) -> bool:
    """Begin a rollout if there is something to do, and show it to its end. Returns whether it is done."""
    before = plane.client.get("/v1/rollouts", tuple[RolloutStatus, ...], cohort=cohort)
    is_first = not any(one.began for one in before)  # a new fleet has no records yet
    begin(plane.client, checked, (cohort,), "", {"without_replay": is_first}, yes=True)
    newest = plane.client.get("/v1/rollouts", tuple[RolloutStatus, ...], cohort=cohort)[0]
    if newest.state not in OPEN and newest in before:
        return True  # devices have it
    shown = ""
    while True:
        found = plane.client.get(f"/v1/rollouts/{newest.id}", RolloutStatus)
        if (line := rollout_line(found)) != shown:
            shown = line
            click.echo("\n  ".join([line, *notes(found)]))
            if found.state == "paused":
                click.echo(f"  decide in the console, {plane.url}/console, with the token in {plane.token}, or with")
                connection = f"--url {plane.url} --token-file {plane.token}"
                click.echo(f"  causeway-fleet accept {found.id} {connection}   (or resume, abort)")
        if found.state in _ENDED:
            return found.state == "done"
        time.sleep(_POLL_S)
