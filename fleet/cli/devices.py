"""The commands `causeway-fleet devices | enroll | revoke | erase | hold | release | pin | audit`."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import click
import msgspec

from causeway_server.router.numbers import seconds_of
from causeway_server.router.serving.process import ask, option

from ..operators.answers import AuditPage, DeviceAnswer, DevicePage, JoinTokenAnswer, RolloutStatus
from ..store.history import AuditRow, DeviceEvent, first_fault
from .client import PROGRAM, FleetClient, connected, yes_option
from .rollout_output import bundle_name, counted, table, time_text

_WHOLE = re.compile(r"[0-9a-f]{64}")
_PLAIN = re.compile(r"[^\s\"={}\[\],]+")


@click.command()
@click.argument("device", default="")
@option("--cohort", "List only devices of this cohort.", default="")
@option(
    "--state",
    "List only devices whose agent is in this state. Other values: revoked, cloned, held or pinned.",
    default="",
)
@option("--site", "List only devices of this site.", default="")
@option("--search", "List only devices whose id contains this text.", default="")
@connected
def devices(client: FleetClient, device: str, cohort: str, state: str, site: str, search: str) -> None:
    """List the fleet's devices, or show DEVICE with its history.

    Exit code: 0 shown, 1 the control plane refuses or does not answer.
    """
    if device:
        one = client.get(f"/v1/devices/{quote(device, safe='')}", DeviceAnswer)
        _print_table((one,))
        if one.history:
            click.echo()
        for line in table(("time", "state", "running", "why"), [_event(event) for event in one.history]):
            click.echo(line)
        return
    found = every_device(client, cohort=cohort, state=state, site=site, q=search)
    _print_table(found)
    if not found:
        click.echo(
            "There is no such device." if cohort or state or site or search else "No device has joined.", err=True
        )


def every_device(client: FleetClient, **query: str) -> list[DeviceAnswer]:
    """Return the devices that match the query of `GET /v1/devices`, of all its pages."""
    found: list[DeviceAnswer] = []
    after: str | None = ""
    while after is not None:
        page = client.get("/v1/devices", DevicePage, **query, after=after, limit="500")
        found, after = [*found, *page.devices], page.next
    return found


@click.command()
@option(
    "--cohort",
    "Cohort of the devices that join with the token. Default: the cohort that matches their labels.",
    default="",
)
@option("--uses", "Number of devices that may join with the token.", click.IntRange(min=1), 1)
@option("--expires", "Time for which the token is valid, such as 30m, 12h or 7d.", default="1d")
@option(
    "--label",
    "Label of the devices that join with the token. This label overrides the label that a device "
    "reports. May be repeated.",
    to="labels",
    multiple=True,
    metavar="NAME=VALUE",
)
@connected
def enroll(client: FleetClient, cohort: str, uses: int, expires: str, labels: tuple[str, ...]) -> None:
    """Make a join token and print it. The token cannot be shown again. A device joins the fleet with the token and
    `causeway-edge fleet join`.

    Exit code: 0 made, 1 refused, 2 bad arguments.
    """
    seconds = seconds_of(expires)
    if not seconds:
        raise click.BadParameter(f"Expected a time such as 30m, 12h or 7d, not {expires!r}.", param_hint="--expires")
    pairs = [label.partition("=") for label in labels]
    if any(not name or not mark for name, mark, _ in pairs):
        raise click.BadParameter("Expected NAME=VALUE.", param_hint="--label")
    request = {
        "cohort": cohort,
        "uses": uses,
        "expires_s": seconds,
        "labels": {name: value for name, _, value in pairs},
    }
    made = client.post("/v1/join-tokens", JoinTokenAnswer, request)
    click.echo(made.token)
    click.echo(f"The join token is valid for {counted(uses, 'device')}, until {time_text(made.expires)}.", err=True)


def _action(name: str, text: str) -> click.Command:
    @click.command(name, help=f"{text}\n\nExit code: 0 done, 1 refused.")
    @click.argument("device")
    @option("--reason", "Reason that is written to the audit log.", default="")
    @connected
    def command(client: FleetClient, device: str, reason: str) -> None:
        _print_table((client.post(f"/v1/devices/{quote(device, safe='')}/{name}", DeviceAnswer, {"reason": reason}),))

    return command


hold = _action("hold", "Hold DEVICE: it keeps the bundle that it runs now, whatever its cohort's rollouts say.")
release = _action("release", "Let DEVICE follow the rollouts of its cohort again. This ends a hold or a pin.")


@click.command()
@click.argument("device")
@option("--reason", "Reason that is written to the audit log.", default="")
@yes_option
@connected
def revoke(client: FleetClient, device: str, reason: str, yes: bool) -> None:
    """Revoke DEVICE permanently. The control plane and the gateways then refuse the device's tokens and its key. The
    command asks for confirmation.

    The device continues with the bundle that it runs, without the cloud and without updates. Its name stays in use: to
    return, the device must leave (`causeway-edge fleet leave`) and join with a new join token under another name. Exit
    code: 0 done, also before; 1 refused, or the answer is no; 2 there is no terminal to ask at, and no --yes.
    """
    path = f"/v1/devices/{quote(device, safe='')}"
    before = client.get(path, DeviceAnswer)
    _print_table((before,))
    if before.revoked is not None:
        click.echo(f"{device} was already revoked at {time_text(before.revoked)}.")
        return
    click.echo(f"Within a minute the control plane and the cloud gateways refuse {device} for good.")
    click.echo(
        "The device continues to answer from its bundle. To return to the fleet, the device must leave and join "
        "again under another name."
    )
    ask(PROGRAM, f"Revoke {device}?", yes=yes)
    client.post(f"{path}/revoke", DeviceAnswer, {"reason": reason})
    click.echo(f"{device} is revoked.")


@click.command()
@click.argument("device")
@option(
    "--client",
    "Erase only what the device stores about this client. Default: about all clients.",
    to="of",
    metavar="NAME",
)
@option("--reason", "Reason that is written to the audit log.", default="")
@option("--wait", "Maximum time that the command waits for the receipt.", default="60s")
@option("--status", "Print the receipt of the last order, and give no new order.", is_flag=True)
@yes_option
@connected
def erase(client: FleetClient, device: str, of: str | None, reason: str, wait: str, status: bool, yes: bool) -> None:
    """Order DEVICE to erase what it stores about its clients, and print its signed receipt. The command asks for
    confirmation.

    A device that is offline erases when it is back. Of a device that has erased everything the control plane keeps its
    row and the audit log, no history and no counters. Exit code: 0 erased, 1 refused, or the answer is no, or not
    erased yet; 2 bad arguments, or there is no terminal to ask at, and no --yes.
    """
    path, left_s = f"/v1/devices/{quote(device, safe='')}", seconds_of(wait)
    if of == "":
        raise click.BadParameter("The name of the client is empty.", param_hint="--client")
    if not left_s:
        raise click.BadParameter(f"Expected a time such as 30s or 5m, not {wait!r}.", param_hint="--wait")
    if not status:
        ask(PROGRAM, f"Erase all data of {of or 'all clients'} on {device} permanently?", yes=yes)
        client.post(f"{path}/erase", DeviceAnswer, {"client": of, "reason": reason})
    until = time.monotonic() + left_s * (not status)
    while (erasure := client.get(path, DeviceAnswer).erasure) is not None and erasure.finished is None:
        if time.monotonic() >= until:
            raise click.ClickException(f"{device} has not erased the data yet. Ask again with --status.")
        time.sleep(min(1.0, left_s))
    if erasure is None:
        raise click.ClickException(f"{device} was never ordered to erase data.")
    click.echo(erasure.receipt)


@click.command()
@click.argument("device")
@click.argument("bundle")
@option("--reason", "Reason that is written to the audit log.", default="")
@connected
def pin(client: FleetClient, device: str, bundle: str, reason: str) -> None:
    """Pin DEVICE: it runs the signed bundle BUNDLE, whatever its cohort's rollouts say.

    For a bundle that a rollout has named, its first digits are enough; for any other bundle the whole id is needed.
    Exit code: 0 done, 1 refused.
    """
    request = {"bundle": _whole_id(client, bundle), "reason": reason}
    _print_table((client.post(f"/v1/devices/{quote(device, safe='')}/pin", DeviceAnswer, request),))


@click.group(invoke_without_command=True)
@option("--after", "Print only rows after this number.", click.IntRange(min=0), 0, show_default=False)
@option("--verify", "Check the hash chain from the first row on, and print the last hash.", is_flag=True)
@option("--head", "With --verify: fail unless a row has this hash, noted earlier.", default="", metavar="HASH")
@connected
def audit(client: FleetClient, after: int, verify: bool, head: str) -> None:
    """Print the audit log, one line for each change: time, actor, action and details.

    Exit code: 0 printed or the chain holds, 1 it does not hold, or the control plane refuses.
    """
    last: AuditRow | None = None
    hashes: set[str] = set()
    position = 0 if verify else after
    while rows := client.get("/v1/audit", AuditPage, after=str(position)).rows:
        position = rows[-1].n
        if not verify:
            for row in rows:
                click.echo(f"{row.n:>5}  {time_text(row.at)}  {row.actor} {row.action}  {_what(row.what)}")
            continue
        fault = first_fault(rows, last)
        if fault:
            raise click.ClickException(f"The audit log was changed: {fault}.")
        last = rows[-1]
        hashes.update(row.hash for row in rows)
    if verify:
        if head and head not in hashes:
            raise click.ClickException(f"The audit log was truncated: no row has the hash {head}.")
        count = 0 if last is None else last.n
        end = "" if last is None else f", the chain holds; the last hash is {last.hash}"
        click.echo(f"{counted(count, 'row')}{end}")


def _print_table(devices: Sequence[DeviceAnswer]) -> None:
    head = ("device", "cohort", "site", "state", "running", "last seen", "notes")
    for line in table(head, [_row(device) for device in devices]):
        click.echo(line)


def _row(device: DeviceAnswer) -> tuple[str, ...]:
    notes = [name for name in ("held", "cloned") if getattr(device, name)]
    notes += ["revoked"] if device.revoked is not None else []
    notes += [f"pinned to {bundle_name(device.pin)}"] if device.pin else []
    notes += [f"quarantined {', '.join(map(bundle_name, device.quarantined))}"] if device.quarantined else []
    notes += [f"{device.code}: {device.reason}"] if device.code else []
    last_seen = time_text(device.last_seen) if device.last_seen else "never"
    running = bundle_name(device.running)
    return device.id, device.cohort, device.site, device.state, running, last_seen, "; ".join(notes)


def _event(event: DeviceEvent) -> tuple[str, ...]:
    why = f"{event.code}: {event.reason}" if event.code else ""
    wanted = f" -> {bundle_name(event.wanted)}" if event.wanted else ""
    return time_text(event.at), event.state, bundle_name(event.running) + wanted, why


def _whole_id(client: FleetClient, bundle: str) -> str:
    """Return the id of the bundle with this beginning. Raises ClickException if there is none, or more than one."""
    if _WHOLE.fullmatch(bundle):
        return bundle
    rollouts = client.get("/v1/rollouts", tuple[RolloutStatus, ...])
    known = {one for rollout in rollouts for one in (rollout.to_bundle, rollout.from_bundle) if one is not None}
    found = sorted(one for one in known if one.startswith(bundle))
    if len(found) != 1:
        raise click.ClickException(
            f"{len(found) or 'no'} bundles of the newest rollouts begin with {bundle!r}. Give more digits of the "
            "bundle's id."
        )
    return found[0]


def _what(what: msgspec.Raw) -> str:
    """Return a row's JSON as `key=value`, without empty values. Bundles are shortened to their first digits."""
    values = msgspec.json.decode(what, type=dict[str, Any])
    shown = {key: value for key, value in values.items() if value is not False and value not in ("", None, {}, [])}
    return " ".join(f"{key}={_value(value)}" for key, value in shown.items())


def _value(value: object) -> str:
    if isinstance(value, str):
        if _WHOLE.fullmatch(value):
            return bundle_name(value)
        return value if _PLAIN.fullmatch(value) else msgspec.json.encode(value).decode()
    return msgspec.json.encode(value).decode()
