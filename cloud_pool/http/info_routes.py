"""The public routes that generate nothing: /v1/models, /healthz and a bare /readyz."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web

from router.errors import ModelNotFound
from router.openai import ModelObject, ModelUse, encode_model, encode_models

from ..accounts.model_access import AllowedTiers, find_tier, usable
from ..tiers.tier import Tier
from .readiness import Readiness
from .responses import JSON

MODELS = "/v1/models/"


class InfoRoutes:
    """`tiers` is by name and alias. `draining`: /readyz reports 503, so that load balancers send no more requests."""

    def __init__(self, tiers: Mapping[str, Tier], readiness: Readiness, created: int) -> None:
        self._tiers = tiers
        self._readiness = readiness
        self._created = created
        self.draining = False

    def models(self, allowed: AllowedTiers) -> web.StreamResponse:
        """List the models that the caller may name in a request, by name and alias."""
        listed = [self._listed(name, tier) for name, tier in usable(self._tiers, allowed).items() if tier.paths]
        return web.Response(body=encode_models(listed), content_type=JSON)

    def model(self, path: str, allowed: AllowedTiers) -> web.StreamResponse:
        """Raises ModelNotFound or ModelNotAllowed."""
        name = path.removeprefix(MODELS)
        tier = find_tier(self._tiers, name, allowed)
        if not tier.paths:
            raise ModelNotFound(f"No request names the tier {name!r}: it reads parts of requests.", param="model")
        return web.Response(body=encode_model(self._listed(name, tier)), content_type=JSON)

    def _listed(self, name: str, tier: Tier) -> ModelObject:
        return ModelObject(name, "causeway", self._created, causeway=ModelUse(tier.paths))

    async def healthz(self, http: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=b'{"status":"ok"}', content_type=JSON)

    async def readyz(self, http: web.BaseRequest) -> web.StreamResponse:
        """Report whether this gateway can answer: 200 if an inference succeeds on at least one endpoint, else 503.

        Anyone may ask, so it names no tier and no endpoint; `operator` does.
        """
        if not self.draining and await self._readiness.ready():
            return web.Response(body=b'{"ready":true}', content_type=JSON)
        return web.Response(body=b'{"ready":false}', status=503, content_type=JSON)
