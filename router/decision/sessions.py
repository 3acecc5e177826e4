"""Sessions: the turns of an agent that belong together, the target to which they are pinned, and what leaving it costs.

A session is known by a name of its client (the header `x-session-id`, a stored conversation or chain of responses),
and by its history: by digests of the messages before the model's last ones, with the ids of the tools that these call.
What the model said is left out, because clients send it back in another form. Only digests are kept.

1. A tool's result belongs to the turn that asked for it, whose digest has the call's ids: that turn knows the target,
   also where one named session runs several agents at once. Without it the session's last turn does.
2. A request that was bound to the device, or to regions, binds whatever continues it by name or by history, and what
   repeats its words after the same history, because it may have failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Final

import msgspec

from ..policy.compiled import Constraint, Policy, Route, as_variant, chosen_by_name
from ..residency import Regions, narrowed
from ..session_tags import tags_of_session
from ..trackers import network_of
from ..types import (
    AudioPart,
    Chunk,
    Decision,
    FilePart,
    ImagePart,
    Message,
    Reason,
    Request,
    Session,
    SessionOutcome,
    Target,
)

KEY_BYTES: Final = 16
NO_SESSION: Final = Session()
SESSION_BOUND: Final = Constraint("session", None, "on_device")
EXCLUSIONS: Final = (
    *("constraint_excluded", "region_excluded", "preference_excluded", "target_absent", "target_unable"),
    *("session_left", "budget_excluded"),
)
"""The codes of reasons for which a target may not answer."""
_MAX_SINCE: Final = 64  # messages since the last answer whose keys are looked up
_WARM_S: Final = 300.0  # time for which servers commonly keep a prefix
_encode = msgspec.msgpack.Encoder().encode
FindSession = Callable[[bytes], Session | None]


class SessionKeys(msgspec.Struct, frozen=True):
    """The digests by which a request finds its session, and by which the next one will."""

    asked: bytes | None  # of the history that the model answered last; None: it has answered nothing
    since: tuple[bytes, ...]  # of the history with each message after that answer; the last one has all of it
    named: bytes | None  # of the client's name for the session
    tool_result: bool
    owner: bytes  # of the client, or its network

    @property
    def turns(self) -> tuple[bytes, ...]:
        """The keys of the turn before, the surest one first."""
        return tuple([key for key in (self.asked, self.named) if key is not None])

    @property
    def bindings(self) -> tuple[bytes, ...]:
        """The keys under which a request is bound before it is answered."""
        return (self.after(()),) if self.named is None else (self.after(()), self.named)

    @property
    def known(self) -> tuple[bytes, ...]:
        """All keys under which earlier requests left a state: also those whose words are repeated without an answer."""
        return (*self.turns, *[_digest(digest, []) for digest in self.since])

    def after(self, call_ids: Iterable[str]) -> bytes:
        """Return the key of the history with an answer to it. `call_ids`: of the answer's tool calls."""
        return _digest(self.since[-1], sorted(call_ids))


@dataclass(eq=False, repr=False, slots=True)
class SessionTurn:
    """A request's turn in its session.

    Attributes:
        session: The state before it.
        calls: The ids of the answer's tool calls, by choice.
        outcome: Whether its answer stayed at the target; None before it.
    """

    keys: SessionKeys
    session: Session
    calls: dict[int, list[str]] = field(default_factory=lambda: {0: []})
    outcome: SessionOutcome | None = None

    def add(self, chunk: Chunk) -> None:
        """Note the tool calls of a chunk of the answer, as the client gets it."""
        if chunk.tool_calls:
            self.calls.setdefault(chunk.index, []).extend(call.id for call in chunk.tool_calls if call.id)

    def states(self, state: Session) -> dict[bytes, Session]:
        """Return what is kept after the answer: the state under the keys by which the next request finds it."""
        keys = [self.keys.after(ids) for ids in self.calls.values()]
        return dict.fromkeys(keys if self.keys.named is None else [*keys, self.keys.named], state)


def keys_of(request: Request, owner: str) -> SessionKeys:
    """Return the keys of a chat. `owner`: the client, with whom others share no session."""
    messages = request.messages
    end = len(messages) - 1  # an answer that the client has begun itself is not a turn
    while end > 0 and messages[end - 1].role != "assistant":
        end -= 1
    start = end
    while start > 0 and messages[start - 1].role == "assistant":
        start -= 1
    hashed, asked, since = blake2b(owner.encode("utf-8", "replace"), digest_size=KEY_BYTES), None, []
    for index, message in enumerate(messages):
        if index == start < end:
            ids = [call.id for one in messages[start:end] for call in one.tool_calls]
            asked = _digest(hashed.digest(), sorted(ids))
        hashed.update(_encode(_essence(message)))
        if index >= end:
            since.append(hashed.digest())
    tool_result = start < end and any(message.role in ("tool", "function") for message in messages[end:])
    named = next((_digest(owner, tag) for tag in tags_of_session(request.hints.tags)), None)
    return SessionKeys(asked, tuple(since[-_MAX_SINCE:]), named, tool_result, client_of(owner))


def client_of(owner: str) -> bytes:
    """Return the digest of a client, or its network, under which its sessions are kept."""
    return _digest(network_of(owner))


def session_of(keys: SessionKeys, find: FindSession, now: float) -> Session:
    """Return the state of a request's session. `now`: Unix seconds."""
    found = {key: session for key in keys.known if (session := find(key)) is not None}
    last = next((found[key] for key in keys.turns if key in found and found[key].target), NO_SESSION)
    regions = narrowed(*[None if one.regions is None else frozenset(one.regions) for one in found.values()])
    return msgspec.structs.replace(
        last,
        warm=last.warm if now - last.at < _WARM_S else {},
        on_device=any(one.on_device for one in found.values()),
        regions=_sorted(regions),
        tool_result=keys.tool_result and bool(last.target),
    )


def bound(session: Session, *, on_device: bool, regions: Iterable[str] | None) -> Session:
    """Return the session as it is bound by a request that was bound itself, before its answer."""
    both = narrowed(
        None if session.regions is None else frozenset(session.regions), None if regions is None else frozenset(regions)
    )
    return msgspec.structs.replace(session, on_device=session.on_device or on_device, regions=_sorted(both))


def answered(session: Session, target: Target, tokens: int, now: float) -> Session:
    """Return the session after an answer of a target.

    Args:
        session: The session, `bound` by the request.
        tokens: The length of prompt and answer, which are warm there from now on.
        now: Unix seconds.
    """
    warm = {**session.warm, target.name: tokens}
    known = msgspec.structs.replace(session, target=target.name, cloud=target.cloud, model=target.served, warm=warm)
    return msgspec.structs.replace(known, tool_result=False, at=now)


def is_pinned(policy: Policy, session: Session) -> bool:
    """Return whether the session's last target is to answer."""
    rules = policy.session
    return rules is not None and bool(session.target) and (rules.pin == "conversation" or session.tool_result)


def counts_prefix(policy: Policy) -> bool:
    """Return whether leaving a target costs its warm tokens."""
    return policy.session is not None and policy.session.switch_cost == "prefix"


def pinned_route(
    policy: Policy, session: Session, route: Route | None, named: Route | None, reasons: list[Reason]
) -> tuple[Route | None, str]:
    """Return the route of a request in its session, and the name of the only target that may answer ("": any).

    1. Nothing is pinned: the route as it is.
    2. The target is gone, or the client named another one: without it; a route without targets under `require`.
    3. Otherwise the target comes first, in the cloud of the last turn if it is in several; the others of the route
       follow under `prefer`. Only a failure leaves it: neither a handoff nor a score does.
    """
    if policy.session is None or not is_pinned(policy, session):
        return route, ""  # (1)
    only = session.target if policy.session.mode == "require" else ""
    rule = "" if route is None else route.name
    targets = _targets_of(policy, session)
    if named is not None:
        places = [(one.name, one.cloud) for one in named.targets]
        targets = tuple(one for one in targets if (one.name, one.cloud) in places)
    if not targets:  # (2)
        detail = "the request names another model" if named is not None else "the policy no longer has its model"
        reasons.append(Reason("session_left", rule=SESSION_BOUND.name, target=session.target, detail=detail))
        return (chosen_by_name(()) if only else route), only
    why = "the tool's result" if session.tool_result else "the conversation"
    reasons.append(Reason("session_pinned", rule=SESSION_BOUND.name, target=session.target, detail=why))
    keys = {one.key for one in targets}
    others = () if only or route is None else tuple(one for one in route.targets if one.key not in keys)
    base = chosen_by_name(()) if route is None else route
    return replace(base, name=rule, targets=(*targets, *others), handoff=None, best_of=None, promise=None), only  # (3)


def outcome_of(session: Session, decision: Decision | None, target: str, model: str, because: str) -> SessionOutcome:
    """Return whether an answer stayed at the target of the session's last turn.

    Args:
        decision: The decision; None for an answer of the cache.
        because: The reason of the answer's head.
    """
    before = session.target
    if not before:
        return SessionOutcome("new")
    reasons = () if decision is None else decision.reasons
    if (target, model) == (before, session.model):
        pinned = next((one.detail for one in reasons if one.code == "session_pinned"), "")
        return SessionOutcome("stayed", f"pinned: {pinned}" if pinned else because, before)
    left = next((one.code for one in reasons if _names(one, before) and one.code in (*EXCLUSIONS, "target_down")), "")
    lost = max(0, session.warm.get(before, 0) - session.warm.get(target, 0))
    return SessionOutcome("switched", left or because, before, lost)


def _targets_of(policy: Policy, session: Session) -> tuple[Target, ...]:
    """Return the session's last target in each of its clouds, that of the last turn first; () if it is gone."""
    base = policy.base or policy
    for target in base.offered:
        if target.name == session.target:
            place = base.places.get(target.name)
            models = ("", *(() if place is None else [variant.model for variant in place.variants]))
            for one in (as_variant(target, model) for model in models):
                if one.served == session.model:
                    return tuple(sorted(one.in_each_cloud, key=lambda each: each.cloud != session.cloud))
    return ()


def _names(reason: Reason, target: str) -> bool:
    return reason.target.partition("@")[0] == target


def _sorted(regions: Regions) -> tuple[str, ...] | None:
    return None if regions is None else tuple(sorted(regions))


def _digest(*values: object) -> bytes:
    return blake2b(_encode(values), digest_size=KEY_BYTES).digest()


def _essence(message: Message) -> tuple[object, ...]:
    """Return what clients repeat unchanged: not the arguments of calls, nor unknown fields."""
    calls = [(call.id, call.name) for call in message.tool_calls]
    return message.role, message.tool_call_id, _text(message), calls


def _text(message: Message) -> str:
    content = message.content
    if isinstance(content, str) or content is None:
        return (content or "").strip()
    texts: list[str] = []
    for part in content:
        if isinstance(part, ImagePart):
            texts.append(part.url)
        elif isinstance(part, AudioPart):
            texts.append(part.data)
        else:
            texts.append(part.document if isinstance(part, FilePart) else part.text)
    return "".join(texts).strip()
