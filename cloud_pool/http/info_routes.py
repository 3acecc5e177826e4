"""The routes that generate nothing: /v1/models, /healthz, /readyz and /metrics."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from aiohttp import hdrs, web

from router.openai import encode_model, encode_models

from ..accounts.model_access import AllowedTiers, find_tier, usable
from ..config.tiers import Tier
from ..observability.metrics import CONTENT_TYPE, Metrics
from .readiness import Readiness
from .responses import JSON

MODELS = "/v1/models/"


class InfoRoutes:
    """`tiers` is by name and alias. `draining`: /readyz reports 503, so that load balancers send no more requests."""

    def __init__(self, tiers: Mapping[str, Tier], readiness: Readiness, metrics: Metrics, created: int) -> None:
        self._tiers = tiers
        self._readiness = readiness
        self._metrics = metrics
        self._created = created
        self.draining = False

    def models(self, allowed: AllowedTiers) -> web.StreamResponse:
        """List the models that the caller may use, by name and alias."""
        rows = [(name, "causeway", self._created) for name in usable(self._tiers, allowed)]
        return web.Response(body=encode_models(rows), content_type=JSON)

    def model(self, path: str, allowed: AllowedTiers) -> web.StreamResponse:
        """Raises ModelNotFound or ModelNotAllowed."""
        name = path.removeprefix(MODELS)
        find_tier(self._tiers, name, allowed)
        return web.Response(body=encode_model(name, "causeway", self._created), content_type=JSON)

    async def healthz(self, http: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=b'{"status":"ok"}', content_type=JSON)

    async def readyz(self, http: web.BaseRequest) -> web.StreamResponse:
        """Report whether this gateway can answer: 200 if an inference succeeds on at least one endpoint, else 503."""
        checked = {} if self.draining else await self._readiness.check()
        ready = any(tier.ready for tier in checked.values())
        tiers = {
            name: {"ready": tier.ready, "error": tier.error, "endpoints": tier.endpoints}
            for name, tier in checked.items()
        }
        body = msgspec.json.encode({"ready": ready, "draining": self.draining, "tiers": tiers})
        return web.Response(body=body, status=200 if ready else 503, content_type=JSON)

    async def metrics(self, http: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=self._metrics.text(), headers={hdrs.CONTENT_TYPE: CONTENT_TYPE})
