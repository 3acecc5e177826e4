"""A tier's section `upstream`: which kind of server answers for it, and how it is reached."""

from __future__ import annotations

import re
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from causeway_server.router.config import Positive, Seconds
from causeway_server.router.errors import ConfigError

_METRICS_PORT = re.compile(r":\d{1,5}/[!-~]*")
_METRICS = re.compile(r"(:\d{1,5})?/[!-~]*")
UpstreamKind = Literal["triton", "trtllm", "trtllm_llmapi", "openai"]
Feature = Literal["tools", "logprobs", "schemas"]
FEATURES: tuple[Feature, ...] = ("tools", "logprobs", "schemas")
"""Features that servers with OpenAI's API may lack. `schemas`: JSON answers."""


class UpstreamConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The kind of server that answers for the tier."""

    kind: UpstreamKind = "triton"
    urls: tuple[str, ...] = ()
    key_file: str = ""
    ca_file: str = ""
    tls: bool = False
    server_name: str = ""
    client_cert_file: str = ""
    client_key_file: str = ""
    without: tuple[Feature, ...] = ()
    verify_features: bool = True
    metrics: str = ""
    connect_timeout_s: Seconds = 2.0
    token_timeout_s: Seconds = 30.0
    max_connections: Positive = 1024

    @property
    def is_http(self) -> bool:
        """Whether the upstream speaks OpenAI's HTTP API: its own template and tool parser are used."""
        return self.kind == "openai"

    @property
    def is_trtllm(self) -> bool:
        """Whether the upstream is a model of TensorRT-LLM in Triton."""
        return self.kind in ("trtllm", "trtllm_llmapi")

    def check(self, where: str) -> None:
        """Raise ConfigError for a combination of keys that cannot work. `where`: path of the section."""
        form = _METRICS if self.is_http else _METRICS_PORT
        if self.metrics and not form.fullmatch(self.metrics):
            known = "`/metrics` or `:PORT/metrics`" if self.is_http else "`:8002/metrics`: gRPC's port has none"
            raise ConfigError(f"{self.metrics!r} is not of the form {known}.", where=f"{where}.metrics")
        if not self.is_http:
            for key in ("urls", "key_file", "without"):
                if getattr(self, key):
                    raise ConfigError(f"`{key}` is only for `kind: openai`. Remove `{key}`.", where=f"{where}.{key}")
            for key in ("ca_file", "server_name", "client_cert_file", "client_key_file"):
                if getattr(self, key) and not self.tls:
                    raise ConfigError("Certificates need TLS: set `tls: true`.", where=f"{where}.{key}")
            return
        for key in ("tls", "server_name"):
            if getattr(self, key):
                raise ConfigError(
                    f"`{key}` is only for Triton. Remove `{key}`, and write `https` into `urls`.",
                    where=f"{where}.{key}",
                )
        if not self.urls:
            raise ConfigError("Name the servers in `urls`, such as `[http://vllm:8000/v1]`.", where=f"{where}.urls")
        for index, url in enumerate(self.urls):
            check_url(url, f"{where}.urls[{index}]")
            if url in self.urls[:index]:
                raise ConfigError(f"The URL {url} is listed twice.", where=f"{where}.urls[{index}]")


def check_url(url: str, where: str) -> None:
    """Raise ConfigError for a text that is not the base URL of a server."""
    if "@" in url:
        raise ConfigError("The URL must not hold a user or a password. Name a `key_file` instead.", where=where)
    if not _is_base_url(url):
        raise ConfigError(f"{url!r} is not a URL such as `http://HOST:PORT/v1`, without a final `/`.", where=where)


def _is_base_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        has_server = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    is_plain = not (parts.query or parts.fragment or url.endswith("/"))
    return has_server and is_plain and url.isascii() and not any(char.isspace() for char in url)
