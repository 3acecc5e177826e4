"""The making of one answer: the request, the decision, the attempts. Several requests may share one (`flight`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from router.decision.attempts import AttemptSequence
from router.errors import CausewayError, CloudFailed, InvalidRequest
from router.policy.compiled import Policy
from router.types import AttemptRecord, CachePlan, Decision, Estimates, Request, Snapshot, Target, Usage

from ..backends.backend import UpstreamInfo
from .reply import AnswerHead

if TYPE_CHECKING:
    from ..observability.tracing import RequestTrace

_FALLBACK = "fallback"
_HANDOFF = "handoff"


class Generation:
    """Facts that grow while the answer is made; only the task that runs the work writes them. Times: monotonic s."""

    def __init__(
        self,
        id: str,  # noqa: A002 -- of the decision
        request: Request,
        policy: Policy,
        snapshot: Snapshot,
        *,
        arrived: float,
        deadline: float,
        traceparent: str = "",
        trace: RequestTrace | None = None,
    ) -> None:
        self.id = id
        self.request = request
        self.policy = policy
        self.snapshot = snapshot
        self.arrived = arrived
        self.deadline = deadline
        self.traceparent = traceparent  # the caller's
        self.trace = trace
        self.plan = CachePlan()
        self.key: bytes | None = None  # of the cache; None: the policy keeps this out of it
        self.estimates = Estimates()
        self.decision: Decision | None = None
        self.course: AttemptSequence | None = None
        self.heard = UpstreamInfo()  # what the last attempt's cloud said
        self.usage = Usage()
        self.committed = False  # a byte of the answer has left
        self.over = False  # no attempt is to come
        self._records: tuple[AttemptRecord, ...] | None = None

    @property
    def on_device(self) -> bool:
        """Bound to the device by a wish or a constraint: nothing of the content may be kept on disk."""
        wished = self.request.hints.prefer == "only_on_device"
        return wished or self.plan.private or (self.decision is not None and self.decision.on_device)

    @property
    def target(self) -> Target | None:
        """Who answers: the attempt at work, or the last one."""
        return self.course.attempts[-1].plan.target if self.course is not None and self.course.attempts else None

    @property
    def degraded(self) -> bool:
        return self.course is not None and (self.course.degraded or self.heard.degraded)

    @property
    def reason(self) -> str:
        """The rule that chose; if a later attempt answers, what made it: a failure goes before a handoff."""
        if self.decision is None or self.course is None:
            return ""
        before = [attempt for attempt in self.course.attempts[:-1] if attempt.error is not None]
        failed = [attempt for attempt in before if attempt.state.value != "handed_off"]
        for attempts, kind in ((failed, _FALLBACK), (before, _HANDOFF)):
            if attempts and attempts[-1].error is not None:
                return f"{kind}: {attempts[-1].error.code}"
        return self.decision.rule or ("continued" if self.request.resume else "model_named")

    @property
    def onward(self) -> str:
        """The trace context that the attempt at work hands on."""
        if self.trace is None or self.course is None:
            return self.traceparent
        return self.trace.attempt(len(self.course.attempts) - 1)

    def head(self) -> AnswerHead:
        target = self.target
        assert target is not None
        return AnswerHead(
            id=self.id,
            policy=policy_label(self.policy),
            route=target.at,
            target=target.name,
            model=target.model,
            reason=self.reason,
            cache="bypass" if self.key is None else "miss",
            degraded=self.degraded,
        )

    def records(self, now: float) -> tuple[AttemptRecord, ...]:
        """What each attempt came to, without the words of others: a target that complains may quote the ask."""
        if self.course is None:
            return ()
        if self._records is not None:
            return self._records
        records = tuple(
            msgspec.structs.replace(record, detail="") if _quotes(attempt.error) else record
            for attempt, record in zip(self.course.attempts, self.course.records(now), strict=True)
        )
        if records and self.heard.degraded and not records[-1].error:
            records = (*records[:-1], msgspec.structs.replace(records[-1], detail=str(self.heard)))
        if self.over:
            self._records = records  # they do not change any more
        return records

    def usd(self) -> float:
        """What the attempts cost, also those that were given up. The answer's own usage where the target told it."""
        if self.course is None:
            return 0.0
        cost = 0.0
        for attempt in self.course.attempts:
            tokens = attempt.tokens
            if attempt is self.course.attempts[-1]:
                tokens = max(tokens, self.usage.prompt_tokens + self.usage.completion_tokens)
            cost += tokens / 1000.0 * attempt.plan.target.usd_per_1k_tokens
        return cost


def _quotes(error: CausewayError | None) -> bool:
    """Whether the message holds what a target said (`router.openai.decode` puts it after "reported:")."""
    return isinstance(error, InvalidRequest) or (isinstance(error, CloudFailed) and "reported:" in error.message)


def policy_label(policy: Policy) -> str:
    return f"{policy.name}@{policy.revision}"
