"""Why no target may answer a request: what none of them can do, and the error for the client."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import CausewayError, NoRoute, UnsupportedFeature
from ..policy.compiled import Policy, Route
from ..policy.signals import required_abilities
from ..types import AUTO, Ability, Decision, Modality, Request, Snapshot, Target
from .part_forms import part_forms

# Ability → the request's field that needs it, and the text for it.
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

    1. The request needs what no target of the policy, or none that it names, can do: UnsupportedFeature (400), because
       it can never pass.
    2. Anything else may pass at another time: NoRoute (503). It names what excluded each target.
    """
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
            f"no target of policy {decision.policy}@{decision.revision} that this request may use supports {needs}. "
            f"Leave that out{_reading(missing)}, or add a target with `can: [{', '.join(missing)}]` to the policy.",
            param=_NEEDS[missing[0]][0],
        )
    exclusions = [  # (2)
        f"{reason.target or 'no target'} ({reason.code}{': ' + because if because else ''})"
        for reason in decision.reasons
        if reason.code in ("constraint_excluded", "preference_excluded", "target_absent", "target_unable")
        for because in (reason.detail or reason.rule,)
    ]
    detail = ", ".join(exclusions) or "no route of the policy holds"
    return NoRoute(f"policy {decision.policy}@{decision.revision} leaves no target: {detail}")


def _reading(missing: tuple[Ability, ...]) -> str:
    """How the box itself could make text of such parts, for models that take text only."""
    extras = [f"`{extra}`" for ability, extra in (("audio", "voice"), ("image", "pictures")) if ability in missing]
    return f", let the box read it (extra {' and '.join(extras)}, `fusion: late`)" if extras else ""


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
        kinds: of content in the request.
        route: the route that holds, or `named`.
        named: the targets that the client chose; None: any target of the policy might serve the request.

    Returns:
        The required abilities that targets lack, () if one target has all; the able targets of the policy, () unless
        the client named a model.
    """
    forms = part_forms(kinds, snapshot, "late" if route is None else route.fusion)
    required = required_abilities(request, kinds)

    def lacking(target: Target) -> list[Ability]:
        return forms.unmet([ability for ability in required if ability not in target.can], target)

    lacks = [lacking(target) for target in (policy.targets if named is None else named.targets)]
    missing = tuple(ability for ability in required if any(ability in one for one in lacks)) if all(lacks) else ()
    if named is None or request.resume:
        return missing, ()
    return missing, tuple(target.name for target in policy.targets if not lacking(target))
