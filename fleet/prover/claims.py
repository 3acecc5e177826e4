"""The statements about a policy: its constraints over all ways out, its owner's claims, and comparisons."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final, Literal, NamedTuple, get_args

import z3

from causeway_server.router.policy.compiled import Constraint, Policy
from causeway_server.router.policy.expression import TAGS
from causeway_server.router.policy.outcomes import Claim, compile_claim

from .conditions import Conditions, tokens_of
from .facts import FALSE, Element, Formula
from .outcome import Outcome, World

Kind = Literal["keep", "claim", "compare", "reach"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
PRIVATE: Final = "private"
TAG_CLAIM: Final = f"tag-{PRIVATE}"
_STAYS: Final = "!outcome.leaves && !outcome.shared"


class Statement(NamedTuple):
    """A statement about all requests."""

    kind: Kind
    name: str
    text: str
    sought: Formula  # the requests for which it is false; for `reach` those that the rule decides
    claim: Claim | None = None  # its condition, for the test case of a counterexample

    @property
    def holds(self) -> str:
        """The condition as the key `holds` of a test case."""
        assert self.claim is not None
        when, holds = self.claim.when, self.claim.holds.source
        return holds if when is None else f"!({when.source}) || ({holds})"


def statements(world: World, new: Outcome, policy: Policy, old: Outcome | None) -> Iterator[Statement]:
    """Yield the statements about a policy. `old`: the policy that it replaces."""
    conditions = Conditions(world.facts, policy.default_temperature, new.facts)

    def of_claim(kind: Kind, text: str, claim: Claim) -> Statement:
        about, holds = conditions.truth(claim.when), conditions.truth(claim.holds)
        return Statement(kind, claim.name, text, z3.And(about.binds, z3.Not(holds.holds)), claim)

    for constraint in (*policy.constraints, *policy.part_constraints, *policy.region_constraints):
        source, text = _kept(constraint)
        yield of_claim("keep", text, Claim(constraint.name, constraint.when, compile_claim(source)))
    if _names_private(policy):
        when, holds = compile_claim(f'"{PRIVATE}" in {TAGS}'), compile_claim(_STAYS)
        text = f"no request with the tag `{PRIVATE}` leaves the device, and no other client gets its answer"
        yield of_claim("keep", text, Claim(TAG_CLAIM, when, holds))
    for claim in policy.claims:
        yield of_claim("claim", claim.holds.source, claim)
    yield from () if old is None else _compared(new, old)
    for name, decides in new.routes.items():
        yield Statement("reach", name, "some request is decided by this route", decides)
    for name, decides in new.cache_rules.items():
        yield Statement("reach", name, "some request is decided by this cache rule", decides)


def _kept(constraint: Constraint) -> tuple[str, str]:
    """Return the meaning of a constraint over all ways out, as a condition and in words."""
    if constraint.keep == "on_device":
        return _STAYS, "what it binds does not leave the device, and no other client gets its answer"
    if constraint.keep == "parts_on_device":
        return "!outcome.parts_leave", "audio, images and files that it binds do not leave the device"
    regions = json.dumps(sorted(constraint.regions))
    return (
        f"outcome.regions.all(r, r in {regions})",
        f"what it binds leaves for {', '.join(sorted(constraint.regions))} only",
    )


def _names_private(policy: Policy) -> bool:
    sources = [one.when.source for one in policy.constraints if one.when is not None]
    return any(token.kind == "string" and token.text[1:-1] == PRIVATE for one in sources for token in tokens_of(one))


def _compared(new: Outcome, old: Outcome) -> Iterator[Statement]:
    """Yield the comparisons with an older policy, for the models that both know."""
    for name, text in (("leaves", "request"), ("parts_leave", "audio, image or file")):
        more = z3.And(_flag(new, name), z3.Not(_flag(old, name)), z3.Not(old.error))
        claim = Claim(f"{name.replace('_', '-')}-no-more", None, compile_claim(f"!outcome.{name}"))
        yield Statement("compare", claim.name, f"no {text} leaves that stays under the older policy", more, claim)
    for kind, held in old.mask.items():
        less = z3.And(
            _flag(new, "leaves"), _flag(old, "leaves"), held, z3.Not(new.mask.get(kind, FALSE)), z3.Not(old.error)
        )
        claim = Claim(f"masks-{kind}", None, compile_claim(f'!outcome.leaves || "{kind}" in outcome.mask'))
        yield Statement("compare", claim.name, f"what the older policy masks as {kind} leaves masked", less, claim)


def _flag(outcome: Outcome, name: str) -> Formula:
    found = outcome.facts[f"outcome.{name}"]
    assert not isinstance(found, list | Element)
    return found
