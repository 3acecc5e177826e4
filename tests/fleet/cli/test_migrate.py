"""`lint --fix` and `migrate` of `causeway-fleet`: fleets, policies, cases and alert rules of the version before."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from causeway_server.fleet.cli.commands import main

FLEET = """\
version: 1
name: shops
cohorts:
  tills:
    policy: rules/till.yaml
    signals: [pictures.text]     # what they read
    settings: {modalities.max_parts: 3, decisions.record: cheap}
"""
POLICY = """\
version: 1
name: till
targets: {small: {at: edge, model: assistant}}
routes:
  - {name: text, when: 'has(pictures.text) && pictures.text', use: [small]}
  - {name: otherwise, use: [small]}
"""
CASES = """\
policy: ../till.yaml
cases:
  - {name: one, request: {prompt_tokens: 3}, snapshot: {pictures: {text: true}}, expect: {route: text}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A fleet of before."""
    (tmp_path / "rules" / "cases").mkdir(parents=True)
    (tmp_path / "fleet.yaml").write_text(FLEET)
    (tmp_path / "rules" / "till.yaml").write_text(POLICY)
    (tmp_path / "rules" / "cases" / "till.yaml").write_text(CASES)
    return tmp_path


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], env={"COLUMNS": "300"})


def test_lint_names_the_successors(folder: Path) -> None:
    result = run("lint", folder)
    assert result.exit_code == 1
    for old, new in (
        ("pictures.text", "images.text"),
        ("modalities.max_parts", "parts.max_parts"),
        ("decisions.record", "decisions.signals"),
    ):
        assert f"`{old}` is now `{new}`." in result.output
    assert "`causeway-fleet lint --fix` rewrites the file." in result.output


def test_lint_fixes_a_fleet_with_its_policies_and_cases(folder: Path) -> None:
    result = run("lint", "--fix", folder)
    assert result.exit_code == 0, result.output
    assert (folder / "fleet.yaml").read_text() == FLEET.replace("pictures.text", "images.text").replace(
        "modalities.max_parts: 3, decisions.record: cheap", "parts.max_parts: 3, decisions.signals: named"
    )
    assert run("test", folder).exit_code == 0
    assert sorted(path.name for path in folder.rglob("*.before")) == [
        "fleet.yaml.before",
        "till.yaml.before",
        "till.yaml.before",
    ]
    assert "rewritten" not in run("lint", "--fix", folder).output


def test_lint_fixes_a_folder_of_policies(folder: Path) -> None:
    assert run("lint", "--fix", folder / "rules").exit_code == 0
    assert run("test", folder / "rules").exit_code == 0


def test_a_file_that_cannot_be_rewritten_is_a_usage_error(folder: Path) -> None:
    (folder / "fleet.yaml").write_text("cohorts: {")
    assert run("lint", "--fix", folder).exit_code == 2


def test_alert_rules_are_rewritten_and_what_is_left_is_named(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text("a: causeway_cloud_retries_total\nb: causeway_cloud_hedges\n")
    result = run("migrate", rules)
    assert (result.exit_code, "rules.yaml:2: `causeway_cloud_hedges` was removed." in result.output) == (1, True)
    assert rules.read_text() == "a: causeway_gateway_retries_total\nb: causeway_cloud_hedges\n"
    rules.write_text("a: causeway_gateway_retries_total\n")
    assert run("migrate", rules).exit_code == 0


def test_an_old_signal_on_the_command_line_is_refused(folder: Path) -> None:
    policy = folder / "rules" / "till.yaml"
    run("lint", "--fix", policy)
    for arguments in (
        ("lint", policy, "--signals", "pictures.text"),
        ("route", policy, "hi", "--set", "pictures.text=true"),
    ):
        result = run(*arguments)
        assert "`pictures.text` is now `images.text`." in result.output
