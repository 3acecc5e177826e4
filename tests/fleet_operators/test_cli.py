"""The operators' commands against a real control plane, in a process of its own."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet.repository.fleets import edit

from .conftest import operated_fleet
from .process import Process, until

pytestmark = pytest.mark.slow


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    one = Process(operated_fleet(tmp_path))
    yield one
    one.kill(signal.SIGTERM)


def test_apply_says_what_will_change_and_asks(process: Process) -> None:
    folder = str(process.signed.path)
    asked = process.run("apply", folder, "--cohort", "kiosk", answer="n\n")
    assert asked.exit_code == 1
    assert "kiosk: serial 1 on 0 boxes" in asked.output
    assert "stages: 50 %, 100 %; the first is 0 of 0 boxes" in asked.output
    assert "Begin 1 rollout at retail?" in asked.output
    assert "kiosk: 0 boxes" in process.done("status")
    begun = process.done("apply", folder, "--cohort", "kiosk", "--yes")
    name = re.search(r"rollout (r-\S+) has begun", begun)
    assert name is not None
    until(lambda: re.search(" stage,", process.done("status", name[1])))
    again = process.run("apply", folder, "--cohort", "kiosk", "--yes")
    assert (again.exit_code, "in state stage: abort it, or wait" in again.output) == (1, True)
    assert "paused" in process.done("pause", "kiosk", "--reason", "lunch", as_="olga")
    assert "the role approver" in process.run("accept", "kiosk", as_="olga").output
    assert "stage 2 of 2, 100 %: by april" in process.done("accept", "kiosk")
    process.done("abort", name[1])
    until(lambda: re.search(" reverted", process.done("status", "kiosk")))
    assert "april rollout.abort" in process.done("status", name[1])


def test_what_is_not_signed_is_not_applied(process: Process) -> None:
    edit(process.signed.path / "policies" / "kiosk.yaml", "device", "on-device")
    edit(process.signed.path / "policies" / "cases" / "kiosk.yaml", "route: device", "route: on-device")
    result = process.run("apply", str(process.signed.path), "--yes")
    assert result.exit_code == 1
    assert "kiosk: the folder differs from what is signed; run `causeway-fleet sign`" in result.output


def test_devices_tokens_and_the_log(process: Process) -> None:
    token = process.done("enroll", "--cohort", "kiosk", "--uses", "2", "--label", "site=7")
    assert token.startswith("cwjoin_")
    assert process.done("devices") == ""
    assert "there is no device box-9" in process.run("hold", "box-9").output
    assert "NAME=VALUE" in process.run("enroll", "--label", "site").output
    assert "april join_token.new" in process.done("audit")
    verified = process.done("audit", "--verify")
    head = re.search(r"1 rows, the chain holds; the last hash is (\w+)", verified)
    assert head is not None
    process.done("enroll")
    assert "2 rows" in process.done("audit", "--verify", "--head", head[1])
    assert "cut off" in process.run("audit", "--verify", "--head", "0" * 64).output


def test_a_wrong_token_and_a_control_plane_that_is_away(process: Process) -> None:
    assert "answered 401: the token or session is not known here" in process.run("status", as_="mallory").output
    assert process.run("status", as_="").exit_code == 2
    process.kill()
    result = process.run("status")
    assert (result.exit_code, "does not answer" in result.output) == (1, True)
    process.start()
    assert "kiosk: 0 boxes" in process.done("status")


def test_sigterm_ends_the_process_soon(process: Process) -> None:
    process.kill(signal.SIGTERM)
    process.start()
