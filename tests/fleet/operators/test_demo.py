"""`make demo-fleet` in small: its control plane, two of its devices with their applications, and one of its
rollouts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from causeway_server.fleet.cli.commands import main
from tests.bed.fleet.demo import POLICIES, ROLLOUTS, Demo, Pace, write_folder, write_policy

pytestmark = pytest.mark.slow

PACE = Pace(stages=(100,), first_look="1s", silence="5s", least="6s", most="60s", soak="1s", records=5)
DEVICE = {
    "fleet.trial_s": "1s",
    "fleet.trial_requests": 2,
    "fleet.trial_max_s": "5s",
    "fleet.telemetry_interval_s": "1s",
}


@pytest.mark.parametrize("policy", ROLLOUTS)
def test_every_policy_passes_lint_and_its_cases(tmp_path: Path, policy: str) -> None:
    """The bad one too: only its devices find it out."""
    assert list(ROLLOUTS) == list(POLICIES)
    write_folder(tmp_path)
    write_policy(tmp_path, policy)
    result = CliRunner().invoke(main, ["test", str(tmp_path)])
    assert result.exit_code == 0, result.output


@pytest.mark.engine
async def test_weights_with_calibration_and_a_promise_reach_devices_and_what_lacks_proof_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demo = Demo(tmp_path / "demo", 2, "127.0.0.1:0", pace=PACE, device=DEVICE, requests_per_s=2.0)
    await demo.run(once=True, rollouts={"first": "done", "second": "done", "leaking": "draft"})
    output = capsys.readouterr().out
    assert "the policy 'first' reached 2 of 2 devices" in output
    assert "weights come without a signal `confidence` or `pair`" in output
    assert "the cohort kiosks needs 10000 (`replay.records`)" in output
    assert "the policy 'second' reached 2 of 2 devices" in output
    assert "route long promises 95.0% as good as large (risk 0.05)" in output
    assert re.search(r"replayed [1-9]\d* recorded requests of 2 devices over", output)
    assert re.search(r"on the device: predicted \d.* happened \d", output)
    assert "leaves-no-more is refuted" in output
    assert "the policy 'leaking' reached 0 of 2 devices" in output
    assert "× 200" in output
