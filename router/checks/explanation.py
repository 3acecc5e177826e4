"""A decision in words: which rules were evaluated, which held, which signals were absent.

Used for the response of `POST /v1/route`, and for drafts of a policy that are tried on one request (`try_draft`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from ..decision.decide import decide, plan_cache
from ..documents.data import table_of
from ..documents.reader import did_you_mean
from ..errors import ConfigError
from ..guard.facts import NOTHING, Detector, facts_of
from ..policy.compiled import Policy
from ..policy.signals import ESTIMATED, SIGNALS, SignalType, find_signal
from ..renames import advice
from ..types import (
    AttemptPlan,
    CachePlan,
    Decision,
    Estimates,
    Handoff,
    NowSignals,
    Reason,
    ReasonCode,
    Request,
    Session,
    Snapshot,
)
from .cases import CaseRequest, CaseSnapshot, estimates_of

Segment = tuple[str, str]  # text and its style, as rich writes styles; "" for none
Line = list[Segment]


class RouteExplanation(msgspec.Struct, frozen=True):
    """The response of `/v1/route`."""

    cache: CachePlan
    decision: Decision
    estimates: Estimates
    snapshot: Snapshot
    cached_age_s: float | None = None
    similarity: float | None = None  # similarity of the cached answer's question; None: an exact hit, or no hit
    draft: bool = False  # whether it was decided without a device, from the signals that the author set


_REASON_TEXTS = table_of(__package__, "reasons.yaml", dict[ReasonCode, tuple[str, str, str]])
"""Mark, style and text of each reason; `{detail}` and `{target}` are fields of the reason."""


_ABSENT_IN_A_DRAFT = "the signal {detail} is not set, so the rule does not hold"
_DRAFT_NOTE = (
    "a draft: give signals with --set SIGNAL=VALUE; unless prompt_tokens is set, it is estimated from the text"
)


def explain(explanation: RouteExplanation) -> list[Line]:
    """Return the explanation as lines of styled text."""
    decision = explanation.decision
    name = decision.rule or ("the request names a model" if decision.attempts else "no route")
    head: Line = [(name, "bold"), (f"  {decision.policy}@{decision.revision}", "")]
    if decision.on_device:
        head.append(("  bound to the device", "yellow"))
    if decision.regions is not None:
        head.append((f"  bound to {', '.join(decision.regions) or 'no region'}", "yellow"))
    # The cache plan repeats the decision's constraints; show them once.
    cache = [reason for reason in explanation.cache.reasons if not reason.code.startswith(("constraint", "guard"))]
    reasons = [*decision.reasons, *(reason for reason in cache if reason not in decision.reasons)]
    return [
        head,
        *_attempts(decision),
        [],
        *_reasons(reasons, draft=explanation.draft),
        [],
        [(f"cache    {_cache(explanation)}", "")],
        *_session(explanation.estimates.session),
        *_shadow(decision),
        *_signals(explanation),
        *([[(_DRAFT_NOTE, "dim")]] if explanation.draft else []),
    ]


def _attempts(decision: Decision) -> list[Line]:
    if not decision.attempts:
        status = 400 if decision.missing_abilities else 503
        return [[(f"  no attempt is left: the response is {status} with these reasons", "red")]]
    rows = []
    for number, plan in enumerate(decision.attempts, start=1):
        handoff, target = plan.handoff, plan.target
        notes = [*_fusion_notes(plan), *([] if handoff is None else [_handoff_note(handoff)])]
        note = "; ".join(notes)
        rows.append(((f"  {number}.", ""), (target.key, ""), (target.at, ""), (target.served, ""), (note, "dim")))
    return _aligned(rows)


def _fusion_notes(plan: AttemptPlan) -> list[str]:
    forms = {"text": plan.facts, "soft tokens": plan.soft}
    forms_text = [f"{' and '.join(kinds)} as {form}" for form, kinds in forms.items() if kinds]
    if not forms_text:
        return []
    first = ", of the branch that is ready first" if plan.wait_for == "first" else ""
    return [f"{plan.fusion} fusion: {', '.join(forms_text)}{first}"]


def _handoff_note(handoff: Handoff) -> str:
    time = "" if handoff.within_s is None else f" or {handoff.within_s:g} s"
    return f"handoff if confidence is below {handoff.below:g} after {handoff.after_tokens} tokens{time}"


def _reasons(reasons: Sequence[Reason], *, draft: bool) -> list[Line]:
    rows = []
    for reason in reasons:
        mark, style, template = _REASON_TEXTS[reason.code]
        if draft and reason.code == "signal_absent":
            template = _ABSENT_IN_A_DRAFT
        text = template.format(detail=reason.detail, target=reason.target or "the target").strip()
        rows.append(((f"  {mark}", style), (reason.rule, ""), (text, style)))
    return _aligned(rows)


def _aligned(rows: Sequence[Sequence[Segment]]) -> list[Line]:
    """Pad the columns, two spaces apart; the last text of a line is not padded."""
    widths = [max(len(text) for text, _ in column) for column in zip(*rows, strict=True)]
    lines: list[Line] = []
    for row in rows:
        last = max(at for at, (text, _) in enumerate(row) if text)
        padded = [(text.ljust(width + 2), style) for (text, style), width in zip(row[:last], widths, strict=False)]
        lines.append([*padded, row[last]])
    return lines


def _cache(explanation: RouteExplanation) -> str:
    if explanation.cached_age_s is not None:
        age = f"an answer {explanation.cached_age_s:.1f} s old"
        if explanation.similarity is None:
            return f"hit: {age}"
        return f"semantic: {age} to a question of similarity {explanation.similarity:.2f}"
    exact = explanation.cache.exact
    if exact is None:
        return f"bypass: {explanation.cache.bypass}"
    semantic = explanation.cache.semantic
    shared = "" if semantic is None else f", and {semantic.ttl_s:g} s for questions with the same meaning"
    return f"miss; the answer would be fresh for {exact.ttl_s:g} s{shared}"


def _shadow(decision: Decision) -> list[Line]:
    """Return how often the other side answers the same request for comparison; "" if it never does."""
    shadow = decision.shadow
    if shadow is None:
        return []
    text = f"a share of {shadow.share:.3g} of such answers, for at most {shadow.usd_per_day:g} USD a day"
    return [[(f"shadow   the other side is also asked after {text}", "")]]


def _session(session: Session | None) -> list[Line]:
    """Return what is known of the request's session; "" if the policy has no `session`."""
    if session is None:
        return []
    text = "new, or unknown here"
    if session.target:
        warm = ", ".join(f"{tokens} tokens warm at {name}" for name, tokens in session.warm.items())
        text = f"its last turn was answered by {session.target} ({session.model})" + (f"; {warm}" if warm else "")
    return [[(f"session  {text}", "")]]


def _signals(explanation: RouteExplanation) -> list[Line]:
    """Return every signal that has a value, under its name in policies."""
    snapshot, estimates = explanation.snapshot, explanation.estimates
    measured = ("device", "edge", "cloud", "spend", "energy")
    groups: dict[str, dict[str, object]] = {
        "request": {},
        "images": {},
        "audio": {},
        "pii": {},
        "secrets": {},
        **{name: msgspec.structs.asdict(getattr(snapshot, name)) for name in measured},
    }
    if len(snapshot.clouds) > 1:
        groups |= {f"cloud.{name}": msgspec.structs.asdict(cloud) for name, cloud in snapshot.clouds.items()}
    for signal, field in ESTIMATED.items():
        group, _, name = signal.partition(".")
        groups[group][name] = getattr(estimates, field)
    lines: list[Line] = []
    for group, signals in groups.items():
        present = [f"{name} {_format(value)}" for name, value in signals.items() if value not in (None, (), "")]
        if present:
            lines.append([(f"{group:7}  {', '.join(present)}", "")])
    return lines


def _format(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


CHARACTERS_PER_TOKEN: Final = 4  # of English text; the device counts with its model's tokenizer
_OTHERS: Mapping[str, SignalType] = {
    # Settings of a draft's request that are not signals.
    "request.model": "string",
    "request.image": "bool",
    "request.logprobs": "bool",
    "down": "list",
}
_SETTABLE: Mapping[str, SignalType] = {
    f"{group}.{field.name}": SIGNALS[f"{group}.{field.name}"].type
    for group, example in [("request", CaseRequest()), *msgspec.structs.asdict(CaseSnapshot()).items()]
    if isinstance(example, msgspec.Struct)
    for field in msgspec.structs.fields(example)
    if f"{group}.{field.name}" in SIGNALS
} | dict(_OTHERS)


def try_draft(policy: Policy, text: str, settings: Iterable[str], now: NowSignals) -> RouteExplanation:
    """Decide a request of this text under `policy`, without a device, from the signals that the author sets.

    Args:
        text: The prompt. Its length gives an estimate of the token count unless `request.prompt_tokens` is set.
        settings: Signal values, such as ``device.temperature_c=90``, ``request.tags=private,a`` or ``down=large``;
            later ones win. A signal that is not set, or set to nothing, is absent.
        now: The local time, which `now.*` settings replace.
    Raises:
        ConfigError, ModelNotFound: A setting's key or value, or a `request.model`, does not exist.
    """
    request_fields: dict[str, object] = {"prompt_tokens": max(1, round(len(text) / CHARACTERS_PER_TOKEN))}
    drafted = Request(kind="completion", model="", prompts=(text,))
    found = facts_of(drafted, Detector(policy.guard_settings.phone_regions)) if policy.reads_texts else NOTHING
    groups: dict[str, dict[str, object]] = {
        "request": request_fields,
        "now": msgspec.structs.asdict(now),
        "pii": {"classes": found.classes, "count": found.pii},
        "secrets": {"count": found.secrets},
    }
    down: object = ()
    for setting in settings:
        key, value = _read(setting)
        group, _, name = key.partition(".")
        if key == "down":
            down = value or ()
            continue
        if "." in name:
            group, _, name = key.rpartition(".")
        if value is None:
            groups.get(group, {}).pop(name, None)
        else:
            groups.setdefault(group, {})[name] = value
    clouds = {group.partition(".")[2]: groups.pop(group) for group in list(groups) if "." in group}
    request = msgspec.convert(groups.pop("request"), CaseRequest)
    case = msgspec.convert({**groups, "down": down, "clouds": clouds}, CaseSnapshot)
    estimates = estimates_of(request, case)
    question, snapshot = request.build(), case.build()
    return RouteExplanation(
        cache=plan_cache(policy, question, snapshot, estimates),
        decision=decide(policy, question, snapshot, estimates),
        estimates=estimates,
        snapshot=snapshot,
        draft=True,
    )


def _read(setting: str) -> tuple[str, object]:
    """Return key and value; the value is None if it is empty, which makes the signal absent. Raises ConfigError."""
    key, separator, text = (part.strip() for part in setting.partition("="))
    where = f"--set {setting[:100]}"
    if not separator:
        raise ConfigError("Write KEY=VALUE, such as device.temperature_c=90.", where=where)
    spec = find_signal(key)
    kind = spec.type if spec is not None and key.count(".") == 2 else _SETTABLE.get(key)
    if kind is None:
        near = did_you_mean(key, _SETTABLE) or f"; known: {', '.join(_SETTABLE)}"
        message = advice("signal", key, rewrites=False) or f"Unknown signal `{key[:64]}`{near}."
        raise ConfigError(message, where=where)
    if not text:
        return key, None
    read, expected = _READERS[kind]
    try:
        value = read(text)
    except (ValueError, KeyError):
        raise ConfigError(f"Expected {expected}, not {text[:64]!r}.", where=where) from None
    known = () if spec is None else spec.values
    if known and isinstance(value, str) and value not in known:
        raise ConfigError(f"Expected one of {', '.join(filter(None, known))}, not {text[:64]!r}.", where=where)
    return key, value


def _items(text: str) -> list[str]:
    return [item for part in text.strip("[]").split(",") if (item := part.strip().strip("'\""))]


_READERS: Mapping[SignalType, tuple[Callable[[str], object], str]] = {
    "int": (int, "a whole number"),
    "double": (float, "a number"),
    "bool": ({"true": True, "false": False}.__getitem__, "true or false"),
    "string": (str, "text"),
    "list": (_items, "a list: a,b"),
}
