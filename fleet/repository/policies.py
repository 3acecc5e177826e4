"""Policies and their test cases: finding files, checking policies, running cases. Only reads files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from causeway_server.router.bundle.manifest import SignalKind
from causeway_server.router.checks.cases import CaseResult, read_cases, run_cases
from causeway_server.router.documents.strict_yaml import Problem, SourceLocation
from causeway_server.router.errors import PolicyError
from causeway_server.router.policy.compiled import Policy, check_policy, with_adapters

CASES = "cases"
AdapterNames = Mapping[str, Sequence[str]]
"""The LoRA adapters of models on the device, by the model's name."""
_SUFFIXES = (".yaml", ".yml")


class CheckedPolicy(msgspec.Struct, frozen=True):
    """A policy file that was read. `policy` is None if any problem is an error."""

    path: Path
    policy: Policy | None
    problems: tuple[Problem, ...]

    @property
    def label(self) -> str:
        """``name@revision``; "" if the policy has errors."""
        return "" if self.policy is None else f"{self.policy.name}@{self.policy.revision}"


class CaseRun(msgspec.Struct, frozen=True):
    """A case file that was run. `results` is empty if `problems` prevented the run."""

    path: Path
    policy: str  # name@revision, "" if there is none
    results: tuple[CaseResult, ...]
    problems: tuple[Problem, ...]

    @property
    def failed(self) -> bool:
        return bool(self.problems) or any(result.differences for result in self.results)


def policy_files(paths: tuple[Path, ...]) -> list[Path]:
    """Return the files among `paths`, and the YAML files directly inside the folders. Raises FileNotFoundError."""
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"No such file or folder: {path}.")
        found += yaml_in(path) if path.is_dir() else [path]
    return found


def check_file(path: Path, readable: frozenset[str] | None = None) -> CheckedPolicy:
    """Check a policy file, which may be unreadable. Never raise. `readable`: signals of devices, if known."""
    try:
        # Invalid UTF-8 becomes U+FFFD, which keys and names must not contain, so that the problem gets a location.
        text = path.read_bytes().decode("utf-8", "replace")
    except OSError as error:
        return CheckedPolicy(path, None, (Problem(SourceLocation(str(path)), error.strerror or str(error)),))
    policy, problems = check_policy(text, str(path), readable=readable)
    return CheckedPolicy(path, policy, problems)


def calibrated_models(policy: Policy) -> Iterator[tuple[str, tuple[SignalKind, str]]]:
    """Yield each device model whose learned signals a policy compares, with the reason and the key."""
    edge = [target for target in policy.targets if target.at == "edge"]
    if edge and not edge[0].adapter and "edge.quality" in policy.needs:
        yield edge[0].model, ("edge.quality", "the policy compares `edge.quality`")
    for route in policy.routes:
        models = {target.model for target in route.targets if target.at == "edge" and not target.adapter}
        for model in sorted(models) if route.handoff is not None else ():
            yield model, ("confidence", f"route `{route.name}` compares the confidence of its first tokens (`handoff`)")


def run_file(
    path: Path, reported: Collection[Path] = (), adapters: Callable[[Path], Sequence[AdapterNames]] = lambda _: ()
) -> CaseRun:
    """Run the cases of a file against the policy that it names. Never raise.

    `reported`: resolved paths of policies whose problems are already reported. `adapters`: those of each cohort that
    runs a policy, in all of which a case must hold.
    """
    try:
        text = path.read_bytes().decode("utf-8", "replace")
    except OSError as error:
        return CaseRun(path, "", (), (Problem(SourceLocation(str(path)), error.strerror or str(error)),))
    cases, locations, problems = read_cases(text, str(path))
    if cases is None or problems:
        return CaseRun(path, "", (), problems)
    checked = check_file(path.parent / cases.policy)
    invalid = Problem(locations.find("policy"), f"the policy {cases.policy} is invalid or missing")
    if checked.policy is None:
        known = (path.parent / cases.policy).resolve() in reported
        return CaseRun(path, "", (), (invalid,) if known else (invalid, *checked.problems))
    try:
        policies = [with_adapters(checked.policy, names.get) for names in adapters(checked.path) or ({},)]
    except PolicyError:  # an unknown adapter, which the fleet's check reports
        return CaseRun(path, checked.label, (), (invalid,))
    of_cohorts = zip(*(run_cases(cases, locations, policy) for policy in policies), strict=True)
    results = [next((one for one in same if one.differences), same[0]) for same in of_cohorts]
    return CaseRun(path, checked.label, tuple(results), ())


def yaml_in(folder: Path) -> list[Path]:
    """Return the YAML files directly inside a folder, sorted; none if there is no folder."""
    inside = folder.iterdir() if folder.is_dir() else ()
    return sorted(path for path in inside if path.suffix in _SUFFIXES and path.is_file())
