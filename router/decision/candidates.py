"""The order of targets under `best_of`: by a score for each request, from estimates of quality, price and latency."""

from __future__ import annotations

from typing import Final

from ..prices import PICO_USD
from ..types import Candidate, Estimates, Reason, Request, Session, Target, Usage, Weights

ANSWER_TOKENS: Final = 256
"""The assumed length of an answer if neither the calibration nor the client's limit says more."""
_UNKNOWN: Final = Candidate("edge", "")
_NO_SESSION: Final = Session()


def ranked(
    targets: tuple[Target, ...],
    rule: str,
    weights: Weights,
    request: Request,
    estimates: Estimates,
    reasons: list[Reason],
    session: Session = _NO_SESSION,
) -> tuple[Target, ...]:
    """Return the targets, the highest score first; equal scores keep the policy's order. Appends to `reasons`.

    The score is quality · `weights.quality` - price · `weights.usd` - latency · `weights.latency`.

    1. If quality counts and a target has no estimate of it, the policy's order stays.
    2. The price is that of the counted prompt (0 tokens if it was not counted) and of the expected answer: the
       calibrated mean, at most the client's limit; without a calibration the limit, else `ANSWER_TOKENS`.
    3. A target that was not measured yet counts as fast as the fastest one: it is tried, and then measured.
    4. Tokens of the session that a target has warm have their own price there. Leaving the target of the last turn
       costs what is warm there, as if it had to be read once more.

    Args:
        session: The request's session, if the policy counts the cost of leaving a target.
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
    price_left = next((one.price.rates[0] for one in targets if one.name == session.target), 0)
    scored: list[tuple[float, Target]] = []
    for target, one in zip(targets, found, strict=True):
        usd = _usd(target, one, request, estimates, session.warm.get(target.name, 0))
        lost = 0 if target.name == session.target else session.warm.get(session.target, 0)
        usd += lost * price_left / PICO_USD  # (4)
        latency_s = fastest_s if one.latency_s is None else one.latency_s  # (3)
        quality = one.quality or 0.0
        score = weights.quality * quality - weights.usd * usd - weights.latency * latency_s
        detail = f"score {score:.4f}: quality {quality:.3f}, {usd:.6f} USD, {latency_s:.2f} s"
        detail += f", {lost} warm tokens left" if lost else ""
        reasons.append(Reason("target_scored", rule=rule, target=target.key, detail=detail))
        scored.append((score, target))
    return tuple(target for _, target in sorted(scored, key=lambda pair: -pair[0]))


def _usd(target: Target, candidate: Candidate, request: Request, estimates: Estimates, warm: int) -> float:
    """Return the expected price of an answer, US dollars. (2) `warm`: tokens in the target's cache."""
    most = request.max_tokens
    length = candidate.answer_tokens
    if length is None:
        length = ANSWER_TOKENS if most is None else most
    elif most is not None:
        length = min(length, most)
    usage = Usage(estimates.prompt_tokens or 0, round(length * request.sequences), cached_tokens=warm)
    return usage.pico_usd(target.price) / PICO_USD
