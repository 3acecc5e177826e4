"""The commands `causeway-fleet apply | status | pause | resume | accept | abort` for rollouts at a control plane."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import click
import msgspec

from causeway_server.router.bundle.manifest import BundleManifest
from causeway_server.router.serving.process import ask, format_option, option

from ..operators.answers import FleetAnswer, RolloutDetail, RolloutStatus
from ..repository.build import BuiltBundle, build_bundles
from ..repository.fleet_file import rollout_settings
from ..repository.folder import CheckedFleet
from ..rollout.settings import (
    LIFE,
    OPEN,
    RolloutEvent,
    RolloutSettings,
    RolloutState,
    small_fleet_advice,
    stage_devices,
)
from .client import PROGRAM, FleetClient, connected, yes_option
from .rollout_output import (
    bundle_name,
    counted,
    detail_lines,
    manifest_changes,
    notes,
    overview,
    percent,
    rollout_line,
    state_text,
)
from .signing import readable_errors, valid_fleet

_Folder = click.Path(path_type=Path, file_okay=False, exists=True)
_SHOWN = 20  # rollouts in the overview


@click.command()
@click.argument("folder", type=_Folder)
@option(
    "--cohort",
    "Roll out to this cohort only. May be repeated. Default: all cohorts whose bundle has changed.",
    to="only",
    multiple=True,
)
@option(
    "--bundle",
    "Id of the signed bundle that is rolled out, such as an earlier one. Default: the newest bundle.",
    default="",
)
@option(
    "--allow-leaving",
    "Continue even if, in the replay, recorded requests leave the device under the new policy. Only an "
    "approver may do this.",
    is_flag=True,
)
@option(
    "--without-replay", "Continue even if there are no records to replay. Only an approver may do this.", is_flag=True
)
@yes_option
@connected
def apply(
    client: FleetClient,
    folder: Path,
    only: tuple[str, ...],
    bundle: str,
    allow_leaving: bool,
    without_replay: bool,
    yes: bool,
) -> None:
    """Roll out the signed bundles of the fleet in FOLDER. The command asks for confirmation.

    Exit code: 0 begun or nothing to do, 1 refused or not signed, or the answer is no, 2 bad arguments, or there is no
    terminal to ask at and no --yes.
    """
    if bundle and len(only) != 1:
        raise click.UsageError("--bundle needs exactly one --cohort.")
    allowed = {"allow_leaving": allow_leaving, "without_replay": without_replay}
    begin(client, valid_fleet(folder), only, bundle, allowed, yes=yes)


def begin(
    client: FleetClient,
    checked: CheckedFleet,
    only: Sequence[str],
    bundle: str,
    allowed: Mapping[str, bool],
    *,
    yes: bool,
) -> None:
    """Print what would change, ask, and begin the rollouts. The arguments are described at `apply`."""
    with readable_errors():
        from ..trust.offline import all_signed_manifests
        from ..trust.published import PublishedFolder

        signed = all_signed_manifests(PublishedFolder(checked.folder))
        newest = {cohort: max(bundles.values(), key=lambda one: one.serial) for cohort, bundles in signed.items()}
        built = build_bundles(checked, newest, int(datetime.now(UTC).timestamp()))
    unknown = [name for name in only if name not in built]
    if unknown:
        raise click.UsageError(f"fleet.yaml has no cohort {unknown[0]}. Its cohorts: {', '.join(built)}.")
    status = client.get("/v1/fleet", FleetAnswer)
    chosen: dict[str, str] = {}
    for cohort in only or built:
        wanted = _wanted(cohort, bundle, built[cohort], signed.get(cohort, {}))
        rollouts = client.get("/v1/rollouts", tuple[RolloutStatus, ...], cohort=cohort)
        if nothing := _nothing_to_do(cohort, wanted, rollouts):
            click.echo(f"{cohort}: {nothing}")
            continue
        assert checked.fleet is not None
        devices = next((one.devices for one in status.cohorts if one.name == cohort), 0)
        settings = rollout_settings(checked.fleet.cohorts[cohort].rollout)
        before = signed[cohort].get(_left_with(rollouts) or "")
        for line in _plan_lines(before, signed[cohort][wanted], settings, devices):
            click.echo(line)
        chosen[cohort] = wanted
    if not chosen:
        return
    ask(PROGRAM, f"Begin {counted(len(chosen), 'rollout')} at {status.name}?", yes=yes)
    for cohort, wanted in chosen.items():
        begun = client.post("/v1/rollouts", RolloutStatus, {"cohort": cohort, "to_bundle": wanted, **allowed})
        click.echo(f"{cohort}: rollout {begun.id} has begun; `causeway-fleet status {begun.id}` shows it")


@click.command()
@click.argument("rollout", default="")
@format_option
@connected
def status(client: FleetClient, rollout: str, as_json: bool) -> None:
    """Show the fleet and its rollouts, or one ROLLOUT (an id, or a cohort) with its last evaluation. The name of a
    cohort means the cohort's newest rollout.

    Exit code: 0 shown, 1 the control plane refuses or does not answer.
    """
    if rollout:
        detail = client.get(f"/v1/rollouts/{_find(client, rollout)}", RolloutDetail)
        if as_json:
            click.echo(msgspec.json.encode(detail))
        else:
            for line in detail_lines(detail):
                click.echo(line)
        return
    fleet = client.get("/v1/fleet", FleetAnswer)
    rollouts = client.get("/v1/rollouts", tuple[RolloutStatus, ...])
    if as_json:
        click.echo(msgspec.json.encode({"fleet": fleet, "rollouts": rollouts}))
        return
    for line in overview(fleet, rollouts[:_SHOWN]):
        click.echo(line)
    if len(rollouts) > _SHOWN:
        click.echo(f"and {len(rollouts) - _SHOWN} older rollouts, which --format json lists")
    for problem in fleet.problems:
        click.echo(f"problem: {problem}", err=True)


def _decision(action: str, text: str) -> click.Command:
    @click.command(
        action,
        help=f"{text}\n\nExit code: 0 done, 1 refused: the rollout's state or the operator's role does not allow it.",
    )
    @click.argument("rollout")
    @option("--reason", "Reason that is written to the audit log and shown to other operators.", default="")
    @connected
    def command(client: FleetClient, rollout: str, reason: str) -> None:
        path = f"/v1/rollouts/{_find(client, rollout)}/{action}"
        _print(client.post(path, RolloutStatus, {"reason": reason}))

    return command


pause = _decision("pause", "Pause ROLLOUT (an id, or a cohort). Devices that already have the new bundle keep it.")
resume = _decision("resume", "Continue the paused ROLLOUT (an id, or a cohort).")
accept = _decision(
    "accept", "Accept the paused stage of ROLLOUT (an id, or a cohort) as passed. Only an approver may do this."
)


@click.command()
@click.argument("rollout")
@option("--reason", "Reason that is written to the audit log and shown to other operators.", default="")
@yes_option
@connected
def abort(client: FleetClient, rollout: str, reason: str, yes: bool) -> None:
    """Abort ROLLOUT (an id, or a cohort): its devices return to the previous bundle. The command asks for confirmation.
    A rollout that has ended can be aborted, too.

    An aborted rollout cannot continue: `apply` begins a new one. Exit code: 0 done, 1 the rollout's state or the
    operator's role does not allow it, or the answer is no, 2 there is no terminal to ask at, and no --yes.
    """
    name = _find(client, rollout)
    before = client.get(f"/v1/rollouts/{name}", RolloutStatus)
    click.echo(rollout_line(before))
    if RolloutEvent.ABORT in LIFE[RolloutState(before.state)]:
        last = "an aborted rollout cannot continue, `apply` begins a new one"
        if before.from_bundle is None:
            click.echo(
                f"the cohort has no earlier bundle, so devices that run the bundle of this rollout keep it; {last}"
            )
        else:
            click.echo(f"the devices of this rollout return to {bundle_name(before.from_bundle)}; {last}")
        ask(PROGRAM, f"Abort {name}?", yes=yes)
    _print(client.post(f"/v1/rollouts/{name}/abort", RolloutStatus, {"reason": reason}))


def _print(rollout: RolloutStatus) -> None:
    click.echo(rollout_line(rollout))
    for note in notes(rollout):
        click.echo(f"  {note}")


def _wanted(cohort: str, bundle: str, built: BuiltBundle, signed: dict[str, BundleManifest]) -> str:
    """Return the signed bundle to roll out."""
    if not bundle:
        if built.id not in signed:
            raise click.ClickException(
                f"{cohort}: the files in the folder differ from the signed bundle. Run `causeway-fleet sign`."
            )
        return built.id
    found = [one for one in signed if one.startswith(bundle)]
    if len(found) != 1:
        raise click.ClickException(f"{cohort}: {len(found)} signed bundles begin with {bundle}, but exactly one must.")
    return found[0]


def _nothing_to_do(cohort: str, wanted: str, rollouts: Sequence[RolloutStatus]) -> str:
    """Return why no rollout should begin, or "". Raises ClickException if another bundle's is under way."""
    under_way = next((one for one in rollouts if one.state in OPEN), None)
    if under_way is None:
        return "no change" if wanted == _left_with(rollouts) else ""
    if under_way.to_bundle == wanted:
        return f"{under_way.id} is under way already ({state_text(under_way)})"
    raise click.ClickException(
        f"{cohort}: the rollout {under_way.id} of another bundle is under way ({state_text(under_way)}): "
        f"wait until it ends, or end it with `causeway-fleet abort {under_way.id}`"
    )


def _left_with(rollouts: Sequence[RolloutStatus]) -> str | None:
    """Return the bundle that the cohort has after its newest rollout."""
    newest = next((one for one in rollouts if one.began), None)
    if newest is None:
        return None
    return newest.to_bundle if newest.state == "done" else newest.from_bundle


def _find(client: FleetClient, name: str) -> str:
    """Return the id of a rollout; a cohort's name means its newest rollout."""
    if name.startswith("r-"):
        return name
    rollouts = client.get("/v1/rollouts", tuple[RolloutStatus, ...], cohort=name)
    return rollouts[0].id if rollouts else name


def _plan_lines(
    before: BundleManifest | None, after: BundleManifest, settings: RolloutSettings, devices: int
) -> Iterator[str]:
    """Yield the plan: changes, number of devices, stages, and advice about them."""
    yield f"{after.cohort}: serial {after.serial} on {counted(devices, 'device')}"
    yield from (f"  {change}" for change in manifest_changes(before, after))
    shares = ", ".join(percent(stage.share) for stage in settings.stages)
    first = stage_devices(settings.stages[0].share, devices)
    yield f"  stages: {shares}; the first is {first} of {counted(devices, 'device')}"
    yield from (f"  note: {advice}" for advice in small_fleet_advice(settings, devices))
