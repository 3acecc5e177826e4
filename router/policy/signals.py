"""The signals that a policy can name (`SIGNALS`), and functions that read them and that evaluate conditions.

The table is also the source for the checks of expressions and for the documentation. A signal is `group.name`. A reader
returns None if the device or the request has no such value: the signal is then absent.

Conditions are compiled by `expression.py`. Only the signals that a policy names are read. `TargetAvailability` derives
from the signals which targets cannot answer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal

import msgspec

from ..guard.classes import PII_CLASSES
from ..types import (
    MODALITIES,
    Ability,
    CloudSignals,
    DeviceSetup,
    EdgeSignals,
    Estimates,
    FilePart,
    ImagePart,
    Modality,
    Request,
    Snapshot,
    Target,
    TextPart,
    replace_surrogates,
)
from .cel_library import cel

SignalType = Literal["int", "double", "bool", "string", "list"]  # list: of strings
Value = int | float | bool | str | list[str]
Reader = Callable[[Request, Snapshot, Estimates], Value | None]

OPENAI_TEMPERATURE = 1.0
"""OpenAI's default temperature, assumed for a target whose default is unknown."""
TEMPERATURE = "request.temperature"
IMAGE_PIXELS = "request.image_pixels"
IMAGES_TEXT = "images.text"
AUDIO_S = "request.audio_s"
LANGUAGE = "request.language"
AUDIO_SPEECH = "audio.speech"
PII_CLASSES_SIGNAL = "pii.classes"
PII_COUNT = "pii.count"
SECRETS_COUNT = "secrets.count"
GUARD_SIGNALS = frozenset({PII_CLASSES_SIGNAL, PII_COUNT, SECRETS_COUNT})
"""The signals of the guard's detectors, which read all texts of a request."""
_INT64 = 2**63 - 1  # the widest int of CEL


class SignalSpec(msgspec.Struct, frozen=True):
    name: str  # "device.temperature_c"
    type: SignalType
    unit: str  # "" for none
    meaning: str
    absent: str  # when the signal is absent; "" for never
    read: Reader
    values: tuple[str, ...] = ()  # all possible values of a text (or of a list's elements), where they are known
    optional: bool = False  # many devices or requests normally lack it

    @property
    def variable(self) -> str:
        """The name in the compiled expression: flat, as nested maps are 10 times as slow in CEL's binding."""
        return self.name.replace(".", "__")

    @property
    def presence_variable(self) -> str:
        """The variable that `has(signal)` becomes."""
        return f"{self.variable}__known"


def is_sampled(request: Request, default_temperature: float) -> bool:
    """Return whether a second run could give another answer: temperature above 0 or several choices, even with a seed.

    Args:
        default_temperature: The temperature if the request sets none.
    """
    return request.kind != "embedding" and (temperature_of(request, default_temperature) != 0.0 or request.n > 1)


def temperature_of(request: Request, default: float) -> float:
    """Return the request's temperature, `default` if it sets none; 0.0 for embeddings, where nothing is sampled."""
    if request.kind == "embedding":
        return 0.0
    temperature = request.sampling.temperature
    return default if temperature is None else float(temperature)


def wants_tools(request: Request) -> bool:
    return bool(request.tools) and request.tool_choice.mode != "none"


def wants_json(request: Request) -> bool:
    return request.response_format is not None and request.response_format.kind != "text"


def modalities(request: Request) -> list[Modality]:
    """Return the kinds of content in the messages, in the order text, image, audio, file."""
    found: set[Modality] = {"text"}
    for message in request.messages:
        content = message.content
        if content is None or isinstance(content, str):
            continue
        for part in content:
            if not isinstance(part, TextPart):
                found.add("image" if isinstance(part, ImagePart) else "file" if isinstance(part, FilePart) else "audio")
    return ["text"] if len(found) == 1 else [name for name in MODALITIES if name in found]


def required_abilities(request: Request, kinds: list[Modality]) -> tuple[Ability, ...]:
    """Return the abilities that a target needs for a request with these kinds of content."""
    if len(kinds) == 1 and not request.tools and request.response_format is None and request.logprobs is None:
        return (request.kind,)
    required: list[Ability] = [request.kind]
    if wants_tools(request):
        required.append("tools")
    if wants_json(request):
        required.append("json")
    if request.logprobs is not None:
        required.append("logprobs")
    return (*required, *[kind for kind in kinds if kind != "text"])


def _of_parts(modality: Modality, value: Value | None, without: Value, request: Request) -> Value | None:
    """Return a reader of an estimate about parts, which is constant for requests without such parts."""
    return without if value is None and modality not in modalities(request) else value


def _double(value: float | None) -> float | None:
    """Convert a reading for CEL: an int becomes a double; NaN and infinities become None."""
    return None if value is None or not math.isfinite(value) else float(value)


def _int(value: int | None) -> int | None:
    return value if value is None or -_INT64 <= value <= _INT64 else max(-_INT64, min(_INT64, value))


_S = SignalSpec
_SPECS: tuple[SignalSpec, ...] = (
    _S("request.kind", "string", "", "kind of request", "", lambda r, s, e: r.kind,
       values=("chat", "completion", "embedding")),
    _S("request.prompt_tokens", "int", "tokens",
       "length of the prompt, counted with the tokenizer of the device's model",
       "the device's model is not running", lambda r, s, e: _int(e.prompt_tokens)),
    _S("request.max_tokens", "int", "tokens", "the client's limit for the answer", "the client sets no limit",
       lambda r, s, e: _int(r.max_tokens), optional=True),
    _S(TEMPERATURE, "double", "", "sampling temperature that the client sets; if the client sets none, the "
       "highest `temperature` of the policy's targets; for embeddings 0.0", "",
       lambda r, s, e: temperature_of(r, OPENAI_TEMPERATURE)),
    _S("request.n", "int", "", "number of choices (answers) that the client requests", "", lambda r, s, e: _int(r.n)),
    _S("request.tags", "list", "", "tags that the request or the API key has", "",
       lambda r, s, e: [replace_surrogates(tag) for tag in r.hints.tags]),
    _S("request.modalities", "list", "", "kinds of content that the messages have", "",
       lambda r, s, e: list(modalities(r)),
       values=("text", "image", "audio", "file")),
    _S(IMAGE_PIXELS, "int", "pixels", "total size of the request's images (`image_url`), as the image files "
       "declare it; 0 for a request without images", "this device has no encoder for images",
       lambda r, s, e: _of_parts("image", e.image_pixels, 0, r), optional=True),
    _S(AUDIO_S, "double", "s", "total length of the request's audio clips; 0.0 for a request without audio",
       "this device has no encoder for audio, or the encoder was not ready in time",
       lambda r, s, e: _of_parts("audio", _double(e.audio_s), 0.0, r), optional=True),
    _S(LANGUAGE, "string", "", "language spoken in the request's audio clips, as a code of ISO 639-1",
       "the request's audio has no speech, or this device has no encoder for audio", lambda r, s, e: e.language,
       optional=True),
    _S("request.tools", "bool", "", "true: the request offers tools, and `tool_choice` is not `none`", "",
       lambda r, s, e: wants_tools(r)),
    _S("request.json", "bool", "", "true: `response_format` requires JSON", "", lambda r, s, e: wants_json(r)),
    _S("request.stream", "bool", "", "true: the client requests a stream", "", lambda r, s, e: r.stream),
    _S("request.client", "string", "", "name of the client's API key; without a key, the client's address", "",
       lambda r, s, e: replace_surrogates(r.hints.client)),
    _S("request.prefer", "string", "", "the client's routing preference; empty if the client has none", "",
       lambda r, s, e: r.hints.prefer or "",
       values=("", "prefer_on_device", "only_on_device", "prefer_cloud", "only_cloud")),
    _S("request.deadline_ms", "int", "ms", "time limit that the client sets for the request",
       "the client sets no time limit",
       lambda r, s, e: _int(r.hints.deadline_ms), optional=True),
    _S("device.temperature_c", "double", "°C", "temperature of the hottest thermal zone", "no thermal zone is readable",
       lambda r, s, e: _double(s.device.temperature_c), optional=True),
    _S("device.throttled", "bool", "", "true: the processor's clock is limited because of heat or power",
       "the state of the clock is not readable",
       lambda r, s, e: s.device.throttled, optional=True),
    _S("device.memory_free_mb", "double", "MB", "memory that is available without swapping",
       "the memory is not readable",
       lambda r, s, e: _double(s.device.memory_free_mb)),
    _S("device.cpu", "double", "0..1", "share of the time in which the CPU cores are busy",
       "the load of the CPU is not readable",
       lambda r, s, e: _double(s.device.cpu)),
    _S("device.power_w", "double", "W", "power that the device draws", "no power rail is readable",
       lambda r, s, e: _double(s.device.power_w), optional=True),
    _S("device.battery", "double", "0..1", "charge of the battery", "the device has no battery",
       lambda r, s, e: _double(s.device.battery),
       optional=True),
    _S("edge.queue", "int", "requests", "number of requests that wait for the device's engine",
       "the device has no engine",
       lambda r, s, e: _int(s.edge.queue)),
    _S("edge.tokens_per_s", "double", "tokens/s", "recent speed at which the device generates one answer",
       "the device has not generated an answer yet",
       lambda r, s, e: _double(s.edge.tokens_per_s)),
    _S("edge.quality", "double", "0..1", "probability that the device's answer is right, estimated before the answer "
       "is generated", "the device's model has no quality estimator", lambda r, s, e: _double(e.quality),
       optional=True),
    _S("edge.loaded", "bool", "", "true: the device's model is in memory, or the next request loads it",
       "the device has no engine",
       lambda r, s, e: s.edge.loaded),
    _S("edge.feedback", "double", "0..1", "mean of the scores that clients recently gave to the device's answers",
       "no client has recently scored an answer of the device", lambda r, s, e: _double(s.edge.feedback),
       optional=True),
    _S(IMAGES_TEXT, "bool", "", "true: one of the request's images (`image_url`) has text; false for a request without "
       "images",
       "this device has no encoder for images, or the encoder was not ready in time",
       lambda r, s, e: _of_parts("image", e.images_text, without=False, request=r), optional=True),
    _S(AUDIO_SPEECH, "bool", "", "true: words are heard in one of the request's audio clips; false for a request "
       "without audio",
       "this device has no encoder for audio, or the encoder was not ready in time",
       lambda r, s, e: _of_parts("audio", e.audio_speech, without=False, request=r), optional=True),
    _S(PII_CLASSES_SIGNAL, "list", "", "classes of personal data that the request's texts have",
       "", lambda r, s, e: None if e.pii_classes is None else list(e.pii_classes),
       values=PII_CLASSES),
    _S(PII_COUNT, "int", "values", "number of different personal values in the request's texts", "",
       lambda r, s, e: _int(e.pii_count)),
    _S(SECRETS_COUNT, "int", "values", "number of different secret keys (of clouds, code forges and other services) "
       "in the request's texts", "", lambda r, s, e: _int(e.key_count)),
    _S("cloud.reachable", "bool", "", "true: the last probe of the cloud succeeded",
       "the device has no cloud, or has not probed the cloud yet",
       lambda r, s, e: s.cloud.reachable),
    _S("cloud.rtt_ms", "double", "ms", "recent round-trip time to the cloud",
       "the round-trip time has not been measured yet",
       lambda r, s, e: _double(s.cloud.rtt_ms)),
    _S("cloud.breaker", "string", "", "state of the cloud's circuit breaker", "the device has no cloud",
       lambda r, s, e: s.cloud.breaker, values=("closed", "half_open", "open")),
    _S("cloud.tier", "string", "", "name of the cloud's tier that answered the last request",
       "no tier of the cloud has answered yet",
       lambda r, s, e: None if s.cloud.tier is None else replace_surrogates(s.cloud.tier)),
    _S("cloud.feedback", "double", "0..1", "mean of the scores that clients recently gave to the cloud's answers",
       "no client has recently scored an answer of the cloud", lambda r, s, e: _double(s.cloud.feedback),
       optional=True),
    _S("spend.usd_hour", "double", "USD", "cost of the answers of the last 60 minutes",
       "the device cannot count its spending",
       lambda r, s, e: _double(s.spend.usd_hour)),
    _S("spend.usd_today", "double", "USD", "cost of the answers since local midnight",
       "the device cannot count its spending",
       lambda r, s, e: _double(s.spend.usd_today)),
    _S("spend.usd_month", "double", "USD", "cost of the answers since the first of the month, local time",
       "the device cannot count its spending",
       lambda r, s, e: _double(s.spend.usd_month)),
    _S("now.hour", "int", "0..23", "hour of the day, local time", "", lambda r, s, e: _int(s.now.hour)),
    _S("now.weekday", "int", "1..7", "day of the week, local time; Monday is 1", "",
       lambda r, s, e: _int(s.now.weekday)),
    _S("now.minute", "int", "0..59", "minute of the hour, local time", "", lambda r, s, e: _int(s.now.minute)),
    _S("now.unix", "int", "s", "Unix time", "", lambda r, s, e: _int(s.now.unix)),
)  # fmt: skip
SIGNALS: Mapping[str, SignalSpec] = {spec.name: spec for spec in _SPECS}

GROUPS: frozenset[str] = frozenset(name.partition(".")[0] for name in SIGNALS)

CLOUD_NAME = "[a-z](?:_?[a-z0-9]){0,31}"
"""The pattern of a cloud's name, which is a part of the names of its signals."""
OF_EACH_CLOUD = ("reachable", "rtt_ms", "breaker", "tier")
"""The signals of each cloud. No cloud may have a signal's name: `cloud.rtt_ms` is a signal of the first cloud."""
_OF_CLOUD = re.compile(rf"cloud\.({CLOUD_NAME})\.(\w+)")
_NO_CLOUD = CloudSignals()


def is_reserved(cloud: str) -> bool:
    """Return whether no cloud may have this name, because a signal has it."""
    return f"cloud.{cloud}" in SIGNALS


def find_signal(name: str) -> SignalSpec | None:
    """Return a signal by its name: one of `SIGNALS`, or one of a cloud, such as `cloud.eu.rtt_ms`; None if unknown."""
    return SIGNALS.get(name) or _signal_of_cloud(name)


@lru_cache(maxsize=1024)
def _signal_of_cloud(name: str) -> SignalSpec | None:
    found = _OF_CLOUD.fullmatch(name)
    if found is None or found[2] not in OF_EACH_CLOUD or is_reserved(found[1]):
        return None
    spec = SIGNALS[f"cloud.{found[2]}"]
    return msgspec.structs.replace(
        spec,
        name=name,
        meaning=spec.meaning.replace("the cloud", f"the cloud `{found[1]}`"),
        absent=f"{spec.absent}, or this device has no cloud `{found[1]}`",
        read=partial(_read_of_cloud, found[1], spec.read),
    )


def _read_of_cloud(
    cloud: str, read: Reader, request: Request, snapshot: Snapshot, estimates: Estimates
) -> Value | None:
    return read(request, Snapshot(cloud=snapshot.clouds.get(cloud, _NO_CLOUD)), estimates)


def signal_spec(name: str) -> SignalSpec:
    """Return a signal that exists, by its name."""
    spec = find_signal(name)
    assert spec is not None, name
    return spec


class SignalValues:
    """The signal values of one request, as a CEL context, and the names of absent signals."""

    __slots__ = ("absent", "context")

    def __init__(self, values: dict[str, Value], absent: tuple[str, ...] = ()) -> None:
        self.context = cel.Context(values)
        self.absent = absent


class EvaluationFailure(msgspec.Struct, frozen=True):
    """A condition without a result. `absent` names the missing signals; "" if it failed for another reason."""

    absent: str
    message: str


@dataclass(frozen=True, slots=True, eq=False)
class Expression:
    """A compiled condition, immutable, created by `compile_expression`."""

    source: str
    program: cel.Program
    signals: frozenset[str]  # named in the source, `has()` included
    presences: frozenset[str]  # those in `has()`
    needed: frozenset[str] = frozenset()  # the condition does not hold while one of these is absent

    def evaluate(self, values: SignalValues) -> bool | EvaluationFailure:
        """Return whether the condition holds, or why it cannot be evaluated. Never raises."""
        try:
            result = self.program.execute(values.context)
        except Exception as error:  # the binding raises KeyError, TypeError, RuntimeError and others, undocumented
            missing = ", ".join(name for name in values.absent if name in self.signals)
            return EvaluationFailure(missing, str(error).partition("\n")[0][:200])
        if result is True or result is False:
            return result
        return EvaluationFailure("", f"the result is {result!r}, not true or false")


OF_TEXT: tuple[str, ...] = ("request.prompt_tokens", "edge.quality", *sorted(GUARD_SIGNALS))
"""The on-demand signals of a request's text, which includes the text that encoders find in audio and images."""
PART_SIGNALS: Mapping[str, Modality] = {
    IMAGE_PIXELS: "image",
    IMAGES_TEXT: "image",
    AUDIO_S: "audio",
    LANGUAGE: "audio",
    AUDIO_SPEECH: "audio",
}
"""The on-demand signals about parts, by kind; the device's decoders and encoders compute them."""
ESTIMATED: Mapping[str, str] = {
    "request.prompt_tokens": "prompt_tokens",
    "edge.quality": "quality",
    IMAGE_PIXELS: "image_pixels",
    IMAGES_TEXT: "images_text",
    AUDIO_S: "audio_s",
    LANGUAGE: "language",
    AUDIO_SPEECH: "audio_speech",
    PII_CLASSES_SIGNAL: "pii_classes",
    PII_COUNT: "pii_count",
    SECRETS_COUNT: "key_count",
}
"""The on-demand signals, each with its field of `Estimates`."""
ON_DEMAND: tuple[str, ...] = tuple(ESTIMATED)
"""The on-demand signals: computed for a request only if the policy names them, or if records keep all signals."""


LISTED_UNRECORDED: tuple[str, ...] = tuple([name for name in ON_DEMAND if name not in GUARD_SIGNALS])
"""The signals that a record lists if not computed. Those of the guard are never absent: no value means this."""


@lru_cache(maxsize=256)
def concerned(signals: tuple[str, ...], kinds: tuple[Modality, ...]) -> tuple[str, ...]:
    """Return the signals that are not constant for requests with these kinds of content."""
    return tuple([name for name in signals if PART_SIGNALS.get(name, "text") in kinds])


def _reader(name: str, default_temperature: float) -> Reader:
    if name == TEMPERATURE:
        return lambda r, s, e: temperature_of(r, default_temperature)
    return signal_spec(name).read


class RequiredSignals:
    """The signals that a set of expressions names, and how to read them. No other signal is computed.

    Args:
        default_temperature: The value of `request.temperature` if the client sets none.
    """

    __slots__ = ("_presences", "_readers", "request_only", "signals")

    def __init__(self, expressions: Iterable[Expression], default_temperature: float = OPENAI_TEMPERATURE) -> None:
        expressions = list(expressions)
        named: frozenset[str] = frozenset().union(*(expression.signals for expression in expressions))
        self.signals = frozenset(name for name in named if find_signal(name) is not None)  # others: of an outcome
        presences: frozenset[str] = frozenset().union(*(expression.presences for expression in expressions))
        self._readers = tuple(
            (name, signal_spec(name).variable, _reader(name, default_temperature)) for name in sorted(self.signals)
        )
        self._presences = tuple((name, signal_spec(name).presence_variable) for name in sorted(presences))

        # True if all signals depend only on the request, not on the device, an estimate or the time.
        self.request_only = all(
            name.startswith("request.") and name not in ON_DEMAND for name in self.signals | presences
        )

    def read(self, request: Request, snapshot: Snapshot, estimates: Estimates) -> SignalValues:
        values: dict[str, Value] = {}
        absent: list[str] = []
        for name, variable, reader in self._readers:
            value = reader(request, snapshot, estimates)
            if value is None:
                absent.append(name)
            else:
                values[variable] = value
        for name, variable in self._presences:
            values[variable] = name not in absent
        return SignalValues(values, tuple(absent))


_NONE: frozenset[str] = frozenset()
_NO_CLOUDS: Mapping[str, CloudSignals] = {}


class TargetAvailability:
    """The keys of a policy's targets that cannot answer now (`down`), or never can on this device (`absent`)."""

    def __init__(self, targets: Iterable[Target], setup: DeviceSetup) -> None:
        each = [one for target in targets for one in target.in_each_cloud]
        self._edge = frozenset(target.key for target in each if target.at == "edge")
        self._cloud = tuple((target.cloud, target.model, target.key) for target in each if target.at == "cloud")
        self._has_engine = setup.engine
        self.absent = _NONE if setup.engine else self._edge
        self.absent |= {key for cloud, _, key in self._cloud if not setup.has_cloud(cloud)}

    def down(
        self, edge: EdgeSignals, cloud: CloudSignals, clouds: Mapping[str, CloudSignals] = _NO_CLOUDS
    ) -> frozenset[str]:
        """Return the targets that are known to be down. A cloud that has not been probed counts as up.

        Args:
            cloud: The first cloud.
            clouds: All clouds by name.
        """
        down = self._edge if self._has_engine and not edge.loaded else _NONE
        if all(_is_up(one) for one in clouds.values() or (cloud,)):
            return down
        return down | {key for name, model, key in self._cloud if _is_down(clouds.get(name, cloud), model)}


def _is_up(cloud: CloudSignals) -> bool:
    return cloud.reachable is not False and cloud.breaker != "open" and not cloud.unavailable_models


def _is_down(cloud: CloudSignals, model: str) -> bool:
    return cloud.reachable is False or cloud.breaker == "open" or model in cloud.unavailable_models
