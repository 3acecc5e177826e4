"""The public routes that generate nothing: /v1/models, /healthz and a bare /readyz."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aiohttp import web

from router.errors import ModelNotFound
from router.openai import ModelObject, ModelUse, encode_model, encode_models
from router.serving.responses import body_response

from ..accounts.model_access import AllowedTiers, find_tier, usable
from ..tiers.tier import Tier
from .readiness import Readiness

MODELS = "/v1/models/"


class InfoRoutes:
    """`draining`: /readyz reports 503, so that load balancers send no more requests.

    Args:
        tiers: by name and alias.
        created: unix time, s, of the models.
        document: makes the OpenAPI document of paths and their methods, as JSON.
    """

    def __init__(
        self,
        tiers: Mapping[str, Tier],
        readiness: Readiness,
        created: int,
        document: Callable[[Mapping[str, str]], bytes],
    ) -> None:
        self.document = document
        self._tiers = tiers
        self._readiness = readiness
        self._created = created
        self.draining = False

    def models(self, allowed: AllowedTiers) -> web.StreamResponse:
        """List the models that the caller may name in a request, by name and alias."""
        listed = [self._listed(name, tier) for name, tier in usable(self._tiers, allowed).items() if tier.paths]
        return body_response(encode_models(listed))

    def model(self, path: str, allowed: AllowedTiers) -> web.StreamResponse:
        """Raises ModelNotFound or ModelNotAllowed."""
        name = path.removeprefix(MODELS)
        tier = find_tier(self._tiers, name, allowed)
        if not tier.paths:
            raise ModelNotFound(f"No request names the tier {name!r}: it reads parts of requests.", param="model")
        return body_response(encode_model(self._listed(name, tier)))

    def _listed(self, name: str, tier: Tier) -> ModelObject:
        return ModelObject(name, "causeway", self._created, causeway=ModelUse(tier.paths))

    async def healthz(self, http: web.BaseRequest) -> web.StreamResponse:
        return body_response(b'{"status":"ok"}')

    async def readyz(self, http: web.BaseRequest) -> web.StreamResponse:
        """Report whether this gateway can answer: 200 if an inference succeeds on at least one endpoint, else 503.

        Anyone may ask, so it names no tier and no endpoint; `operator` does.
        """
        if not self.draining and await self._readiness.ready():
            return body_response(b'{"ready":true}')
        return body_response(b'{"ready":false}', 503)
