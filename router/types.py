"""The vocabulary: what travels between the hops, frozen.

bytes → Request → (cache) → Decision → Chunks → Outcome. Durations are seconds (``*_s``) or milliseconds (``*_ms``);
text is str; JSON documents that we only carry (schemas, unknown fields) stay canonical JSON text, so that everything is
hashable.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Kind = Literal["chat", "completion", "embedding"]
Prefer = Literal["prefer_on_device", "only_on_device", "prefer_cloud", "only_cloud"]
Location = Literal["edge", "cloud"]
Route = Literal["edge", "cloud", "cache", "none"]
CacheStatus = Literal["hit", "semantic", "stale", "miss", "bypass", "coalesced"]
Ability = Literal["chat", "completion", "embedding", "tools", "json", "logprobs", "image", "audio", "file"]
FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]
AUTO = "auto"
"""The model name with which a caller leaves the choice to the policy."""


# --- the ask ---------------------------------------------------------------------------------------------------------


class TextPart(msgspec.Struct, frozen=True, tag="text"):
    text: str


class ImagePart(msgspec.Struct, frozen=True, tag="image"):
    url: str
    detail: str = "auto"


class AudioPart(msgspec.Struct, frozen=True, tag="audio"):
    data: str  # base64
    format: str


class FilePart(msgspec.Struct, frozen=True, tag="file"):
    document: str  # canonical JSON of OpenAI's `file` object


Part = TextPart | ImagePart | AudioPart | FilePart


class ToolCall(msgspec.Struct, frozen=True):
    id: str
    name: str
    arguments: str  # JSON text


class Message(msgspec.Struct, frozen=True):
    role: str
    content: str | tuple[Part, ...] | None = None
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


class Tool(msgspec.Struct, frozen=True):
    name: str
    description: str = ""
    parameters: str = "{}"  # canonical JSON schema
    strict: bool = False


class ToolChoice(msgspec.Struct, frozen=True):
    """``none`` | ``auto`` | ``required`` | ``function`` (then `name` says which)."""

    mode: Literal["none", "auto", "required", "function"] = "auto"
    name: str | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    kind: Literal["text", "json_object", "json_schema"] = "text"
    name: str = ""
    schema: str = ""  # canonical JSON schema, for json_schema
    strict: bool = False
    description: str = ""


class Sampling(msgspec.Struct, frozen=True):
    """What was asked; None is the backend's default (OpenAI's: temperature 1, top_p 1)."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_penalty: float | None = None
    seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, bias), sorted by id


class RoutingHints(msgspec.Struct, frozen=True):
    """What the caller says about routing; never sent to a target, can only narrow a policy."""

    prefer: Prefer | None = None
    tags: tuple[str, ...] = ()  # sorted, unique
    client: str = ""  # who asks, from the API key or the peer
    deadline_ms: int | None = None  # time left, as said by the caller


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One parsed, valid ask. `client`, `tags`, `prefer`, `deadline_ms` of DESIGN §4 are in `wishes`."""

    kind: Kind
    model: str
    messages: tuple[Message, ...] = ()  # chat
    prompts: tuple[str | tuple[int, ...], ...] = ()  # completion and embedding; text or token ids
    max_tokens: int | None = None
    # The caller's own name for it: some servers know only the old one, some models refuse it.
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
    logprobs: int | None = None  # None: off; k ≥ 0: the chosen token's and the k best alternatives
    echo: bool = False  # completion
    suffix: str | None = None  # completion
    dimensions: int | None = None  # embedding
    encoding_format: Literal["float", "base64"] = "float"  # embedding
    user: str | None = None
    extra: str = ""  # canonical JSON object of fields we do not interpret, carried to the target; "" for none
    hints: RoutingHints = RoutingHints()
    resume: str = ""  # the token of an answer that was cut short: its rest is wanted, from whom it came


# --- the answer ------------------------------------------------------------------------------------------------------


class TokenAlternative(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: tuple[int, ...] | None = None


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: tuple[int, ...] | None = None
    top: tuple[TokenAlternative, ...] = ()


class ToolCallDelta(msgspec.Struct, frozen=True):
    """A piece of a tool call; `id` and `name` come with the first piece of call number `index`."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, found in the KV cache


class Confidence(msgspec.Struct, frozen=True):
    """How sure the model was over its first `tokens` tokens. `score`, in [0, 1], is what a handoff compares."""

    tokens: int
    score: float
    logprob: float  # mean, natural log
    margin: float  # mean of p(best) - p(second)
    entropy: float  # mean, nats
    refusal: float = 0.0  # probability of the model's own refusal token at the first position


class Chunk(msgspec.Struct, frozen=True):
    """A streamed piece of choice `index`; it may carry several tokens.

    The last piece of a choice has its `finish_reason`; the last chunk of an answer has `usage` (all choices together)
    and may carry nothing else. `confidence` is the running value, on the first tokens of choice 0 only.
    """

    text: str = ""
    index: int = 0
    tokens: int = 0  # how many tokens this piece stands for
    tool_calls: tuple[ToolCallDelta, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    confidence: Confidence | None = None
    usage: Usage | None = None
    refusal: str | None = None
    resume: str = ""  # with the last piece of an answer that was cut short: the token to ask for the rest with


class Embeddings(msgspec.Struct, frozen=True):
    vectors: tuple[tuple[float, ...], ...]  # [n_inputs][n_dimensions]
    usage: Usage = Usage()


# --- the choice ------------------------------------------------------------------------------------------------------


class Target(msgspec.Struct, frozen=True):
    """A model somewhere, as the policy names it."""

    name: str
    at: Location
    model: str
    timeout_s: float | None = None  # whole answer
    first_token_timeout_s: float | None = None
    usd_per_1k_tokens: float = 0.0
    can: tuple[Ability, ...] = ("chat", "completion", "tools", "json", "logprobs")


class Handoff(msgspec.Struct, frozen=True):
    """Hold back the first `after_tokens`; hand off to the next attempt if confidence is under `below`."""

    after_tokens: int
    below: float


class AttemptPlan(msgspec.Struct, frozen=True):
    target: Target
    handoff: Handoff | None = None  # only where a later attempt exists


ReasonCode = Literal[
    "rule_held",  # this route decided
    "rule_not_held",
    "signal_absent",  # the rule needs a signal that this box cannot read: it does not hold
    "rule_failed",  # the expression raised (a type mismatch at run time): it does not hold
    "constraint_held",
    "constraint_excluded",  # a constraint removed a target
    "preference_excluded",  # the caller's wish removed a target
    "preference_ordered",  # the caller's wish moved a target forward
    "model_named",  # the caller named a target instead of `auto`
    "continued",  # the rest of an answer comes from where its start came from
    "target_unable",  # the target cannot do what was asked (an image, embeddings, tools)
    "target_down",  # breaker open, engine not running: moved to the end, not removed
    "no_route",  # nothing left
    "cache_rule_held",
    "cache_rule_not_held",
    "cache_refused",  # sampled or tool request without the policy's word, or constrained
]


class Reason(msgspec.Struct, frozen=True):
    code: ReasonCode
    rule: str = ""  # the rule, constraint or wish that speaks
    target: str = ""
    detail: str = ""  # the signal's name, the expression's error, the wish


class Decision(msgspec.Struct, frozen=True):
    """What shall be tried, in order, and why. An empty `attempts` means no route: answer 503 with the reasons."""

    policy: str
    revision: str
    rule: str  # the route that held, or "" when a model was named
    attempts: tuple[AttemptPlan, ...]
    reasons: tuple[Reason, ...] = ()
    on_device: bool = False  # a constraint or wish binds this request to the device (fail closed)
    private: bool = False  # a *constraint* binds it: nothing of its content may be kept beyond memory, nor logged
    skipped_target: str = ""  # the target that would come first if it were not down: another's answer is degraded


class ExactCache(msgspec.Struct, frozen=True):
    ttl_s: float
    stale_if_error_s: float = 0.0


class CachePlan(msgspec.Struct, frozen=True):
    """What the policy allows for this request. `exact` None: bypass."""

    exact: ExactCache | None = None
    rule: str = ""
    reasons: tuple[Reason, ...] = ()
    private: bool = False  # then: memory only, and never shared between clients


# --- what is known when deciding -------------------------------------------------------------------------------------


class DeviceSignals(msgspec.Struct, frozen=True):
    """None: this box cannot read it; a rule that needs it does not hold."""

    temperature_c: float | None = None
    throttled: bool | None = None
    memory_free_mb: float | None = None
    cpu: float | None = None  # busy share of all cores, 0..1
    power_w: float | None = None
    battery: float | None = None  # charge, 0..1


class EdgeSignals(msgspec.Struct, frozen=True):
    queue: int | None = None  # requests waiting for the engine
    tokens_per_s: float | None = None  # of one stream, recent
    loaded: bool | None = None


class CloudSignals(msgspec.Struct, frozen=True):
    reachable: bool | None = None
    rtt_ms: float | None = None
    breaker: str | None = None  # closed | half_open | open
    tier: str | None = None  # the tier that last answered
    away: tuple[str, ...] = ()  # models that nothing behind it answers for now, by its own word


class SpendSignals(msgspec.Struct, frozen=True):
    usd_hour: float | None = None  # rolling 60 min
    usd_today: float | None = None  # since local midnight
    usd_month: float | None = None


class NowSignals(msgspec.Struct, frozen=True):
    hour: int | None = None  # 0..23 local
    weekday: int | None = None  # 1 Monday .. 7 Sunday
    minute: int | None = None
    unix: int | None = None  # s


class Snapshot(msgspec.Struct, frozen=True):
    """The signals of the box at decision time. `down`: targets that cannot be tried right now (moved last)."""

    device: DeviceSignals = DeviceSignals()
    edge: EdgeSignals = EdgeSignals()
    cloud: CloudSignals = CloudSignals()
    spend: SpendSignals = SpendSignals()
    now: NowSignals = NowSignals()
    down: frozenset[str] = frozenset()


class Estimates(msgspec.Struct, frozen=True):
    """Signals about this very request that cost something to compute; None: not computed or absent."""

    prompt_tokens: int | None = None  # the edge model's own count
    quality: float | None = None  # edge.quality: probability that the device's answer will be right


# --- what happened ---------------------------------------------------------------------------------------------------


class AttemptRecord(msgspec.Struct, frozen=True):
    target: str
    at: Location
    state: str  # the attempt machine's last state (router/attempt)
    started_ms: float  # since the request arrived
    ttft_ms: float | None = None  # since the attempt started
    duration_ms: float | None = None
    tokens: int = 0
    confidence: Confidence | None = None
    error: str = ""  # an error code of router/errors
    detail: str = ""


class Outcome(msgspec.Struct, frozen=True):
    """Measured after; exactly one per request."""

    status: Literal["ok", "error", "cancelled", "rejected"]
    http_status: int
    route: Route
    target: str = ""
    model: str = ""
    reason: str = ""  # short: rule name, `cache`, or what made the fallback
    cache: CacheStatus = "bypass"
    # Not answered by the policy's first choice because that failed or is down; or stale; or the cloud gave less.
    degraded: bool = False
    attempts: tuple[AttemptRecord, ...] = ()
    ttft_ms: float | None = None
    total_ms: float = 0.0
    usage: Usage = Usage()
    finish_reason: str = ""
    usd: float = 0.0
    error: str = ""


class DecisionRecord(msgspec.Struct, frozen=True):
    """What `GET /v1/decisions/{id}` returns: the story of one request, without its content."""

    id: str
    created: float  # unix time, s
    kind: Kind
    model: str
    stream: bool
    client: str
    tags: tuple[str, ...]
    prefer: Prefer | None
    estimates: Estimates
    snapshot: Snapshot
    decision: Decision | None  # None when the cache answered or the request was refused before
    outcome: Outcome
