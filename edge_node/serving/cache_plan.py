"""The policy's cache rule for a request, and the key under which its answer is kept.

The key covers what changes the answer: all of the request (`router.fingerprint`), which models the policy's names
stand for, and for private requests whose they are. A plan is a pure function of policy, request and signals: it is not
made twice for the same request under the same snapshot, or under any if the policy's rules ask about the request alone.
"""

from __future__ import annotations

import hashlib

import msgspec

from router.decision.decide import plan_cache
from router.fingerprint import fingerprint
from router.policy.compiled import Policy
from router.policy.signals import is_sampled
from router.types import CachePlan, Estimates, Request, Snapshot


class PlannedCache(msgspec.Struct, frozen=True):
    """`key` None: the policy keeps this request out of the cache."""

    plan: CachePlan
    key: bytes | None


class PlanMemo:
    """What was planned lately for one request; whoever keeps the request keeps this beside it."""

    __slots__ = ("planned", "policy", "snapshot")

    def __init__(self) -> None:
        self.policy: Policy | None = None
        self.snapshot: Snapshot | None = None
        self.planned: PlannedCache | None = None


class CachePlanner:
    """`scope`: what else tells answers apart, such as the device's model files."""

    def __init__(self, scope: bytes = b"") -> None:
        self._scope = scope
        self._scoped: tuple[Policy | None, bytes] = (None, b"")

    def plan(self, policy: Policy, request: Request, snapshot: Snapshot, estimates: Estimates) -> PlannedCache:
        """What the rules say, computed afresh."""
        plan = plan_cache(policy, request, snapshot, estimates)
        return PlannedCache(plan, None if plan.exact is None else self._key(policy, request, plan))

    def remembered(self, policy: Policy, request: Request, snapshot: Snapshot, memo: PlanMemo) -> PlannedCache:
        """The same without estimates, from the memo if nothing that the policy's rules ask about has changed."""
        planned = memo.planned
        known = memo.policy is policy and (policy.cache_needs.of_request or memo.snapshot is snapshot)
        if planned is None or not known:
            planned = memo.planned = self.plan(policy, request, snapshot, Estimates())
            memo.policy, memo.snapshot = policy, snapshot
        return planned

    def _key(self, policy: Policy, request: Request, plan: CachePlan) -> bytes:
        if self._scoped[0] is not policy:
            targets = msgspec.msgpack.encode((self._scope, policy.targets))
            self._scoped = (policy, hashlib.blake2b(targets, digest_size=16).digest())
        private = b"private:" + request.hints.client.encode("utf-8", "replace") if plan.private else b""
        return fingerprint(request, self._scoped[1] + private)


def is_cacheable(policy: Policy, request: Request) -> bool:
    """False: no cache rule can hold, whatever its condition; so none need be tried."""
    if request.resume:
        return False  # the rest of another answer
    return not is_sampled(request) or any(rule.allow_sampled for rule in policy.cache)
