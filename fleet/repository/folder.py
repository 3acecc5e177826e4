"""Reading and checking of a fleet's folder, which is `fleet.yaml` and every file that it names, and creation of a new
folder. `fleet_problems` and the functions after it are pure: the checks of `fleet.yaml` beyond its grammar.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from string import Template

import msgspec

from causeway_server.router.bundle.manifest import is_scale
from causeway_server.router.bundle.settings import read_setting
from causeway_server.router.checks.cases import read_cases
from causeway_server.router.documents.reader import KeyLocations, did_you_mean, read_struct
from causeway_server.router.documents.strict_yaml import Problem, SourceLocation, YamlError, read_yaml
from causeway_server.router.migrate.rewrite import DocumentKind, scalars_at
from causeway_server.router.policy.signals import SIGNALS, find_signal
from causeway_server.router.renames import REWRITES, advice, find

from .fleet_file import FLEET_FILE, CohortDoc, FleetDoc, ModelDoc, ProjectorDoc, WeightsFile, is_hasty, rollout_problems
from .policies import CASES, AdapterNames, CheckedPolicy, calibrated_models, check_file, yaml_in

POLICIES = "policies"


class CheckedFleet(msgspec.Struct, frozen=True):
    """A checked fleet; `problems` of `fleet.yaml`, as each policy has its own. `fleet`: None if unreadable."""

    path: Path  # path of fleet.yaml
    fleet: FleetDoc | None
    policies: tuple[CheckedPolicy, ...]
    problems: tuple[Problem, ...]

    @property
    def label(self) -> str:
        """The fleet's name and its number of cohorts; "" if it has errors."""
        if self.fleet is None or self.failed:
            return ""
        count = len(self.fleet.cohorts)
        return f"{self.fleet.name}, {count} cohort{'s' if count > 1 else ''}"

    @property
    def failed(self) -> bool:
        """Whether `fleet.yaml` has errors."""
        return any(problem.severity == "error" for problem in self.problems)

    @property
    def folder(self) -> Path:
        return self.path.parent

    def adapters(self, policy: Path) -> list[AdapterNames]:
        """Return the names of the models' adapters, for each cohort that runs `policy`."""
        cohorts = () if self.fleet is None else self.fleet.cohorts.values()
        return [one.adapters for one in cohorts if (self.folder / one.policy).resolve() == policy.resolve()]


def is_fleet(path: Path) -> bool:
    """Return whether the path is a `fleet.yaml`, or a folder with one."""
    return (path / FLEET_FILE).is_file() if path.is_dir() else path.name == FLEET_FILE


def documents(path: Path) -> list[tuple[Path, DocumentKind]]:
    """Return the files in which names of the previous version may occur: of a fleet, a folder or a policy."""
    folder = path if path.is_dir() else path.parent
    found: list[tuple[Path, DocumentKind]] = []
    policies = yaml_in(path) if path.is_dir() else [path]
    if is_fleet(path):
        file = folder / FLEET_FILE
        found.append((file, "fleet.yaml"))
        named: set[Path] = set()
        with contextlib.suppress(OSError, UnicodeDecodeError, YamlError):  # named where the file is rewritten
            tree = read_yaml(file.read_text(encoding="utf-8"), str(file))
            named = {folder / scalar.text for scalar in scalars_at(tree, "cohorts.NAME.policy")}
        policies = sorted({one for one in named if one.is_file()} | {*yaml_in(folder / POLICIES)})
    found += [(one, "policy") for one in policies]
    cases = {case for one in policies for case in yaml_in(one.parent / CASES)}
    return [*found, *((case, "cases") for case in sorted(cases))]


def check_fleet(path: Path, readable: frozenset[str] | None = None) -> CheckedFleet:
    """Check `fleet.yaml` (or its folder), its files, and every policy in the folder. Never raise.

    `readable`: signals that devices can read, for cohorts that do not list theirs; None if unknown.
    """
    file = path / FLEET_FILE if path.is_dir() else path
    try:
        text = file.read_bytes().decode("utf-8", "replace")
    except OSError as error:
        return CheckedFleet(file, None, (), (Problem(SourceLocation(str(file)), error.strerror or str(error)),))
    fleet, locations, problems = read_struct(text, str(file), FleetDoc)
    named = [] if fleet is None else [file.parent / cohort.policy for cohort in fleet.cohorts.values()]
    files = {*(path for path in named if path.is_file()), *yaml_in(file.parent / POLICIES)}
    once = sorted({path.resolve(): path for path in sorted(files)}.values())
    policies = tuple(_check_policy(path, file.parent, fleet, readable) for path in once)
    if fleet is not None:
        problems += (*fleet_problems(fleet, locations), *_file_problems(file.parent, fleet, locations))
        problems += tuple(_policy_problems(file.parent, fleet, policies, locations))
    return CheckedFleet(file, fleet, policies, problems)


def _check_policy(path: Path, folder: Path, fleet: FleetDoc | None, readable: frozenset[str] | None) -> CheckedPolicy:
    """Check a policy for each cohort that runs it; a problem of several cohorts is reported once."""
    cohorts = () if fleet is None else fleet.cohorts.values()
    devices = [cohort.signals for cohort in cohorts if (folder / cohort.policy).resolve() == path.resolve()]
    checked = [check_file(path, readable if signals is None else frozenset(signals)) for signals in devices or [None]]
    problems = tuple(dict.fromkeys(problem for one in checked for problem in one.problems))
    return msgspec.structs.replace(checked[0], problems=problems)


def cases_of(policy: Path) -> list[Path]:
    """Return the case files that name this policy, from the folder `cases` beside it."""
    found = []
    for path in yaml_in(policy.parent / CASES):
        cases, _, _ = read_cases(path.read_bytes().decode("utf-8", "replace"), str(path))
        if cases is not None and (path.parent / cases.policy).resolve() == policy.resolve():
            found.append(path)
    return found


def _file_problems(folder: Path, fleet: FleetDoc, locations: KeyLocations) -> Iterator[Problem]:
    for name, cohort in fleet.cohorts.items():
        for key, path in _named_files(cohort):
            location = locations.find(f"cohorts.{name}.{key}")
            if message := _missing(folder, path):
                yield Problem(location, message)
            elif key == "policy" and not cases_of(folder / path):
                message = f"no test cases: no file in {(folder / path).parent / CASES} names this policy"
                yield Problem(location, message, "warning")


def _policy_problems(
    folder: Path, fleet: FleetDoc, policies: Sequence[CheckedPolicy], locations: KeyLocations
) -> Iterator[Problem]:
    """Find requirements of a cohort's policy that its models do not meet.

    1. A target needs an adapter that the bundle's model lacks. The models that devices already have are unknown here.
    2. The policy compares the confidence or quality of new weights, which come without a calibration: a signal is for
       weights that devices have now, so `edge.quality` is absent, and `handoff.below` compared with the raw score.
    """
    compiled = {one.path.resolve(): one.policy for one in policies}
    for name, cohort in fleet.cohorts.items():
        policy = compiled.get((folder / cohort.policy).resolve())
        if policy is None:
            continue
        for target in policy.targets:
            model = cohort.models.get(target.model) if target.at == "edge" and target.adapter else None
            if model is not None and target.adapter not in model.adapters:  # (1)
                yield Problem(
                    locations.find(f"cohorts.{name}.models.{target.model}"),
                    f"the target `{target.name}` of the policy uses {target.served}, but the model has no such "
                    f"adapter. Its adapters: {', '.join(model.adapters) or 'none'}",
                )
        for compared, (kind, use) in calibrated_models(policy):
            doc = cohort.models.get(compared)
            if doc is not None and not doc.uncalibrated and not {kind, "pair"} & set(doc.signals):  # (2)
                message = (
                    f"{use}, but these weights come without a signal `{kind}` or `pair` that was fitted "
                    "on them: add it to `signals`, or set `uncalibrated: true`"
                )
                yield Problem(locations.find(f"cohorts.{name}.models.{compared}"), message)


def _named_files(cohort: CohortDoc) -> Iterator[tuple[str, str]]:
    yield "policy", cohort.policy
    for model, doc in cohort.models.items():
        for key, one in doc.files.items():
            if one.file is not None:
                yield f"models.{model}{key}.file", one.file
        for key, image in doc.images.items():
            yield f"models.{model}{key}", image


def _missing(folder: Path, path: str) -> str:
    """Return the fault of a path of `fleet.yaml`; "" if there is none."""
    if not (folder / path).resolve().is_relative_to(folder.resolve()):
        return f"`{path}` is outside the fleet's folder: move the file into it"
    return "" if (folder / path).is_file() else f"the file `{path}` does not exist"


def fleet_problems(fleet: FleetDoc, locations: KeyLocations) -> tuple[Problem, ...]:
    """Check settings against the keys that a fleet may set, models, stages, and cohorts that no device can reach."""
    cohorts = (problem for name in fleet.cohorts for problem in _cohort(fleet, name, locations))
    return (*_unreachable(fleet, locations), *cohorts)


def _unreachable(fleet: FleetDoc, locations: KeyLocations) -> Iterator[Problem]:
    """Yield cohorts that get no device, because an earlier cohort has fewer or the same labels."""
    names = list(fleet.cohorts)
    for index, name in enumerate(names):
        for earlier in names[:index]:
            if fleet.cohorts[earlier].match.items() <= fleet.cohorts[name].match.items():
                message = f"no device can reach this cohort: {earlier} above matches all of its devices; move it above"
                yield Problem(locations.find(f"cohorts.{name}"), message)
                break


def _cohort(fleet: FleetDoc, name: str, locations: KeyLocations) -> Iterator[Problem]:
    cohort, path = fleet.cohorts[name], f"cohorts.{name}"
    for index, signal in enumerate(cohort.signals or ()):
        if find_signal(signal) is None:
            message = advice("signal", signal) or f"unknown signal `{signal}`{did_you_mean(signal, SIGNALS)}"
            yield Problem(locations.find(f"{path}.signals[{index}]"), message)
    for key, value in cohort.settings.items():
        try:
            read_setting(key, value)
        except ValueError as error:
            message = str(error) if find("edge.yaml", key) is None else f"{error}. {REWRITES['fleet.yaml']}"
            yield Problem(locations.find(f"{path}.settings.{key}"), message)
    for model, doc in cohort.models.items():
        for key, message in _model(doc):
            yield Problem(locations.find(f"{path}.models.{model}{key}"), message)
    for key, message in rollout_problems(cohort.rollout):
        yield Problem(locations.find(f"{path}.rollout.{key}"), message)
    if is_hasty(cohort.rollout):
        message = (
            "a healthy device without requests reports every 5 to 6 minutes: with less than 6m it would count as "
            "silent, unless `fleet.telemetry_interval_s` of the devices is short and they always have requests"
        )
        yield Problem(locations.find(f"{path}.rollout.silence"), message, "warning")


def _model(doc: ModelDoc) -> Iterator[tuple[str, str]]:
    """Yield the problems of a model, each with its key relative to the model's key."""
    for key, one in doc.files.items():
        if message := _weights(one):
            yield key, message
    for name, adapter in doc.adapters.items():
        if not is_scale(adapter.scale):
            yield f".adapters.{name}.scale", "must be a finite number other than 0"
    yield from _signals(doc)
    if doc.projector is not None:
        yield from _projector(doc, doc.projector)
    else:
        for key in doc.images:
            yield key, "the model lacks a `projector`, which an image needs"


def _projector(model: ModelDoc, doc: ProjectorDoc) -> Iterator[tuple[str, str]]:
    if None not in (doc.model_sha256, model.sha256) and doc.model_sha256 != model.sha256:
        yield (
            ".projector.model_sha256",
            f"the model's weights are {model.sha256}, but the projector was made for others",
        )


def _signals(model: ModelDoc) -> Iterator[tuple[str, str]]:
    for kind, doc in model.signals.items():
        key = f".signals.{kind}"
        if doc.model_sha256 is None:
            yield (
                key,
                "needs `model_sha256`, the hash of the weights it was fitted on (`judges_sha256` in its manifest)",
            )
        elif model.sha256 is not None and doc.model_sha256 != model.sha256:
            yield (
                f"{key}.model_sha256",
                f"the model's weights are {model.sha256}, but the signal was fitted on others",
            )
    if model.signals and model.uncalibrated:
        yield ".uncalibrated", "the model has `signals`, too: remove one of the two"


def _weights(doc: WeightsFile) -> str:
    """Return the fault of the weights; "" if there is none."""
    if (doc.file is None) == (doc.sha256 is None):
        return "needs either `file`, or `sha256` and `size_bytes` of an uploaded file"
    if (doc.sha256 is None) != (doc.size_bytes is None):
        return "`sha256` and `size_bytes` belong together; a `file` needs neither"
    return ""


def new_fleet(folder: Path) -> tuple[Path, ...]:
    """Write a new fleet's files (one cohort, a policy that stays on the device, its cases) and return their paths.

    Raises FileExistsError before anything was written, or OSError.
    """
    sources = {
        folder / FLEET_FILE: "new_fleet.yaml",
        folder / ".gitignore": "new_gitignore.txt",
        folder / "policies" / "default.yaml": "new_policy.yaml",
        folder / "policies" / "cases" / "default.yaml": "new_cases.yaml",
    }
    files = {path: Path(__file__).with_name(source).read_text(encoding="utf-8") for path, source in sources.items()}
    files[folder / FLEET_FILE] = Template(files[folder / FLEET_FILE]).substitute(name=fleet_name(folder))
    for path in files:
        if path.exists():
            raise FileExistsError(f"{path} already exists; nothing was written.")
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tuple(files)


def fleet_name(folder: Path) -> str:
    """Return the folder's name without the characters that a fleet's name may not have."""
    letters = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in folder.resolve().name)
    return letters.strip("-")[:64].strip("-") or "fleet"
