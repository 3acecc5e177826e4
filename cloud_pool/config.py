"""The gateway's configuration: frozen structs, and the file and command-line flags that are read into them.

Each section is in the room that it configures. Flags override the file. Durations may be written `500ms`, `30s` or
`7d`, sizes `64MiB`. Unknown keys, wrong types and impossible combinations are refused with file, line and key. A
relative path in the file is relative to the file. Without a file there is one tier, `assistant-large`, on a Triton at
its usual port on this machine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from causeway_server.router.config import EgressLedgerConfig, Positive, SessionConfig, TracingConfig
from causeway_server.router.documents import strict_yaml
from causeway_server.router.errors import ConfigError
from causeway_server.router.numbers import without_unit
from causeway_server.router.renames import advice
from causeway_server.router.web_origins import WebOrigins, is_loopback, listener_hosts

from .accounts.identity.config import IdentityConfig
from .accounts.tenants.config import TenantsConfig
from .cache.config import CacheConfig
from .degradation.config import DegradationConfig
from .dispatch.config import LoadBalancingConfig
from .dispatch.discovery import parse_endpoint_address
from .http.config import MAX_PORT, GrpcConfig, OperatorConfig, ServerConfig
from .redis.config import RedisAddress, parse_redis, with_url
from .serving.guard import GuardConfig
from .storage.config import JobsConfig
from .streams.config import StreamsConfig
from .tiers.config import DEFAULT_TRITON, PartsConfig, TierConfig
from .upstreams.openai_http import read_credentials


class GatewaySessionConfig(SessionConfig, frozen=True, forbid_unknown_fields=True):
    """Live sessions over WebSocket."""

    max_sessions: Positive = 1024


OPERATOR_PORT_OFFSET = 100
"""Distance from `server.port` to the operators' port, if the latter is not configured."""


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    server: ServerConfig = ServerConfig()
    operator: OperatorConfig = OperatorConfig()
    tiers: Annotated[tuple[TierConfig, ...], Meta(min_length=1)] = (TierConfig(),)
    triton_key_file: str = ""
    load_balancing: LoadBalancingConfig = LoadBalancingConfig()
    degradation: DegradationConfig = DegradationConfig()
    state_dir: str = ""
    model_dirs: tuple[str, ...] = ()
    redis: RedisAddress = ""
    identity: IdentityConfig = IdentityConfig()
    tenants: TenantsConfig = TenantsConfig()
    jobs: JobsConfig = JobsConfig()
    streams: StreamsConfig = StreamsConfig()
    cache: CacheConfig = CacheConfig()
    realtime: GatewaySessionConfig = GatewaySessionConfig()
    parts: PartsConfig = PartsConfig()
    guard: GuardConfig = GuardConfig()
    grpc: GrpcConfig = GrpcConfig()
    tracing: TracingConfig = TracingConfig()
    egress_ledger: EgressLedgerConfig = EgressLedgerConfig()
    audit_file: str = ""
    log: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"

    @property
    def web_origins(self) -> WebOrigins:
        """Return the web origins whose pages may use the public address."""
        hosts = listener_hosts(self.server.host, self.server.hosts, needs_key=self.authenticates)
        return WebOrigins(self.server.origins, hosts, "server.origins")

    @property
    def authenticates(self) -> bool:
        """Whether each caller needs a token or a client certificate."""
        return bool(self.server.token_file or self.identity.signed or self.identity.certificates.tenants)

    @property
    def has_operator_tokens(self) -> bool:
        """Whether operators' tokens are configured; otherwise the gateway creates a token."""
        return bool(self.operator.token_file or self.identity.key_file)

    @property
    def operator_web_origins(self) -> WebOrigins:
        """Return the web origins allowed at the operators' address: none, because only programs use it."""
        hosts = listener_hosts(self.operator.host, self.server.hosts, needs_key=self.has_operator_tokens)
        return WebOrigins(hosts=hosts)

    @property
    def operator_server(self) -> ServerConfig:
        """Server settings of the operators' address, with the limits of `server`."""
        port = self.operator.port
        if port is None:
            port = self.server.port and self.server.port + OPERATOR_PORT_OFFSET
        return msgspec.structs.replace(self.server, host=self.operator.host, port=port, tls=self.operator.tls)


_PATHS = re.compile(r"(.+_)?file|state_dir|model_dirs|names_model")  # keys that hold paths


class Flags(msgspec.Struct, frozen=True, kw_only=True):
    """The command-line flags; None if a flag is absent."""

    host: str | None = None
    port: int | None = None
    token_file: str | None = None
    operator_port: int | None = None
    triton: str | None = None  # Triton's address, for every tier that names none of its own
    tiers: tuple[str, ...] = ()  # names of tiers, instead of those in the file
    model_dirs: tuple[str, ...] = ()
    redis: str | None = None
    log: Literal["debug", "info", "warning", "error"] | None = None


def load_config(path: Path | None, flags: Flags, environ: Mapping[str, str] = os.environ) -> Config:
    """Read, merge and check the configuration. `environ` determines the default of `state_dir`.

    Raises ConfigError, which names the file and line, or the flag, and the key.
    """
    positions: dict[str, str] = {}
    config = Config() if path is None else _read(path, positions)
    tiers = tuple(TierConfig(name=name) for name in flags.tiers) or config.tiers
    if flags.triton is not None:
        parse_endpoint_address(flags.triton, where="--triton")
        addressed = [tier.name for tier in tiers if tier.triton != DEFAULT_TRITON or tier.endpoints]
        if addressed and all(tier.upstream.is_http or tier.name in addressed for tier in tiers):
            message = "Each tier names its own servers, which this does not replace. Remove it, or a tier's `triton`."
            raise ConfigError(message, where="--triton")
        tiers = tuple(
            tier
            if tier.upstream.is_http or tier.name in addressed
            else msgspec.structs.replace(tier, triton=flags.triton)
            for tier in tiers
        )
    port = config.operator.port if flags.operator_port is None else flags.operator_port
    server = {name: getattr(flags, name) for name in ("host", "port", "token_file") if getattr(flags, name) is not None}
    config = msgspec.structs.replace(
        config,
        server=msgspec.structs.replace(config.server, **server),
        operator=msgspec.structs.replace(config.operator, port=port),
        tiers=tiers,
        state_dir=config.state_dir or _default_state_dir(environ),
        model_dirs=(*flags.model_dirs, *config.model_dirs),
        redis=config.redis if flags.redis is None else with_url(config.redis, flags.redis),
        log=flags.log or config.log,
    )
    try:
        _check(config)
    except ConfigError as error:
        reason = error.message.removeprefix(f"{error.where}: ")
        raise ConfigError(reason, where=positions.get(error.where, error.where)) from None
    return config


def _read(path: Path, positions: dict[str, str]) -> Config:
    """Read the file and make its paths absolute. `positions` collects each key's file and line."""
    try:
        tree = strict_yaml.read_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(error), where=str(path)) from error
    except strict_yaml.YamlError as fault:
        raise ConfigError(fault.problem.message, where=str(fault.problem.location)) from fault
    document = _plain(tree, positions, path.parent)
    try:
        return msgspec.convert(document, Config)
    except msgspec.ValidationError as error:
        reason, _, key = str(error).partition(" - at `$")
        unknown = re.search(r"unknown field `(.*)`", reason)
        key = key.rstrip("`").lstrip(".") + (f".{unknown[1]}" if unknown else "")
        reason = advice("gateway.yaml", key.lstrip(".")) or reason
        raise ConfigError(reason, where=positions.get(key.lstrip("."), f"{path}: {key}")) from error


def _plain(tree: strict_yaml.Tree, positions: dict[str, str], folder: Path) -> object:
    """Convert a YAML tree to plain values, with absolute paths; `positions` collects each key's file and line."""
    positions[tree.location.path] = str(tree.location)
    if isinstance(tree, strict_yaml.Mapping):
        pairs = zip(tree.keys, tree.values, strict=True)
        plain = {}
        for key, value in pairs:
            plain[key.text] = _absolute(key.text, without_unit(key.text, _plain(value, positions, folder)), folder)
            positions[key.location.path] = str(key.location)
        return plain
    if isinstance(tree, strict_yaml.Sequence):
        return [_plain(item, positions, folder) for item in tree.items]
    return _scalar(tree)


def _scalar(scalar: strict_yaml.Scalar) -> object:
    """Convert a scalar. Raises ConfigError for YAML types that are not used (dates, octal numbers)."""
    value = scalar.value()
    if scalar.kind in ("int", "float") and isinstance(value, str):
        raise ConfigError(f"{value!r} is not a plain decimal number.", where=str(scalar.location))
    if scalar.kind == "other":
        raise ConfigError(
            f"{value!r} is a date or binary data in YAML. If it is meant as text, put it in quotes.",
            where=str(scalar.location),
        )
    return value


def _absolute(key: str, value: object, folder: Path) -> object:
    """Return a key's value, with a path relative to `folder` made absolute."""
    if isinstance(value, list):
        return [_absolute(key, item, folder) for item in value]
    if _PATHS.fullmatch(key) and isinstance(value, str) and value and (key, value) != ("audit_file", "-"):
        return str((folder / value).absolute())
    return value


def _check(config: Config) -> None:
    for host in (config.server.host, *(() if config.grpc.port is None else (config.grpc.host,))):
        if not config.authenticates and not is_loopback(host):
            raise ConfigError(
                f"Listening on {host} needs bearer tokens or client certificates. For tokens set `server.token_file`, "
                "`identity.key_file`, `identity.issuers` or `identity.fleet.url`; for certificates set "
                "`identity.certificates.tenants`.",
                where="server.token_file",
            )
    if config.identity.certificates.tenants and not config.server.tls.client_ca_file:
        raise ConfigError(
            "Client certificates need a CA: set `server.tls.client_ca_file`.", where="identity.certificates.tenants"
        )
    if config.identity.api_keys.accept and not config.redis:
        raise ConfigError("API keys are stored in Redis. Set `redis`.", where="identity.api_keys.accept")
    _check_operator(config)
    config.identity.check()
    for where, address in (("redis", config.redis), ("cache.redis", config.cache.redis)):
        if address:
            parse_redis(address, where)
    models = {name: tier.region for tier in config.tiers for name in (tier.name, *tier.aliases, *tier.adapters)}
    config.tenants.check(models, config.identity.region)
    config.jobs.check()
    config.streams.check()
    config.guard.compiled()
    config.cache.check(config.redis)
    config.degradation.check([tier.name for tier in config.tiers])
    for index, price in enumerate(config.tenants.prices):
        if price.tier not in {tier.name for tier in config.tiers}:
            raise ConfigError(f"There is no tier {price.tier!r}.", where=f"tenants.prices[{index}].tier")
    seen: dict[str, str] = {}
    for index, tier in enumerate(config.tiers):
        where = f"tiers[{index}]"
        tier.upstream.check(f"{where}.upstream")
        _check_endpoints(tier, where)
        for name in (tier.name, *tier.aliases, *tier.adapters):
            if name in seen:
                raise ConfigError(
                    f"The name {name!r} is already a name, alias or adapter of {seen[name]}.", where=where
                )
            seen[name] = where


def _check_operator(config: Config) -> None:
    operator = config.operator
    if not config.has_operator_tokens and not is_loopback(operator.host):
        raise ConfigError(
            f"Listening on {operator.host} needs tokens. Set `operator.token_file` or `identity.key_file`.",
            where="operator.token_file",
        )
    if config.operator_server.port > MAX_PORT:
        raise ConfigError(
            f"The port server.port + {OPERATOR_PORT_OFFSET} is above {MAX_PORT}. Set `operator.port`.",
            where="operator.port",
        )


def _check_endpoints(tier: TierConfig, where: str) -> None:
    if tier.upstream.is_http:
        read_credentials(tier.upstream, f"{where}.upstream")
        for key, value in (("triton", tier.triton != DEFAULT_TRITON), ("endpoints", tier.endpoints)):
            if value:
                raise ConfigError(
                    f"`{key}` is only for Triton, but this tier has `kind: openai`. Set `upstream.urls`.",
                    where=f"{where}.{key}",
                )
        return
    if not tier.endpoints:
        parse_endpoint_address(tier.triton, where=f"{where}.triton")
        return
    if tier.triton != DEFAULT_TRITON:
        raise ConfigError("Set either `triton` or `endpoints`, not both.", where=f"{where}.endpoints")
    seen = set()
    for index, text in enumerate(tier.endpoints):
        address = parse_endpoint_address(text, where=f"{where}.endpoints[{index}]")
        if (address.is_dns, address.address) in seen:
            raise ConfigError(f"The endpoint {address.address} is listed twice.", where=f"{where}.endpoints[{index}]")
        seen.add((address.is_dns, address.address))


def _default_state_dir(environ: Mapping[str, str]) -> str:
    """Return systemd's (first) state folder, else the user's; "" if there is none."""
    if state_dir := environ.get("STATE_DIRECTORY", "").split(":")[0]:
        return state_dir
    home = environ.get("HOME", "")
    state_home = environ.get("XDG_STATE_HOME") or (home and str(Path(home) / ".local" / "state"))
    return state_home and str(Path(state_home) / "causeway-cloud")
