"""The vocabulary: the frozen values that are passed along the request path.

bytes → Request → (cache) → Decision → Chunks → Outcome. Durations are seconds (``*_s``) or milliseconds (``*_ms``);
text is str. JSON documents that we pass on without reading them (schemas, unknown fields) stay canonical JSON text, so
that everything is hashable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, TypeVar

import msgspec

from .prices import FREE, Price

_Row = TypeVar("_Row")

Kind = Literal["chat", "completion", "embedding"]
OPERATIONS: Mapping[Kind, str] = {"chat": "chat", "completion": "text_completion", "embedding": "embeddings"}
"""The names of OpenTelemetry's GenAI conventions."""
AudioKind = Literal["transcription", "speech"]
"""The kinds of audio requests, which the device itself answers without a target."""
Prefer = Literal["prefer_on_device", "only_on_device", "prefer_cloud", "only_cloud"]
Priority = Literal["interactive", "standard", "bulk"]
Location = Literal["edge", "cloud"]
Route = Literal["edge", "cloud", "cache", "none"]
CacheStatus = Literal["hit", "semantic", "stale", "miss", "bypass", "coalesced"]
Ability = Literal["chat", "completion", "embedding", "tools", "json", "logprobs", "image", "audio", "file"]
Modality = Literal["text", "image", "audio", "file"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
"""The reasoning effort that the client allows (`reasoning`)."""
FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]
Transcripts = Literal["written", "spoken"]
"""The form of transcripts in a model's prompt: as a speech model writes them, or in lower case without punctuation."""
PartStatus = Literal["ok", "timeout", "failed", "skipped"]  # skipped: the policy did not wait for it
Overflow = Literal["refuse", "trim_middle"]
"""The treatment of a chat that exceeds a model's context."""
Fusion = Literal["late", "early", "hybrid"]
WaitFor = Literal["all", "first"]
MODALITIES: tuple[Modality, ...] = ("text", "image", "audio", "file")
AUTO = "auto"
"""The model name by which a client lets the policy choose."""


# --- the request -----------------------------------------------------------------------------------------------------


# `extra` of parts, messages, calls and tools: a canonical JSON object of their uninterpreted fields, which are sent to
# the target and are part of cache keys; "" for none.


class TextPart(msgspec.Struct, frozen=True, gc=False, tag="text"):
    text: str
    extra: str = ""


class ImagePart(msgspec.Struct, frozen=True, gc=False, tag="image"):
    url: str
    detail: Literal["auto", "low", "high"] = "auto"
    extra: str = ""


class AudioPart(msgspec.Struct, frozen=True, gc=False, tag="audio"):
    data: str  # base64
    format: str
    extra: str = ""


class FilePart(msgspec.Struct, frozen=True, gc=False, tag="file"):
    document: str  # canonical JSON of OpenAI's `file` object
    extra: str = ""


Part = TextPart | ImagePart | AudioPart | FilePart


class ToolCall(msgspec.Struct, frozen=True, gc=False):
    id: str
    name: str
    arguments: str  # JSON text
    extra: str = ""


class Message(msgspec.Struct, frozen=True, gc=False):
    role: str
    content: str | tuple[Part, ...] | None = None
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    extra: str = ""


class Tool(msgspec.Struct, frozen=True, gc=False):
    name: str
    description: str = ""
    parameters: str = "{}"  # canonical JSON schema
    strict: bool = False
    extra: str = ""


class ToolChoice(msgspec.Struct, frozen=True, gc=False):
    """The choice among tools: ``none``, ``auto``, ``required`` or ``function`` (the function `name`)."""

    mode: Literal["none", "auto", "required", "function"] = "auto"
    name: str | None = None


class ResponseFormat(msgspec.Struct, frozen=True, gc=False):
    kind: Literal["text", "json_object", "json_schema"] = "text"
    name: str = ""
    schema: str = ""  # canonical JSON schema, for json_schema
    strict: bool = False
    description: str = ""


class Sampling(msgspec.Struct, frozen=True, gc=False):
    """The requested sampling parameters. None means the backend's default (OpenAI's: temperature 1, top_p 1)."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_penalty: float | None = None
    seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, bias), sorted by id


class RoutingHints(msgspec.Struct, frozen=True, gc=False):
    """The client's routing hints. They can only narrow a policy. Of these, targets are told the priority alone."""

    prefer: Prefer | None = None
    tags: tuple[str, ...] = ()  # in the form of `folded_tags`, whatever their source
    client: str = ""  # name of the API key, or address of the peer
    deadline_ms: int | None = None  # time limit that the client sets
    priority: Priority | None = None  # within what the client may have; None: nothing was asked for or set

    def __post_init__(self) -> None:
        if self.tags:
            msgspec.structs.force_setattr(self, "tags", folded_tags(self.tags))

    @property
    def restriction(self) -> Prefer | None:
        """The preference if it excludes targets; other preferences only order them."""
        return self.prefer if self.prefer in ("only_on_device", "only_cloud") else None


def folded_tags(tags: Iterable[str]) -> tuple[str, ...]:
    """Return tags in the form in which they are compared: case-folded, sorted, unique."""
    return tuple(sorted({tag.casefold() for tag in tags}))


def replace_surrogates(text: str) -> str:
    """Return text without lone surrogates, which encoders refuse; undecodable bytes of headers become surrogates."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


class Request(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A parsed and valid request. The signals client, tags, prefer and deadline_ms are in `hints`."""

    kind: Kind
    model: str
    messages: tuple[Message, ...] = ()  # of a chat
    prompts: tuple[str | tuple[int, ...], ...] = ()  # of a completion or embedding: text or token ids
    max_tokens: int | None = None
    # The client's name of the limit is kept: some servers know only the old name, some models refuse it.
    limit_name: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    n: int = 1
    stream: bool = False
    include_usage: bool = False  # stream_options.include_usage
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    response_format: ResponseFormat | None = None
    # number of alternatives to return logprobs for, besides the chosen token; None: no logprobs
    logprobs: int | None = None
    echo: bool = False  # of a completion
    suffix: str | None = None  # of a completion
    dimensions: int | None = None  # of an embedding
    encoding_format: Literal["float", "base64"] = "float"  # of an embedding
    reasoning_effort: Effort | None = None
    user: str | None = None
    extra: str = ""  # canonical JSON object of fields that we do not interpret but pass on; "" for none
    hints: RoutingHints = RoutingHints()

    @property
    def sequences(self) -> int:
        """The number of requested answers: `n` for each of its prompts, or for the chat."""
        return self.n * (len(self.prompts) or 1)


class RequestFeatures(msgspec.Struct, frozen=True, gc=False):
    """The request's fields that routing reads: `request.*` but on-demand signals, and inputs of `decide`."""

    kind: Kind | AudioKind
    model: str
    client: str
    tags: tuple[str, ...]
    prefer: Prefer | None
    deadline_ms: int | None
    stream: bool
    n: int
    prompts: int  # number of prompts; 0 for a chat
    max_tokens: int | None
    temperature: float | None  # as the client set it
    modalities: tuple[Modality, ...]
    offers_tools: bool  # regardless of tool_choice
    tools: bool  # value of the signal: tools are offered, and tool_choice is not none
    json: bool
    logprobs: bool


# --- the answer ------------------------------------------------------------------------------------------------------


class TokenAlternative(msgspec.Struct, frozen=True, gc=False):
    token: str
    logprob: float
    bytes: tuple[int, ...] | None = None


class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    token: str
    logprob: float
    bytes: tuple[int, ...] | None = None
    top: tuple[TokenAlternative, ...] = ()


class ToolCallDelta(msgspec.Struct, frozen=True, gc=False):
    """A part of a tool call. `id` and `name` come with the first part of call number `index`."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None
    extra: str = ""  # canonical JSON object of the call's fields that we do not interpret; "" for none


class Usage(msgspec.Struct, frozen=True, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens that were found in the KV cache
    reasoning_tokens: int = 0  # completion tokens of the model's reasoning
    audio_ms: int = 0  # length of the audio that the model heard

    def pico_usd(self, price: Price) -> int:
        """Return the cost at a price, as a whole number of 1e-12 USD. What used nothing was not a request."""
        if price is FREE or not (self.prompt_tokens or self.completion_tokens or self.audio_ms):
            return 0
        prompt, known, answer, request, second = price.rates
        cost = self.prompt_tokens * prompt + self.completion_tokens * answer + request
        if self.cached_tokens:
            cost += min(self.cached_tokens, self.prompt_tokens) * (known - prompt)
        return cost + round(self.audio_ms * second / 1000) if self.audio_ms else cost


class Confidence(msgspec.Struct, frozen=True, gc=False):
    """The model's confidence over its first `tokens` tokens. A handoff compares `score`, in [0, 1].

    `calibration`: the name of the device's refit that `score` comes from; "": the calibration that ships, or none.
    `shipped`: the score without that refit. `kind`: the number of the prompt's probable kind, if refits are on.
    """

    tokens: int
    score: float
    logprob: float  # mean logprob, natural log
    margin: float  # mean of p(best) - p(second)
    entropy: float  # mean entropy, nats
    refusal: float = 0.0  # probability of the model's own refusal token at the first position
    least: float = 0.0  # lowest logprob of a token
    calibration: str = ""
    shipped: float | None = None
    kind: int = 0

    @property
    def stated(self) -> float:
        """The score without a refit."""
        return self.score if self.shipped is None else self.shipped


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """A streamed part of choice `index`. It may carry several tokens.

    The last chunk of a choice has its `finish_reason`; the last chunk of an answer has `usage` (of all choices) and may
    carry nothing else. `confidence` is the running value, on the first tokens of choice 0 only.
    """

    text: str = ""
    index: int = 0
    tokens: int = 0  # number of tokens in this chunk
    tool_calls: tuple[ToolCallDelta, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    confidence: Confidence | None = None
    usage: Usage | None = None
    refusal: str | None = None
    reasoning: str = ""  # the model's reasoning; never part of `text`
    extra: str = ""  # canonical JSON object of the message's fields that we do not interpret; "" for none
    note: str = ""  # a note on reading the target's answer, for the decision record only
    stop: str = ""  # with `finish_reason`: the stop string that ended the text, where the target tells it


class Fact(msgspec.Struct, frozen=True, gc=False):
    """The result of an encoder for a part of a request: the words in audio, the text in an image."""

    text: str  # "" if there is no speech, or no text
    confidence: float  # 0 to 1
    language: str = ""  # ISO 639-1, "" if it is not known


class Embeddings(msgspec.Struct, frozen=True, gc=False):
    vectors: tuple[tuple[float, ...], ...]  # [n_inputs][n_dimensions]
    usage: Usage = Usage()


# --- the decision ----------------------------------------------------------------------------------------------------


class Target(msgspec.Struct, frozen=True, gc=False):
    """A model on the device or in the cloud, as the policy defines it."""

    name: str
    at: Location
    model: str
    timeout_s: float | None = None  # time limit of the whole answer
    first_token_timeout_s: float | None = None
    price: Price = FREE
    temperature: float | None = None  # temperature to send if the client sets none; None: the model's own default
    can: tuple[Ability, ...] = ("chat", "completion", "tools", "json", "logprobs")
    adapter: str = ""  # LoRA adapter of the model
    variant: str = ""  # the variant whose model stands in the place of the target's own
    cloud: str = ""  # name of its cloud; "": the first that the device lists, or the target is on the device
    clouds: tuple[str, ...] = ()  # of a target in several clouds: all of them, in the order in which they are tried

    @property
    def key(self) -> str:
        """The name of the target, with its cloud if it is in several: ``large@eu``."""
        return self.full_name if self.clouds else self.name

    @property
    def full_name(self) -> str:
        """The name of the target, with its cloud if that is known."""
        return f"{self.name}@{self.cloud}" if self.cloud else self.name

    @property
    def in_each_cloud(self) -> tuple[Target, ...]:
        """The target once for each of its clouds, in order."""
        return tuple([msgspec.structs.replace(self, cloud=cloud) for cloud in self.clouds]) or (self,)

    @property
    def served(self) -> str:
        """The name of the model, with that of its adapter."""
        return f"{self.model}+{self.adapter}" if self.adapter else self.model


class Handoff(msgspec.Struct, frozen=True, gc=False):
    """Hold back the first `after_tokens` tokens; hand off to the next attempt if their confidence is below `below`."""

    after_tokens: int
    below: float
    within_s: float | None = None  # time after the first token, at which the handoff is decided


class Promise(msgspec.Struct, frozen=True, gc=False):
    """A route's promise of quality: of its answers, a share of `keep` is at least as good as those of the target `of`.

    With a probability of 1 - `risk` the share of the whole falls short by at most `tolerance`. `shadow`: share of the
    device's answers that `of` is asked as well. `only_where_measured`: requests that cannot be measured, or that lack
    evidence, follow the route as it is written; else a cloud answers them first.
    """

    of: str
    keep: float
    risk: float
    tolerance: float
    shadow: float
    only_where_measured: bool


class PromiseSignals(msgspec.Struct, frozen=True, gc=False):
    """The state of a route's promise on a device. `threshold`: confidence below which the device hands off, moved by
    labelled answers; None while evidence is short. `answers`: the labelled answers so far. `detail`: what is missing.
    """

    threshold: float | None = None
    answers: int = 0
    detail: str = ""


class Weights(msgspec.Struct, frozen=True, gc=False):
    """The weights of a score by which targets are ordered: per unit of quality, per US dollar, per second."""

    quality: float
    usd: float
    latency: float


class AttemptPlan(msgspec.Struct, frozen=True, gc=False):
    target: Target
    handoff: Handoff | None = None  # set only if a later attempt exists
    facts: tuple[Modality, ...] = ()  # kinds of parts that reach the target as text, by the device's encoders
    soft: tuple[Modality, ...] = ()  # kinds of parts that reach the target as soft tokens, by its model's projector
    fusion: Fusion = "late"  # fusion that the route asks for
    wait_for: WaitFor = "all"  # branches that the attempt waits for


ReasonCode = Literal[
    "rule_held",  # this route decides
    "rule_not_held",
    "signal_absent",  # the rule needs a signal that this device does not have: it does not hold
    "rule_failed",  # the expression raised (a type mismatch at run time): it does not hold
    "constraint_held",
    "constraint_excluded",  # a constraint excludes a target
    "region_excluded",  # the request is bound to regions, and the target is in none of them
    "budget_excluded",  # the answer could cost more than what is left of the policy's budgets
    "preference_excluded",  # the client's preference excludes a target
    "preference_ordered",  # the client's preference moves a target forward
    "target_scored",  # `best_of`: the target's score, and the estimates that it is made of
    "estimate_absent",  # `best_of`: the target has no estimate of quality, so the order of the list stays
    "model_named",  # the client named a model instead of `auto`
    "continued",  # of records of an earlier version: the rest of an answer comes from the target that made its start
    "target_unable",  # the target lacks an ability that the request needs (images, embeddings, tools)
    "target_absent",  # the device has no cloud, or no engine, for this target: it is not tried
    "target_down",  # breaker open, engine not running: moved to the end, not removed
    "session_bound",  # an earlier request of the session is bound to the device, or to regions
    "session_pinned",  # the target that the session asked before comes first, or alone
    "session_left",  # that target is gone, or the client named another one
    "guard_held",  # this rule of the guard applies to the request; `detail` is its action
    "guard_not_held",
    "calibration_set_aside",  # shadow answers showed that the target's calibrated signals are wrong: they are not used
    "promise_kept",  # the device hands off below the threshold (`detail`) that the route's promise allows
    "promise_unmeasured",  # the promise lacks evidence, or gets no label from this request (`detail`)
    "no_route",  # no target is left
    "cache_rule_held",
    "cache_rule_not_held",
    "cache_refused",  # sampled, offers tools (without the rule's permission)
]


class Reason(msgspec.Struct, frozen=True, gc=False):
    code: ReasonCode
    rule: str = ""  # name of the rule or constraint, or the client's preference
    target: str = ""
    detail: str = ""  # name of the absent signal, error of the expression, missing ability, ...


class Shadow(msgspec.Struct, frozen=True, gc=False):
    """The shadow rule: after a `share` of the answers the other side answers, too, for at most `usd_per_day`.
    `max_drift`: calibration error, beyond that explained by chance, above which calibrated signals are set aside.
    `refit`: whether the device corrects them by its own labels.
    """

    share: float
    usd_per_day: float
    max_drift: float
    refit: bool = False


class Decision(msgspec.Struct, frozen=True, gc=False):
    """The attempts in order, with the reasons. Without `attempts` the answer is 503 with the reasons."""

    policy: str
    revision: str
    rule: str  # name of the route that held; "" if the client named a model
    attempts: tuple[AttemptPlan, ...]
    reasons: tuple[Reason, ...] = ()
    on_device: bool = False  # whether a constraint or the client binds this request to the device
    # whether a constraint binds it, so that its content must not be logged, or stored other than in memory
    private: bool = False
    parts_on_device: bool = False  # whether a constraint binds its audio, images and files to the device
    regions: tuple[str, ...] | None = None  # regions to which constraints and tags bind it; None: it is not bound
    # Without attempts: what the request needs and no target of the policy (or none that it names) can do.
    missing_abilities: tuple[Ability, ...] = ()
    # other targets of the policy with the needed capabilities, if the client named one
    able_targets: tuple[str, ...] = ()
    skipped_target: str = ""  # the target that would be first if it were not down; answers of others are degraded
    pinned: str = ""  # the only target that the policy's `session` allows, whether it is there or not
    shadow: Shadow | None = None  # whether the answer may be followed by a shadow request to the other side
    refused_by: str = ""  # rule of the guard that refuses the request
    mask: tuple[str, ...] = ()  # classes of values that cloud targets get as placeholders
    promise: Promise | None = None  # the route's promise, if the answer may give a label for it


class ExactCache(msgspec.Struct, frozen=True, gc=False):
    ttl_s: float
    stale_if_error_s: float = 0.0


class SemanticCache(msgspec.Struct, frozen=True, gc=False):
    """The rule of the semantic cache: questions with the same meaning share an answer up to `ttl_s` old. `max_error`:
    accepted share of wrong answers.
    """

    ttl_s: float
    max_error: float = 0.01


class CachePlan(msgspec.Struct, frozen=True, gc=False):
    """The policy's cache rule for a request. If `exact` is None, the cache is bypassed, and `bypass` is the reason."""

    exact: ExactCache | None = None
    semantic: SemanticCache | None = None  # set only with `exact`
    rule: str = ""
    bypass: str = ""
    reasons: tuple[Reason, ...] = ()
    private: bool = False  # whether the answer is kept only in memory, and never shared between clients
    regions: tuple[str, ...] | None = None  # as in `Decision`: such answers are shared within the same binding only


# --- signals ---------------------------------------------------------------------------------------------------------


class DeviceSignals(msgspec.Struct, frozen=True, gc=False):
    """The signals of the device. None: the device cannot read it, so a rule that needs it does not hold."""

    temperature_c: float | None = None
    throttled: bool | None = None
    memory_free_mb: float | None = None
    cpu: float | None = None  # busy share of all cores, 0..1
    power_w: float | None = None
    battery: float | None = None  # charge, 0..1
    battery_wh: float | None = None  # what the batteries hold when full, as they say
    discharging: bool | None = None  # whether a battery feeds the device
    throttles_c: float | None = None  # lowest temperature at which the kernel slows the processor down


class EdgeSignals(msgspec.Struct, frozen=True, gc=False):
    queue: int | None = None  # number of requests that wait for the engine
    tokens_per_s: float | None = None  # recent speed of one stream
    loaded: bool | None = None
    feedback: float | None = None  # recent mean of the clients' scores


class CloudSignals(msgspec.Struct, frozen=True, gc=False):
    reachable: bool | None = None
    rtt_ms: float | None = None
    breaker: str | None = None  # closed | half_open | open
    tier: str | None = None  # tier that answered last
    unavailable_models: tuple[str, ...] = ()  # models that the cloud currently reports as unavailable
    feedback: float | None = None  # recent mean of the clients' scores


class SpendSignals(msgspec.Struct, frozen=True, gc=False):
    usd_hour: float | None = None  # spending of the last 60 minutes
    usd_today: float | None = None  # spending since local midnight
    usd_month: float | None = None
    usd_left: float | None = None  # of the policy's budget of the day, less what requests in flight may cost
    price: float | None = None  # what a dollar of the budget must gain in quality


class EnergySignals(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The energy that answers take, for a policy that paces battery or heat. None: unknown, or no such policy."""

    price: float | None = None  # what a watt-hour must gain in quality
    limit: str = ""  # what sets the price: battery, heat
    wh_left: float | None = None  # of the battery, for answers until the policy's hour
    token_wh: float | None = None  # of a token that the device generates, watt-hours
    cloud_wh: float | None = None  # of a cloud's answer, watt-hours
    throttles_in_s: float | None = None  # forecast at the present draw; None: it will not


class NowSignals(msgspec.Struct, frozen=True, gc=False):
    hour: int | None = None  # local hour, 0 to 23
    weekday: int | None = None  # 1 (Monday) to 7 (Sunday)
    minute: int | None = None
    unix: int | None = None  # Unix seconds


class DeviceSetup(msgspec.Struct, frozen=True, gc=False):
    """The setup of a device. `temperatures`: default temperatures of its models whose targets declare none; None if
    unknown. `clouds`: the names of its clouds in order; () if `cloud` is false, or if they were not recorded.
    """

    engine: bool
    cloud: bool
    temperatures: dict[str, float | None] = {}
    encoders: tuple[Modality, ...] = ()  # kinds of parts that the device turns into text
    projectors: dict[str, tuple[Modality, ...]] = {}  # kinds that it turns into soft tokens, by model on the device
    clouds: tuple[str, ...] = ()
    regions: dict[str, str] = {}  # regions of the clouds that have one, by name

    def region_of(self, target: Target) -> str:
        """Return the region of a target's cloud; "" if it has none, or if the device's clouds were not recorded."""
        return self.regions.get(target.cloud or next(iter(self.clouds), ""), "")

    def has_cloud(self, name: str) -> bool:
        """Return whether the device has this cloud; "": any. A device whose clouds were not recorded has each."""
        return self.cloud and (not name or not self.clouds or name in self.clouds)


class Snapshot(msgspec.Struct, frozen=True, gc=False):
    """The signals of the device at decision time.

    `cloud`: the first cloud; `clouds`: all of them by name, in order. `down`: keys of targets that are known to be
    down, which are tried last. `absent`: targets at a location that this device is not set up for (no cloud is
    configured, the engine is off), which are never tried. `setup`: None if unknown. `uncalibrated`: edge targets whose
    calibrated signals were set aside. `promises`: states of the routes' promises, by route.
    """

    device: DeviceSignals = DeviceSignals()
    edge: EdgeSignals = EdgeSignals()
    cloud: CloudSignals = CloudSignals()
    spend: SpendSignals = SpendSignals()
    now: NowSignals = NowSignals()
    down: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()
    setup: DeviceSetup | None = None
    uncalibrated: frozenset[str] = frozenset()
    clouds: dict[str, CloudSignals] = {}
    promises: dict[str, PromiseSignals] = {}
    energy: EnergySignals = EnergySignals()


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """The estimates of one target's answer to a request, for `best_of`. A field is None if unknown."""

    at: Location
    model: str  # name of the model, with its adapter
    quality: float | None = None  # probability that the answer is right
    answer_tokens: float | None = None  # expected length in tokens
    latency_s: float | None = None  # recent time of an answer, seconds


class Session(msgspec.Struct, frozen=True, gc=False):
    """The state of a request's session before it: numbers and names, no content. A new session has no `target`."""

    target: str = ""  # name of the target that answered its last turn
    cloud: str = ""  # its cloud
    model: str = ""  # its model there, with the adapter, or that of its variant
    warm: dict[str, int] = {}  # prompt tokens that targets read a moment ago, by name
    on_device: bool = False  # whether a request of it was bound to the device, which binds the rest
    regions: tuple[str, ...] | None = None  # regions to which its requests were bound; None: they were not
    tool_result: bool = False  # whether the request brings the result of a tool that `target` asked for
    at: float = 0.0  # end of its last turn, Unix seconds


class SessionOutcome(msgspec.Struct, frozen=True, gc=False):
    """Whether the target of a session's last turn answered this one, too."""

    status: Literal["new", "stayed", "switched"]
    reason: str = ""  # why it stayed or switched
    before: str = ""  # target of the last turn
    lost_tokens: int = 0  # prompt tokens that were warm there, and not at the target that answered

    @property
    def header(self) -> str:
        """The value of the response header."""
        if self.status == "new":
            return self.status
        before = f"; from={self.before}" if self.status == "switched" else ""
        return f"{self.status}{before}; reason={self.reason}"


class Estimates(msgspec.Struct, frozen=True, gc=False):
    """The on-demand signals of a request, which are expensive. None: the signal is absent or not computed."""

    prompt_tokens: int | None = None  # counted with the edge model's tokenizer
    quality: float | None = None  # `edge.quality`: probability that the device's answer is right
    image_pixels: int | None = None  # pixels of all images, as their files declare them
    images_text: bool | None = None  # images.text: whether an image contains text
    audio_s: float | None = None  # length of all audio
    language: str | None = None  # request.language, ISO 639-1
    audio_speech: bool | None = None  # audio.speech: whether an audio part contains speech
    candidates: tuple[Candidate, ...] | None = None  # estimates of the targets that `best_of` compares
    session: Session | None = None  # None: the policy has no `session`
    pii_classes: tuple[str, ...] | None = None  # pii.classes, sorted
    pii_count: int | None = None  # pii.count: number of different personal values
    key_count: int | None = None  # secrets.count: number of different keys


# --- the outcome -----------------------------------------------------------------------------------------------------


class AttemptRecord(msgspec.Struct, frozen=True, gc=False):
    target: str
    at: Location
    state: str  # last AttemptState (router/decision/attempts.py)
    started_ms: float  # time since the request arrived
    ttft_ms: float | None = None  # time since the attempt started
    duration_ms: float | None = None
    tokens: int = 0
    confidence: Confidence | None = None
    error: str = ""  # error code of router/errors
    detail: str = ""
    cloud: str = ""  # name of the target's cloud; "" on the device
    region: str = ""  # configured region of that cloud


class PartRecord(msgspec.Struct, frozen=True, gc=False):
    """The record of a part that was given to an encoder, without its content."""

    part: str  # path in the request
    modality: Modality
    sha256: str
    size_bytes: int
    status: PartStatus
    cached: bool = False  # whether the fact was cached from an equal part
    soft: bool = False  # whether soft tokens were requested instead of text
    duration_ms: float = 0.0
    confidence: float | None = None


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """The measured result of a request, of which there is exactly one."""

    status: Literal["ok", "error", "cancelled", "rejected"]
    http_status: int
    route: Route
    target: str = ""
    model: str = ""
    variant: str = ""  # the target's variant that answered
    reason: str = ""  # name of the rule, `cache`, or the cause of the fallback
    cache: CacheStatus = "bypass"
    cache_reason: str = ""  # reason why the cache was bypassed
    cache_age_s: float | None = None  # age of the cached answer
    # similarity of the cached answer's question, 0 to 1; set only if `cache` is semantic
    similarity: float | None = None
    # The policy's first choice failed or is down, the answer is stale, or the cloud itself degraded the answer.
    degraded: bool = False
    attempts: tuple[AttemptRecord, ...] = ()
    ttft_ms: float | None = None
    total_ms: float = 0.0
    usage: Usage = Usage()
    finish_reason: str = ""
    usd: float = 0.0
    # whether `usd` includes an estimate for an abandoned attempt: its prompt by the device's count, and the
    # tokens received
    estimated: bool = False
    error: str = ""
    session: SessionOutcome | None = None  # None: the policy has no `session`, or there is no answer


class DecisionRecord(msgspec.Struct, frozen=True, gc=False):
    """The body of `GET /v1/decisions/{id}`: all data about a request except its content."""

    id: str
    created: float  # Unix seconds
    request: RequestFeatures
    estimates: Estimates
    unrecorded: tuple[str, ...]  # on-demand signals that were not computed, so that they are unknown rather than absent
    snapshot: Snapshot
    decision: Decision | None  # None if the cache answered, or the request was refused before a decision
    outcome: Outcome
    parts: tuple[PartRecord, ...] = ()  # parts that were given to encoders
    shadow: str = ""  # target of this answer's shadow request; "" for none
    trial_group: int | None = None  # of its unit in the counts of the target's variants; None: it has none


def decode_row(decoder: msgspec.msgpack.Decoder[_Row], data: object) -> _Row | None:
    """Decode a row of a store. Returns None for a row of an incompatible version."""
    if not isinstance(data, bytes):
        return None
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
