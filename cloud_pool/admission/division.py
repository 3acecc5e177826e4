"""A tier's permits divided between the gateways and the workers that share it. Pure.

Gateways divide all permits, whether jobs run or not, but reserve those that jobs hold or may take until the next
heartbeat, as they reserve their last ones (`permits`): a flood leaves them free from its first moment on, and
only urgent requests and those of light tenants may wait in Triton for the end of a job. No gateway gets more than its
demand while another gets less (max-min fairness), and what no gateway demands is divided evenly. Each keeps at least
half of an even part, for requests that arrive between two heartbeats.

Workers divide what the gateways leave, since jobs are the lowest class:

    left = permits − demand of the gateways − headroom

The headroom is, at each endpoint, one permit and two standard deviations of its demand, as if requests came at random
(a Poisson process, whose variance is its mean), so that nearly every request finds a sequence that no job holds,
although no process knows how full an endpoint is of the others' work. By simulation one deviation raises the p99 to the
first token by half at half load, and the headroom of one endpoint for three of them by a fifth to two thirds. The
demand of the last seconds counts (`JobShare`), since requests come and go faster than jobs end. Where nothing is left,
one job may start every four seconds, so that jobs never stop; one that always runs would double the p99 of sixteen
sequences at four fifths of their load.

Where a gateway's requests wait, or their first tokens are late, the workers use a smaller share of what is left: half
of it at once, and a little more with each heartbeat in which that is over (AIMD, as TCP's congestion control).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Literal

import msgspec

PeerKind = Literal["gateway", "worker"]
CUT_S = 2.0
"""Minimum time between two cuts: running jobs must end before a cut shows."""
_DEVIATIONS = 2.0
_TRICKLE = 8  # heartbeats
_GROWTH = 0.05  # of the share, per heartbeat
_MIN_SHARE = 1 / 64
_DECAY = 0.8  # of the demand, per heartbeat


class PeerState(msgspec.Struct, frozen=True):
    """State of a gateway or worker that it announces to the others for a tier."""

    kind: PeerKind
    demand: float  # permits that it could use
    running: int = 0  # requests that run or wait in a gateway, jobs and messages that run in a worker
    lacks_capacity: bool = False  # requests wait, or first tokens are late
    part: int = 0  # of a worker: permits that its jobs may hold from its next heartbeat on


Peers = Mapping[str, PeerState]
"""Peers by name."""


class JobShare:
    """Share of the permits left by the gateways that jobs use. `now`: monotonic seconds."""

    def __init__(self) -> None:
        self.value = 1.0
        self._demand = 0.0
        self._cut_at = -math.inf
        self._beats = -1

    def permits(self, permits: int, peers: Peers, now: float, endpoints: float = 1.0) -> int:
        """Return the tier's permits for the jobs of all workers; call it once per heartbeat.

        If nothing is left, it is 1 in three heartbeats of _TRICKLE: a part counts from its third heartbeat on.
        """
        gateways = [peer for peer in peers.values() if peer.kind == "gateway"]
        self._demand = max(float(sum(gateway.running for gateway in gateways)), _DECAY * self._demand)
        if any(gateway.lacks_capacity for gateway in gateways):
            if now - self._cut_at >= CUT_S:
                self.value, self._cut_at = max(_MIN_SHARE, self.value / 2.0), now
        else:
            self.value = min(1.0, self.value + _GROWTH)
        headroom = endpoints + _DEVIATIONS * math.sqrt(self._demand * endpoints) if gateways else 0.0
        left = permits - self._demand - headroom
        self._beats += 1
        return max(int(self._beats % _TRICKLE < 3), int(left * self.value))


def gateway_permits(permits: int, peers: Peers) -> dict[str, int]:
    """Return each gateway's part of the permits; they add up to `permits`, or are 1 each if gateways outnumber them."""
    demands = {name: peer.demand for name, peer in peers.items() if peer.kind == "gateway"}
    if permits <= len(demands):
        return dict.fromkeys(demands, 1)
    least = max(1.0, permits / (2 * len(demands)))
    return divide_permits(permits, {name: max(least, demand) for name, demand in demands.items()})


def reserved_for_jobs(parts: Mapping[str, int], peers: Peers) -> dict[str, int]:
    """Return how many of each gateway's permits (`parts`) jobs hold or may take until the next heartbeat."""
    jobs = sum(max(peer.running, peer.part) for peer in peers.values() if peer.kind == "worker")
    return divide_permits(min(jobs, sum(parts.values())), parts)


def worker_permits(permits: int, peers: Peers, turn: int = 0) -> dict[str, int]:
    """Return each worker's part of the jobs' permits: one more than its jobs at least, if there are enough.

    If there are too few, workers without work get none (a pipeline that stands by has none while another one receives),
    and the others take turns; `turn` is the same for all peers and changes after a while. A worker that still runs more
    jobs than its part starts none, and until they have ended the others divide the rest.
    """
    workers = {name: peer for name, peer in peers.items() if peer.kind == "worker"}
    order = {name: (peer.demand <= 0.0, _draw(turn, name), name) for name, peer in workers.items()}
    parts: dict[str, int] = {}
    while workers:
        wanted = {name: 1.0 + peer.demand for name, peer in workers.items()}
        divided = divide_permits(permits, wanted, order)
        over = [name for name, part in divided.items() if workers[name].running > part]
        if not over:
            return parts | divided
        for name in over:
            parts[name] = divided[name]
            permits = max(0, permits - workers.pop(name).running)
    return parts


def divide_permits(
    permits: int, wanted: Mapping[str, float], order: Mapping[str, tuple[object, ...]] | None = None
) -> dict[str, int]:
    """Return parts of `permits`, max-min fair by demand, with the rest divided evenly.

    `order`: of peers with the same claim to one permit; None: by name.
    """
    left, parts = float(permits), {}
    for at, name in enumerate(sorted(wanted, key=lambda peer: (wanted[peer], peer))):
        parts[name] = min(wanted[name], left / (len(wanted) - at))
        left -= parts[name]
    return _rounded({name: part + left / len(parts) for name, part in parts.items()}, permits, order or {})


def _rounded(parts: Mapping[str, float], permits: int, order: Mapping[str, tuple[object, ...]]) -> dict[str, int]:
    """Round down and give the rest to the largest remainders, ties by `order`: all peers get the same result."""
    whole = {name: int(part) for name, part in parts.items()}
    first = sorted(parts, key=lambda name: (round(whole[name] - parts[name], 6), order.get(name, (name,))))
    for name in first[: permits - sum(whole.values())]:
        whole[name] += 1
    return whole


def _draw(turn: int, name: str) -> bytes:
    """Return a pseudo-random key that is the same in all processes and differs for each turn."""
    return hashlib.blake2b(f"{turn} {name}".encode(), digest_size=8).digest()
