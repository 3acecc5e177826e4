"""The response cache's side of a decision: whether a request's answer may be cached, and under which key.

- `plan_cache` applies the policy's cache rules to one request.
- `fingerprint` is the key: all of a request that changes its answer, and nothing else. A field that `UNKEYED_FIELDS`
  does not name is in the key, so a new field of `Request` cannot make two requests collide.
- `CachePlanner` joins the two. A plan is a pure function of policy, request and signals; it is computed once for the
  same request under the same snapshot, or under any snapshot if the policy's cache rules read only the request.
"""

from __future__ import annotations

from hashlib import blake2b
from operator import attrgetter
from typing import Final

import msgspec

from ..policy.compiled import CacheRule, Policy
from ..policy.signals import is_sampled
from ..types import CachePlan, Estimates, Reason, Request, Snapshot
from .decide import binding_constraints, first_match

KEY_BYTES: Final = 16

UNKEYED_FIELDS: Final[dict[str, str]] = {
    "stream": "only how the answer is delivered; a cached answer can be delivered either way",
    "include_usage": "usage is stored with every answer",
    "user": "OpenAI's abuse monitoring reads it, no model does",
    "hints": "only `prefer` changes the answer and is in the key; what tags, client and deadline decide (which target "
    "may answer, whose answer it is) is in the scope",
}

_keyed_fields = attrgetter(*[name for name in Request.__struct_fields__ if name not in UNKEYED_FIELDS])
_ENCODER = msgspec.msgpack.Encoder()


def fingerprint(request: Request, scope: bytes) -> bytes:
    """Return the cache key of a request: 16 bytes of BLAKE2b over its msgpack encoding.

    msgpack is self-delimiting, so two different requests never encode alike.

    Args:
        scope: extra bytes in the key for what the request itself does not contain, such as the targets that the
            policy's names stand for, or the client whose entries are private.
    """
    encoded = _ENCODER.encode((scope, request.hints.prefer, _keyed_fields(request)))
    return blake2b(encoded, digest_size=KEY_BYTES).digest()


def plan_cache(policy: Policy, request: Request, snapshot: Snapshot, estimates: Estimates) -> CachePlan:
    """Apply the policy's cache rules: the first one that holds decides. Without one nothing is cached. Never raises."""
    reasons: list[Reason] = []
    values = policy.cache_needs.read(request, snapshot, estimates)
    private = bool(binding_constraints(policy.constraints, values, reasons))
    rule = first_match(policy.cache, values, reasons)
    if rule is None or rule.exact is None:
        return CachePlan(rule="" if rule is None else rule.name, reasons=tuple(reasons), private=private)
    refusal = _refusal(rule, request)
    if refusal:
        reasons.append(Reason("cache_refused", rule=rule.name, detail=refusal))
        return CachePlan(rule=rule.name, reasons=tuple(reasons), private=private)
    return CachePlan(exact=rule.exact, rule=rule.name, reasons=tuple(reasons), private=private)


def is_cacheable(policy: Policy, request: Request) -> bool:
    """False if no cache rule can allow this request whatever its condition is, so that no rule need be evaluated."""
    if request.resume:
        return False  # the rest of another answer
    return not is_sampled(request) or any(rule.allow_sampled for rule in policy.cache)


def _refusal(rule: CacheRule, request: Request) -> str:
    if request.resume:
        return "the rest of another answer"
    if is_sampled(request) and not rule.allow_sampled:
        return "sampled: a second run may give another answer"
    return "the request offers tools" if request.tools and not rule.allow_tools else ""


class KeyedCachePlan(msgspec.Struct, frozen=True):
    plan: CachePlan
    key: bytes | None  # None: the policy keeps this request out of the cache


class CachePlanMemo:
    """The last plan of one request. The owner of the request keeps it beside the request."""

    __slots__ = ("planned", "policy", "snapshot")

    def __init__(self) -> None:
        self.policy: Policy | None = None
        self.snapshot: Snapshot | None = None
        self.planned: KeyedCachePlan | None = None


class CachePlanner:
    """Plans and keys cache entries.

    Args:
        scope: extra cache-key bytes, such as hashes of the device's model files.
    """

    def __init__(self, scope: bytes = b"") -> None:
        self._scope = scope
        self._policy_scope: tuple[Policy | None, bytes] = (None, b"")  # the last policy and its scope

    def plan(self, policy: Policy, request: Request, snapshot: Snapshot, estimates: Estimates) -> KeyedCachePlan:
        """Evaluate the cache rules and compute the key."""
        plan = plan_cache(policy, request, snapshot, estimates)
        return KeyedCachePlan(plan, None if plan.exact is None else self._key(policy, request, plan))

    def plan_memoized(
        self, policy: Policy, request: Request, snapshot: Snapshot, memo: CachePlanMemo
    ) -> KeyedCachePlan:
        """Plan without estimates. Reuses the memo if nothing that the policy's cache rules read has changed."""
        planned = memo.planned
        valid = memo.policy is policy and (policy.cache_needs.request_only or memo.snapshot is snapshot)
        if planned is None or not valid:
            planned = memo.planned = self.plan(policy, request, snapshot, Estimates())
            memo.policy, memo.snapshot = policy, snapshot
        return planned

    def _key(self, policy: Policy, request: Request, plan: CachePlan) -> bytes:
        if self._policy_scope[0] is not policy:
            targets = _ENCODER.encode((self._scope, policy.targets))
            self._policy_scope = (policy, blake2b(targets, digest_size=16).digest())
        private = b"private:" + request.hints.client.encode("utf-8", "replace") if plan.private else b""
        return fingerprint(request, self._policy_scope[1] + private)
