"""The daemon's configuration: frozen, checked at start, unknown keys refused. File < environment < flag.

A key ``server.port`` is `port:` under `server:` in the file, ``CAUSEWAY_SERVER__PORT`` in the environment and
``--set server.port=…`` on the command line. Durations may be written ``500ms``, ``30s``, ``10m``, ``7d``; sizes
``64MiB``, ``1GB``. A relative path in the file is relative to the file, elsewhere to the working directory.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from router.errors import ConfigError

from .layers import Layer, build, leaves_of, read_environ, read_flags, read_yaml, variable_of
from .values import Setting

PREFIX = "CAUSEWAY_"
_MAX_SECRET_BYTES = 64 * 1024

Port = Annotated[int, Meta(ge=0, le=65535)]
TokenCounter = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]
Pause = Annotated[float, Meta(ge=0)]


class KeyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]  # of the key, hex: the key itself is never stored
    tags: tuple[str, ...] = ()  # added to every request of this key


class ServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    port: Port = 8080
    socket: str = ""
    max_body_bytes: Positive = 8 * 1024 * 1024
    read_timeout_s: Seconds = 20.0
    drain_s: Pause = 20.0
    keys: tuple[KeyConfig, ...] = ()
    default_deadline_s: Seconds = 120.0


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model_dirs: tuple[str, ...] = ()
    sequences: Annotated[int, Meta(ge=1, le=256)] = 16
    batch_tokens: Positive = 512
    context_tokens: TokenCounter = 0
    threads: TokenCounter = 0
    gpu_layers: Annotated[int, Meta(ge=-1)] = 0
    call_grammar: bool = True
    enabled: bool = True


class CloudConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    url: str = ""
    api_key: str = ""
    api_key_file: str = ""
    connect_timeout_s: Seconds = 2.0
    first_token_timeout_s: Seconds = 10.0
    timeout_s: Seconds = 60.0
    connections: Positive = 100
    probe_interval_s: Seconds = 5.0
    ca_file: str = ""


class CacheConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    memory_bytes: TokenCounter = 32 * 1024 * 1024
    disk_bytes: TokenCounter = 256 * 1024 * 1024


class DecisionsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    memory_count: Positive = 2000
    max_age_s: Seconds = 7 * 86400.0


class TracingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    endpoint: str = ""
    share: Annotated[float, Meta(ge=0, le=1)] = 1.0


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    policy: str = ""
    state_dir: str = ""
    server: ServerConfig = ServerConfig()
    engine: EngineConfig = EngineConfig()
    cloud: CloudConfig = CloudConfig()
    cache: CacheConfig = CacheConfig()
    decisions: DecisionsConfig = DecisionsConfig()
    tracing: TracingConfig = TracingConfig()
    log: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"


MEANING: Mapping[str, str] = {
    "policy": "path of the policy; empty: the default policy that ships",
    "state_dir": "folder of cache and decisions; empty: $STATE_DIRECTORY, else ~/.local/state/causeway",
    "server.host": "address to listen on; anything but loopback should have `server.keys`",
    "server.port": "TCP port; 0: any free one",
    "server.socket": "path of a Unix socket to listen on as well; empty: none",
    "server.max_body_bytes": "a larger request body is refused with 413",
    "server.read_timeout_s": "a whole request must have arrived by then",
    "server.drain_s": "on SIGTERM, how long running requests may still take",
    "server.keys": "API keys: a list of {name, sha256 of the key in hex, tags}; empty: no key is asked for",
    "server.default_deadline_s": "a request's whole time where the caller names none",
    "engine.model_dirs": "folders searched for models before the ones that ship",
    "engine.sequences": "requests decoded together; more wait",
    "engine.batch_tokens": "tokens of one decode step, prompt pieces included",
    "engine.context_tokens": "one request's prompt and answer; 0: the model's own limit, bounded by memory",
    "engine.threads": "0: the cores that are free at start",
    "engine.gpu_layers": "layers on the GPU; -1: all",
    "engine.call_grammar": "hold calls to the words of what was said, where the model answers so; false: they are free",
    "engine.enabled": "false: this box has no engine and everything goes to the cloud",
    "cloud.url": "an OpenAI-compatible server, usually ending in /v1; empty: edge only",
    "cloud.api_key": "bearer token for the cloud; better in a file",
    "cloud.api_key_file": "file with the bearer token, read at start",
    "cloud.connect_timeout_s": "time to connect",
    "cloud.first_token_timeout_s": "time to the first token, where the policy's target says nothing",
    "cloud.timeout_s": "time for a whole answer, where the policy's target says nothing",
    "cloud.connections": "connections kept to the cloud at most",
    "cloud.probe_interval_s": "how often an idle box asks whether the cloud is there",
    "cloud.ca_file": "PEM file of the authority that signed the cloud's certificate; empty: the system's",
    "cache.memory_bytes": "bound of the cache in memory",
    "cache.disk_bytes": "bound of the cache on disk; 0: memory only",
    "decisions.memory_count": "decision records kept, the newest",
    "decisions.max_age_s": "older records are dropped",
    "tracing.endpoint": "OpenTelemetry collector that takes OTLP over HTTP, as `http://host:4318`; empty: no traces",
    "tracing.share": "of the requests without a trace of their caller's, how many are traced, 0 to 1",
    "log": "debug, info, warning or error",
    "log_format": "text or json; prompts and answers are in neither",
}
"""What each key is for: the README's table and `causeway-edge config` are made from it."""

_PATHS = ("policy", "state_dir", "server.socket", "cloud.api_key_file", "cloud.ca_file")


def config_keys() -> list[str]:
    """Every key, dotted, in the order of the structs."""
    return list(leaves_of(Config))


def config_variable(key: str) -> str:
    """The environment variable of a key: ``server.port`` is ``CAUSEWAY_SERVER__PORT``."""
    return variable_of(key, PREFIX)


def load_config(path: Path | None, environ: Mapping[str, str], flags: Mapping[str, object]) -> Config:
    """The configuration from a file (or none), the environment and flags (by dotted key; None: not given).

    `state_dir` and other paths come out absolute and `cloud.api_key` holds the token of `cloud.api_key_file`.
    Raises ConfigError naming the file and line, the variable or the flag, and the key.
    """
    leaves = leaves_of(Config)
    layers: list[Layer] = [
        read_yaml(_read(path, "config file"), str(path), leaves, path.absolute().parent) if path else {},
        read_environ(environ, PREFIX, leaves),
        read_flags(flags, leaves),
    ]
    merged = _later_secret_wins([_resolve_paths(layer) for layer in layers])
    _check_url(merged.get("cloud.url"))
    config = build(Config, [merged])
    return msgspec.structs.replace(
        config,
        state_dir=config.state_dir or _default_state_dir(environ),
        cloud=_with_secret(config.cloud),
    )


def _read(path: Path, what: str) -> str:
    try:
        with path.open("rb") as file:
            return file.read(1 << 20).decode()
    except OSError as error:
        raise ConfigError(f"cannot read the {what}: {error.strerror}", where=str(path)) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the {what} is not UTF-8 text", where=str(path)) from error


def _resolve_paths(layer: Layer) -> dict[str, Setting]:
    """Paths made absolute, against the folder of the file that says them."""
    resolved = dict(layer)
    for key in _PATHS:
        setting = layer.get(key)
        if setting and isinstance(setting.value, str) and setting.value:
            resolved[key] = msgspec.structs.replace(setting, value=_absolute(setting.value, setting.base))
    dirs = layer.get("engine.model_dirs")
    if dirs and isinstance(dirs.value, list):
        absolute = [_absolute(item, dirs.base) if isinstance(item, str) else item for item in dirs.value]
        resolved["engine.model_dirs"] = msgspec.structs.replace(dirs, value=absolute)
    elif dirs and isinstance(dirs.value, str):
        absolute = [_absolute(item.strip(), dirs.base) for item in dirs.value.split(",") if item.strip()]
        resolved["engine.model_dirs"] = msgspec.structs.replace(dirs, value=absolute)
    return resolved


def _absolute(path: str, base: Path) -> str:
    return str((base / Path(path).expanduser()).absolute())


def _later_secret_wins(layers: list[dict[str, Setting]]) -> dict[str, Setting]:
    """One layer out of several. A token in the environment wins over a token *file* in the file, and vice versa."""
    merged: dict[str, Setting] = {}
    for layer in layers:
        given = {key for key in ("cloud.api_key", "cloud.api_key_file") if key in layer and layer[key].value}
        if len(given) == 2:
            where = f"{layer['cloud.api_key'].where}: cloud.api_key"
            raise ConfigError("give either this or cloud.api_key_file, not both", where=where)
        if "cloud.api_key" in given:
            merged.pop("cloud.api_key_file", None)
        if "cloud.api_key_file" in given:
            merged.pop("cloud.api_key", None)
        merged |= layer
    return merged


def _check_url(setting: Setting | None) -> None:
    if setting is None or not isinstance(setting.value, str) or not setting.value:
        return
    parts = urlsplit(setting.value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        told = f"must be a URL like https://cloud.example/v1, not {setting.value!r}"
        raise ConfigError(told, where=f"{setting.where}: cloud.url")


def _with_secret(cloud: CloudConfig) -> CloudConfig:
    url = cloud.url.rstrip("/")
    if not cloud.api_key_file:
        return msgspec.structs.replace(cloud, url=url)
    secret = _read(Path(cloud.api_key_file), "key file").strip()
    if not secret or len(secret) > _MAX_SECRET_BYTES or "\n" in secret:
        raise ConfigError(
            "the key file must hold one line, the token", where=f"{cloud.api_key_file}: cloud.api_key_file"
        )
    return msgspec.structs.replace(cloud, url=url, api_key=secret)


def _default_state_dir(environ: Mapping[str, str]) -> str:
    # systemd's StateDirectory= may name several, separated by colons; the first is ours.
    if given := environ.get("STATE_DIRECTORY", "").split(":")[0]:
        return given
    state_home = environ.get("XDG_STATE_HOME") or str(
        Path(environ.get("HOME") or "~").expanduser() / ".local" / "state"
    )
    return str(Path(state_home) / "causeway")
