"""The evidence of promises over changes of policy and restarts."""

from __future__ import annotations

import random

from causeway_server.edge_node.signals.promises import Promises
from causeway_server.router.policy.compiled import Policy, parse_policy
from causeway_server.router.types import Confidence

FILE = """
version: 1
name: kiosk
targets: {small: {at: edge, model: MODEL}, large: {at: cloud, model: l, price: {output: 1}}}
routes: [{name: doubt, use: [small, large], handoff: {after_tokens: 8, below: 0.1}, promise: {of: large, keep: 0.9}}]
shadow: {share: 0.1, usd_per_day: 1}
"""


def policy(model: str) -> Policy:
    return parse_policy(FILE.replace("MODEL", model))


def use(promises: Promises, model: str) -> None:
    promises.use(policy(model), lambda name: f"hash of {name}", {})


def requests(promises: Promises) -> float:
    return next(record.requests for record in promises.records[-1:])


def test_the_evidence_of_a_pair_that_was_set_aside_comes_back_with_it() -> None:
    """Also if the daemon was restarted meanwhile."""
    before, rng = Promises(), random.Random(1)
    use(before, "first")
    for _ in range(50):
        before.draw("doubt", Confidence(8, 0.9, -0.1, 0.9, 0.2), rng, on_device=True)
    evidence = requests(before)
    use(before, "second")
    assert (evidence > 0.0, requests(before)) == (True, 0.0)
    after = Promises()
    use(after, "second")
    after.restore(before.records)
    assert requests(after) == 0.0
    use(after, "first")
    assert requests(after) == evidence


def test_few_promises_that_were_set_aside_are_kept() -> None:
    promises = Promises()
    for number in range(100):
        use(promises, f"model-{number}")
    assert len(promises.records) == 17
