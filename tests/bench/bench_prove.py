"""Proofs of policies: their time, how many are undecided, and the formulas beside `decide`."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from causeway_server.fleet.prover.proof import Proof, prove
from causeway_server.fleet.repository.policies import policy_files
from causeway_server.router.policy.compiled import Policy, parse_policy
from tests.fleet.prover.agreement import Agreement
from tests.fleet.prover.policies import drawn
from tests.tool import run_tool

from .rows import Row

ROOT = Path(__file__).parents[2]
SHIPPED = policy_files((ROOT / "policies", ROOT / "examples" / "policies"))
POLICIES = int(os.environ.get("PROVE_POLICIES", "2000"))
PAIRS = int(os.environ.get("PROVE_PAIRS", "1000000"))
PAIRS_OF_ONE = 2_500
DEPTH = 20_000  # of the formulas, which are walked


def main() -> list[Row]:
    """Prove what ships, then drawn policies, each second one against the one before; then compare decisions."""
    sys.setrecursionlimit(DEPTH)
    return [*_shipped(), *_drawn(), *_agreement()]


def _shipped() -> Iterator[Row]:
    times = {}
    for path in SHIPPED:
        policy, began = parse_policy(path.read_text()), time.process_time()
        assert all(proof.status == "proved" for proof in prove(policy))
        times[path.stem] = time.process_time() - began
    slowest = max(times, key=times.__getitem__)
    note = f"processor time; {len(times)} policies were proved, and the proof of {slowest} is the slowest"
    yield Row("slowest proof of a policy that ships", times[slowest], "s", 1.0, note=note)


def _drawn() -> Iterator[Row]:
    statements, undecided, of_policies, times = 0, 0, 0, []
    before: Policy | None = None
    for number, (_, policy) in enumerate(itertools.islice(drawn(2026), POLICIES)):
        began = time.process_time()
        found: tuple[Proof, ...] = prove(policy, before if number % 2 else None)
        times.append(time.process_time() - began)
        left = sum(proof.status == "undecided" for proof in found)
        statements, undecided, of_policies = statements + len(found), undecided + left, of_policies + bool(left)
        before = policy
    times.sort()
    note = f"{undecided} of {statements} statements about {len(times)} policies; they belong to {of_policies} policies"
    yield Row(
        "share of statements that the prover could not decide in 10 s",
        100 * undecided / statements,
        "%",
        2.0,
        note=note,
    )
    note = f"processor time; 99th percentile {times[int(0.99 * len(times))]:.2f} s, longest {times[-1]:.2f} s"
    yield Row("median proof of a generated policy", times[len(times) // 2], "s", note=note)


def _agreement() -> Iterator[Row]:
    compared, differing, policies = 0, 0, 0
    for _, policy in drawn(7102):
        agreement = Agreement(policy, policies)
        differing += len({id(one.pair) for one in agreement.disagreements(PAIRS_OF_ONE)})
        compared, policies = compared + agreement.compared, policies + 1
        if compared >= PAIRS:
            break
    note = f"of {compared:,} pairs of a request and one of {policies} policies"
    yield Row("pairs in which the formulas disagree with `decide`", differing, "pairs", 0.0, note=note)


def _print_rows() -> None:
    for row in main():
        print(f"{row.name}: {row.value:.3f} {row.unit}  {row.note}")


if __name__ == "__main__":
    sys.exit(run_tool(_print_rows))
