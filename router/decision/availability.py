"""Which targets of a policy cannot answer now (`down`), or never can on this box (`absent`)."""

from __future__ import annotations

from collections.abc import Iterable

from ..types import BoxSetup, CloudSignals, EdgeSignals, Target

_NONE: frozenset[str] = frozenset()


class TargetAvailability:
    """The availability of the targets of one policy on one box."""

    def __init__(self, targets: Iterable[Target], setup: BoxSetup) -> None:
        targets = tuple(targets)
        self._edge = frozenset(target.name for target in targets if target.at == "edge")
        self._cloud = frozenset(target.name for target in targets if target.at == "cloud")
        self._cloud_models = tuple((target.model, target.name) for target in targets if target.at == "cloud")
        self._has_engine = setup.engine
        self.absent = (_NONE if setup.engine else self._edge) | (_NONE if setup.cloud else self._cloud)

    def down(self, edge: EdgeSignals, cloud: CloudSignals) -> frozenset[str]:
        """Return the targets that are known to be down. A cloud that was never probed counts as up."""
        down = _NONE
        if self._has_engine and not edge.loaded:
            down |= self._edge
        if cloud.reachable is False or cloud.breaker == "open":
            down |= self._cloud
        if cloud.unavailable_models:
            down |= {name for model, name in self._cloud_models if model in cloud.unavailable_models}
        return down
