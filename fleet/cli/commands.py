"""The `causeway-fleet` commands, which check policies and fleets. A CI needs one line: ``causeway-fleet test DIR``."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import click
import msgspec
from rich.text import Text

from causeway_server.router.checks.explanation import explain, try_draft
from causeway_server.router.checks.replay import replay as run_replay
from causeway_server.router.config import ListenerTls, schema_of
from causeway_server.router.documents.reader import did_you_mean
from causeway_server.router.errors import CausewayError, ConfigError, ModelNotFound
from causeway_server.router.migrate.rewrite import DocumentKind
from causeway_server.router.policy.compiled import Policy
from causeway_server.router.policy.file import policy_schema
from causeway_server.router.policy.signals import SIGNALS, find_signal
from causeway_server.router.renames import advice
from causeway_server.router.serving.logs import start_log
from causeway_server.router.serving.process import ProgramGroup, format_option, migrate_file, option, run_fast
from causeway_server.router.types import NowSignals

from ..operators.operators_file import OperatorsDoc
from ..repository.fleet_file import FleetDoc
from ..repository.folder import CheckedFleet, check_fleet, documents, is_fleet, new_fleet
from ..repository.policies import CASES, CheckedPolicy, check_file, policy_files, run_file, yaml_in
from ..repository.records import RecordReader, record_files
from ..trust.keys import TrustDoc
from . import devices, egress, proofs, quick, rollouts, signing
from .output import (
    Checked,
    lint_report,
    new_console,
    print_bad_lines,
    print_lint,
    print_problems,
    print_replay,
    print_run,
    replay_document,
)

OK, FOUND, USAGE = 0, 1, 2
"""Exit codes: no errors; errors in a policy or a case; nothing to check, or bad arguments."""
SECTIONS = {
    "Write and check": ("init", "lint", "test", "prove", "route", "replay", "schema", "migrate"),
    "Sign": ("keys", "diff", "sign"),
    "Certificates": ("tls",),
    "Roll out": ("quick", "serve", "downgrade", "apply", "status", "pause", "resume", "accept", "abort"),
    "Devices": ("enroll", "devices", "hold", "pin", "release", "revoke", "erase", "audit"),
}
"""The commands in the order of `--help`."""


class _Sections(ProgramGroup):
    """A command group that lists its commands by purpose, each with its whole first sentence."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, names in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(limit=500)) for name in names])


@click.group("causeway-fleet", cls=_Sections, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="causeway-router", prog_name="causeway-fleet")
def main() -> None:
    """Check policies and fleets, run test cases, sign bundles, and serve devices."""


for _command in (
    *(rollouts.apply, rollouts.status, rollouts.pause, rollouts.resume, rollouts.accept, rollouts.abort),
    *(
        devices.devices,
        devices.enroll,
        devices.revoke,
        devices.erase,
        devices.hold,
        devices.release,
        devices.pin,
        devices.audit,
    ),
):
    main.add_command(_command)
devices.audit.add_command(egress.egress)
devices.audit.add_command(egress.proof)
for _command in (quick.quick, proofs.prove, signing.keys, signing.sign, signing.diff, signing.tls):
    main.add_command(_command)


@main.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
def init(folder: Path) -> None:
    """Write the files of a new fleet to FOLDER: fleet.yaml, a policy, and test cases for the policy.

    Exit code: 0 written, 2 a file exists already or cannot be written.
    """
    try:
        files = new_fleet(folder)
    except OSError as error:
        raise _Usage(str(error)) from error
    for path in files:
        click.echo(f"Wrote {path}.")
    click.echo(f"Next, run causeway-fleet lint {folder} and causeway-fleet test {folder}.")


@main.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@format_option
@option("--strict", "Treat each warning as an error.", is_flag=True)
@option(
    "--signals",
    "The signals that the devices can read, from the groups device, edge and cloud. Give a list separated by "
    "commas, or a file. `lint` warns if a policy uses other signals of these groups.",
    metavar="FILE|LIST",
)
@option(
    "--fix",
    "First change the names of the previous version to the present names, in policies and in test cases.",
    is_flag=True,
)
def lint(paths: tuple[Path, ...], as_json: bool, strict: bool, signals: str | None, fix: bool) -> None:
    """Check PATHS: policy files, folders of policies, or the folder of a fleet with its fleet.yaml.

    With the extra `fleet`, each policy is proved, too (see `prove`). With --fix, files are rewritten with their layout
    and comments; each original is saved as FILE.before. Problems are printed with file, line, column and key.

    Exit code: 0 no errors, 1 errors found, 2 nothing to check.
    """
    if fix:
        _migrate([file for path in paths for file in documents(path)])
    found = _checked(paths, None if signals is None else _readable(signals))
    checked = [proofs.with_proofs(one) if isinstance(one, CheckedPolicy) else one for one in found]
    report = lint_report(checked)
    if as_json:
        click.echo(msgspec.json.encode(report))
    else:
        print_lint(new_console(), checked)
    raise SystemExit(FOUND if report.errors or (strict and report.warnings) else OK)


@main.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False))
def migrate(files: tuple[Path, ...]) -> None:
    """Change the metric names of the previous version to the present names in FILES. FILES are alert rules and
    dashboards.

    `lint --fix` rewrites policies, test cases and fleets. Exit code: 0 done, 1 some changes must be made by hand.
    """
    if _migrate([(file, "metrics") for file in files]):
        raise SystemExit(FOUND)


def _migrate(files: Sequence[tuple[Path, DocumentKind]]) -> int:
    """Rewrite files, list the changes on stderr, and return the number of changes that must be made by hand."""
    left = 0
    try:
        for path, kind in files:
            rewritten = migrate_file(path, kind)
            left += len(rewritten.left)
            for line in rewritten.report(str(path)):
                click.echo(line, err=True)
    except ConfigError as error:
        raise _Usage(str(error)) from error
    return left


@main.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
def test(folder: Path) -> None:
    """Check the policies in FOLDER, and run the test cases in FOLDER/cases.

    If FOLDER has a fleet.yaml, check the fleet and run the cases of its policies, which are in `cases` beside them.
    Models have the adapters of each cohort that runs the policy. Exit code: 0 all pass, 1 a file has errors or a case
    fails, 2 nothing to test.
    """
    console = new_console()
    checked = _checked((folder,))
    invalid = [file for file in checked if any(problem.severity == "error" for problem in file.problems)]
    files = sorted(
        {case for file in checked if isinstance(file, CheckedPolicy) for case in yaml_in(file.path.parent / CASES)}
    )
    for file in invalid:
        print_problems(console, file.problems)
    if not files and invalid:
        raise SystemExit(FOUND)
    if not files:
        where = folder / CASES if not is_fleet(folder) else f"a folder {CASES} beside a policy of {folder}"
        raise _Usage(f"No cases in {where}. Add at least one, because a test without cases does not pass.")
    reported = {file.path.resolve() for file in invalid}
    fleets = [file for file in checked if isinstance(file, CheckedFleet)]
    runs = [run_file(path, reported, *(fleet.adapters for fleet in fleets)) for path in files]
    for run in runs:
        print_run(console, run)
    raise SystemExit(FOUND if invalid or any(run.failed for run in runs) else OK)


@main.command()
@click.argument("policy", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("text")
@option(
    "--set",
    "Value of a signal, such as device.temperature_c=90 or request.tags=private. request.model=TARGET says "
    "which model the request names, and down=TARGET says that a target is down. May be repeated. "
    "Signals without a value are absent.",
    to="settings",
    multiple=True,
    metavar="SIGNAL=VALUE",
)
@format_option
def route(policy: Path, text: str, settings: tuple[str, ...], as_json: bool) -> None:
    """Show how POLICY would route a request with the prompt TEXT, and why.

    Exit code: 0 decided, 1 the policy has errors or lacks the model, 2 bad arguments.
    """
    checked = check_file(policy)
    print_problems(new_console(stderr=True), checked.problems)
    if checked.policy is None:
        raise SystemExit(FOUND)
    now = datetime.now().astimezone()
    local = NowSignals(now.hour, now.isoweekday(), now.minute, int(now.timestamp()))
    try:
        explanation = try_draft(checked.policy, text, settings, local)
    except ConfigError as error:
        raise _Usage(error.message) from error
    except ModelNotFound as error:
        raise click.ClickException(error.message) from error
    if as_json:
        click.echo(msgspec.json.encode(explanation))
        return
    for line in explain(explanation):
        new_console().print(Text.assemble(*line), soft_wrap=True)


@main.command()
@click.argument("new", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("more", nargs=-1, metavar="--over RECORDS...")
@option(
    "--old",
    "Policy with which NEW is compared. Default: NEW is compared with the recorded decisions.",
    click.Path(path_type=Path, dir_okay=False),
)
@option(
    "--over",
    "Files or folders of decision records, as JSON lines from `causeway-edge decisions export`. `-`: "
    "read stdin. May be repeated.",
    multiple=True,
    required=True,
    metavar="RECORDS",
)
@format_option
@option(
    "--limit",
    "Maximum number of requests that are listed as leaving the device. 0: all requests. JSON output always lists all.",
    click.IntRange(min=0),
    20,
)
def replay(
    new: Path, more: tuple[str, ...], old: Path | None, over: tuple[str, ...], as_json: bool, limit: int
) -> None:
    """Replay recorded decisions under the policy NEW, and report what changes: requests that move to another target,
    requests that leave the device, cost and latency.

    Exit code: 0 no request that stayed on the device would leave it, 1 at least one would or may, 2 the policy has
    errors, there are no records, or bad arguments.
    """
    new_policy = _valid_policy(new)
    old_policy = None if old is None else _valid_policy(old)
    try:
        reader = RecordReader(record_files((*over, *more)))
    except OSError as error:
        raise _Usage(str(error)) from error
    report = run_replay(reader, new_policy, old_policy)
    print_bad_lines(new_console(stderr=True), reader)
    if not report.requests and not report.undecided:
        raise _Usage(f"No decision records in {', '.join((*over, *more))}.")
    if as_json:
        click.echo(msgspec.json.encode(replay_document(report, reader)))
    else:
        print_replay(new_console(), report, reader, limit=limit)
    raise SystemExit(FOUND if report.leaving else OK)


@main.command()
@click.argument("file", type=click.Choice(["policy", "fleet", "operators", "trust"]), default="policy")
def schema(file: str) -> None:
    """Print the JSON schema of policy files, of fleet.yaml, of operators.yaml or of trust.yaml."""
    structs: dict[str, type[msgspec.Struct]] = {"fleet": FleetDoc, "operators": OperatorsDoc, "trust": TrustDoc}
    click.echo(policy_schema() if file == "policy" else schema_of(structs[file], f"Causeway {file}.yaml"), nl=False)


def _valid_policy(path: Path) -> Policy:
    checked = check_file(path)
    errors = [problem for problem in checked.problems if problem.severity == "error"]
    print_problems(new_console(stderr=True), errors)
    if checked.policy is None:
        raise SystemExit(USAGE)
    return checked.policy


class _Usage(click.ClickException):
    exit_code = USAGE


def _readable(signals: str) -> frozenset[str]:
    """Return the signals of a list, or of the file of that name. `#` starts a comment."""
    try:
        text = Path(signals).read_text(encoding="utf-8") if Path(signals).is_file() else signals
    except (OSError, UnicodeDecodeError) as error:
        raise _Usage(f"--signals {signals[:100]}: {error}") from error
    names = re.sub(r"#.*", "", text).replace(",", " ").split()
    unknown = [name for name in names if find_signal(name) is None]
    if unknown or not names:
        what = "names no signal"
        if unknown:
            near = did_you_mean(unknown[0], SIGNALS)
            what = advice("signal", unknown[0], rewrites=False) or f"unknown signal `{unknown[0][:100]}`{near}"
        raise _Usage(f"--signals: {what}. Give a file, or a list of signals such as device.cpu,edge.queue.")
    return frozenset(names)


def _checked(paths: tuple[Path, ...], readable: frozenset[str] | None = None) -> list[Checked]:
    """Check each path, which is a fleet with its policies, a folder of policies, or one policy."""
    found: list[Checked] = []
    for path in paths:
        if is_fleet(path):
            fleet = check_fleet(path, readable)
            found += [fleet, *fleet.policies]
            continue
        try:
            found += [check_file(file, readable) for file in policy_files((path,))]
        except OSError as error:
            raise _Usage(str(error)) from error
    if not found:
        raise _Usage(f"No policy (*.yaml) and no fleet.yaml in {', '.join(map(str, paths))}.")
    return found


_Folder = click.Path(path_type=Path, file_okay=False)
_File = click.Path(path_type=Path, dir_okay=False)
_database = option(
    "--database",
    "URL of a PostgreSQL database, as postgresql://USER:PASSWORD@HOST/NAME. Default: a SQLite database "
    "in the state folder.",
    default="",
    metavar="URL",
)


@main.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False, exists=True))
@option(
    "--keys",
    "Folder with the private keys of the online roles (the roles that sign while the control plane runs).",
    _Folder,
    required=True,
)
@option(
    "--state-dir",
    "State folder of this server. The folder has the key that signs tokens, and SQLite's database.",
    _Folder,
    required=True,
)
@option(
    "--listen",
    "Address at which the server listens. Port 0: any free port.",
    default="127.0.0.1:8090",
    metavar="HOST:PORT",
)
@_database
@option("--issuer", "Value of the claim `iss` in the tokens that devices get.", default="causeway")
@option(
    "--max-files",
    "Maximum number of files that connections may open. A device's poll that waits for a change takes "
    "one file, any other connection takes two.",
    click.IntRange(min=64),
    65_536,
)
@option(
    "--tls-cert-file", "PEM file with the server's certificate. Default: the server uses no TLS.", _File, to="cert_file"
)
@option("--tls-key-file", "PEM file with the private key of the certificate in --tls-cert-file.", _File, to="key_file")
@option(
    "--tls-client-ca-file",
    "PEM file of the CAs that sign client certificates. Every client then needs such a certificate.",
    _File,
    to="client_ca_file",
)
@option("--device-ca", "Folder that `tls init` made. The CA in this folder issues the devices' certificates.", _Folder)
def serve(
    folder: Path,
    keys: Path,
    state_dir: Path,
    listen: str,
    database: str,
    issuer: str,
    max_files: int,
    device_ca: Path | None,
    **tls: Path | None,
) -> None:
    """Run the control plane of the fleet in FOLDER. When the control plane can serve, it prints `ready url=…` on
    stdout.

    Beyond loopback it needs a certificate, or a TLS proxy in front of it.

    Exit code: 0 stopped by a signal, 1 it cannot start, 2 bad arguments.
    """
    from ..app import ServeSettings
    from ..app import serve as run

    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise click.BadParameter(f"Expected HOST:PORT, such as 0.0.0.0:8090, not {listen!r}.", param_hint="--listen")
    start_log("info", "text")
    certificates = ListenerTls(**{name: "" if path is None else str(path) for name, path in tls.items()})
    settings = ServeSettings(
        folder,
        keys,
        state_dir,
        database,
        issuer,
        host.strip("[]"),
        int(port),
        tls=certificates,
        device_ca=device_ca,
        max_files=max_files,
    )
    try:
        run_fast(run(settings))
    except CausewayError as error:
        raise click.ClickException(error.message) from error
    except OSError as error:
        if error.filename is None:
            raise
        raise click.ClickException(f"{error.filename}: {error.strerror}.") from error


@main.command()
@click.argument("revision")
@option(
    "--state-dir",
    "State folder of the control plane, which has SQLite's database. Not needed with --database.",
    _Folder,
)
@_database
def downgrade(revision: str, state_dir: Path | None, database: str) -> None:
    """Take the database of a stopped control plane back to the schema REVISION, so that an earlier version of the
    control plane can use it.

    What later revisions added stays for the next upgrade. Exit code: 0 done, 1 not possible, nothing
    written, 2 bad arguments.
    """
    from ..app import sqlite_url
    from ..store.database import Store

    if not database:
        if state_dir is None:
            raise click.UsageError("No database is named. Add --state-dir or --database.")
        if not (state_dir / "fleet.db").exists():
            raise click.ClickException(f"There is no database fleet.db in {state_dir}.")
        database = sqlite_url(state_dir)

    async def run() -> None:
        await (await Store.open(database, downgrade=revision)).close()

    try:
        asyncio.run(run())
    except CausewayError as error:
        raise click.ClickException(error.message) from error
    click.echo(f"The database has revision {revision}.")
