"""The output of the commands: text for people, coloured on a terminal, or one JSON object for programs."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.text import Text

from router.documents.strict_yaml import Problem

from ..repository.folder import CheckedFleet
from ..repository.policies import CaseRun, CheckedPolicy
from ..repository.wording import counted

Checked = CheckedPolicy | CheckedFleet
_STYLE = {"error": "bold red", "warning": "yellow"}


class ProblemReport(msgspec.Struct, frozen=True):
    file: str
    line: int  # from 1; 0: the file as a whole
    column: int
    key: str
    severity: str
    message: str


class LintReport(msgspec.Struct, frozen=True):
    """The output of `lint --format json`."""

    files: int
    errors: int
    warnings: int
    problems: tuple[ProblemReport, ...]


def lint_report(checked: Sequence[Checked]) -> LintReport:
    problems = [problem for file in checked for problem in file.problems]
    return LintReport(
        files=len(checked),
        errors=sum(problem.severity == "error" for problem in problems),
        warnings=sum(problem.severity == "warning" for problem in problems),
        problems=tuple(
            ProblemReport(
                problem.location.file,
                problem.location.line,
                problem.location.column,
                problem.location.path,
                problem.severity,
                problem.message,
            )
            for problem in problems
        ),
    )


def print_problems(console: Console, problems: Sequence[Problem]) -> None:
    """Print ``file:line:column: error: message [key]``, which editors and CI systems recognise as a link."""
    for problem in problems:
        location = msgspec.structs.replace(problem.location, path="")
        key = f" [{problem.location.path}]" if problem.location.path else ""
        line = Text.assemble(f"{location}: ", (problem.severity, _STYLE[problem.severity]), f": {problem.message}{key}")
        console.print(line, soft_wrap=True)


def print_lint(console: Console, checked: Sequence[Checked]) -> None:
    for file in checked:
        print_problems(console, file.problems)
        if not file.problems and file.label:
            console.print(Text(f"{file.path}: ok  {file.label}"), soft_wrap=True)
    report = lint_report(checked)
    console.print(
        Text(f"{counted(report.files, 'file')}, {counted(report.errors, 'error')}, "
             f"{counted(report.warnings, 'warning')}")
    )  # fmt: skip


def print_run(console: Console, run: CaseRun) -> None:
    print_problems(console, run.problems)
    for result in run.results:
        if not result.differences:
            continue
        location = msgspec.structs.replace(result.location, path="")
        console.print(Text.assemble(f"{location}: ", ("FAIL", "bold red"), f" {result.name}"), soft_wrap=True)
        for difference in result.differences:
            console.print(Text(f"    {difference.key}"))
            console.print(Text(f"      - expected  {difference.expected}", "green"), soft_wrap=True)
            console.print(Text(f"      + found     {difference.found}", "red"), soft_wrap=True)
    if run.results:
        passed = sum(not result.differences for result in run.results)
        console.print(Text(f"{run.path}: {passed} of {len(run.results)} cases pass  ({run.policy})"), soft_wrap=True)
