"""The README cannot rot: what the code can do is named there."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

import cloud_pool.cli.main
import edge_node.cli.main
import fleet.cli.commands
import models.cli.commands
from edge_node.config.schema import config_keys
from router.policy.signals import SIGNALS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
GROUPS: dict[str, click.Command] = {
    "causeway-edge": edge_node.cli.main.main,
    "causeway-cloud": cloud_pool.cli.main.main,
    "causeway-fleet": fleet.cli.commands.main,
    "causeway-models": models.cli.commands.main,
}
METRIC = re.compile(r'"((?:causeway_(?:edge|cloud)|gen_ai_(?:server|client))_[a-z_]+)"')


def metrics() -> set[str]:
    sources = [*(ROOT / "edge_node").rglob("*.py"), *(ROOT / "cloud_pool").rglob("*.py")]
    return {name for source in sources for name in METRIC.findall(source.read_text(encoding="utf-8"))}


def test_the_search_for_metrics_finds_some() -> None:
    """Otherwise the next test could not fail."""
    assert {"causeway_edge_requests", "causeway_cloud_requests"} <= metrics()


@pytest.mark.parametrize("name", sorted(metrics()))
def test_each_metric_is_named(name: str) -> None:
    """Every metric that the daemon or the gateway exports is in the README."""
    assert f"`{name}`" in README


@pytest.mark.parametrize("key", config_keys())
def test_each_config_key_is_named(key: str) -> None:
    """Every key of the edge's configuration is in the README."""
    assert f"`{key}`" in README


@pytest.mark.parametrize("signal", sorted(SIGNALS))
def test_each_signal_is_named(signal: str) -> None:
    """Every signal that a policy may use is in the README."""
    assert f"`{signal}`" in README


@pytest.mark.parametrize(
    ("program", "command"),
    [(program, name) for program, group in GROUPS.items() for name in sorted(getattr(group, "commands", {}))],
)
def test_each_command_is_named(program: str, command: str) -> None:
    """Every command of every program is in the README: alone or in the program's list."""
    listed = re.findall(rf"`{program} ([^`]*)`", README)
    words = {word for text in listed for word in re.findall(r"[a-z-]+", text)}
    assert command in words


def test_each_make_target_is_named() -> None:
    """`make` targets that a user needs are in the README."""
    for target in ("run", "test", "check", "bench"):
        assert f"`make {target}`" in README
