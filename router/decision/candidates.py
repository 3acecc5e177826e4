"""The order of targets under `best_of`: by a score for each request, from estimates of quality, price and latency."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ..prices import PICO_USD
from ..types import Candidate, Estimates, Reason, Request, Session, Snapshot, Target, TextPart, Usage, Weights

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
    signals: tuple[Snapshot, Estimates],
    reasons: list[Reason],
    session: Session = _NO_SESSION,
) -> tuple[Target, ...]:
    """Return the targets, the highest score first; equal scores keep the policy's order. Appends to `reasons`.

    The score is quality · `weights.quality` - price · `weights.usd` - latency · `weights.latency`, less what the answer
    takes from the policy's budgets: its price, and its watt-hours, times what a unit of them must gain.

    1. If quality counts and a target has no estimate of it, the policy's order stays.
    2. The price is that of the counted prompt (0 tokens if it was not counted) and of the expected answer: the
       calibrated mean, at most the client's limit; without a calibration the limit, else `ANSWER_TOKENS`.
    3. A target that was not measured yet counts as fast as the fastest one: it is tried, and then measured.
    4. Tokens of the session that a target has warm have their own price there. Leaving the target of the last turn
       costs what is warm there, as if it had to be read once more.

    Args:
        session: The request's session, if the policy counts the cost of leaving a target.
    """
    scored = scores(targets, rule, weights, request, signals, reasons, session)
    spend, energy = signals[0].spend, signals[0].energy
    price, wh_price = spend.price or 0.0, energy.price or 0.0
    paid = f", {price:.4g} for a USD of the budget" if price else ""
    totals: list[tuple[float, Target]] = []
    for target, (quality, usd, wh, detail) in zip(targets, scored, strict=False):
        total = quality - price * usd - wh_price * wh
        paid_wh = f", {wh:.6f} Wh at {wh_price:.4g} ({energy.limit})" if wh_price else ""
        text = f"score {total:.4f}: {detail}{paid}{paid_wh}"
        reasons.append(Reason("target_scored", rule=rule, target=target.key, detail=text))
        totals.append((total, target))
    return tuple(target for _, target in sorted(totals, key=lambda pair: -pair[0])) or targets


def scores(
    targets: tuple[Target, ...],
    rule: str,
    weights: Weights,
    request: Request,
    signals: tuple[Snapshot, Estimates],
    reasons: list[Reason],
    session: Session = _NO_SESSION,
) -> list[tuple[float, float, float, str]]:
    """Return score without a budget, USD, watt-hours and details of each target; [] where the order stays."""
    snapshot, estimates = signals
    known = {(one.at, one.model): one for one in estimates.candidates or ()}
    found = [known.get((target.at, target.served), _UNKNOWN) for target in targets]
    missing = [target for target, one in zip(targets, found, strict=True) if one.quality is None]
    if missing and weights.quality:  # (1)
        reasons += [
            Reason("estimate_absent", rule=rule, target=target.key, detail="no calibrated quality; the order stays")
            for target in missing
        ]
        return []
    fastest_s = min((one.latency_s for one in found if one.latency_s is not None), default=0.0)
    price_left = next((one.price.rates[0] for one in targets if one.name == session.target), 0)
    scored: list[tuple[float, float, float, str]] = []
    for target, one in zip(targets, found, strict=True):
        tokens = expected_tokens(request, one)
        usd = expected_usd(target, tokens, estimates, session.warm.get(target.name, 0))
        lost = 0 if target.name == session.target else session.warm.get(session.target, 0)
        usd += lost * price_left / PICO_USD  # (4)
        latency_s = fastest_s if one.latency_s is None else one.latency_s  # (3)
        quality = one.quality or 0.0
        score = weights.quality * quality - weights.usd * usd - weights.latency * latency_s
        detail = f"quality {quality:.3f}, {usd:.6f} USD, {latency_s:.2f} s"
        detail += f", {lost} warm tokens left" if lost else ""
        scored.append((score, usd, expected_wh(target, tokens, snapshot), detail))
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
    audio_ms = round(estimates.audio_s * 1000.0) if estimates.audio_s else 0
    usage = Usage(round(prompt * _MARGIN) + _TEMPLATE_TOKENS, most, audio_ms=audio_ms)
    return usage.pico_usd(target.price) / PICO_USD


def _size(items: Sequence[object]) -> int:
    """Return the bytes of the texts among a message's parts, or the number of a prompt's tokens."""
    return sum(len(item.text.encode()) if isinstance(item, TextPart) else isinstance(item, int) for item in items)


def expected_tokens(request: Request, candidate: Candidate = _UNKNOWN) -> float:
    """Return the expected length of the answers, tokens. (2)"""
    most, length = request.max_tokens, candidate.answer_tokens
    if length is None:
        length = ANSWER_TOKENS if most is None else most
    elif most is not None:
        length = min(length, most)
    return length * request.sequences


def expected_usd(target: Target, tokens: float, estimates: Estimates, warm: int = 0) -> float:
    """Return the expected price of an answer, US dollars. (2) `warm`: tokens in the target's cache."""
    usage = Usage(estimates.prompt_tokens or 0, round(tokens), cached_tokens=warm)
    return usage.pico_usd(target.price) / PICO_USD


def expected_wh(target: Target, tokens: float, snapshot: Snapshot) -> float:
    """Return what an answer takes from the device's battery, watt-hours; 0 if it is unknown."""
    energy = snapshot.energy
    return (tokens * (energy.token_wh or 0.0) if target.at == "edge" else energy.cloud_wh) or 0.0
