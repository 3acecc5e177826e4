"""`causeway-edge migrate`: what a device has of the version before, rewritten."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from causeway_server.edge_node.cli.main import main
from causeway_server.edge_node.config.loader import load_config
from causeway_server.router.policy.compiled import parse_policy

POLICY = """\
version: 1
name: till
targets: {small: {at: edge, model: assistant}}
routes:
  - {name: text, when: 'has(pictures.text) && pictures.text', use: [small]}
  - {name: otherwise, use: [small]}
"""


@pytest.fixture
def edge(tmp_path: Path) -> Path:
    """A configuration of before with its policy."""
    (tmp_path / "till.yaml").write_text(POLICY)
    file = tmp_path / "edge.yaml"
    file.write_text("policy: till.yaml\nengine: {model_dirs: [models]}\nmodalities: {remembered: 5}\n")
    return file


def run(file: Path | None, home: Path, **environ: str) -> Result:
    arguments = [] if file is None else [str(file)]
    return CliRunner().invoke(main, ["migrate", *arguments], env={"HOME": str(home), "XDG_DATA_HOME": "", **environ})


def test_a_device_of_before_can_start_afterwards(edge: Path, tmp_path: Path) -> None:
    result = run(edge, tmp_path)
    assert result.exit_code == 0, result.output
    config = load_config(edge, {"HOME": str(tmp_path)}, {})
    assert config.parts.fact_cache_entries == 5
    assert parse_policy(Path(config.policy).read_text(), config.policy).name == "till"
    again = run(None, tmp_path, CAUSEWAY_CONFIG=str(edge))
    assert again.output.splitlines() == [
        f"{edge}: nothing to rewrite.",
        f"{edge.parent}/till.yaml: nothing to rewrite.",
    ]


def test_a_policy_that_is_not_there_is_named(edge: Path, tmp_path: Path) -> None:
    (tmp_path / "till.yaml").unlink()
    result = run(edge, tmp_path)
    assert (result.exit_code, "till.yaml: No such file" in result.output) == (2, True)
