"""In which form the sounds, pictures and files of a request reach a target: as they are, as text, or as soft tokens.

A target that cannot take a kind of part, or may not have it, gets what this box's encoders found in it.
"""

from __future__ import annotations

import msgspec

from ..types import Ability, AttemptPlan, BoxSetup, Fusion, Modality, Snapshot, Target, WaitFor


class PartForms(msgspec.Struct, frozen=True):
    """How this box encodes the parts of one request.

    `found`: their kinds; () if it encodes none. `kept`: a constraint keeps the parts on the device.
    """

    found: tuple[Modality, ...]
    setup: BoxSetup
    fusion: Fusion
    kept: bool = False

    @property
    def texts(self) -> tuple[Modality, ...]:
        """Kinds of parts that may reach a target as text."""
        return () if self.fusion == "early" else self.setup.encoders

    def encoded(self, target: Target) -> tuple[tuple[Modality, ...], tuple[Modality, ...]]:
        """Return the kinds of parts that reach a target as text, and as soft tokens."""
        away = target.at != "edge"
        needed = [one for one in self.found if one not in target.can or (self.kept and away)]
        projected = () if away or self.fusion == "late" else self.setup.projectors.get(target.model, ())
        soft = tuple([one for one in needed if one in projected])
        return tuple([one for one in self.texts if one in needed and one not in soft]), soft

    def unmet(self, missing: list[Ability], target: Target) -> list[Ability]:
        """Return those of the abilities that a target lacks which no form of the parts makes up for."""
        if not missing or not self.found:
            return missing
        encoded = [one for form in self.encoded(target) for one in form]
        return [ability for ability in missing if ability not in encoded]

    def noted(self, plans: tuple[AttemptPlan, ...], wait_for: WaitFor) -> tuple[AttemptPlan, ...]:
        """Note in each plan which parts its target gets as text or as soft tokens, and how."""
        if not self.found:
            return plans
        formed: list[AttemptPlan] = []
        for plan in plans:
            facts, soft = self.encoded(plan.target)
            formed.append(msgspec.structs.replace(plan, facts=facts, soft=soft, fusion=self.fusion, wait_for=wait_for))
        return tuple(formed)


_NOT_ENCODED = PartForms((), BoxSetup(engine=False, cloud=False), "late")


def part_forms(kinds: list[Modality], snapshot: Snapshot, fusion: Fusion, *, kept: bool = False) -> PartForms:
    """Return how this box encodes the parts of a request with these kinds of content.

    Args:
        kept: the parts may not leave the device.
    """
    setup = snapshot.setup
    if setup is None or len(kinds) == 1 or not (setup.encoders or setup.projectors):
        return _NOT_ENCODED
    return PartForms(tuple(kinds[1:]), setup, fusion, kept)
