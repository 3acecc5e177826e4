"""`causeway-fleet devices | enroll | revoke | hold | release | pin | audit`: devices and the log of a control plane."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import click
import msgspec

from router.documents.quantities import seconds_of

from ..operators.audit_chain import AuditRow, first_fault
from .client import FleetClient, connected


class DeviceStatus(msgspec.Struct, frozen=True):
    """The part of a device that is shown."""

    id: str
    cohort: str
    site: str
    state: str
    running: str | None
    last_seen: float
    held: bool
    pin: str | None
    cloned: bool
    revoked: float | None
    code: str
    reason: str
    history: tuple[dict[str, Any], ...] = ()


class ListedDevices(msgspec.Struct, frozen=True):
    devices: tuple[DeviceStatus, ...]
    next: str | None


class MadeToken(msgspec.Struct, frozen=True):
    token: str
    expires: float


class AuditLine(msgspec.Struct, frozen=True):
    n: int
    at: float
    actor: str
    action: str
    what: msgspec.Raw
    previous: str
    hash: str

    @property
    def row(self) -> AuditRow:
        return AuditRow(self.n, self.at, self.actor, self.action, bytes(self.what).decode(), self.previous, self.hash)


class AuditLines(msgspec.Struct, frozen=True):
    rows: tuple[AuditLine, ...]


@click.command()
@click.argument("device", default="")
@click.option("--cohort", default="", help="Only this cohort.")
@click.option("--state", default="", help="Only this state of the agent, or revoked, cloned, held or pinned.")
@click.option("--site", default="", help="Only this site.")
@click.option("--search", default="", help="A part of the id.")
@connected
def devices(client: FleetClient, device: str, cohort: str, state: str, site: str, search: str) -> None:
    """List devices, or show one DEVICE with its history.

    Exit code: 0 shown, 1 the control plane refuses or does not answer.
    """
    if device:
        one = client.get(f"/v1/devices/{device}", DeviceStatus)
        click.echo(_line(one))
        for event in one.history:
            running = (event["running"] or "the factory files")[:12]
            click.echo(f"  {_time(event['at'])} {event['state']} {running} {event['code']} {event['reason']}".rstrip())
        return
    after: str | None = ""
    while after is not None:
        page = client.get(
            "/v1/devices", ListedDevices, cohort=cohort, state=state, site=site, q=search, after=after, limit="500"
        )
        for one in page.devices:
            click.echo(_line(one))
        after = page.next


@click.command()
@click.option("--cohort", default="", help="The cohort; default: by the labels.")
@click.option("--uses", type=click.IntRange(min=1), default=1, show_default=True, help="Boxes that may join with it.")
@click.option("--expires", default="1d", show_default=True, help="A time such as 30m, 12h or 7d.")
@click.option("--label", "labels", multiple=True, metavar="NAME=VALUE", help="Of the boxes; wins over theirs.")
@connected
def enroll(client: FleetClient, cohort: str, uses: int, expires: str, labels: tuple[str, ...]) -> None:
    """Make a join token and print it; it cannot be shown again. A box joins with `causeway-edge fleet join`.

    Exit code: 0 made, 1 refused, 2 bad arguments.
    """
    seconds = seconds_of(expires)
    if not seconds:
        raise click.BadParameter(f"a time such as 30m, 12h or 7d, not {expires!r}", param_hint="--expires")
    pairs = [label.partition("=") for label in labels]
    if any(not name or not mark for name, mark, _ in pairs):
        raise click.BadParameter("NAME=VALUE", param_hint="--label")
    request = {
        "cohort": cohort,
        "uses": uses,
        "expires_s": seconds,
        "labels": {name: value for name, _, value in pairs},
    }
    made = client.post("/v1/join-tokens", MadeToken, request)
    click.echo(made.token)
    click.echo(f"for {uses} box{'es' if uses > 1 else ''}, until {_time(made.expires)}", err=True)


def _action(name: str, text: str) -> click.Command:
    @click.command(name, help=f"{text}\n\nExit code: 0 done, 1 refused.")
    @click.argument("device")
    @click.option("--reason", default="", help="For the audit log.")
    @connected
    def command(client: FleetClient, device: str, reason: str) -> None:
        click.echo(_line(client.post(f"/v1/devices/{device}/{name}", DeviceStatus, {"reason": reason})))

    return command


revoke = _action("revoke", "Refuse the tokens and the key of DEVICE, here and at the cloud gateways, for good.")
hold = _action("hold", "Let DEVICE keep what it runs.")
release = _action("release", "Let DEVICE follow its cohort again: ends a hold and a pin.")


@click.command()
@click.argument("device")
@click.argument("bundle")
@click.option("--reason", default="", help="For the audit log.")
@connected
def pin(client: FleetClient, device: str, bundle: str, reason: str) -> None:
    """Let DEVICE run the signed BUNDLE (its whole id), whatever its cohort's rollouts say.

    Exit code: 0 done, 1 refused.
    """
    request = {"bundle": bundle, "reason": reason}
    click.echo(_line(client.post(f"/v1/devices/{device}/pin", DeviceStatus, request)))


@click.command()
@click.option("--after", type=click.IntRange(min=0), default=0, help="Print rows after this number.")
@click.option("--verify", is_flag=True, help="Check the hash chain from the first row on, and print the last hash.")
@click.option("--head", default="", metavar="HASH", help="With --verify: a hash noted earlier must be there.")
@connected
def audit(client: FleetClient, after: int, verify: bool, head: str) -> None:
    """Print the audit log: who changed what, when; one line for each change.

    Exit code: 0 printed or the chain holds, 1 it does not hold, or the control plane refuses.
    """
    last: AuditRow | None = None
    hashes: set[str] = set()
    position = 0 if verify else after
    while page := client.get("/v1/audit", AuditLines, after=str(position)).rows:
        rows = [line.row for line in page]
        position = rows[-1].n
        if not verify:
            for row in rows:
                click.echo(f"{row.n} {_time(row.at)} {row.actor} {row.action} {row.what}")
            continue
        fault = first_fault(rows, last)
        if fault:
            raise click.ClickException(f"the audit log was changed: {fault}")
        last = rows[-1]
        hashes.update(row.hash for row in rows)
    if verify:
        if head and head not in hashes:
            raise click.ClickException(f"the audit log was cut off: no row has the hash {head}")
        click.echo("0 rows" if last is None else f"{last.n} rows, the chain holds; the last hash is {last.hash}")


def _line(device: DeviceStatus) -> str:
    marks = [name for name in ("held", "cloned") if getattr(device, name)]
    marks += ["revoked"] if device.revoked is not None else []
    marks += [f"pinned to {device.pin[:12]}"] if device.pin else []
    last_seen = f"seen {_time(device.last_seen)}" if device.last_seen else "never seen"
    problem = f"{device.code}: {device.reason}" if device.code else ""
    running = (device.running or "the factory files")[: 17 if device.running is None else 12]
    return " ".join(
        filter(None, (device.id, device.cohort, device.site, device.state, running, last_seen, *marks, problem))
    )


def _time(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S}Z"
