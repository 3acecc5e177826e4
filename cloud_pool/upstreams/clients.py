"""The clients of all upstreams, which the pools of all tiers share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from anyio.abc import TaskGroup

from causeway_server.router.serving.tls.contexts import HTTP2, client_tls

from .config import UpstreamConfig, UpstreamKind
from .inference import Upstream
from .openai_http import OpenAIUpstream, read_credentials, upstream_tls
from .triton.client import TritonAccess, TritonClient
from .triton.tensors import TensorFormat, VllmTensors
from .triton.trtllm import EnsembleTensors, LlmApiTensors

TRITON = UpstreamConfig()
_TENSORS: Mapping[UpstreamKind, TensorFormat] = {
    "triton": VllmTensors(),
    "trtllm": EnsembleTensors(),
    "trtllm_llmapi": LlmApiTensors(),
}


class UpstreamClients:
    """The clients: one for each address and kind, for as long as a pool lists it or a call runs there.

    `reloaded` gets each model loaded again in a Triton; `key_file` has the key of Triton's model control.
    """

    def __init__(self, tasks: TaskGroup, reloaded: Callable[[str], None], *, key_file: Path | None = None) -> None:
        self._tasks = tasks
        self._reloaded = reloaded
        self._key_file = key_file
        self._clients: dict[UpstreamConfig, dict[str, Upstream]] = {}

    def get(self, address: str, config: UpstreamConfig = TRITON) -> Upstream:
        """Return the client of this address, created on first use."""
        known = self.known(config)
        if address not in known:
            known[address] = self._made(address, config)
        return known[address]

    def known(self, config: UpstreamConfig) -> dict[str, Upstream]:
        """Return the clients of this configuration that there are, by address; the same mapping each time."""
        return self._clients.setdefault(config, {})

    def _made(self, address: str, config: UpstreamConfig) -> Upstream:
        if config.is_http:
            return OpenAIUpstream(address, config, read_credentials(config))
        tensors = _TENSORS[config.kind]
        access = TritonAccess(
            key_file=self._key_file,
            tls=client_tls(upstream_tls(config), HTTP2) if config.tls else None,
            server_name=config.server_name,
        )
        triton = TritonClient(address, self._tasks, reloaded=self._reloaded, access=access, tensors=tensors)
        self._tasks.start_soon(triton.check_model_control)
        return triton

    async def retain(self, addresses: Iterable[str]) -> None:
        """Close the clients of all other addresses."""
        kept = set(addresses)
        for known in self._clients.values():
            for address in known.keys() - kept:
                await known.pop(address).close()

    async def close(self) -> None:
        await self.retain(())
