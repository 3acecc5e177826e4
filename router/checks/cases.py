"""Test cases of a policy: a request, the device's signals, and the expected decision. Strictly parsed, run without I/O.

Fields that `expect` leaves out are not compared.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ..decision.decide import decide, plan_cache
from ..documents.reader import KeyLocations, read_struct
from ..documents.strict_yaml import Problem, SourceLocation
from ..errors import InvalidRequest, ModelNotFound
from ..guard.classes import GuardClass, PiiClass
from ..policy.cel_source import ExpressionError
from ..policy.compiled import Policy, with_variants
from ..policy.file import Condition, seconds
from ..policy.outcomes import Claim, compile_claim, outcome_values
from ..types import (
    AUTO,
    AudioPart,
    CachePlan,
    Candidate,
    CloudSignals,
    Decision,
    DeviceSetup,
    DeviceSignals,
    EdgeSignals,
    EnergySignals,
    Estimates,
    FilePart,
    ImagePart,
    Kind,
    Message,
    Modality,
    NowSignals,
    Part,
    Prefer,
    PromiseSignals,
    Reason,
    Request,
    ResponseFormat,
    RoutingHints,
    Sampling,
    Session,
    Snapshot,
    SpendSignals,
    Tool,
    ToolChoice,
)


class CaseRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The request of a test case, by its signals. Without `prompt_tokens` the edge model is not running."""

    kind: Kind = "chat"
    model: str = AUTO
    prompt_tokens: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    n: int = 1
    stream: bool = False
    tags: tuple[str, ...] = ()
    client: str = ""
    prefer: Prefer | None = None
    deadline_ms: int | None = None
    tools: bool = False
    json: bool = False
    image: bool = False
    image_pixels: int | None = None  # size of the request's image
    file: bool = False
    audio: bool = False
    audio_s: float | None = None  # length of the request's audio
    language: str | None = None  # the language spoken in the audio
    logprobs: bool = False
    tool_choice: Literal["auto", "none"] = "auto"  # with `tools`
    prompts: int = 0  # number of prompts of a completion or an embedding

    def build(self) -> Request:
        parts: list[Part] = []
        if self.image or self.image_pixels is not None:
            parts.append(ImagePart("https://example.org/a.png"))
        if self.audio or self.audio_s is not None or self.language is not None:
            parts.append(AudioPart("", "wav"))
        if self.file:
            parts.append(FilePart("{}"))
        return Request(
            kind=self.kind,
            model=self.model,
            messages=(Message("user", tuple(parts) or "…"),),
            prompts=("…",) * self.prompts,
            max_tokens=self.max_tokens,
            sampling=Sampling(temperature=self.temperature),
            n=self.n,
            stream=self.stream,
            tools=(Tool("tool"),) if self.tools else (),
            tool_choice=ToolChoice(self.tool_choice),
            response_format=ResponseFormat("json_object") if self.json else None,
            logprobs=0 if self.logprobs else None,
            hints=RoutingHints(
                prefer=self.prefer, tags=tuple(sorted(self.tags)), client=self.client, deadline_ms=self.deadline_ms
            ),
        )


class CaseEdge(EdgeSignals, frozen=True):
    quality: float | None = None  # estimate about the request, as `edge.quality` in policies


class CaseImages(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text: bool | None = None  # whether an encoder finds text in the request's images


class CaseAudio(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    speech: bool | None = None  # whether an encoder finds speech in the request's audio clips


class CasePii(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    classes: tuple[PiiClass, ...] = ()  # classes of personal data that the detectors find
    count: int = 0  # number of different values


class CaseSecrets(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    count: int = 0  # number of different keys that the detectors find


class CaseSnapshot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The signals of the device. A signal that is left out is absent."""

    device: DeviceSignals = DeviceSignals()
    edge: CaseEdge = CaseEdge()
    images: CaseImages = CaseImages()
    audio: CaseAudio = CaseAudio()
    pii: CasePii = CasePii()
    secrets: CaseSecrets = CaseSecrets()
    cloud: CloudSignals = CloudSignals()  # the first cloud
    clouds: dict[str, CloudSignals] = {}
    regions: dict[str, str] = {}  # regions of the device's clouds, by name
    spend: SpendSignals = SpendSignals()
    energy: EnergySignals = EnergySignals()
    now: NowSignals = NowSignals()
    down: frozenset[str] = frozenset()
    encoders: tuple[Modality, ...] = ()  # kinds of parts that the device turns into text
    projectors: dict[str, tuple[Modality, ...]] = {}  # kinds that it turns into soft tokens, by model
    candidates: tuple[Candidate, ...] | None = None  # estimates of the targets of `best_of`
    promises: dict[str, float] = {}  # thresholds that promises allow, by route; a route without one lacks evidence
    variants: dict[str, str] = {}  # models of the variants that answer, by target

    def build(self) -> Snapshot:
        edge = EdgeSignals(self.edge.queue, self.edge.tokens_per_s, self.edge.loaded, self.edge.feedback)
        clouds = tuple({**self.clouds, **self.regions})
        setup = None
        if self.regions or self.encoders or self.projectors:
            setup = DeviceSetup(True, True, {}, self.encoders, self.projectors, clouds, self.regions)
        return Snapshot(
            self.device,
            edge,
            self.cloud,
            self.spend,
            self.now,
            self.down,
            setup=setup,
            clouds=self.clouds,
            promises={name: PromiseSignals(threshold) for name, threshold in self.promises.items()},
            energy=self.energy,
        )


def estimates_of(request: CaseRequest, snapshot: CaseSnapshot) -> Estimates:
    """Return the estimates that a case contains."""
    return Estimates(
        prompt_tokens=request.prompt_tokens,
        quality=snapshot.edge.quality,
        image_pixels=request.image_pixels,
        images_text=snapshot.images.text,
        audio_s=request.audio_s,
        language=request.language,
        audio_speech=snapshot.audio.speech,
        pii_classes=snapshot.pii.classes,
        pii_count=snapshot.pii.count,
        key_count=snapshot.secrets.count,
        candidates=snapshot.candidates,
    )


class Expect(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The expected decision. Each of `reasons` must match a reason of the decision in the fields that it has."""

    route: str | UnsetType = UNSET  # the rule that decided; "" for none
    targets: tuple[str, ...] | UnsetType = UNSET  # targets in order, including the last resort after a handoff
    handoff: bool | UnsetType = UNSET  # whether any attempt may hand off
    on_device: bool | UnsetType = UNSET
    private: bool | UnsetType = UNSET
    mask: tuple[GuardClass, ...] | UnsetType = UNSET  # classes that cloud targets get as placeholders; [] for none
    refused_by: str | UnsetType = UNSET  # rule of the guard that refuses the request; "" for none
    reasons: tuple[Reason, ...] = ()
    cache: (
        Annotated[str, Meta(pattern=r"^(bypass|[0-9.]+(ms|s|m|h|d))$", title="bypass or a time to live such as 30s")]
        | UnsetType
    ) = UNSET
    cache_reasons: tuple[Reason, ...] = ()
    error: Literal["model_not_found"] | UnsetType = UNSET
    holds: Condition | UnsetType = UNSET  # a condition over its signals and `outcome.*`, as in `claims`


class CaseSession(Session, frozen=True, forbid_unknown_fields=True):
    """The state of a session. Left out: the request has none."""


class Case(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    expect: Expect
    request: CaseRequest = CaseRequest()
    snapshot: CaseSnapshot = CaseSnapshot()
    session: CaseSession | None = None  # state of the request's session


class CaseFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    policy: str  # path of the policy, relative to this file
    cases: Annotated[tuple[Case, ...], Meta(min_length=1)]


class Difference(msgspec.Struct, frozen=True):
    key: str  # key of `expect`
    expected: str
    found: str


class CaseResult(msgspec.Struct, frozen=True):
    name: str
    location: SourceLocation
    differences: tuple[Difference, ...]


def read_cases(text: str, file: str) -> tuple[CaseFile | None, KeyLocations, tuple[Problem, ...]]:
    """Parse a case file. `file` is its name in messages; each fault is a problem with its location."""
    cases, locations, problems = read_struct(text, file, CaseFile)
    if cases is not None:
        problems = tuple(
            Problem(
                locations.find(f"cases[{index}].expect"), "the case expects nothing: add `targets`, `cache` or `error`"
            )
            for index, case in enumerate(cases.cases)
            if case.expect == Expect()
        )
    return cases, locations, problems


def run_cases(cases: CaseFile, locations: KeyLocations, policy: Policy) -> list[CaseResult]:
    """Decide each case under `policy` and compare the decision with `expect`."""
    return [
        CaseResult(case.name, locations.find(f"cases[{index}]"), tuple(_compare(case, policy)))
        for index, case in enumerate(cases.cases)
    ]


class Decided(msgspec.Struct, frozen=True):
    """The decisions of a policy for a case. `decision`: None if it refuses the request, for the reason `error`."""

    request: Request
    snapshot: Snapshot
    estimates: Estimates
    decision: Decision | None
    plan: CachePlan
    error: str = ""

    def keeps(self, policy: Policy, claim: Claim) -> bool:
        """Return whether a claim is true for the case."""
        outcome = outcome_values(self.decision, self.plan, self.request, self.snapshot.setup)
        facts = (self.request, self.snapshot, self.estimates)
        return claim.is_kept(outcome, *facts, policy.default_temperature) is True


def decide_case(policy: Policy, request: CaseRequest, snapshot: CaseSnapshot, session: Session | None) -> Decided:
    """Decide the request of a case. As on a device, variants answer no request that names a model."""
    built, facts = request.build(), snapshot.build()
    if snapshot.variants and (built.model == AUTO or built.model in policy.target_names):
        chosen = {name: model for name, model in snapshot.variants.items() if model in _variants(policy, name)}
        policy = with_variants(policy, chosen)
    estimates = msgspec.structs.replace(estimates_of(request, snapshot), session=session)
    plan = plan_cache(policy, built, facts, estimates)
    try:
        return Decided(built, facts, estimates, decide(policy, built, facts, estimates), plan)
    except (ModelNotFound, InvalidRequest) as error:
        return Decided(built, facts, estimates, None, plan, error.code)


def _variants(policy: Policy, target: str) -> tuple[str, ...]:
    return tuple([one.model for one in policy.places[target].variants] if target in policy.places else [])


def _holds(expect: Expect, policy: Policy, decided: Decided) -> list[Difference]:
    if isinstance(expect.holds, UnsetType):
        return []
    try:
        claim = Claim("", None, compile_claim(expect.holds))
    except ExpressionError as error:
        return [Difference("holds", "a condition over signals and outcome.*", error.message)]
    return [] if decided.keeps(policy, claim) else [Difference("holds", expect.holds, "not true")]


def _compare(case: Case, policy: Policy) -> list[Difference]:
    for name, model in case.snapshot.variants.items():
        if model not in (known := _variants(policy, name)):
            return [Difference("variants", f"a variant of {name}: {', '.join(known) or 'it has none'}", model)]
    decided, expect = decide_case(policy, case.request, case.snapshot, case.session), case.expect
    decision, plan = decided.decision, decided.plan
    if decision is None:
        return [*_differ("error", expect.error, decided.error), *_holds(expect, policy, decided)]
    return [
        *_holds(expect, policy, decided),
        *_differ("error", expect.error, "none"),
        *_differ("route", expect.route, decision.rule),
        *_differ("targets", _target_list(expect.targets), _target_list(tuple(a.target.key for a in decision.attempts))),
        *_differ("handoff", expect.handoff, any(a.handoff is not None for a in decision.attempts)),
        *_differ("on_device", expect.on_device, decision.on_device),
        *_differ("private", expect.private, decision.private),
        *_differ("mask", _target_list(expect.mask), _target_list(decision.mask)),
        *_differ("refused_by", expect.refused_by, decision.refused_by),
        *_differ("cache", _expected_ttl(expect.cache), _planned_ttl(plan)),
        *_missing("reasons", expect.reasons, decision),
        *_missing("cache_reasons", expect.cache_reasons, plan),
    ]


def _differ(key: str, expected: object, found: object) -> list[Difference]:
    if isinstance(expected, UnsetType):
        # An unexpected error is a difference; the absence of one is not.
        return [Difference(key, "none", str(found))] if key == "error" and found != "none" else []
    return [] if expected == found else [Difference(key, str(expected) or "(none)", str(found) or "(none)")]


def _target_list(targets: tuple[str, ...] | UnsetType) -> str | UnsetType:
    return targets if isinstance(targets, UnsetType) else f"[{', '.join(targets)}]"


def _expected_ttl(cache: str | UnsetType) -> str | UnsetType:
    return cache if isinstance(cache, UnsetType) or cache == "bypass" else f"{seconds(cache):g}s"


def _planned_ttl(plan: CachePlan) -> str:
    return "bypass" if plan.exact is None else f"{plan.exact.ttl_s:g}s"


def _missing(key: str, expected: tuple[Reason, ...], decided: Decision | CachePlan) -> list[Difference]:
    found = "; ".join(_text(reason) for reason in decided.reasons) or "(none)"
    return [
        Difference(key, _text(reason), found)
        for reason in expected
        if not any(_matches(reason, actual) for actual in decided.reasons)
    ]


def _matches(expected: Reason, actual: Reason) -> bool:
    return (
        expected.code == actual.code
        and expected.rule in ("", actual.rule)
        and expected.target in ("", actual.target)
        and expected.detail in actual.detail
    )


def _text(reason: Reason) -> str:
    return " ".join(part for part in (reason.code, reason.rule, reason.target, reason.detail) if part)
