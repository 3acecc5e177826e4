"""The order of targets under `best_of`: by a score for each request, from estimates of quality, price and latency."""

from __future__ import annotations

from typing import Final

from ..prices import PICO_USD
from ..types import Candidate, Estimates, Reason, Request, Target, Usage, Weights

ANSWER_TOKENS: Final = 256
"""The assumed length of an answer if neither the calibration nor the client's limit says more."""
_UNKNOWN: Final = Candidate("edge", "")


def ranked(
    targets: tuple[Target, ...],
    rule: str,
    weights: Weights,
    request: Request,
    estimates: Estimates,
    reasons: list[Reason],
) -> tuple[Target, ...]:
    """Return the targets, the highest score first; equal scores keep the policy's order. Appends to `reasons`.

    The score is quality · `weights.quality` - price · `weights.usd` - latency · `weights.latency`.

    1. If quality counts and a target has no estimate of it, the policy's order stays.
    2. The price is that of the counted prompt (0 tokens if it was not counted) and of the expected answer: the
       calibrated mean, at most the client's limit; without a calibration the limit, else `ANSWER_TOKENS`.
    3. A target that was not measured yet counts as fast as the fastest one: it is tried, and then measured.
    """
    known = {(one.at, one.model): one for one in estimates.candidates or ()}
    found = [known.get((target.at, target.served), _UNKNOWN) for target in targets]
    missing = [target for target, one in zip(targets, found, strict=True) if one.quality is None]
    if missing and weights.quality:  # (1)
        reasons += [
            Reason("estimate_absent", rule=rule, target=target.key, detail="no calibrated quality; the order stays")
            for target in missing
        ]
        return targets
    fastest_s = min((one.latency_s for one in found if one.latency_s is not None), default=0.0)
    scored: list[tuple[float, Target]] = []
    for target, one in zip(targets, found, strict=True):
        usd = _usd(target, one, request, estimates)
        latency_s = fastest_s if one.latency_s is None else one.latency_s  # (3)
        quality = one.quality or 0.0
        score = weights.quality * quality - weights.usd * usd - weights.latency * latency_s
        detail = f"score {score:.4f}: quality {quality:.3f}, {usd:.6f} USD, {latency_s:.2f} s"
        reasons.append(Reason("target_scored", rule=rule, target=target.key, detail=detail))
        scored.append((score, target))
    return tuple(target for _, target in sorted(scored, key=lambda pair: -pair[0]))


def _usd(target: Target, candidate: Candidate, request: Request, estimates: Estimates) -> float:
    """Return the expected price of an answer, US dollars. (2)"""
    most = request.max_tokens
    length = candidate.answer_tokens
    if length is None:
        length = ANSWER_TOKENS if most is None else most
    elif most is not None:
        length = min(length, most)
    usage = Usage(estimates.prompt_tokens or 0, round(length * request.sequences))
    return usage.pico_usd(target.price) / PICO_USD
