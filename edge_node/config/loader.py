"""Load the daemon's configuration: frozen, validated at start, unknown keys rejected. File < environment < flag.

The key ``server.port`` is `port:` under `server:` in the file, ``CAUSEWAY_SERVER__PORT`` in the environment and
``--set server.port=…`` on the command line. Durations may be written ``500ms``, ``30s``, ``10m``, ``7d``; sizes
``64MiB``, ``1GB``. A relative path in the file is relative to the file, elsewhere to the working directory.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from router.errors import ConfigError

from .layers import Layer, Setting, build, leaves_of, read_environ, read_flags, read_list, read_yaml, variable_of
from .schema import CloudConfig, Config

PREFIX = "CAUSEWAY_"
_MAX_FILE_BYTES = 1024 * 1024
_MAX_SECRET_BYTES = 64 * 1024
_PATHS = (
    *("policy", "state_dir", "server.socket", "cloud.api_key_file", "cloud.ca_file"),
    "jobs.webhooks.ca_file",
    *("mqtt.password_file", "mqtt.ca_file", "mqtt.cert_file", "mqtt.key_file"),
)


def config_keys() -> list[str]:
    """Return every dotted key, in the order of the structs."""
    return list(leaves_of(Config))


def config_variable(key: str) -> str:
    """Return the environment variable of a key: ``server.port`` is ``CAUSEWAY_SERVER__PORT``."""
    return variable_of(key, PREFIX)


def load_config(path: Path | None, environ: Mapping[str, str], flags: Mapping[str, object]) -> Config:
    """Load the configuration from a file, the environment and command-line flags, later ones taking precedence.

    Args:
        path: The YAML file, or None.
        environ: The environment variables.
        flags: Values by dotted key; None means that the flag was not set.

    Returns:
        The configuration with absolute paths; `cloud.api_key` holds the token read from `cloud.api_key_file`.

    Raises:
        ConfigError: Names the file and line, the variable or the flag, and the key.
    """
    leaves = leaves_of(Config)
    layers: list[Layer] = [
        read_yaml(_read(path, "config file"), str(path), leaves, path.absolute().parent) if path else {},
        read_environ(environ, PREFIX, leaves),
        read_flags(flags, leaves),
    ]
    merged = _merge_secrets([_resolve_paths(layer) for layer in layers])
    _check_url(merged.get("cloud.url"))
    config = build(Config, [merged])
    return msgspec.structs.replace(
        config,
        state_dir=config.state_dir or _default_state_dir(environ),
        cloud=_with_secret(config.cloud),
    )


def _read(path: Path, description: str) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_FILE_BYTES).decode()
    except OSError as error:
        raise ConfigError(f"cannot read the {description}: {error.strerror}", where=str(path)) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the {description} is not UTF-8 text", where=str(path)) from error


def _resolve_paths(layer: Layer) -> dict[str, Setting]:
    """Make paths absolute, relative to the folder of the file that sets them."""
    resolved = dict(layer)
    for key in _PATHS:
        setting = layer.get(key)
        if setting and isinstance(setting.value, str) and setting.value:
            resolved[key] = msgspec.structs.replace(setting, value=_absolute(setting.value, setting.base))
    dirs = layer.get("engine.model_dirs")
    listed = read_list(dirs.value) if dirs and isinstance(dirs.value, str) else dirs and dirs.value
    if dirs and isinstance(listed, list):
        absolute = [_absolute(item, dirs.base) if isinstance(item, str) else item for item in listed]
        resolved["engine.model_dirs"] = msgspec.structs.replace(dirs, value=absolute)
    return resolved


def _absolute(path: str, base: Path) -> str:
    return str((base / Path(path).expanduser()).absolute())


def _merge_secrets(layers: list[dict[str, Setting]]) -> dict[str, Setting]:
    """Merge the layers. A token in a later layer replaces a token file of an earlier one, and the reverse."""
    merged: dict[str, Setting] = {}
    for layer in layers:
        present = {key for key in ("cloud.api_key", "cloud.api_key_file") if key in layer and layer[key].value}
        if len(present) == 2:
            where = f"{layer['cloud.api_key'].where}: cloud.api_key"
            raise ConfigError("set either this or cloud.api_key_file, not both", where=where)
        if "cloud.api_key" in present:
            merged.pop("cloud.api_key_file", None)
        if "cloud.api_key_file" in present:
            merged.pop("cloud.api_key", None)
        merged |= layer
    return merged


def _check_url(setting: Setting | None) -> None:
    if setting is None or not isinstance(setting.value, str) or not setting.value:
        return
    parts = urlsplit(setting.value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        message = f"must be a URL like https://cloud.example/v1, not {setting.value!r}"
        raise ConfigError(message, where=f"{setting.where}: cloud.url")


def _with_secret(cloud: CloudConfig) -> CloudConfig:
    url = cloud.url.rstrip("/")
    if not cloud.api_key_file:
        return msgspec.structs.replace(cloud, url=url)
    secret = _read(Path(cloud.api_key_file), "key file").strip()
    if not secret or len(secret) > _MAX_SECRET_BYTES or "\n" in secret:
        raise ConfigError(
            "the key file must hold the token on one line", where=f"{cloud.api_key_file}: cloud.api_key_file"
        )
    return msgspec.structs.replace(cloud, url=url, api_key=secret)


def _default_state_dir(environ: Mapping[str, str]) -> str:
    # systemd's StateDirectory= may name several folders, separated by colons; the first is the daemon's.
    if state_dir := environ.get("STATE_DIRECTORY", "").split(":")[0]:
        return state_dir
    state_home = environ.get("XDG_STATE_HOME") or str(
        Path(environ.get("HOME") or "~").expanduser() / ".local" / "state"
    )
    return str(Path(state_home) / "causeway")
