"""The command `causeway-fleet quick`: from a policy to a control plane and a rollout on a few devices, with one key."""

from __future__ import annotations

import fcntl
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, NoReturn

import click

from causeway_server.router.numbers import seconds_of
from causeway_server.router.serving.folders import write_atomically
from causeway_server.router.serving.process import end_with_parent, option

from ..operators.answers import JoinTokenAnswer, RolloutStatus
from ..repository.folder import CheckedFleet
from ..rollout.settings import OPEN
from .client import FleetClient
from .devices import every_device
from .rollout_output import notes, rollout_line, time_text
from .rollouts import begin
from .signing import HOST, NAME, load_signers, readable_errors, sign_fleet, valid_fleet

if TYPE_CHECKING:
    from types import FrameType

_MOST = 1000
_POLL_S = 1.0
_JOIN_S = 86_400.0
_ENDED = ("done", "reverted", "draft")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@click.command()
@click.argument("policy", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@option(
    "--devices",
    "Number of devices, such as 20, or their names, separated by commas: kiosk-1,kiosk-2,…",
    required=True,
    metavar="N|NAMES",
)
@option(
    "--listen",
    "Address at which devices reach the control plane. If devices on other machines must reach it, "
    "HOST becomes a name in the control plane's certificate.",
    default="127.0.0.1:8090",
    metavar="HOST:PORT",
)
@option(
    "--wait",
    "Maximum time that the command waits for devices that have not joined. Then the devices that have "
    "joined get the policy.",
    default="10m",
)
def quick(policy: Path, devices: str, listen: str, wait: str) -> None:
    """Bring POLICY to a few devices. The command sets up a fleet with one key, serves the control plane, prints how
    devices join, and rolls the policy out.

    The fleet's folder is the git checkout of POLICY, or the folder of its fleet.yaml; what is there already stays. In
    git, POLICY and its test cases must be committed. Run it again to go on where it was stopped, and after each change
    of the policy: while the first one serves, another one only rolls out. Ctrl-C stops it, and devices keep what they
    run.

    Exit code: 0 rolled out, 1 not, or refused, 2 bad arguments.
    """
    names, host = _names(devices), _host(listen)
    if (wait_s := seconds_of(wait)) is None:
        raise click.BadParameter(f"Expected a time such as 0s, 10m or 2h, not {wait!r}.", param_hint="--wait")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as below nohup
            signal.signal(number, _interrupt)
    with readable_errors():
        from ..trust import quick_folder as folders

        folder = folders.fleet_of(policy)
        commit = folders.committed(policy)
        with folders.one_at_a_time(folder):
            checked, cohort = _signed(folder, policy)
        click.echo(f"{policy}{f' of commit {commit}' if commit else ''} is the policy of {cohort} in {folder}.")
        with _control_plane(folder, listen, host) as plane:
            _enrol(plane, cohort, names, wait_s)
            is_done = _roll_out(plane, checked, cohort)
            if plane.process is not None:
                click.echo(
                    f"The control plane serves until Ctrl-C: {plane.url}/console, with the token in {plane.token}"
                )
                with suppress(KeyboardInterrupt):
                    plane.process.wait()
                    raise click.ClickException(f"The control plane ended. The reason is in {plane.log}.")
    raise SystemExit(0 if is_done else 1)


@dataclass(frozen=True)
class _ControlPlane:
    """A control plane that answers. `process`: None if another command started it."""

    state: Path
    url: str
    process: subprocess.Popen[str] | None = None

    @property
    def token(self) -> Path:
        return self.state / "server" / "bootstrap-token"

    @cached_property
    def client(self) -> FleetClient:
        return FleetClient(self.url, self.token.read_text(encoding="utf-8").strip(), self.ca_file)

    @property
    def ca_file(self) -> Path | None:
        return self.state / "tls" / "ca.pem" if self.url.startswith("https") else None

    @property
    def trusting(self) -> str:
        """The option of a printed command that names the CA, or ""."""
        return "" if self.ca_file is None else f" --ca-file {shlex.quote(str(self.ca_file))}"

    @property
    def connection(self) -> str:
        """The options of a printed command that reach this control plane."""
        return f"--url {self.url} --token-file {shlex.quote(str(self.token))}{self.trusting}"

    @property
    def log(self) -> Path:
        return self.state / "control-plane.log"


def _signed(folder: Path, policy: Path) -> tuple[CheckedFleet, str]:
    """Set this folder up if it is new, and sign its fleet; return it with the policy's cohort."""
    from ..trust import quick_folder as folders

    for path in folders.set_up(folder, policy):
        click.echo(f"Wrote {path}.")
    checked = valid_fleet(folder)
    cohort = _cohort(checked, policy)
    keys = folders.private_keys(folder)
    for lost in (key for key in keys.values() if not key.exists()):
        click.echo(
            f"{lost} is missing, for example because `git clean -x` deleted it. Restore the folder .causeway from its "
            "backup.",
            err=True,
        )
    owner = [key for name, key in keys.items() if name == folders.OWNER and key.exists()]
    if not sign_fleet(checked, load_signers(owner, None)):
        command = f"causeway-fleet sign {shlex.quote(str(folder))} --key KEY.pem"
        message = f"These signatures are missing. Run `{command}` with those keys, then this command again."
        raise click.ClickException(message)
    return checked, cohort


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _names(devices: str) -> list[str]:
    if devices.isdecimal():
        count = min(int(devices[:9]), _MOST + 1)  # no number of devices is longer
        names = [f"device-{number:04}" for number in range(1, count + 1)]
    else:
        names = devices.split(",")
    wrong = next((one for one in names if not NAME.fullmatch(one)), None)
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
    is_name = host in _LOOPBACK or (HOST.fullmatch(host) and "*" not in host and host != "0.0.0.0")
    if not is_name or not port.isdecimal() or not 0 < int(port) <= 65535:
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
        raise click.ClickException(f"{where}. Give a policy that exactly one cohort has, or use `sign` and `apply`.")
    return found[0]


@contextmanager
def _control_plane(folder: Path, listen: str, host: str) -> Iterator[_ControlPlane]:
    """Yield the control plane that runs, or start one, which ends with this command.

    Its process holds the lock of `control-plane.lock`. If that is free, `control-plane.url` is of one that has ended,
    and another program may have that port by now.
    """
    from ..trust.quick_folder import one_at_a_time, server_certificate, state_of

    state, process = state_of(folder), None
    where = state / "control-plane.url"
    try:
        with one_at_a_time(folder), (state / "control-plane.lock").open("ab") as serving:
            while not (is_free := _lock(serving)) and not where.exists():
                time.sleep(_POLL_S)  # the command that started it was killed, and it ends, too
            if is_free:
                where.unlink(missing_ok=True)
                command = [sys.executable, "-m", "causeway_server.fleet", "serve", str(folder), "--listen", listen]
                command += ["--keys", str(state / "server-key"), "--state-dir", str(state / "server")]
                if host not in _LOOPBACK:
                    certificate, key = server_certificate(folder, host, time.time())
                    command += ["--tls-cert-file", str(certificate), "--tls-key-file", str(key)]
                with (state / "control-plane.log").open("ab") as log:
                    process = subprocess.Popen(
                        command,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        text=True,
                        start_new_session=True,  # Ctrl-C reaches this command alone
                        preexec_fn=end_with_parent,  # noqa: PLW1509 - it only calls prctl
                        pass_fds=(serving.fileno(),),
                    )
                assert process.stdout is not None
                line = next((line for line in process.stdout if line.startswith("ready url=")), "")
                if not line:
                    raise click.ClickException(
                        f"The control plane did not start. The reason is in {state / 'control-plane.log'}."
                    )
                write_atomically(where, line.strip().removeprefix("ready url=").encode())
            plane = _ControlPlane(state, where.read_text(encoding="utf-8"), process)
        yield plane
    finally:
        if process is not None:
            process.terminate()
            process.wait()


def _lock(file: IO[bytes]) -> bool:
    """Take a file's lock, unless another process holds it. Returns whether it was free."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _enrol(plane: _ControlPlane, cohort: str, names: Sequence[str], wait_s: float) -> None:
    """Print how the devices join that have not, and wait for them. Raises ClickException if the cohort has none."""
    known = {device.id: device for device in every_device(plane.client)}
    missing = set(names) - known.keys()
    for name in names:
        if name in known and known[name].revoked is not None:
            click.echo(f"{name} was revoked, so it gets no policy. To return, the device must join under another name.")
    if missing:
        request = {"cohort": cohort, "uses": len(missing), "expires_s": _JOIN_S, "labels": {}}
        made = plane.client.post("/v1/join-tokens", JoinTokenAnswer, request)
        token = plane.state / "join-token"
        write_atomically(token, made.token.encode(), 0o600)
        click.echo(f"To join, each device runs its line with a copy of these files, before {time_text(made.expires)}:")
        for name in sorted(missing):
            line = f"causeway-edge fleet join {plane.url} --name {name}{plane.trusting} < {shlex.quote(str(token))}"
            click.echo(f"  {line}")
    ends = time.monotonic() + wait_s
    while missing and time.monotonic() < ends:
        time.sleep(_POLL_S)
        joined = missing & {device.id for device in every_device(plane.client)}
        missing -= joined
        for name in sorted(joined):
            click.echo(f"{name} has joined.")
    if all(device.revoked is not None for device in every_device(plane.client, cohort=cohort)):
        raise click.ClickException("No device has joined. Run the command again when a device can join.")
    if missing:
        click.echo(
            f"These devices have not joined yet: {', '.join(sorted(missing))}. They get the policy when they join."
        )


def _roll_out(plane: _ControlPlane, checked: CheckedFleet, cohort: str) -> bool:
    """Begin a rollout if there is something to do, and show it to its end. Returns whether it is done."""
    from ..trust.offline import all_signed_manifests
    from ..trust.published import PublishedFolder

    before = plane.client.get("/v1/rollouts", tuple[RolloutStatus, ...], cohort=cohort)
    signed = all_signed_manifests(PublishedFolder(checked.folder))[cohort]
    wanted = max(signed, key=lambda bundle: signed[bundle].serial)
    if before and before[0].to_bundle == wanted and before[0].state in ("reverting", "reverted"):
        click.echo(rollout_line(before[0]))
        command = f"causeway-fleet apply {shlex.quote(str(checked.folder))} --cohort {cohort} {plane.connection}"
        click.echo(f"  The rollout does not begin again by itself: change the policy, or run\n  {command}")
        return False
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
                click.echo(f"  To decide, open the console {plane.url}/console with the token in {plane.token}, or run")
                click.echo(f"  causeway-fleet accept {found.id} {plane.connection}   (or resume, abort)")
        if found.state in _ENDED:
            return found.state == "done"
        time.sleep(_POLL_S)
