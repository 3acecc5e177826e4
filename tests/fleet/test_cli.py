"""`causeway-fleet`: exit codes, places, and output that people and programs can read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fleet.cli.commands import main
from router.policy.file import policy_schema

POLICIES = Path(__file__).parents[2] / "policies"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A fleet's own policy repository: the shipped policies and cases, free to be broken."""
    shutil.copytree(POLICIES, tmp_path / "policies")
    return tmp_path / "policies"


def run(*arguments: str | Path) -> Result:
    # Wide, so that no message is wrapped in the middle of what is compared.
    return CliRunner().invoke(main, [str(argument) for argument in arguments], env={"COLUMNS": "300"})


def spoil(folder: Path, old: str, new: str, name: str = "default.yaml") -> None:
    path = folder / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


# --- lint ------------------------------------------------------------------------------------------------------------


def test_lint_says_that_all_is_well(folder: Path) -> None:
    """Every policy is named with its revision; exit code 0; case files are no policies."""
    result = run("lint", folder)
    assert result.exit_code == 0
    assert "4 policies, 0 errors, 0 warnings" in result.output
    assert f"{folder / 'private.yaml'}: ok  private@" in result.output


def test_lint_points_at_each_mistake(folder: Path) -> None:
    """file:line:column: severity: message [key], and exit code 1."""
    spoil(folder, "device.temperature_c", "device.temprature_c")
    result = run("lint", folder / "default.yaml")
    assert result.exit_code == 1
    line = (folder / "default.yaml").read_text().splitlines().index(next_line(folder, "temprature")) + 1
    assert f"{folder / 'default.yaml'}:{line}:11: error: unknown signal `device.temprature_c`" in result.output
    assert "[routes[0].when]" in result.output
    assert "1 policy, 1 error, 0 warnings" in result.output


def next_line(folder: Path, word: str) -> str:
    return next(line for line in (folder / "default.yaml").read_text().splitlines() if word in line)


def test_lint_gives_programs_one_json_object(folder: Path) -> None:
    """The same findings, with file, line, column, key, severity and message as fields."""
    spoil(folder, "at: edge", "at: egde")
    result = run("lint", "--format", "json", folder)
    assert result.exit_code == 1
    report = json.loads(result.output)
    assert (report["files"], report["errors"], report["warnings"]) == (4, 1, 0)
    assert report["problems"] == [
        {
            "file": str(folder / "default.yaml"),
            "line": 11,
            "column": 9,
            "key": "targets.small.at",
            "severity": "error",
            "message": "`egde` is not one of cloud, edge, did you mean `edge`?",
        }
    ]


def test_lint_lets_warnings_pass_unless_strict(folder: Path) -> None:
    """A doubt is told; only --strict makes it fail."""
    spoil(folder, "  - name: otherwise\n    use", "  - name: otherwise\n    when: request.stream\n    use")
    relaxed = run("lint", folder)
    assert relaxed.exit_code == 0
    assert "warning: every route has a `when`" in relaxed.output
    assert run("lint", "--strict", folder).exit_code == 1


@pytest.mark.parametrize("path", ["missing.yaml", "empty"])
def test_lint_of_nothing_is_a_wrong_use(tmp_path: Path, path: str) -> None:
    """No file to check is exit code 2: a typo in a CI script must not look like success."""
    (tmp_path / "empty").mkdir()
    result = run("lint", tmp_path / path)
    assert result.exit_code == 2
    assert path in result.output


def test_lint_of_a_file_that_is_no_text(tmp_path: Path) -> None:
    """Bytes that are no UTF-8 are a finding with a place, not a traceback."""
    (tmp_path / "p.yaml").write_bytes(b"version: 1\nname: \xff\xfe\n")
    result = run("lint", tmp_path / "p.yaml")
    assert result.exit_code == 1
    assert "error:" in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)


def test_lint_of_a_folder_named_like_a_policy(tmp_path: Path) -> None:
    """An unreadable path is a finding of that path."""
    (tmp_path / "p.yaml").mkdir()
    (tmp_path / "p.yaml" / "q.yaml").symlink_to(tmp_path / "nowhere")
    assert run("lint", tmp_path / "p.yaml").exit_code == 2


# --- test ------------------------------------------------------------------------------------------------------------


def test_test_runs_every_case(folder: Path) -> None:
    """All cases of all policies pass as they ship, and their number is told."""
    result = run("test", folder)
    assert result.exit_code == 0, result.output
    for name in ("default", "offline_first", "private", "cost_cap"):
        assert f"{folder / 'cases' / name}.yaml: " in result.output
    assert "FAIL" not in result.output


def test_test_shows_what_was_expected_and_what_was_found(folder: Path) -> None:
    """A case that differs fails with its name, its place and both sides."""
    spoil(folder, "request.prompt_tokens < 48", "request.prompt_tokens < 4")
    result = run("test", folder)
    assert result.exit_code == 1
    name = "FAIL a short prompt starts on the device and may be handed off"
    assert f"{folder / 'cases' / 'default.yaml'}:3:5: {name}" in result.output
    assert "      - expected  [small, large, small]" in result.output
    assert "      + found     [large, small]" in result.output
    assert "      - expected  rule_held fast-path" in result.output


def test_test_refuses_a_broken_policy(folder: Path) -> None:
    """A policy with an error fails the run, whether or not a case names it."""
    spoil(folder, "at: edge", "at: egde", "private.yaml")
    result = run("test", folder)
    assert result.exit_code == 1
    assert "`egde` is not one of" in result.output
    (folder / "cases" / "private.yaml").unlink()
    assert run("test", folder).exit_code == 1


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("prompt_tokens: 12}", "prompt_token: 12}", "unknown key, did you mean `prompt_tokens`?"),
        ("temperature_c: 50", "temperatur_c: 50", "unknown key, did you mean `temperature_c`?"),
        ("code: rule_held", "code: rule_holds", "did you mean `rule_held`?"),
        ("down: [large]", "down: large", "must be a list"),
        ("policy: ../default.yaml", "policy: ../nowhere.yaml", "is invalid or missing"),
        ("expect: {error: model_not_found}", "expect: {}", "expects nothing"),
        ("targets: [small, large, small]", "targets: small", "must be a list"),
    ],
)
def test_a_case_file_is_read_as_strictly_as_a_policy(folder: Path, old: str, new: str, words: str) -> None:
    """A misspelt key in a case would test nothing: it is refused with its place."""
    spoil(folder / "cases", old, new)
    result = run("test", folder)
    assert result.exit_code == 1
    assert words in result.output
    assert f"{folder / 'cases' / 'default.yaml'}:" in result.output


def test_an_expected_error_that_does_not_come_is_a_difference(folder: Path) -> None:
    """model_not_found is compared both ways."""
    spoil(folder / "cases", "request: {model: gpt-4o}", "request: {model: small}")
    result = run("test", folder)
    assert result.exit_code == 1
    assert "      - expected  model_not_found" in result.output
    spoil(folder / "cases", "request: {model: small}", "request: {model: gone}")
    result = run("test", folder)
    assert "      + found     model_not_found" in result.output


def test_a_test_without_cases_is_a_wrong_use(folder: Path) -> None:
    """A CI line that tests nothing does not pass."""
    shutil.rmtree(folder / "cases")
    result = run("test", folder)
    assert result.exit_code == 2
    assert "a test without cases does not pass" in result.output
    assert run("test", folder / "nowhere").exit_code == 2


# --- schema ----------------------------------------------------------------------------------------------------------


def test_schema_prints_what_ships() -> None:
    """The output can be written to policies/schema.json as it is."""
    result = run("schema")
    assert result.exit_code == 0
    assert result.output.encode() == policy_schema()
    assert json.loads(result.output)["title"] == "Causeway policy"


def test_help_names_the_three_commands() -> None:
    """What a first look shows."""
    output = run("--help").output
    assert all(word in output for word in ("lint", "test", "schema"))
