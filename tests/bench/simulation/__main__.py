"""`python -m tests.bench simulation`: rollouts' verdicts, reverts and loads of a fleet; a tier's autoscaler."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

import click
import numpy as np

from causeway_server.fleet.rollout.settings import RolloutState
from tests.tool import run_tool

from .devices import Effect
from .polls import PollModel, polls_after_wake, reconnect_storm, revert_times
from .rollouts import RolloutRun, simulate_rollout
from .scaling import scale, trace

CASES = (
    ("the same bundle on both sides", Effect(), True),
    ("5 % of answers fail", Effect(errors=0.05), False),
    ("latency is 1.5 times as long", Effect(slower=1.5), False),
    ("a tenth of the devices goes silent", Effect(silenced=0.1), False),
    ("a tenth of the devices rolls back", Effect(rolled_back=0.1), False),
)
OUTAGES_S = (0.0, 5.0, 20.0, 40.0, 60.0, 300.0, 1800.0)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--devices", default=5_000, show_default=True, type=click.IntRange(2), help="Devices of the cohort.")
@click.option("--rollouts", default=100, show_default=True, type=click.IntRange(1), help="Rollouts of each case.")
@click.option("--seed", default=0, show_default=True, help="The same seed gives the same figures.")
def main(devices: int, rollouts: int, seed: int) -> None:
    """Simulate rollouts, reverts, polls and reconnects of a fleet, and a tier that scales ahead of its load."""
    for title, effect, accepts in CASES:
        runs = [simulate_rollout(seed + number, devices, effect, accepts=accepts) for number in range(rollouts)]
        click.echo(f"{title}: {outcome_line(runs, devices)}")
    rng, model = np.random.default_rng(seed), PollModel()
    p50, p99 = np.percentile(revert_times(rng, devices, devices, model), (50, 99))
    click.echo(f"revert of all {devices} devices after a fail: p50 {p50:.1f} s, p99 {p99:.1f} s")
    storms = [reconnect_storm(rng, devices, outage_s, model) for outage_s in OUTAGES_S]
    worst = max(storms, key=lambda storm: storm.peak_over_mean)
    settled_s = max(storm.settled_s for storm in storms)
    click.echo(
        f"reconnects after outages of {OUTAGES_S[0]:.0f} to {OUTAGES_S[-1]:.0f} s: peak over mean at most "
        f"{worst.peak_over_mean:.2f} ({worst.peak_per_s:.0f}/s), settled within {settled_s:.0f} s"
    )
    polls = polls_after_wake(rng, devices, 3600.0, model)
    click.echo(f"polls in the hour after a wake: peak over mean {polls.peak_over_mean:.2f} ({polls.mean_per_s:.1f}/s)")
    for number in range(3):
        click.echo(scaling_line(seed + number, season=True))
        click.echo(scaling_line(seed + number, season=False))


def scaling_line(seed: int, *, season: bool) -> str:
    """Say what the forecast changes over three weeks."""
    requests = trace(seed, season=season)
    plain, ahead = scale(requests, ahead=False), scale(requests, ahead=True)
    return (
        f"three weeks {'with' if season else 'without'} a season, trace {seed}: "
        f"late {plain.late / plain.requests:.4%}, "
        f"with the forecast {ahead.late / plain.requests:.4%} ({ahead.late / plain.late - 1:+.1%}), "
        f"replica-hours {plain.replica_hours:.0f}, {ahead.replica_hours / plain.replica_hours:.1%} of them"
    )


def outcome_line(runs: Sequence[RolloutRun], devices: int) -> str:
    """Say how many runs ended how, how far they got, and how long the reverts took."""
    ended = Counter(run.state for run in runs)
    text = ", ".join(f"{count} {state}" for state, count in sorted(ended.items()))
    text += f"; {sum(run.pauses for run in runs)} inconclusive stages"
    aborted = [run for run in runs if run.state is RolloutState.REVERTED]
    if aborted:
        stages = Counter(run.stage + 1 for run in aborted)
        text += "; aborted in stage " + ", ".join(f"{stage} ({count})" for stage, count in sorted(stages.items()))
        exposed = max(run.exposed for run in aborted)
        text += f", at most {exposed} devices ({exposed / devices:.1%}), {max(run.took_s for run in aborted):.0f} s"
        times = np.concatenate([run.reverted_s for run in aborted])
        text += f"; reverted p99 {np.percentile(times, 99):.1f} s" if times.size else ""
    return text


if __name__ == "__main__":
    sys.exit(run_tool(main))
