"""Trials of variants, simulated with the product's own test: `python -m tests.bench variants` runs 1,000 of each kind.

A variant gets 5 % of the answers of a model that is good in 80 % of them, and each answer has one label. How often is
the variant returned, and after how many labelled answers of its own?
"""

from __future__ import annotations

import click
import msgspec
import numpy as np

from causeway_server.router.variants.settings import FEEDBACK, TrialConfig, VariantConfig, VerdictMetric
from causeway_server.router.variants.trials import Trial
from causeway_server.router.variants.verdict import Tally
from tests.tool import run_tool

GOOD, SHARE = 0.8, 5.0
LOOK = 50  # labelled answers of the variant between two looks
CASES = (("5 points worse", 0.05, 4_000), ("equal", 0.0, 20_000))
CONFIG = TrialConfig(metrics=(VerdictMetric(FEEDBACK),))


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--runs", default=1_000, show_default=True, type=click.IntRange(1), help="Trials of each kind.")
@click.option("--seed", default=0, show_default=True, help="The same seed gives the same figures.")
@click.option(
    "--answers-a-user", default=1, show_default=True, help="Labelled answers of each user, correlated by 0.2."
)
def main(runs: int, seed: int, answers_a_user: int) -> None:
    """Simulate trials of variants with one label for each answer, a baseline of 80 % good answers, a share of 5 %."""
    for title, worse_by, answers in CASES:
        found = simulate(runs, worse_by, answers, seed, answers_a_user)
        median = f", half of them after {found.after[len(found.after) // 2]}" if found.after else ""
        click.echo(f"{title}: {found.share(answers):.1%} of {runs} returned within {answers} of its own labels{median}")


class Returned(msgspec.Struct, frozen=True):
    """The runs in which the variant was returned: its own labelled answers until then, sorted."""

    runs: int
    after: tuple[int, ...]

    def share(self, within: int) -> float:
        """Return the share of the runs that returned it within so many labelled answers of its own."""
        return sum(count <= within for count in self.after) / self.runs


def simulate(runs: int, worse_by: float, answers: int, seed: int, answers_a_user: int = 1) -> Returned:
    """Run trials of a variant that is worse by a share.

    Args:
        runs: The number of trials.
        worse_by: The difference of the shares of good answers.
        answers: The labelled answers of the variant after which a trial ends.
        seed: The seed of the first run.
        answers_a_user: The labelled answers of each user, which depend on each other (correlation 0.2) if there are
            several.
    """
    after = []
    for run in range(runs):
        found = _run(np.random.default_rng(seed + run), GOOD - worse_by, answers, answers_a_user)
        if found is not None:
            after.append(found)
    return Returned(runs, tuple(sorted(after)))


def _run(draw: np.random.Generator, good: float, answers: int, answers_a_user: int) -> int | None:
    trial = Trial("target", "v1", VariantConfig("v2", SHARE), CONFIG)
    variant, baseline = trial.arms[FEEDBACK]
    others = round(LOOK * (100 - SHARE) / SHARE)
    for own in range(LOOK, answers + 1, LOOK):
        _label(draw, variant, good, LOOK, answers_a_user)
        _label(draw, baseline, GOOD, others, answers_a_user)
        if trial.look():
            return own
    return None


def _label(draw: np.random.Generator, arm: Tally, good: float, answers: int, answers_a_user: int) -> None:
    users = answers // answers_a_user
    chance = np.full(users, 1 - good)
    if answers_a_user > 1:  # beta-binomial: a correlation of 0.2 between the answers of one user
        chance = draw.beta((1 - good) * 4, good * 4, users)
    bad, groups = draw.binomial(answers_a_user, chance), draw.integers(Tally.GROUPS, size=users)
    events = np.bincount(groups, bad, Tally.GROUPS)
    counts = np.bincount(groups, minlength=Tally.GROUPS) * answers_a_user
    for group in range(Tally.GROUPS):
        arm.add(group, float(events[group]), float(counts[group]))


if __name__ == "__main__":
    run_tool(main)
