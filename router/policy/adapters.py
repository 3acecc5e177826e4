"""LoRA adapters of models on the device: a client asks for `MODEL+ADAPTER`, or `TARGET+ADAPTER`.

A policy does not name adapters: which there are is known on the box alone, from its models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from ..types import Target
from .compiled import Policy

ModelAdapters = Callable[[str], Sequence[str]]
"""The adapters of a model on the device, by its name."""


def with_adapters(policy: Policy, model_adapters: ModelAdapters) -> Policy:
    """Return the policy with a target for each adapter of its edge targets' models, which clients may name."""
    adapted = [
        _with_adapter(target, adapter)
        for target in policy.targets
        if target.at == "edge"
        for adapter in model_adapters(target.model)
    ]
    return replace(policy, adapted=tuple(adapted))


def _with_adapter(target: Target, adapter: str) -> Target:
    return msgspec.structs.replace(target, name=f"{target.name}+{adapter}", adapter=adapter)
