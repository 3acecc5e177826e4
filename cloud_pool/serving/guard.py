"""The gateway's guard: rules about personal data and keys in the texts of requests, on their way to a tier.

Audio, images and files are checked as text, a spoken message in the forms of `EXAMINED`, so that every way in is
covered: HTTP, live sessions, gRPC, jobs, batches and streams. What the cache, in front of it, answers reaches no tier.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from causeway_server.router.errors import ConfigError, GuardRefused
from causeway_server.router.guard.facts import TextModel
from causeway_server.router.guard.mask import Restorer, restorer_of
from causeway_server.router.policy.cel_source import ExpressionError
from causeway_server.router.policy.compiled import GuardRule, guard_rule, guard_settings
from causeway_server.router.policy.expression import compile_expression
from causeway_server.router.policy.file import GuardDoc
from causeway_server.router.policy.signals import GUARD_SIGNALS, ON_DEMAND, RequiredSignals
from causeway_server.router.serving.guard.runner import GuardRunner
from causeway_server.router.types import Estimates, Request, Snapshot

from ..core.request_context import AnswerHead, Generate, Piece, RequestContext

GUARD_HEADER = "x-causeway-guard"


class GuardConfig(GuardDoc, frozen=True):
    """Rules about personal data and keys in requests, as in a device's policy."""

    names_model: str = ""

    def compiled(self) -> tuple[GuardRule, ...]:
        """Return the rules. Raises ConfigError for a condition that is invalid, or names what a gateway has not."""
        rules = []
        for index, rule in enumerate(self.rules):
            where = f"guard.rules[{index}].when"
            if not isinstance(rule.when, str):
                rules.append(guard_rule(rule, None))
                continue
            try:
                when = compile_expression(rule.when)
            except ExpressionError as error:
                raise ConfigError(f"{error.message[:1].upper()}{error.message[1:]}.", where=where) from None
            for name in sorted(when.signals):
                if name not in GUARD_SIGNALS and (not name.startswith("request.") or name in ON_DEMAND):
                    reason = f"A gateway does not know `{name}`: name signals of `request`, `pii` or `secrets`."
                    raise ConfigError(reason, where=where)
            rules.append(guard_rule(rule, when))
        return tuple(rules)


class GatewayGuard:
    """The rules in force, at least one. `model` finds names and addresses; None: they are not found."""

    def __init__(self, config: GuardConfig, rules: tuple[GuardRule, ...], model: TextModel | None = None) -> None:
        self.rules = rules
        self.settings = guard_settings(config)
        self.needs = RequiredSignals([rule.when for rule in rules if rule.when is not None])
        self.reads_texts = not GUARD_SIGNALS.isdisjoint(self.needs.signals)
        self.runner = GuardRunner(model)

    def around(self, generate: Generate) -> Generate:
        """Return `generate` with requests that are checked, and answers with their values."""

        async def answer(context: RequestContext) -> AsyncGenerator[Piece, None]:
            guarded = GuardedRequest(self)
            async with aclosing(generate(msgspec.structs.replace(context, guard=guarded))) as pieces:
                async for piece in pieces:
                    if isinstance(piece, AnswerHead):
                        yield guarded.mark(piece)
                    else:
                        yield piece if guarded.restorer is None else guarded.restorer.chunk(piece)
            for chunk in () if guarded.restorer is None else guarded.restorer.end():
                yield chunk

        return answer


class GuardedRequest:
    """The rules for one request (`core.request_context.RequestGuard`)."""

    def __init__(self, guard: GatewayGuard) -> None:
        self.restorer: Restorer | None = None
        self._guard = guard
        self._applied: tuple[GuardRule, ...] = ()
        self._seen: tuple[Request, Request] | None = None  # the last request, and what its tier gets

    async def check(self, request: Request) -> Request:
        """Return the request as a tier may get it. Raises GuardRefused, or GuardFailed if it cannot be masked."""
        if self._seen is not None and self._seen[0] == request:
            return self._seen[1]
        applied = await self._binding(request)
        self._applied = tuple(dict.fromkeys((*self._applied, *applied)))  # a trimmed request is checked again
        refusing = next((rule for rule in applied if rule.action == "refuse"), None)
        if refusing is not None:
            raise GuardRefused(
                f"The rule `{refusing.name}` of this gateway's guard refuses this request for what its texts contain, "
                "such as personal data or keys. Remove that content, and send the request again."
            )
        classes = {kind for rule in applied for kind in rule.classes}
        allowed = request
        if classes:
            masked = await self._guard.runner.masked(request, classes, self._guard.settings)
            allowed = masked.request
            if masked.values:
                self.restorer = restorer_of(masked)
        self._seen = (request, allowed)
        return allowed

    def mark(self, head: AnswerHead) -> AnswerHead:
        """Name the rules that apply in an answer's head, and so in its audit record."""
        if not self._applied:
            return head
        applied = ",".join(f"{rule.name}={rule.action}" for rule in self._applied)
        return msgspec.structs.replace(head, headers=(*head.headers, (GUARD_HEADER, applied)))

    async def _binding(self, request: Request) -> tuple[GuardRule, ...]:
        """Return the rules that apply; one that cannot be evaluated applies."""
        guard, estimates = self._guard, Estimates()
        if guard.reads_texts:
            found = await guard.runner.facts(request, guard.settings)
            estimates = Estimates(pii_classes=found.classes, pii_count=found.pii, key_count=found.secrets)
        values = guard.needs.read(request, Snapshot(), estimates)
        return tuple([rule for rule in guard.rules if rule.when is None or rule.when.evaluate(values) is not False])
