"""`causeway-fleet`: exit codes, locations, and output for people and programs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from causeway_server.fleet.cli.commands import SECTIONS, main
from causeway_server.router.policy.file import policy_schema

POLICIES = Path(__file__).parents[3] / "policies"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A policy repository of a fleet: a copy of the shipped policies and cases."""
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


def test_lint_names_each_policy_with_its_revision(folder: Path) -> None:
    """Exit code 0. Case files are not policies."""
    result = run("lint", folder)
    assert result.exit_code == 0
    assert "4 files, 0 errors, 0 warnings" in result.output
    assert f"{folder / 'private.yaml'}: ok  private@" in result.output


def test_lint_points_at_each_mistake(folder: Path) -> None:
    spoil(folder, "device.temperature_c", "device.temprature_c")
    result = run("lint", folder / "default.yaml")
    assert result.exit_code == 1
    line = (folder / "default.yaml").read_text().splitlines().index(next_line(folder, "temprature")) + 1
    assert f"{folder / 'default.yaml'}:{line}:11: error: unknown signal `device.temprature_c`" in result.output
    assert "[routes[0].when]" in result.output
    assert "1 file, 1 error, 0 warnings" in result.output


def next_line(folder: Path, word: str) -> str:
    return next(line for line in (folder / "default.yaml").read_text().splitlines() if word in line)


def test_lint_prints_one_json_object_for_programs(folder: Path) -> None:
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
            "message": "`egde` is not edge, cloud, cloud:NAME, or a list of cloud:NAME in order",
        }
    ]


def test_lint_lets_warnings_pass_unless_strict(folder: Path) -> None:
    spoil(folder, "  - name: otherwise\n    use", "  - name: otherwise\n    when: request.stream\n    use")
    relaxed = run("lint", folder)
    assert relaxed.exit_code == 0
    assert "warning: every route has a `when`" in relaxed.output
    assert run("lint", "--strict", folder).exit_code == 1


@pytest.mark.parametrize("path", ["missing.yaml", "empty"])
def test_lint_without_a_policy_is_a_usage_error(tmp_path: Path, path: str) -> None:
    """A typo in a CI script must not look like success."""
    (tmp_path / "empty").mkdir()
    result = run("lint", tmp_path / path)
    assert result.exit_code == 2
    assert path in result.output


def test_lint_reports_a_file_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_bytes(b"version: 1\nname: \xff\xfe\n")
    result = run("lint", tmp_path / "p.yaml")
    assert result.exit_code == 1
    assert "error:" in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)


def test_lint_reports_an_unreadable_path(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").mkdir()
    (tmp_path / "p.yaml" / "q.yaml").symlink_to(tmp_path / "nowhere")
    assert run("lint", tmp_path / "p.yaml").exit_code == 2


# --- test ------------------------------------------------------------------------------------------------------------


def test_test_runs_every_case(folder: Path) -> None:
    result = run("test", folder)
    assert result.exit_code == 0, result.output
    for name in ("default", "offline_first", "private", "cost_cap"):
        assert f"{folder / 'cases' / name}.yaml: " in result.output
    assert "FAIL" not in result.output


@pytest.mark.slow
def test_test_shows_the_expected_and_the_actual_value(folder: Path) -> None:
    spoil(folder, "request.prompt_tokens < 48", "request.prompt_tokens < 4")
    result = run("test", folder)
    assert result.exit_code == 1
    name = "FAIL a short prompt starts on the device and may be handed off"
    assert f"{folder / 'cases' / 'default.yaml'}:3:5: {name}" in result.output
    assert "      - expected  [small, large, small]" in result.output
    assert "      + found     [large, small]" in result.output
    assert "      - expected  rule_held fast-path" in result.output


@pytest.mark.slow
def test_test_refuses_an_invalid_policy(folder: Path) -> None:
    """Whether or not a case names it."""
    spoil(folder, "at: edge", "at: egde", "private.yaml")
    result = run("test", folder)
    assert result.exit_code == 1
    assert result.output.count("`egde` is not edge, cloud") == 1
    (folder / "cases" / "private.yaml").unlink()
    assert run("test", folder).exit_code == 1


@pytest.mark.slow
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
    """A misspelt key in a case would test nothing."""
    spoil(folder / "cases", old, new)
    result = run("test", folder)
    assert result.exit_code == 1
    assert words in result.output
    assert f"{folder / 'cases' / 'default.yaml'}:" in result.output


@pytest.mark.slow
def test_an_expected_error_that_does_not_come_is_a_difference(folder: Path) -> None:
    spoil(folder / "cases", "request: {model: gpt-4o}", "request: {model: small}")
    result = run("test", folder)
    assert result.exit_code == 1
    assert "      - expected  model_not_found" in result.output
    spoil(folder / "cases", "request: {model: small}", "request: {model: gone}")
    result = run("test", folder)
    assert "      + found     model_not_found" in result.output


def test_a_test_without_cases_is_a_usage_error(folder: Path) -> None:
    shutil.rmtree(folder / "cases")
    result = run("test", folder)
    assert result.exit_code == 2
    assert "a test without cases does not pass" in result.output
    assert run("test", folder / "nowhere").exit_code == 2


# --- schema ----------------------------------------------------------------------------------------------------------


def test_schema_prints_the_shipped_schema() -> None:
    result = run("schema")
    assert result.exit_code == 0
    assert result.output.encode() == policy_schema()
    assert json.loads(result.output)["title"] == "Causeway policy"


def test_help_names_the_three_commands() -> None:
    output = run("--help").output
    assert all(word in output for word in ("lint", "test", "schema"))
    assert output.count("...") == 1  # of the usage line: no command is cut short
    assert sorted(name for names in SECTIONS.values() for name in names) == sorted(main.commands)


# --- route -----------------------------------------------------------------------------------------------------------


def test_route_tries_a_draft_without_a_device(folder: Path) -> None:
    """The revision is the file's, and the explanation is the daemon's."""
    result = run("route", folder / "default.yaml", "turn on the light", "--set", "device.temperature_c=90")
    assert result.exit_code == 0, result.output
    for words in ("device-in-trouble  default@", "1.  large", "device   temperature_c 90", "a draft:"):
        assert words in result.stdout
    document = json.loads(run("route", folder / "default.yaml", "x", "--set", "down=small", "--format", "json").stdout)
    assert [plan["target"]["name"] for plan in document["decision"]["attempts"]] == ["large", "small"]


def test_route_of_an_invalid_draft_names_the_mistake(folder: Path) -> None:
    spoil(folder, "device.temperature_c > 85", "device.temperature_c = 85")
    result = run("route", folder / "default.yaml", "x")
    assert result.exit_code == 1
    assert "write == to compare [routes[0].when]" in result.output


@pytest.mark.parametrize(("setting", "code"), [("device.temp=1", 2), ("request.model=none", 1)])
def test_route_with_a_wrong_setting_is_an_error(folder: Path, setting: str, code: int) -> None:
    assert run("route", folder / "default.yaml", "x", "--set", setting).exit_code == code


# --- lint --signals --------------------------------------------------------------------------------------------------


def test_lint_warns_of_signals_that_no_device_of_the_list_can_read(folder: Path) -> None:
    """A list, or a file with comments."""
    (folder.parent / "readable.txt").write_text("# of the kiosks\nedge.queue, cloud.reachable\n")
    for signals in ("edge.queue,cloud.reachable", str(folder.parent / "readable.txt")):
        result = run("lint", "--signals", signals, folder / "default.yaml")
        assert result.exit_code == 0
        assert "no device can read device.temperature_c" in result.output
        assert "no device can read edge.queue" not in result.output


@pytest.mark.parametrize("signals", ["device.temprature_c", "missing.txt", ","])
def test_a_signal_list_with_a_mistake_is_a_usage_error(folder: Path, signals: str) -> None:
    result = run("lint", "--signals", signals, folder / "default.yaml")
    assert result.exit_code == 2
    assert "--signals: " in result.output
