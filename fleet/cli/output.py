"""The output of `lint`, `test` and `replay`: text for people, coloured on a terminal, or one JSON object for programs.

`replay` prints first the requests that leave the device, then other moves, unknown outcomes, cost and latency.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from causeway_server.router.checks.possible import NO_ANSWER
from causeway_server.router.checks.report import MIN_OBSERVED, Cause, Interval, LeavingRequest, ReplayReport
from causeway_server.router.documents.strict_yaml import Problem

from ..repository.folder import CheckedFleet
from ..repository.policies import CaseRun, CheckedPolicy
from ..repository.records import BadLine, RecordReader
from .rollout_output import counted

Checked = CheckedPolicy | CheckedFleet
_STYLE = {"error": "bold red", "warning": "yellow"}
_CAUSES: dict[Cause, str] = {
    "leaves": "goes to the cloud",
    "may_leave": "may go to the cloud, after a failure or a handoff",
    "unknown": "may go to the cloud: depends on {signals}, not recorded",
}
_SHORT_CAUSES: dict[Cause, str] = {
    "leaves": "surely",
    "may_leave": "may go to the cloud as a fallback",
    "unknown": "unknown",
}


class ProblemReport(msgspec.Struct, frozen=True):
    file: str
    line: int  # line number from 1; 0: the file as a whole
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
            ProblemReport(place.file, place.line, place.column, place.path, problem.severity, problem.message)
            for problem in problems
            for place in (problem.location,)
        ),
    )


def new_console(*, stderr: bool = False) -> Console:
    return Console(highlight=False, markup=False, emoji=False, stderr=stderr)


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


class LeavingReport(LeavingRequest, frozen=True):
    """A request that would or may leave the device, with the file of its record."""

    file: str


class ReplayDocument(msgspec.Struct, frozen=True):
    """The output of `replay --format json`."""

    summary: str
    report: ReplayReport
    leaving: tuple[LeavingReport, ...]
    bad_lines: tuple[BadLine, ...]
    bad_line_count: int
    repeated_records: int


def summary(report: ReplayReport) -> str:
    """Return the first line, which says whether requests that stayed on the device would leave it."""
    unknown = sum(one.requests for one in report.unknown)
    end = f"; {counted(unknown, 'outcome')} unknown" if unknown else ""
    of = f"of {counted(report.requests, 'request')}"
    if not report.leaving:
        return f"No request that stayed on the device would leave it, {of}{end}"
    causes = Counter(one.cause for one in report.leaving)
    parts = [f"{causes[cause]} {text}" for cause, text in _SHORT_CAUSES.items() if causes[cause]]
    bound = sum(bool(one.bound_by) for one in report.leaving)
    kept = f", {bound} of them bound to the device before" if bound else ""
    leaving = f"{counted(len(report.leaving), 'request')} that stayed on the device would leave it{kept}"
    return f"{leaving} ({', '.join(parts)}), {of}{end}"


def replay_document(report: ReplayReport, reader: RecordReader) -> ReplayDocument:
    leaving = tuple(
        LeavingReport(**msgspec.structs.asdict(one), file=reader.file_of(one.position)) for one in report.leaving
    )
    return ReplayDocument(
        summary=summary(report),
        report=msgspec.structs.replace(report, leaving=()),
        leaving=leaving,
        bad_lines=tuple(reader.bad_lines),
        bad_line_count=reader.bad_count,
        repeated_records=reader.repeated,
    )


def print_replay(console: Console, report: ReplayReport, reader: RecordReader, *, limit: int) -> None:
    """Print the report, with the first `limit` requests that leave the device."""
    console.print(Text(summary(report), "bold red" if report.leaving else "bold green"), soft_wrap=True)
    if lost := sum(move.requests for move in report.moves if move.moved and move.after == str(NO_ANSWER)):
        console.print(Text(f"{counted(lost, 'request')} that had an answer would get none", "bold red"))
    versus = f"compared with {report.old}" if report.old else "compared with the recorded decisions"
    console.print(Text(f"{report.policy}, {versus}", "dim"), soft_wrap=True)
    _print_leaving(console, report, reader, limit)
    _print_moves(console, report)
    _print_unknown(console, report)
    _print_cost(console, report)
    _print_latency(console, report)
    if report.undecided:
        console.print(
            Text(
                f"{counted(report.undecided, 'record')} not replayed: refused before a decision (rate, queue, shutdown)"
            )
        )
    if reader.repeated:
        console.print(Text(f"{counted(reader.repeated, 'record')} read once although repeated"))


def print_bad_lines(console: Console, reader: RecordReader) -> None:
    for bad in reader.bad_lines:
        console.print(Text(f"{bad.file}:{bad.line}: {bad.message}", "yellow"), soft_wrap=True)
    if more := reader.bad_count - len(reader.bad_lines):
        console.print(Text(f"… and {more} more lines that cannot be read", "yellow"))


def _print_leaving(console: Console, report: ReplayReport, reader: RecordReader, limit: int) -> None:
    if not report.leaving:
        return
    shown = report.leaving[:limit] if limit else report.leaving
    rows = [
        (
            one.id,
            reader.file_of(one.position),
            ", ".join(one.tags),
            one.before,
            one.after,
            one.rule,
            _CAUSES[one.cause].format(signals=", ".join(one.hangs_on))
            + (f"; bound by {', '.join(one.bound_by)}" if one.bound_by else ""),
        )
        for one in shown
    ]
    _print_table(console, "Would leave the device", ("record", "file", "tags", "was", "now", "rule", "why"), rows)
    if more := len(report.leaving) - len(shown):
        console.print(Text(f"… and {more} more: --limit 0 or --format json lists all", "red"))


def _print_moves(console: Console, report: ReplayReport) -> None:
    rows = [
        (f"{move.requests}", move.before, move.after if move.moved else "stays", move.rule_before, move.rule_after)
        for move in report.moves
    ]
    _print_table(console, "Requests", ("requests", "from", "to", "rule before", "rule now"), rows)


def _print_unknown(console: Console, report: ReplayReport) -> None:
    rows = [
        (f"{one.requests}", one.before, " or ".join(one.possible), ", ".join(one.hangs_on)) for one in report.unknown
    ]
    _print_table(console, "Unknown, because a signal was not recorded", ("requests", "from", "to", "hangs on"), rows)


def _print_cost(console: Console, report: ReplayReport) -> None:
    cost = report.cost
    after = f"{cost.after_least_usd:.4f}"
    if cost.after_most_usd != cost.after_least_usd:
        after += f" to {cost.after_most_usd:.4f}"
    console.print(Text(f"Cost of the same tokens: {cost.before_usd:.4f} USD before, {after} USD after"))


def _print_latency(console: Console, report: ReplayReport) -> None:
    latency = report.latency
    rows = [(row.time, f"p{row.share * 100:g}", _interval(row.before), _interval(row.after)) for row in latency.rows]
    title = f"Estimated latency of {counted(latency.requests, 'answer')}, ms (95 % interval)"
    _print_table(console, title, ("time", "", "before", "after"), rows)
    if latency.not_estimated:
        text = (
            f"{counted(latency.not_estimated, 'answer')} not estimated, as their target has fewer than {MIN_OBSERVED}"
        )
        console.print(Text(f"{text} answers were recorded"), soft_wrap=True)


def _print_table(console: Console, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if not rows:
        return
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="dim")
    for name in head:
        table.add_column(name, justify="right" if name == "requests" else "left", overflow="fold")
    for row in rows:
        table.add_row(*[Text(cell) for cell in row])
    console.print()
    console.print(table)
    console.print()


def _interval(interval: Interval) -> str:
    return f"{interval.value:.1f} ({interval.low:.1f} to {interval.high:.1f})"
