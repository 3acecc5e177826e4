"""Which box gets which bundle: a plan that every box evaluates by itself, without a list of boxes.

A box's position is a hash of the salt and its id, so a larger share always includes the boxes of a smaller one, boxes
that appear later fall into place, and another salt draws other boxes first.
"""

from __future__ import annotations

import hashlib
import math
from typing import Annotated

import msgspec
from msgspec import Meta

from .manifest import Name, Sha256
from .refusals import BundleInvalid

WHOLE = 100_000
"""The share that includes every box; 1,000 is one percent."""
MAX_PLAN_BYTES = 1024 * 1024

Device = Annotated[str, Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
"""A box's id; also the `sub` of its tokens, which has at most 64 characters."""
Salt = Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{1,64}$")]


class RolloutPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Moves the boxes of a cohort from one bundle to the next. Signed by the role `rollout`."""

    cohort: Name
    rollout: Name
    from_bundle: Sha256 | None  # None: the cohort's first bundle; boxes outside the share keep what they run
    to_bundle: Sha256
    salt: Salt
    share: Annotated[int, Meta(ge=0, le=WHOLE)]
    pins: dict[Device, Sha256]  # boxes that run a bundle of their own
    holds: frozenset[Device]  # boxes that keep what they run

    @property
    def bundles(self) -> frozenset[str]:
        """The id of every bundle that the plan names."""
        named = {self.to_bundle, *self.pins.values()}
        return frozenset(named if self.from_bundle is None else {*named, self.from_bundle})


def position(salt: str, device: str) -> int:
    """Return the place of a box in the order of a rollout, from 0 to `WHOLE` - 1."""
    return int.from_bytes(hashlib.sha256(f"{salt}:{device}".encode()).digest(), "big") % WHOLE


def in_share(plan: RolloutPlan, device: str) -> bool:
    """Whether the hash alone puts this box among those that get the new bundle."""
    return position(plan.salt, device) < plan.share


def assigned_bundle(plan: RolloutPlan, device: str, running: str | None) -> str | None:
    """Return the id of the bundle that a box shall run.

    1. A pin names the bundle of this box.
    2. A held box keeps what it runs.
    3. A box in the share gets the new bundle.
    4. The others get the old bundle, which undoes the rollout when the share shrinks; without one, they keep what
       they run.

    Args:
        plan: The plan of the box's cohort.
        device: The box's id.
        running: The id of the bundle that the box runs; None: the factory's files.
    """
    if device in plan.pins:
        return plan.pins[device]  # (1)
    if device in plan.holds:
        return running  # (2)
    if in_share(plan, device):
        return plan.to_bundle  # (3)
    return running if plan.from_bundle is None else plan.from_bundle  # (4)


def encode_plan(plan: RolloutPlan) -> bytes:
    """Return the canonical bytes."""
    return msgspec.json.encode(plan, order="deterministic")


def read_plan(content: bytes, cohort: str) -> RolloutPlan:
    """Read the plan of a cohort.

    Raises:
        BundleInvalid: Malformed, too large, or the plan of another cohort.
    """
    if len(content) > MAX_PLAN_BYTES:
        raise BundleInvalid(f"rollout plan of {cohort}: larger than {MAX_PLAN_BYTES} bytes")
    try:
        plan = msgspec.json.decode(content, type=RolloutPlan)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BundleInvalid(f"rollout plan of {cohort}: {error}") from error
    if plan.cohort != cohort:
        raise BundleInvalid(f"rollout plan of {cohort}: it is the plan of {plan.cohort}")
    return plan


def binomial_tail(trials: int, found: int, probability: float) -> float:
    """Return the probability of at least `found` successes, 1 where `found` is no more than expected."""
    if found <= trials * probability:
        return 1.0
    log_term = log_choose(trials, found) + found * math.log(probability) + (trials - found) * math.log1p(-probability)
    tail, ratio, odds = 0.0, 1.0, probability / (1 - probability)
    for count in range(found, trials + 1):
        tail += ratio
        ratio *= (trials - count) / (count + 1) * odds
        if ratio < 1e-16 * tail:
            break
    return min(1.0, math.exp(log_term) * tail)


def log_choose(whole: int, part: int) -> float:
    """Return the logarithm of the number of ways to choose `part` of `whole`."""
    return math.lgamma(whole + 1) - math.lgamma(part + 1) - math.lgamma(whole - part + 1)
