"""`causeway-fleet`: checks the policies of a repository. Its CI needs one line: ``causeway-fleet test DIR``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click
import msgspec
from rich.console import Console

from router.policy.file import policy_schema

from .output import lint_report, print_lint, print_problems, print_run
from .policy_repository import CASES, case_files, check_file, policy_files, run_file

OK, FOUND, USAGE = 0, 1, 2
"""Exit codes: no errors; a policy or a case has errors; the command has nothing to check, or bad arguments."""


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="causeway", prog_name="causeway-fleet")
def main() -> None:
    """Check policies and run their test cases."""


@main.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--format",
    "output_format",
    type=click.Choice(["human", "json"]),
    default="human",
    show_default=True,
    help="Output for people, or one JSON object.",
)
@click.option("--strict", is_flag=True, help="Warnings count as errors.")
def lint(paths: tuple[Path, ...], output_format: Literal["human", "json"], strict: bool) -> None:
    """Check policy files, or all policies in a folder.

    Problems are printed with file, line, column and key. Exit code: 0 no errors, 1 errors found, 2 nothing to check.
    """
    checked = [check_file(path) for path in _policies(paths)]
    report = lint_report(checked)
    if output_format == "json":
        click.echo(msgspec.json.encode(report))
    else:
        print_lint(_console(), checked)
    raise SystemExit(FOUND if report.errors or (strict and report.warnings) else OK)


@main.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
def test(folder: Path) -> None:
    """Check the policies of FOLDER and run the test cases in FOLDER/cases.

    Exit code: 0 all pass, 1 a policy has errors or a case fails, 2 nothing to test.
    """
    console = _console()
    invalid = [checked for checked in map(check_file, _policies((folder,))) if checked.policy is None]
    files = case_files(folder)
    if not files:
        raise _Usage(f"no cases in {folder / CASES}; add at least one, a test without cases does not pass")
    for checked in invalid:
        print_problems(console, checked.problems)
    runs = [run_file(path) for path in files]
    for run in runs:
        print_run(console, run)
    raise SystemExit(FOUND if invalid or any(run.failed for run in runs) else OK)


@main.command()
def schema() -> None:
    """Print the JSON schema of policy files, for editors."""
    click.echo(policy_schema(), nl=False)


class _Usage(click.ClickException):
    exit_code = USAGE


def _policies(paths: tuple[Path, ...]) -> list[Path]:
    try:
        files = policy_files(paths)
    except OSError as error:
        raise _Usage(str(error)) from error
    if not files:
        raise _Usage(f"no policy (*.yaml) in {', '.join(map(str, paths))}")
    return files


def _console() -> Console:
    return Console(highlight=False, markup=False, emoji=False)
