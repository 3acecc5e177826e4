"""The public routes that generate nothing (/v1/models, /healthz and a bare /readyz), and the readiness check."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

import anyio
import msgspec

from causeway_server.router.anthropic.replies import VERSION_HEADER, model_info, model_page
from causeway_server.router.errors import EngineUnavailable, ModelNotFound
from causeway_server.router.openai.answer import ModelObject, ModelUse, encode_model, encode_models
from causeway_server.router.serving.request import AiohttpRequest, HttpExchange
from causeway_server.router.serving.responses import ServerResponse, body_response, json_response

from ..dispatch.pool import Pool
from ..serving.tokenizers import TierTokenizers
from ..tiers.tier import AllowedTiers, Tier, find_tier, usable


class TierReadiness(msgspec.Struct, frozen=True):
    """Readiness of a tier: the error code of each endpoint, "" if it answered. One answering endpoint is enough."""

    endpoints: Mapping[str, str]

    @property
    def ready(self) -> bool:
        return "" in self.endpoints.values()

    @property
    def error(self) -> str:
        """Error code of the first endpoint if none answers; "" otherwise."""
        return "" if self.ready else next(iter(self.endpoints.values()), EngineUnavailable.code)


class Readiness(msgspec.Struct):
    """Readiness of the gateway, determined by an inference on each endpoint of a tier: Triton reports crashed models as
    ready.

    The last result is kept for `cache_s`; concurrent checks share one.
    """

    pools: Mapping[str, Pool]  # by the tier's name
    cache_s: float
    blocked: Callable[[], str] = lambda: ""  # why the gateway cannot answer whatever its tiers can; "" if it can
    problems: Callable[[], tuple[str, ...]] = lambda: ()  # what an operator has to mend, though it may answer
    clock: Callable[[], float] = time.monotonic  # s
    lock: asyncio.Lock = msgspec.field(default_factory=asyncio.Lock)
    checked_at: float | None = None
    tiers: dict[str, TierReadiness] = {}  # as last checked

    async def ready(self) -> bool:
        """Return whether an inference succeeds on at least one endpoint, and nothing else blocks the gateway."""
        return not self.blocked() and any(tier.ready for tier in (await self.check()).values())

    async def check(self) -> Mapping[str, TierReadiness]:
        async with self.lock:
            if self.checked_at is None or self.clock() - self.checked_at >= self.cache_s:
                checked: dict[str, TierReadiness] = {}
                async with anyio.create_task_group() as tasks:
                    for tier, pool in self.pools.items():
                        tasks.start_soon(_check_tier, tier, pool, checked)
                self.tiers = {tier: checked[tier] for tier in self.pools}
                self.checked_at = self.clock()
            return self.tiers


async def _check_tier(tier: str, pool: Pool, checked: dict[str, TierReadiness]) -> None:
    checked[tier] = TierReadiness(await pool.check())


MODELS = "/v1/models/"


class InfoRoutes(msgspec.Struct):
    """The handlers of the informative routes. `draining`: /readyz reports 503 to load balancers."""

    tiers: Mapping[str, Tier]  # by name and alias
    readiness: Readiness
    created: int  # unix time of the models, s
    document: Callable[[Mapping[str, str]], bytes]  # paths and their methods → the OpenAPI document as JSON
    tokenizers: TierTokenizers
    draining: bool = False
    store: bool | msgspec.UnsetType = msgspec.UNSET  # whether a response is stored if its request does not say

    def models(self, http: AiohttpRequest, allowed: AllowedTiers) -> ServerResponse:
        """List the models that the caller may name in a request, by name and alias."""
        listed = [self._listed(name, tier) for name, tier in usable(self.tiers, allowed).items() if tier.paths]
        if VERSION_HEADER in http.headers:
            return json_response(model_page(listed, http.query))
        return body_response(encode_models(listed))

    def model(self, http: AiohttpRequest, allowed: AllowedTiers) -> ServerResponse:
        """Describe one model. Raises ModelNotFound or ModelNotAllowed."""
        name = http.path.removeprefix(MODELS)
        tier = find_tier(self.tiers, name, allowed)
        if not tier.paths:
            raise ModelNotFound(
                f"The tier {name!r} only encodes parts of requests, so it cannot be the model of a request.",
                param="model",
            )
        if VERSION_HEADER in http.headers:
            return json_response(model_info(self._listed(name, tier)))
        return body_response(encode_model(self._listed(name, tier)))

    def _listed(self, name: str, tier: Tier) -> ModelObject:
        return ModelObject(name, "causeway", self.created, causeway=ModelUse(tier.paths, self.store))

    async def healthz(self, http: HttpExchange) -> ServerResponse:
        return body_response(b'{"status":"ok"}')

    async def readyz(self, http: HttpExchange) -> ServerResponse:
        """Answer 200 if an inference succeeds on an endpoint, else 503. Without a token it names no tier."""
        if not self.draining and await self.readiness.ready():
            return body_response(b'{"ready":true}')
        return body_response(b'{"ready":false}', 503)
