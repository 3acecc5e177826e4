"""`causeway-fleet prove`, and the proofs in `lint` and `diff`."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from causeway_server.fleet.cli.commands import main

SOUND = """
version: 1
name: a
targets: {small: {at: edge, model: m}, large: {at: cloud, model: n}}
constraints: [{name: stays, keep: on_device, when: '"private" in request.tags'}]
routes: [{name: any, use: [small, large]}]
claims: [{name: promise, when: '"private" in request.tags', holds: '!outcome.leaves'}]
"""
LEAKING = SOUND.replace("in request.tags'}]\nroutes", "in request.tags && request.n < 3'}]\nroutes")
DEAD = SOUND.replace("routes: [", "routes: [{name: dead, use: [small], when: request.n < 5 && request.n * 2 > 10}, ")
UNPROVABLE = SOUND.replace("!outcome.leaves'", 'request.tags.map(t, t + "x") != ["ax"]\'')


def run(*args: object) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args], catch_exceptions=False)


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    (tmp_path / "policies" / "cases").mkdir(parents=True)
    return tmp_path / "policies" / "a.yaml"


@pytest.mark.parametrize(
    ("text", "code"), [(SOUND, 0), (LEAKING, 1), (DEAD, 1), (UNPROVABLE, 3), (SOUND.replace("keep", "kep"), 1)]
)
def test_the_exit_code_says_what_was_proved(policy: Path, text: str, code: int) -> None:
    policy.write_text(text)
    assert run("prove", policy).exit_code == code


def test_the_printed_case_fails_with_test(policy: Path) -> None:
    policy.write_text(LEAKING)
    _, _, after = run("prove", policy).output.partition("refuted   promise")
    lines = [line[6:] for line in after.splitlines()[1:]]
    cases = yaml.safe_load("\n".join(itertools.takewhile(lambda line: line[:2] in ("- ", "  "), lines)))
    (policy.parent / "cases" / "a.yaml").write_text(yaml.safe_dump({"policy": "../a.yaml", "cases": cases}))
    assert run("test", policy.parent).exit_code == 1
    policy.write_text(SOUND)
    assert run("test", policy.parent).exit_code == 0


def test_an_older_policy_is_compared(policy: Path, tmp_path: Path) -> None:
    older = tmp_path / "older.yaml"
    older.write_text(SOUND)
    policy.write_text(LEAKING.replace("claims", "# claims"))
    result = run("prove", policy, "--old", older, "--format", "json")
    found = {one["name"]: one["status"] for one in json.loads(result.output)[0]["proofs"]}
    assert (result.exit_code, found["leaves-no-more"], found["parts-leave-no-more"]) == (1, "refuted", "proved")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (LEAKING, "error: `promise` is refuted"),
        (LEAKING, "warning: `tag-private` is refuted"),
        (DEAD, "warning: `dead` is refuted"),
        (UNPROVABLE, "warning: `promise` is undecided"),
    ],
)
def test_lint_proves(policy: Path, text: str, line: str) -> None:
    policy.write_text(text)
    output = run("lint", policy).output
    assert line in output
    assert f"{policy}:0" not in output


def test_without_z3_lint_checks_as_before_and_prove_says_what_to_install(
    policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "z3", None)
    policy.write_text(LEAKING)
    assert run("lint", policy).exit_code == 0
    result = run("prove", policy)
    assert (result.exit_code, "pip install 'causeway-router[fleet]'" in result.output) == (2, True)
