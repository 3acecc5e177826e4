"""The gateway's configuration: frozen, checked at start, unknown keys refused with file, line and key. File < flags.

A relative path in the file is relative to the file. Without a file there is one tier, `assistant-large`, on a
Triton at its usual port on this machine.
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from router.documents import strict_yaml
from router.errors import ConfigError

from ..accounts.identity.config import IdentityConfig
from ..accounts.tenants.config import TenantsConfig
from ..admission.config import AdmissionConfig, AdmissionSettings
from ..balancing.config import Balance, PoolConfig
from ..balancing.discovery.endpoint_address import EndpointAddress, parse_endpoint_address
from ..cache.config import CacheConfig
from ..degradation.config import DegradationConfig
from ..dispatch.config import HedgeConfig, RetryBudgetConfig
from ..jobs.config import JobsConfig
from ..upstreams.triton.sampling_parameters import GuidedKey

Port = Annotated[int, Meta(ge=0, le=65535)]
Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]
Pause = Annotated[float, Meta(ge=0)]
DEFAULT_TIER = "assistant-large"
DEFAULT_TRITON = "127.0.0.1:8001"


class ServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    port: Port = 8090  # 0: any free one
    token_file: str = ""  # devices' bearer tokens; "": none asked, which only loopback may do
    max_body_bytes: Positive = 8 * 1024 * 1024
    read_timeout_s: Seconds = 20.0  # a whole request must have arrived by then
    drain_s: Pause = 20.0
    default_deadline_s: Seconds = 120.0  # a request's whole time where the caller names none
    probe_ttl_s: Pause = 5.0  # how long the answer of /readyz, a real inference, is kept
    zone: str = ""  # where this gateway stands: endpoints of the same zone go first, others help; "": all are alike


class TierConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model in a Triton, under the name that callers use."""

    name: Annotated[str, Meta(min_length=1)] = DEFAULT_TIER
    aliases: tuple[str, ...] = ()
    triton: str = DEFAULT_TRITON  # host:port of its gRPC
    endpoints: tuple[str, ...] = ()  # instead, many: host:port, dns:name:port, either with @zone behind it
    balance: Balance = "least"  # of work; prefix: a conversation also stays where its prefix is warm
    model: str = ""  # its name in Triton; "": the tier's
    artifact: str = ""  # chat template, tokens and context of this artifact; "": of the one named like the tier
    template_file: str = ""  # a Jinja chat template instead of the artifact's (a stock vLLM or TensorRT-LLM tier)
    special_tokens: tuple[str, ...] = ()  # with template_file: what a user's text must not be able to say
    bos: str = ""  # with template_file
    eos: str = ""  # with template_file
    context_tokens: Count = 0  # 0: the artifact's
    max_tokens: Count = 0  # of an answer where the caller names none; 0: the whole context
    concurrency: Positive = 16  # requests in Triton at once, at most, of all gateways that share a Redis
    min_concurrency: Count = 1  # of a gateway: its limit is never less than this; 0: it stays at `concurrency`
    ttft_objective_s: Seconds = 2.0  # of an interactive request, from its arrival to its first token
    queue: Count = 64  # more wait here; beyond: 429
    admission: AdmissionConfig = AdmissionConfig()
    tries: Positive = 3  # endpoints that one request may be given to before its first token; 1: no retry
    retry_budget: RetryBudgetConfig = RetryBudgetConfig()
    hedge: HedgeConfig = HedgeConfig()
    call_grammar: bool = True  # hold the calls of an artifact that answers with calls to the words of what was said
    guided: GuidedKey = "guided_decoding"  # what the tier's vLLM backend calls grammars: structured_outputs since 25.09

    @property
    def door(self) -> AdmissionSettings:
        return AdmissionSettings(
            places=self.concurrency,
            min_places=self.min_concurrency,
            queue=self.queue,
            ttft_objective_s=self.ttft_objective_s,
            config=self.admission,
        )

    @property
    def places(self) -> tuple[EndpointAddress, ...]:
        """Raises ConfigError."""
        return tuple(parse_endpoint_address(text) for text in self.endpoints or (self.triton,))


class TracingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    endpoint: str = ""  # OpenTelemetry collector that takes OTLP over HTTP, as http://host:4318; "": no traces
    share: Annotated[float, Meta(ge=0, le=1)] = 1.0  # of the requests without a trace of their caller's


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    server: ServerConfig = ServerConfig()
    tiers: Annotated[tuple[TierConfig, ...], Meta(min_length=1)] = (TierConfig(),)
    pool: PoolConfig = PoolConfig()  # of every tier
    ladder: DegradationConfig = DegradationConfig()  # how answers degrade
    model_dirs: tuple[str, ...] = ()  # searched for artifacts before the ones that ship
    redis: str = ""  # redis://, rediss:// or unix:// URL, shared by the gateways; "": rates are this gateway's own
    identity: IdentityConfig = IdentityConfig()
    tenants: TenantsConfig = TenantsConfig()
    jobs: JobsConfig = JobsConfig()
    cache: CacheConfig = CacheConfig()
    tracing: TracingConfig = TracingConfig()
    audit: str = ""  # file of audit records, "-" for stdout, "" for none
    log: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"


class Flags(msgspec.Struct, frozen=True, kw_only=True):
    """From the command line; None was not given."""

    host: str | None = None
    port: int | None = None
    token_file: str | None = None
    triton: str | None = None  # for every tier
    tiers: tuple[str, ...] = ()  # names, instead of the file's
    model_dirs: tuple[str, ...] = ()
    redis: str | None = None
    log: Literal["debug", "info", "warning", "error"] | None = None


def load_config(path: Path | None, flags: Flags) -> Config:
    """Raises ConfigError."""
    stands: dict[str, str] = {}
    config = Config() if path is None else _absolute(_read(path, stands), path.parent)
    tiers = tuple(TierConfig(name=name) for name in flags.tiers) or config.tiers
    if flags.triton is not None:
        parse_endpoint_address(flags.triton, where="--triton")
        tiers = tuple(msgspec.structs.replace(tier, triton=flags.triton, endpoints=()) for tier in tiers)
    server = {name: getattr(flags, name) for name in ("host", "port", "token_file") if getattr(flags, name) is not None}
    config = msgspec.structs.replace(
        config,
        server=msgspec.structs.replace(config.server, **server),
        tiers=tiers,
        model_dirs=(*flags.model_dirs, *config.model_dirs),
        redis=config.redis if flags.redis is None else flags.redis,
        log=flags.log or config.log,
    )
    try:
        _check(config)
    except ConfigError as error:
        reason = error.message.removeprefix(f"{error.where}: ")
        raise ConfigError(reason, where=stands.get(error.where, error.where)) from None
    return config


def _read(path: Path, places: dict[str, str]) -> Config:
    """`places` gets each key's file, line and path."""
    try:
        tree = strict_yaml.read_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(error), where=str(path)) from error
    except strict_yaml.YamlError as fault:
        raise ConfigError(fault.problem.message, where=str(fault.problem.place)) from fault
    document = _plain(tree, places)
    try:
        return msgspec.convert(document, Config)
    except msgspec.ValidationError as error:
        reason, _, key = str(error).partition(" - at `$")
        unknown = re.search(r"unknown field `(.*)`", reason)
        key = key.rstrip("`").lstrip(".") + (f".{unknown[1]}" if unknown else "")
        raise ConfigError(reason, where=places.get(key.lstrip("."), f"{path}: {key}")) from error


def _plain(tree: strict_yaml.Tree, places: dict[str, str]) -> object:
    """The tree as plain values; `places` gets each key's file, line and path."""
    places[tree.place.path] = str(tree.place)
    if isinstance(tree, strict_yaml.Mapping):
        pairs = zip(tree.keys, tree.values, strict=True)
        found = {}
        for key, value in pairs:
            found[key.text] = _plain(value, places)
            places[key.place.path] = str(key.place)
        return found
    if isinstance(tree, strict_yaml.Sequence):
        return [_plain(item, places) for item in tree.items]
    return _scalar(tree)


def _scalar(scalar: strict_yaml.Scalar) -> object:
    """Raises ConfigError for what YAML writes and we have no type for (dates, octal numbers)."""
    text, kind = scalar.text, scalar.kind
    try:
        if kind == "int":
            return int(text.replace("_", ""))
        if kind == "float":
            return float(text.replace("_", ""))
    except ValueError as error:
        raise ConfigError(f"{text!r} is not a plain number", where=str(scalar.place)) from error
    if kind == "bool":
        return text.lower() in ("true", "yes", "on")
    if kind == "null":
        return None
    if kind == "other":
        raise ConfigError(f"{text!r} is a YAML date or binary; quote it if text is meant", where=str(scalar.place))
    return text


def _absolute(config: Config, folder: Path) -> Config:
    def at(path: str) -> str:
        return str((folder / path).absolute()) if path else ""

    return msgspec.structs.replace(
        config,
        server=msgspec.structs.replace(config.server, token_file=at(config.server.token_file)),
        tiers=tuple(msgspec.structs.replace(tier, template_file=at(tier.template_file)) for tier in config.tiers),
        model_dirs=tuple(at(path) for path in config.model_dirs),
        identity=msgspec.structs.replace(
            config.identity,
            key_file=at(config.identity.key_file),
            revocations_file=at(config.identity.revocations_file),
        ),
        ladder=msgspec.structs.replace(config.ladder, continue_key_file=at(config.ladder.continue_key_file)),
        cache=msgspec.structs.replace(config.cache, secret_file=at(config.cache.secret_file)),
        audit=config.audit if config.audit == "-" else at(config.audit),
    )


def _check(config: Config) -> None:
    if not (config.server.token_file or config.identity.key_file) and not _is_loopback(config.server.host):
        raise ConfigError(
            f"listening on {config.server.host} needs bearer tokens: this, or identity.key_file",
            where="server.token_file",
        )
    if config.redis and not config.redis.startswith(("redis://", "rediss://", "unix://")):
        raise ConfigError("write redis://host:port/0, rediss:// or unix://", where="redis")
    config.tenants.check()
    config.cache.check(config.redis)
    config.ladder.check([tier.name for tier in config.tiers])
    for at, price in enumerate(config.tenants.prices):
        if price.tier not in {tier.name for tier in config.tiers}:
            raise ConfigError(f"there is no tier {price.tier!r}", where=f"tenants.prices[{at}].tier")
    seen: dict[str, str] = {}
    for at, tier in enumerate(config.tiers):
        where = f"tiers[{at}]"
        _check_places(tier, where)
        for name in (tier.name, *tier.aliases):
            if name in seen:
                raise ConfigError(f"{name!r} is already {seen[name]}", where=where)
            seen[name] = where


def _check_places(tier: TierConfig, where: str) -> None:
    if not tier.endpoints:
        parse_endpoint_address(tier.triton, where=f"{where}.triton")
        return
    if tier.triton != DEFAULT_TRITON:
        raise ConfigError("name `triton`, or `endpoints`, not both", where=f"{where}.endpoints")
    seen = set()
    for at, text in enumerate(tier.endpoints):
        place = parse_endpoint_address(text, where=f"{where}.endpoints[{at}]")
        if (place.is_dns, place.address) in seen:
            raise ConfigError(f"{place.address} is there twice", where=f"{where}.endpoints[{at}]")
        seen.add((place.is_dns, place.address))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
