"""The order of targets under `best_of`: by a score for each request, from estimates of quality, price and latency."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ..prices import PICO_USD
from ..types import Candidate, Estimates, Reason, Request, Session, Target, TextPart, Usage, Weights

ANSWER_TOKENS: Final = 256
"""The assumed length of an answer if neither the calibration nor the client's limit says more."""
MOST_TOKENS: Final = 4096
"""The length that an answer is taken to have at most if the client sets no limit."""
_MARGIN, _TEMPLATE_TOKENS = 1.25, 64
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
    price: float = 0.0,
) -> tuple[Target, ...]:
    """Return the targets, the highest score first; equal scores keep the policy's order. Appends to `reasons`.

    The score is quality · `weights.quality` - price · (`weights.usd` + `price`) - latency · `weights.latency`.

    1. If quality counts and a target has no estimate of it, the policy's order stays.
    2. The price is that of the counted prompt (0 tokens if it was not counted) and of the expected answer: the
       calibrated mean, at most the client's limit; without a calibration the limit, else `ANSWER_TOKENS`.
    3. A target that was not measured yet counts as fast as the fastest one: it is tried, and then measured.
    4. Tokens of the session that a target has warm have their own price there. Leaving the target of the last turn
       costs what is warm there, as if it had to be read once more.

    Args:
        session: The request's session, if the policy counts the cost of leaving a target.
        price: The quality that a dollar of the policy's budget must gain.
    """
    scores = _scores(targets, rule, weights, request, estimates, reasons, session)
    if scores is None:
        return targets
    totals: list[tuple[float, Target]] = []
    paid = f", {price:.4g} for a USD of the budget" if price else ""
    for target, (quality, usd, detail) in zip(targets, scores, strict=True):
        total = quality - price * usd
        text = f"score {total:.4f}: {detail}{paid}"
        reasons.append(Reason("target_scored", rule=rule, target=target.key, detail=text))
        totals.append((total, target))
    return tuple(target for _, target in sorted(totals, key=lambda pair: -pair[0]))


def choices(
    targets: tuple[Target, ...], weights: Weights, request: Request, estimates: Estimates, session: Session
) -> list[tuple[float, float]]:
    """Return the score of each target without a budget, and its expected price in US dollars; [] if none is known."""
    scores = _scores(targets, "", weights, request, estimates, [], session) or ()
    return [(quality, usd) for quality, usd, _ in scores]


def _scores(
    targets: tuple[Target, ...],
    rule: str,
    weights: Weights,
    request: Request,
    estimates: Estimates,
    reasons: list[Reason],
    session: Session,
) -> list[tuple[float, float, str]] | None:
    """Return the score without a budget, the price and the details of each target; None where the order stays."""
    known = {(one.at, one.model): one for one in estimates.candidates or ()}
    found = [known.get((target.at, target.served), _UNKNOWN) for target in targets]
    missing = [target for target, one in zip(targets, found, strict=True) if one.quality is None]
    if missing and weights.quality:  # (1)
        reasons += [
            Reason("estimate_absent", rule=rule, target=target.key, detail="no calibrated quality; the order stays")
            for target in missing
        ]
        return None
    fastest_s = min((one.latency_s for one in found if one.latency_s is not None), default=0.0)
    price_left = next((one.price.rates[0] for one in targets if one.name == session.target), 0)
    scored: list[tuple[float, float, str]] = []
    for target, one in zip(targets, found, strict=True):
        usd = _usd(target, one, request, estimates, session.warm.get(target.name, 0))
        lost = 0 if target.name == session.target else session.warm.get(session.target, 0)
        usd += lost * price_left / PICO_USD  # (4)
        latency_s = fastest_s if one.latency_s is None else one.latency_s  # (3)
        quality = one.quality or 0.0
        score = weights.quality * quality - weights.usd * usd - weights.latency * latency_s
        detail = f"quality {quality:.3f}, {usd:.6f} USD, {latency_s:.2f} s"
        detail += f", {lost} warm tokens left" if lost else ""
        scored.append((score, usd, detail))
    return scored


def most_usd(target: Target, request: Request, estimates: Estimates) -> float:
    """Return what an answer costs at most, US dollars.

    A prompt that was not counted has at most a token a byte of its texts, an answer without a limit `MOST_TOKENS`. The
    target's tokenizer and template may make more of a prompt than the device's. Not counted: images, files, tools.
    """
    prompt = estimates.prompt_tokens
    if prompt is None:
        contents = [message.content for message in request.messages] + list(request.prompts)
        prompt = sum(len(text.encode()) if isinstance(text, str) else _size(text or ()) for text in contents)
    most = (request.max_tokens or MOST_TOKENS) * request.sequences
    usage = Usage(round(prompt * _MARGIN) + _TEMPLATE_TOKENS, most, audio_ms=round((estimates.audio_s or 0.0) * 1000.0))
    return usage.pico_usd(target.price) / PICO_USD


def _size(items: Sequence[object]) -> int:
    """Return the bytes of the texts among a message's parts, or the number of a prompt's tokens."""
    return sum(len(item.text.encode()) if isinstance(item, TextPart) else isinstance(item, int) for item in items)


def expected_usd(target: Target, request: Request, estimates: Estimates) -> float:
    """Return the expected price of an answer without a calibration, US dollars."""
    return _usd(target, _UNKNOWN, request, estimates, 0)


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
