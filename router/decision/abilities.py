"""Abilities of targets: the form in which the parts of a request reach each one, and the error when none may answer.

Audio, images and files reach a target as they are, as text, or as soft tokens. A target that cannot take a kind of
part, or may not have it, gets the text that this device's encoders found in it.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ..errors import (
    AllAttemptsFailed,
    BackendError,
    CausewayError,
    GuardRefused,
    NoRoute,
    OutsideRegion,
    SessionTargetUnavailable,
    UnsupportedFeature,
)
from ..policy.compiled import Policy, Route
from ..policy.signals import required_abilities
from ..types import (
    AUTO,
    Ability,
    AttemptPlan,
    Decision,
    DeviceSetup,
    Fusion,
    Modality,
    Request,
    Snapshot,
    Target,
    WaitFor,
)
from .sessions import EXCLUSIONS


class PartForms(msgspec.Struct, frozen=True):
    """The forms in which this device encodes the parts of a request. `found`: the kinds of parts that it encodes.
    `kept`: whether a constraint keeps the parts on the device.
    """

    found: tuple[Modality, ...]
    setup: DeviceSetup
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
        """Return the abilities that a target lacks and that no form of the parts makes up for."""
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


_NOT_ENCODED = PartForms((), DeviceSetup(engine=False, cloud=False), "late")


def part_forms(kinds: list[Modality], snapshot: Snapshot, fusion: Fusion, *, kept: bool = False) -> PartForms:
    """Return how this device encodes the parts of a request with these kinds of content.

    Args:
        kept: The parts may not leave the device.
    """
    setup = snapshot.setup
    if setup is None or len(kinds) == 1 or not (setup.encoders or setup.projectors):
        return _NOT_ENCODED
    return PartForms(tuple(kinds[1:]), setup, fusion, kept)


# Ability → the field of the request that needs it, and its description in messages.
_NEEDS: Mapping[Ability, tuple[str, str]] = {
    "chat": ("model", "chat completions"),
    "completion": ("model", "completions"),
    "embedding": ("model", "embeddings"),
    "tools": ("tools", "tool calls"),
    "json": ("response_format", "JSON answers"),
    "logprobs": ("logprobs", "logprobs"),
    "image": ("messages", "images"),
    "audio": ("messages", "audio"),
    "file": ("messages", "files"),
}


def no_route(decision: Decision) -> CausewayError:
    """Build the error for a decision without attempts.

    0. A rule of the guard refuses it: GuardRefused (400).
    1. No target of the policy, or none that the request names, has the abilities it needs: UnsupportedFeature (400),
       because it can never succeed.
    2. The regions to which it is bound exclude a target, and nothing else is left: OutsideRegion (503).
    3. Anything else may succeed later: NoRoute (503). The message names the reason that excluded each target.
    """
    if decision.refused_by:  # (0)
        return GuardRefused(
            f"The rule `{decision.refused_by}` of policy {decision.policy}@{decision.revision} refuses this request "
            "for what its texts contain, such as personal data or keys. Remove that content, and send the request "
            "again."
        )
    if decision.pinned:
        return SessionTargetUnavailable(
            f"The session stays at `{decision.pinned}` (`session.mode: require`), which cannot answer: "
            f"{_exclusions(decision) or 'no target of the policy has its name and model'}."
        )
    missing = decision.missing_abilities
    if missing:  # (1)
        needs = " and ".join(_NEEDS[ability][1] for ability in missing)
        if decision.able_targets:
            named = next(reason.detail for reason in decision.reasons if reason.code == "model_named")
            able = " or ".join(f"`{name}`" for name in decision.able_targets)
            return UnsupportedFeature(
                f"`{named}` does not support {needs} under policy {decision.policy}@{decision.revision}. Send {able} "
                f"as `model`, or `{AUTO}`; or add `can: [{', '.join(missing)}]` to the target in the policy.",
                param="model",
            )
        return UnsupportedFeature(
            f"No target of policy {decision.policy}@{decision.revision} that this request may use supports {needs}. "
            f"Leave that out{_reading(missing)}, or add a target with `can: [{', '.join(missing)}]` to the policy.",
            param=_NEEDS[missing[0]][0],
        )
    detail = _exclusions(decision) or "no route of the policy holds"
    message = f"Policy {decision.policy}@{decision.revision} leaves no target: {detail}."
    if any(reason.code == "region_excluded" for reason in decision.reasons):  # (2)
        return OutsideRegion(f"{message} The request is bound to {', '.join(decision.regions or ()) or 'no region'}.")
    return NoRoute(message)  # (3)


def pinned_error(decision: Decision, error: CausewayError) -> CausewayError:
    """Return the client's error after every attempt failed: one that names the target if only that may answer."""
    if not decision.pinned or not isinstance(error, AllAttemptsFailed | BackendError):
        return error
    message = f"The session stays at `{decision.pinned}` (`session.mode: require`). {error.message}"
    return SessionTargetUnavailable(message, retry_after_s=error.retry_after_s)


def _exclusions(decision: Decision) -> str:
    return ", ".join(
        f"{reason.target or 'no target'} ({reason.code}{': ' + because if because else ''})"
        for reason in decision.reasons
        if reason.code in EXCLUSIONS
        for because in (reason.detail or reason.rule,)
    )


def _reading(missing: tuple[Ability, ...]) -> str:
    """Return advice on how the device itself could turn such parts into text, for models that take text only."""
    extras = [f"`{extra}`" for ability, extra in (("audio", "voice"), ("image", "images")) if ability in missing]
    return f", let the device read it (extra {' and '.join(extras)}, `fusion: late`)" if extras else ""


def unmet_abilities(
    policy: Policy,
    request: Request,
    kinds: list[Modality],
    snapshot: Snapshot,
    route: Route | None,
    named: Route | None,
) -> tuple[tuple[Ability, ...], tuple[str, ...]]:
    """Return the abilities that keep a request from every target, and the names of targets that have all of them.

    Args:
        kinds: The kinds of content in the request.
        route: The route that holds, or `named`.
        named: The targets that the client chose; None: any target of the policy may serve the request.

    Returns:
        The required abilities that the targets lack, () if one target has all; and the capable targets of the policy,.
        () unless the client named a model.
    """
    forms = part_forms(kinds, snapshot, "late" if route is None else route.fusion)
    required = required_abilities(request, kinds)

    def lacking(target: Target) -> list[Ability]:
        return forms.unmet([ability for ability in required if ability not in target.can], target)

    lacks = [lacking(target) for target in (policy.targets if named is None else named.targets)]
    missing = tuple(ability for ability in required if any(ability in one for one in lacks)) if all(lacks) else ()
    if named is None:
        return missing, ()
    return missing, tuple(target.name for target in policy.targets if not lacking(target))
