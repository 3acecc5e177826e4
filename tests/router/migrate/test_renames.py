"""The table of renamed things agrees with the code, and every old name is refused with its successor."""

from __future__ import annotations

import re

import click
import msgspec
import pytest
from click.testing import CliRunner

from causeway_server.cloud_pool.cli.main import main as causeway_cloud
from causeway_server.edge_node.config.loader import config_variable, read_environ, read_flags, read_yaml
from causeway_server.edge_node.config.schema import Config
from causeway_server.fleet.cli.commands import main as causeway_fleet
from causeway_server.models.cli.commands import main as causeway_models
from causeway_server.router.bundle.settings import SETTINGS, check_setting
from causeway_server.router.checks.cases import read_cases
from causeway_server.router.config import leaves_of
from causeway_server.router.errors import ConfigError
from causeway_server.router.policy.cel_source import ExpressionError, rewrite, scan
from causeway_server.router.policy.signals import SIGNALS
from causeway_server.router.renames import RENAMED, advice, find
from causeway_server.router.serving.process import ProgramGroup
from causeway_train.cli.commands import main as causeway_train
from tests.docs.tables import metric_names

EDGE = [(one.old, one.new) for one in RENAMED["edge.yaml"] if "." in one.old]


def test_new_names_are_in_use_and_old_ones_are_not() -> None:
    keys = leaves_of(Config)
    renamed_keys = [(old, new.replace("clouds.main", "clouds.NAME")) for old, new in EDGE]
    assert [(old, new) for old, new in renamed_keys if old in keys or (new and new not in keys)] == []
    assert [one for one in RENAMED["signal"] if one.old in SIGNALS or one.new not in SIGNALS] == []
    metrics = metric_names("edge_node") | metric_names("cloud_pool") | {"causeway_fleet_devices_ahead"}
    renamed = [one for one in RENAMED["metric"] if one.old in metrics or (one.new and one.new not in metrics)]
    assert renamed == []
    for one in RENAMED["command"]:
        name, *flags = one.old.split(" ")[1:]
        if one.old.startswith("causeway-models") and not flags:
            assert name not in causeway_models.commands
            assert not one.new or name in causeway_train.commands


@pytest.mark.parametrize(("old", "new"), EDGE)
def test_an_old_key_is_refused_wherever_it_is_set(old: str, new: str) -> None:
    """In the file, in the environment, on the command line and in a bundle; only the file can be rewritten."""
    *sections, name = old.split(".")
    deep = len(sections)
    text = "".join(f"{'  ' * at}{section}:\n" for at, section in enumerate(sections)) + f"{'  ' * deep}{name}: 1\n"
    place = rf"edge\.yaml:{deep + 1}:{2 * deep + 1}"
    became = f"is now `{new}`." if new else "was removed."
    refused = rf"{re.escape(old)}: `{re.escape(old)}` {re.escape(became)}"
    with pytest.raises(ConfigError, match=rf"{place}: {refused} .*`causeway-edge migrate` rewrites the file\."):
        read_yaml(text, "edge.yaml")
    with pytest.raises(ConfigError, match=refused):
        read_environ({config_variable(old): "1"})
    with pytest.raises(ConfigError, match=refused):
        read_flags({old: "1"})
    if not new or new in SETTINGS:
        with pytest.raises(ValueError, match=rf"`{re.escape(old)}` {re.escape(became.removesuffix('.'))}"):
            check_setting(old, 1)


def test_a_section_without_keys_is_refused_too() -> None:
    with pytest.raises(ConfigError, match="`modalities` is now `parts`"):
        read_yaml("modalities:\n", "edge.yaml")


def test_an_old_signal_is_refused() -> None:
    with pytest.raises(ExpressionError, match=r"`pictures\.text` is now `images\.text`"):
        rewrite(scan("has(pictures.text)"))


def test_an_old_group_of_a_test_case_is_refused() -> None:
    text = "policy: a.yaml\ncases: [{name: a, snapshot: {pictures: {text: true}}, expect: {route: a}}]\n"
    _, _, problems = read_cases(text, "cases.yaml")
    assert [problem.message for problem in problems] == [advice("cases", "cases[0].snapshot.pictures")]
    assert problems[0].message == "`pictures` is now `images`. `causeway-fleet lint --fix` rewrites the file."


@pytest.mark.parametrize(
    ("program", "arguments", "words"),
    [
        (causeway_cloud, ["triton", "--http-port", "8000"], "`causeway-cloud triton --http-port` was removed."),
        (
            causeway_cloud,
            ["usage", "--json"],
            "`causeway-cloud usage --json` is now `causeway-cloud usage --format json`.",
        ),
        (causeway_cloud, ["keys", "issue", "--days", "3"], "is now `causeway-cloud keys issue --lifetime-s`."),
        (causeway_fleet, ["route", "--json"], "is now `causeway-fleet route --format json`."),
        (causeway_fleet, ["serve", "--data", "x"], "is now `causeway-fleet serve --state-dir`."),
        (causeway_models, ["calibrate", "--run", "x"], "is now `causeway-models calibrate --run-dir`."),
        (causeway_models, ["train", "--x"], "`causeway-models train` is now `causeway-train train`."),
        (causeway_models, ["nothing"], "No such command"),
        (causeway_cloud, ["serve", "--nothing"], "No such option"),
        (causeway_cloud, ["keys", "new", "--nothing"], "No such option"),
    ],
)
def test_an_old_command_or_flag_is_refused(program: click.Group, arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(program, arguments)
    assert (result.exit_code, words in result.output) == (2, True), result.output


def test_a_flag_of_a_command_below_a_group_is_found_by_its_whole_path() -> None:
    """The program's name counts, not how it was started."""

    @click.group("causeway-cloud", cls=ProgramGroup)
    def program() -> None: ...

    @program.command()
    def triton() -> None: ...

    result = CliRunner().invoke(program, ["triton", "--http-port"], prog_name="python -m cloud_pool")
    assert "was removed" in result.output


def test_names_are_found_at_any_place_of_a_list() -> None:
    assert find("gateway.yaml", "tiers[12].hedge") is not None
    assert find("fleet.yaml", "cohorts.eu.west.models.a.golden[0].picture") is not None
    assert find("gateway.yaml", "tiers[].name") is None
    assert advice("gateway.yaml", "tiers") == ""
    assert all(msgspec.structs.asdict(one) for found in RENAMED.values() for one in found)
