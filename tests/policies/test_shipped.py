"""The shipped policies and examples: free of errors and warnings, valid by the schema, each with cases that pass."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from causeway_server.fleet.repository.policies import check_file, policy_files, run_file, yaml_in
from causeway_server.router.checks.cases import read_cases, run_cases
from causeway_server.router.policy.compiled import Policy
from causeway_server.router.policy.file import policy_schema
from causeway_server.router.policy.signals import SIGNALS

POLICIES = Path(__file__).parents[2] / "policies"
EXAMPLES = POLICIES.parent / "examples" / "policies"
SHIPPED = policy_files((POLICIES, EXAMPLES))
CASES = [*yaml_in(POLICIES / "cases"), *yaml_in(EXAMPLES / "cases")]


def load(path: Path) -> Policy:
    policy = check_file(path).policy
    assert policy is not None
    return policy


def test_the_named_policies_ship() -> None:
    assert {path.stem for path in SHIPPED} >= {"default", "offline_first", "private", "cost_cap"}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_policy_has_no_problem(path: Path) -> None:
    """No error and no warning: they are examples."""
    checked = check_file(path)
    assert [str(problem) for problem in checked.problems] == []
    assert checked.policy is not None


def test_the_schema_file_is_up_to_date() -> None:
    """If not: `causeway-fleet schema > policies/schema.json`."""
    assert (POLICIES / "schema.json").read_bytes() == policy_schema()


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_policy_is_valid_by_the_schema(path: Path) -> None:
    schema = json.loads((POLICIES / "schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(yaml.safe_load(path.read_text()), schema, jsonschema.Draft202012Validator)


REFUSED_BY_SCHEMA = [
    ("routes", []),
    ("version", 2),
    ("surprise", 1),
    ("targets", {"a b": {"at": "edge", "model": "m"}}),
    ("targets", {"a": {"at": "moon", "model": "m"}}),
    ("limits", {"queue": -1}),
    ("cache", [{"exact": {"ttl": "30"}}]),
    ("routes", [{"name": "r", "use": ["a"], "handoff": {"after_tokens": 0, "below": 0.5}}]),
    ("constraints", None),
]


@pytest.mark.parametrize(("key", "value"), REFUSED_BY_SCHEMA, ids=str)
def test_the_schema_refuses_what_the_daemon_refuses(key: str, value: object, tmp_path: Path) -> None:
    document = yaml.safe_load((POLICIES / "default.yaml").read_text())
    document[key] = value
    schema = json.loads((POLICIES / "schema.json").read_text())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, schema, jsonschema.Draft202012Validator)
    broken = tmp_path / "broken.yaml"
    broken.write_text(yaml.safe_dump(document))
    assert check_file(broken).policy is None


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_every_case_passes(path: Path) -> None:
    run = run_file(path)
    assert run.problems == ()
    assert run.results
    assert [(result.name, result.differences) for result in run.results if result.differences] == []


def test_every_route_of_a_shipped_policy_has_a_case() -> None:
    covered: dict[str, set[str]] = {path.stem: set() for path in SHIPPED}
    for path in CASES:
        cases, _, _ = read_cases(path.read_text(encoding="utf-8"), str(path))
        assert cases is not None
        expected = {case.expect.route for case in cases.cases if isinstance(case.expect.route, str)}
        covered[Path(cases.policy).stem] |= expected
    for path in SHIPPED:
        assert {route.name for route in load(path).routes} <= covered[path.stem]


def test_a_case_can_fail() -> None:
    """Run against another policy, the cases of the default fail: they do compare something."""
    path = POLICIES / "cases" / "default.yaml"
    cases, document, _ = read_cases(path.read_text(encoding="utf-8"), str(path))
    assert cases is not None
    results = run_cases(cases, document, load(POLICIES / "private.yaml"))
    differing = [result for result in results if result.differences]
    assert len(differing) > len(results) // 2
    assert {difference.key for result in differing for difference in result.differences} >= {"route", "targets"}


def test_the_private_policy_has_no_cloud_target() -> None:
    policy = load(POLICIES / "private.yaml")
    assert {target.at for target in policy.targets} == {"edge"}
    assert [(constraint.when, constraint.keep) for constraint in policy.constraints] == [(None, "on_device")]


def test_shipped_policies_name_only_signals_of_the_table() -> None:
    for path in SHIPPED:
        assert load(path).needs <= set(SIGNALS)
