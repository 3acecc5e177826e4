"""LoRA adapters of models on the device: a client asks for `MODEL+ADAPTER`, or `TARGET+ADAPTER`.

A policy's own target may name one too, as `model: MODEL+ADAPTER`. Which adapters there are is known on the box alone,
from its models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from ..errors import PolicyError
from ..types import Target
from .compiled import Policy

ModelAdapters = Callable[[str], Sequence[str] | None]
"""The adapters of a model on the device, by its name; None if there is no such model, which the engine reports."""


def with_adapters(policy: Policy, model_adapters: ModelAdapters) -> Policy:
    """Return the policy with a target for each adapter of its edge targets' models, which clients may name.

    Args:
        policy: As it is written.
        model_adapters: Those of the box, or of the bundle that it will run.

    Raises:
        PolicyError: an edge target names an adapter that its model does not have.
    """
    adapted = []
    for target in policy.targets:
        known = model_adapters(target.model) if target.at == "edge" else None
        if known is None:
            continue
        if not target.adapter:
            adapted += [_with_adapter(target, adapter) for adapter in known]
        elif target.adapter not in known:
            names = ", ".join(known) or "none"
            raise PolicyError(
                f"{target.model} has no adapter `{target.adapter}`; there are: {names}",
                where=f"targets.{target.name}.model",
            )
    return replace(policy, adapted=tuple(adapted))


def _with_adapter(target: Target, adapter: str) -> Target:
    return msgspec.structs.replace(target, name=f"{target.name}+{adapter}", adapter=adapter)
