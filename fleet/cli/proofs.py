"""The command `causeway-fleet prove`, and the proofs in `lint` and `diff`. They need z3, of the extra `fleet`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
import yaml
from rich.text import Text

from causeway_server.router.documents.reader import read_struct
from causeway_server.router.documents.strict_yaml import Problem, Severity, SourceLocation
from causeway_server.router.policy.compiled import Policy, check_policy
from causeway_server.router.policy.file import PolicyDoc
from causeway_server.router.serving.process import option

from ..repository.policies import CheckedPolicy, check_file, policy_files
from .output import new_console, print_problems
from .rollout_output import counted

if TYPE_CHECKING:
    from ..prover.proof import Proof

PROVED, REFUTED, USAGE, UNDECIDED = 0, 1, 2, 3
"""Exit codes: all proved; a statement is refuted, or a policy has errors; bad arguments; none is refuted, but one is
undecided."""
_STYLES = {"proved": "green", "refuted": "bold red", "undecided": "yellow"}
_PATHS = {"claim": "claims", "reach": "routes", "keep": "constraints"}
_MISSING = "z3 is not installed. Run: pip install 'causeway-router[fleet]'"


class ProofReport(msgspec.Struct, frozen=True):
    """The proofs of one policy, in `prove --format json`."""

    file: str
    policy: str
    proofs: tuple[Proof, ...]


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@option(
    "--old",
    "File of an earlier policy. The command proves that the policies in PATHS keep on the device everything "
    "that the earlier policy keeps on the device.",
    click.Path(path_type=Path, dir_okay=False, exists=True),
)
@option(
    "--timeout",
    "Maximum time, in seconds, for the proof of each statement. After this time the statement counts as undecided.",
    click.FloatRange(min=0.01),
    10.0,
    to="timeout_s",
)
@option(
    "--format",
    "Format of the output: `human`, for people, or `json` (one JSON object).",
    click.Choice(["human", "json"]),
    "human",
    to="output_format",
)
def prove(paths: tuple[Path, ...], old: Path | None, timeout_s: float, output_format: str) -> None:
    """Prove the promises of the policies in PATHS for all requests and all values of signals. If a promise does not
    hold, a counterexample is shown as a test case.

    Exit code: 0 proved, 1 refuted or the policy has errors, 2 bad arguments, 3 something is undecided.
    """
    if find_spec("z3") is None:
        raise click.UsageError(_MISSING)
    try:
        files = policy_files(paths)
    except OSError as error:
        raise click.UsageError(str(error)) from error
    if not files:
        raise click.UsageError(f"No policy (*.yaml) in {', '.join(map(str, paths))}.")
    from ..prover.proof import prove as run

    before = None if old is None else _valid(old)
    reports = []
    for file in files:
        policy = _valid(file)
        reports.append(ProofReport(str(file), f"{policy.name}@{policy.revision}", run(policy, before, timeout_s)))
    if output_format == "json":
        click.echo(msgspec.json.encode(reports))
    else:
        for report in reports:
            print_proofs(f"{report.file}: {report.policy}", report.proofs)
    raise SystemExit(exit_code(proof for report in reports for proof in report.proofs))


def exit_code(proofs: Iterator[Proof]) -> int:
    """Return the exit code for these proofs."""
    found = {proof.status for proof in proofs}
    return REFUTED if "refuted" in found else UNDECIDED if "undecided" in found else PROVED


def _valid(path: Path) -> Policy:
    checked = check_file(path)
    if checked.policy is None:
        print_problems(new_console(stderr=True), [one for one in checked.problems if one.severity == "error"])
        raise SystemExit(REFUTED)
    return checked.policy


def print_proofs(title: str, proofs: Sequence[Proof]) -> None:
    """Print each statement with its result, and each counterexample as a test case."""
    console = new_console()
    console.print(Text(title, "bold"), soft_wrap=True)
    for proof in proofs:
        why = f" ({proof.why})" if proof.why else ""
        line = Text.assemble("  ", (f"{proof.status:9}", _STYLES[proof.status]), f" {proof.name}: {proof.text}{why}")
        console.print(line, soft_wrap=True)
        if proof.case is not None:
            click.echo("".join(f"      {row}\n" for row in case_text(proof).splitlines()), nl=False)
    known = {status: sum(proof.status == status for proof in proofs) for status in _STYLES}
    console.print(
        Text(f"{counted(len(proofs), 'statement')}: " + ", ".join(f"{n} {status}" for status, n in known.items()))
    )


def case_text(proof: Proof) -> str:
    """Return the counterexample in the form of a file of test cases."""
    case = _filled(proof.case)
    assert isinstance(case, dict)
    case["expect"] = case.pop("expect")  # as people write them
    return yaml.safe_dump([case], default_flow_style=None, sort_keys=False, width=110, allow_unicode=True)


def _filled(value: object) -> object:
    """Return a value of a case as plain data, without what has its default."""
    if isinstance(value, dict):
        return {key: _filled(one) for key, one in value.items()}
    if isinstance(value, list | tuple | frozenset):
        return [_filled(one) for one in value]
    if not isinstance(value, msgspec.Struct):
        return value
    found = {}
    for field in msgspec.structs.fields(value):
        one = getattr(value, field.name)
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        if one != default:
            found[field.encode_name] = _filled(one)
    return found


def with_proofs(checked: CheckedPolicy) -> CheckedPolicy:
    """Return a checked policy with a problem for each statement that is not proved; as it is without z3."""
    if checked.policy is None:
        return checked
    if find_spec("z3") is None:
        if not checked.policy.claims:
            return checked
        unproved = Problem(SourceLocation(str(checked.path)), f"`claims` are not proved: {_MISSING}", "warning")
        return msgspec.structs.replace(checked, problems=(*checked.problems, unproved))
    from ..prover.proof import is_refused
    from ..prover.proof import prove as run

    proofs = [proof for proof in run(checked.policy) if proof.status != "proved"]
    if not proofs:
        return checked
    text = checked.path.read_bytes().decode("utf-8", "replace")
    doc, locations, _ = read_struct(text, str(checked.path), PolicyDoc)
    problems = list(checked.problems)
    for proof in proofs:
        listed = [] if doc is None else [one.name for one in getattr(doc, _PATHS[proof.kind], ())]
        path = f"{_PATHS[proof.kind]}[{listed.index(proof.name)}]" if proof.name in listed else _PATHS[proof.kind]
        message = f"`{proof.name}` is {proof.status}: {proof.text}. `causeway-fleet prove` shows why"
        severity: Severity = "error" if is_refused(proof, may_leave=True) else "warning"
        problems.append(Problem(locations.find(path), message, severity))
    return msgspec.structs.replace(checked, problems=tuple(problems))


def print_comparison(old: Path, new: Path) -> int:
    """Prove that no more may leave under the policy `new` than under `old`, and return the exit code."""
    after, before = (check_policy(path.read_bytes().decode("utf-8", "replace"))[0] for path in (new, old))
    if after is None or before is None:
        click.echo("    Not proved: one of the two policies has errors.")
        return UNDECIDED
    if find_spec("z3") is None:
        click.echo(f"    Not proved: {_MISSING}.")
        return UNDECIDED
    from ..prover.proof import prove as run

    proofs = run(after, before, kinds=("compare",))
    print_proofs("    Proof against the signed policy", proofs)
    return exit_code(iter(proofs))
