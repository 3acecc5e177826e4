"""`causeway-fleet apply | status | pause | resume | accept | abort`: rollouts at a control plane."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import msgspec

from router.bundle.manifest import BundleManifest
from router.bundle.rollout import WHOLE

from ..repository.build import BuiltBundle, build_bundles
from ..repository.difference import manifest_changes
from ..repository.rollout_keys import rollout_settings
from ..rollout.advice import small_fleet_advice, stage_boxes
from .client import FleetClient, connected
from .signing import readable_errors, valid_fleet

_Folder = click.Path(path_type=Path, file_okay=False, exists=True)


class CohortStatus(msgspec.Struct, frozen=True):
    """The part of `GET /v1/fleet` that is shown of a cohort."""

    name: str
    boxes: int
    recently_seen: int
    running: dict[str, int]
    rollout: str | None = None
    ahead: int = 0


class FleetStatus(msgspec.Struct, frozen=True):
    name: str
    cohorts: tuple[CohortStatus, ...]
    problems: tuple[str, ...] = ()


class RolloutStatus(msgspec.Struct, frozen=True):
    """The part of a rollout that is shown."""

    id: str
    cohort: str
    state: str
    stage: int
    stages: tuple[int, ...]
    share: int
    began: float
    reason: str
    to_bundle: str
    from_bundle: str | None
    author: str = ""


@click.command()
@click.argument("folder", type=_Folder)
@click.option("--cohort", "only", multiple=True, help="Only this cohort. Repeatable; default: every changed one.")
@click.option("--bundle", default="", help="A signed bundle, such as an earlier one, instead of the newest.")
@click.option("--allow-leaving", is_flag=True, help="Recorded requests may leave the device; needs an approver.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@connected
def apply(
    client: FleetClient, folder: Path, only: tuple[str, ...], bundle: str, allow_leaving: bool, yes: bool
) -> None:
    """Roll the signed bundles of FOLDER out: print what will change on how many boxes, ask, and begin.

    Exit code: 0 begun or nothing to do, 1 refused or not signed, 2 bad arguments.
    """
    if bundle and len(only) != 1:
        raise click.UsageError("--bundle needs one --cohort")
    checked = valid_fleet(folder)
    with readable_errors():
        from ..trust.offline import all_signed_manifests
        from ..trust.published import PublishedFolder

        signed = all_signed_manifests(PublishedFolder(folder))
    newest = {cohort: max(bundles.values(), key=lambda one: one.serial) for cohort, bundles in signed.items()}
    built = build_bundles(checked, newest, int(datetime.now(UTC).timestamp()))
    unknown = [name for name in only if name not in built]
    if unknown:
        raise click.UsageError(f"fleet.yaml has no cohort {unknown[0]}: {', '.join(built)}")
    status = client.get("/v1/fleet", FleetStatus)
    chosen: dict[str, str] = {}
    for cohort in only or built:
        wanted = _wanted(cohort, bundle, built[cohort], signed.get(cohort, {}))
        before = _runs_now(client, cohort)
        if wanted == before:
            click.echo(f"{cohort}: no change")
            continue
        boxes = next((one.boxes for one in status.cohorts if one.name == cohort), 0)
        manifests = signed[cohort]
        _describe(cohort, manifests.get(before or ""), manifests[wanted], boxes)
        assert checked.fleet is not None
        settings = rollout_settings(checked.fleet.cohorts[cohort].rollout)
        first = stage_boxes(settings.stages[0].share, boxes)
        shares = ", ".join(_percent(stage.share) for stage in settings.stages)
        click.echo(f"  stages: {shares}; the first is {first} of {boxes} boxes")
        for advice in small_fleet_advice(settings, boxes):
            click.echo(f"  note: {advice}")
        chosen[cohort] = wanted
    if not chosen:
        return
    if not yes:
        click.confirm(f"Begin {len(chosen)} rollout{'s' if len(chosen) > 1 else ''} at {status.name}?", abort=True)
    for cohort, wanted in chosen.items():
        request = {"cohort": cohort, "to_bundle": wanted, "allow_leaving": allow_leaving}
        begun = client.post("/v1/rollouts", RolloutStatus, request)
        click.echo(f"{cohort}: rollout {begun.id} has begun; `causeway-fleet status {begun.id}` shows it")


@click.command()
@click.argument("rollout", default="")
@click.option("--format", "output_format", type=click.Choice(["human", "json"]), default="human", show_default=True)
@connected
def status(client: FleetClient, rollout: str, output_format: str) -> None:
    """Show the fleet and its rollouts, or one ROLLOUT with its last look; a cohort's name means its newest one.

    Exit code: 0 shown, 1 the control plane refuses or does not answer.
    """
    if rollout:
        detail = client.get(f"/v1/rollouts/{_find(client, rollout)}", dict[str, Any])
        if output_format == "json":
            click.echo(msgspec.json.encode(detail))
        else:
            _print_detail(detail)
        return
    fleet = client.get("/v1/fleet", FleetStatus)
    rollouts = client.get("/v1/rollouts", tuple[RolloutStatus, ...])
    if output_format == "json":
        click.echo(msgspec.json.encode({"fleet": fleet, "rollouts": rollouts}))
        return
    for cohort in fleet.cohorts:
        click.echo(f"{cohort.name}: {cohort.boxes} boxes, {cohort.recently_seen} seen in the last 15 minutes")
        for bundle, boxes in sorted(cohort.running.items(), key=lambda pair: -pair[1]):
            click.echo(f"  {boxes} run {bundle[:12] or 'the factory files'}")
        if cohort.ahead:
            click.echo(f"  {cohort.ahead} know more than the control plane: was it restored from a backup?")
    for one in rollouts[:20]:
        click.echo(_line(one))
    for problem in fleet.problems:
        click.echo(f"problem: {problem}", err=True)


def _decision(action: str, text: str) -> click.Command:
    @click.command(action, help=f"{text}\n\nExit code: 0 done, 1 its state does not allow it, or the role does not.")
    @click.argument("rollout")
    @click.option("--reason", default="", help="For the audit log and the others.")
    @connected
    def command(client: FleetClient, rollout: str, reason: str) -> None:
        path = f"/v1/rollouts/{_find(client, rollout)}/{action}"
        click.echo(_line(client.post(path, RolloutStatus, {"reason": reason})))

    return command


pause = _decision("pause", "Let the stage of ROLLOUT (an id, or a cohort) wait; its boxes keep the bundle.")
resume = _decision("resume", "Let the paused ROLLOUT (an id, or a cohort) go on.")
accept = _decision("accept", "Take the paused stage of ROLLOUT (an id, or a cohort) for passed. Needs an approver.")
abort = _decision("abort", "Return every box of ROLLOUT (an id, or a cohort) to the bundle before, also when done.")


def _wanted(cohort: str, bundle: str, built: BuiltBundle, signed: dict[str, BundleManifest]) -> str:
    """The bundle to roll out, which is signed."""
    if not bundle:
        if built.id not in signed:
            raise click.ClickException(f"{cohort}: the folder differs from what is signed; run `causeway-fleet sign`")
        return built.id
    found = [one for one in signed if one.startswith(bundle)]
    if len(found) != 1:
        raise click.ClickException(f"{cohort}: {len(found)} signed bundles begin with {bundle}")
    return found[0]


def _runs_now(client: FleetClient, cohort: str) -> str | None:
    """Return the bundle that the newest rollout left on the cohort."""
    rollouts = client.get("/v1/rollouts", tuple[RolloutStatus, ...], cohort=cohort)
    newest = next((one for one in rollouts if one.began), None)
    if newest is None:
        return None
    return newest.to_bundle if newest.state == "done" else newest.from_bundle


def _find(client: FleetClient, name: str) -> str:
    """The id of a rollout; a cohort's name stands for its newest."""
    if name.startswith("r-"):
        return name
    rollouts = client.get("/v1/rollouts", tuple[RolloutStatus, ...], cohort=name)
    return rollouts[0].id if rollouts else name


def _describe(cohort: str, before: BundleManifest | None, after: BundleManifest, boxes: int) -> None:
    click.echo(f"{cohort}: serial {after.serial} on {boxes} boxes")
    for change in manifest_changes(before, after):
        click.echo(f"  {change}")


def _line(rollout: RolloutStatus) -> str:
    where = f", stage {rollout.stage + 1} of {len(rollout.stages)}" if rollout.state in ("stage", "paused") else ""
    reason = f": {rollout.reason}" if rollout.reason else ""
    bundle = rollout.to_bundle[:12]
    return f"{rollout.id} {rollout.cohort} {bundle} {rollout.state}{where}, {_percent(rollout.share)}{reason}"


def _print_detail(detail: dict[str, Any]) -> None:
    click.echo(_line(msgspec.convert(detail, RolloutStatus)))
    for state, boxes in sorted(detail["members"].items()):
        click.echo(f"  {boxes} {state}")
    for line in _last_look(detail["looks"]):
        click.echo(f"  {line}")
    for event in detail["events"]:
        at = datetime.fromtimestamp(event["at"], UTC)
        click.echo(f"  {at:%Y-%m-%d %H:%M:%S}Z {event['actor']} {event['action']} {event['reason']}".rstrip())


def _last_look(looks: list[dict[str, Any]]) -> Iterator[str]:
    if looks:
        yield f"look {len(looks)}: {looks[-1]['outcome']}"
        yield from (f"  {metric['outcome']}: {metric['reason']}" for metric in looks[-1]["metrics"])


def _percent(share: int) -> str:
    return f"{share * 100 / WHOLE:g} %"
