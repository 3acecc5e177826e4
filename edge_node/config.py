"""The daemon's configuration: frozen, checked at start, unknown keys refused with their path. File < environment < flag."""

from __future__ import annotations

import msgspec


class KeyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    sha256: str  # of the key, hex: the key itself is never stored
    tags: tuple[str, ...] = ()  # added to every request of this key


class ServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    port: int = 8080  # 0: any free one
    socket: str = ""  # Unix socket path; "" for none
    max_body_bytes: int = 8 * 1024 * 1024
    read_timeout_s: float = 20.0  # a whole request must have arrived by then
    drain_s: float = 20.0
    keys: tuple[KeyConfig, ...] = ()  # none: no key is asked for
    default_deadline_s: float = 120.0


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model_dirs: tuple[str, ...] = ()  # searched before the artifacts that ship
    sequences: int = 16
    batch_tokens: int = 512
    context_tokens: int = 0
    threads: int = 0
    gpu_layers: int = 0
    enabled: bool = True


class CloudConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    url: str = ""  # ends in /v1; "" for none: edge only
    api_key: str = ""
    api_key_file: str = ""
    connect_timeout_s: float = 2.0
    first_token_timeout_s: float = 10.0
    timeout_s: float = 60.0
    connections: int = 100
    probe_interval_s: float = 5.0
    ca_file: str = ""


class CacheConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    memory_bytes: int = 32 * 1024 * 1024
    disk_bytes: int = 256 * 1024 * 1024  # 0: memory only


class DecisionsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    memory_count: int = 2000  # the newest, queryable
    max_age_s: float = 7 * 86400.0


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    policy: str = ""  # path; "": the default policy that ships
    state_dir: str = ""  # "": $STATE_DIRECTORY, else ~/.local/state/causeway
    server: ServerConfig = ServerConfig()
    engine: EngineConfig = EngineConfig()
    cloud: CloudConfig = CloudConfig()
    cache: CacheConfig = CacheConfig()
    decisions: DecisionsConfig = DecisionsConfig()
    log: str = "info"  # debug | info | warning | error
    log_format: str = "text"  # text | json
