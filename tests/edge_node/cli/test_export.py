"""`causeway-edge decisions export`."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import msgspec
from click.testing import CliRunner, Result

from causeway_server.edge_node.cli.main import main
from causeway_server.edge_node.clock import system_clock
from causeway_server.edge_node.storage.decisions import FILE, DecisionStore
from causeway_server.router.types import DecisionRecord
from tests.edge_node.storage.test_decisions import record


def export(state_dir: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["decisions", "export", "--state-dir", str(state_dir), *arguments])


def filled(state_dir: Path, *records: DecisionRecord) -> None:
    with closing(
        DecisionStore(memory_records=10, max_age_s=1e9, directory=state_dir, clock=system_clock())
    ) as decisions:
        decisions.start()
        for one in records:
            decisions.add(one)


def test_each_line_is_a_record(tmp_path: Path) -> None:
    now = system_clock().unix()
    records = [record(1, created=now - 7200.0), record(2, created=now)]
    filled(tmp_path, *records)
    lines = export(tmp_path).stdout.splitlines()
    assert [msgspec.json.decode(line, type=DecisionRecord) for line in lines] == records


def test_since_leaves_out_older_records(tmp_path: Path) -> None:
    now = system_clock().unix()
    filled(tmp_path, record(1, created=now - 7200.0), record(2, created=now))
    (line,) = export(tmp_path, "--since", "1h").stdout.splitlines()
    assert msgspec.json.decode(line, type=DecisionRecord).id == "d2"


def test_a_wrong_duration_is_a_usage_error(tmp_path: Path) -> None:
    result = export(tmp_path, "--since", "yesterday")
    assert result.exit_code == 2
    assert "must be a duration such as 30m" in result.stderr


def test_a_folder_without_records_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    result = export(tmp_path)
    assert result.exit_code == 1
    assert f"{tmp_path / FILE}: give the daemon's own" in result.stderr
