"""The egress ledger of a gateway has what came in by each of its doors, also straight from clients."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from causeway_server.cloud_pool.http.config import GrpcConfig
from causeway_server.cloud_pool.serving.guard import GuardConfig
from causeway_server.fleet.cli.egress import egress, proof, read_folder
from causeway_server.router.config import EgressLedgerConfig
from tests.router.ledger.written import device, pair
from tests.router.ledger.written import gateway as gateway_log

from .test_guard import DOORS, Said, guarded


@pytest.mark.parametrize("door", ["chat", "live session", "gRPC"])
async def test_a_request_straight_to_a_gateway_is_recorded(tmp_path: Path, door: str) -> None:
    ledger = EgressLedgerConfig(enabled=True)
    state = str(tmp_path / "state")
    async with guarded(tmp_path, GuardConfig(), grpc=GrpcConfig(port=0), state_dir=state, egress_ledger=ledger) as (
        gateway,
        _,
    ):
        assert await DOORS[door](gateway) != Said()
    request = gateway.audit[-1]["id"]
    [(_, log)] = read_folder(tmp_path / "state" / "egress")
    assert [(item.id, item.claim, item.private) for item in log.items.values()] == [(request, "", False)]
    assert log.faults == []


def test_a_folder_without_a_ledger_is_a_bad_argument(tmp_path: Path) -> None:
    for command in (egress, proof):
        done = CliRunner().invoke(command, [str(tmp_path), *(["d1"] if command is proof else [])])
        assert (done.exit_code, "has no egress ledger" in done.output) == (2, True)
    (tmp_path / "a.log").write_text("no ledger\n")
    assert CliRunner().invoke(egress, [str(tmp_path)]).exit_code == 2


def test_a_gap_longer_than_an_interval_of_commits_is_a_fault(tmp_path: Path) -> None:
    for log in pair(device(9, closed=False), gateway_log(durable=8)):
        (tmp_path / log.name).mkdir()
        (tmp_path / log.name / "1.log").write_bytes(b"\n".join((*log.lines, b"")))
    heads = tmp_path / "heads.json"
    done = CliRunner().invoke(egress, [str(tmp_path), "--heads", str(heads)])
    assert (done.exit_code, heads.exists()) == (1, False)
    assert "2.000 s, longer than its interval of commits" in done.output
