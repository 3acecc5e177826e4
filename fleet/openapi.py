"""The OpenAPI document of the control plane, of the routes that it serves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from causeway_server.router.api.document import ApiResponse, Operation, openapi_document
from causeway_server.router.api.operations import by_name
from causeway_server.router.api.reader import Api, read_api
from causeway_server.router.bundle import protocol
from causeway_server.router.serving.console import media_type

from .operators import answers
from .operators.decisions import BundleUnknown, FleetInvalid, WrongState
from .operators.oidc import SignInFailed
from .operators.operators_file import Operator
from .server import refusals
from .server.device_api import NotPublished
from .server.files import page
from .server.routes import ApiRoute
from .store.database import StoreUnavailable, TooManyMessages
from .store.generations import Revocations
from .store.rollouts import RolloutChanged

_PATTERN = re.compile(r"\{([a-z0-9_]+):[^}]*\}")
_TYPES = {
    **{name: kind for room in (protocol, answers, refusals) for name, kind in vars(room).items()},
    **by_name(BundleUnknown, FleetInvalid, NotPublished, Operator, Revocations, RolloutChanged, SignInFailed),
    **by_name(StoreUnavailable, TooManyMessages, WrongState),
    "Keys": dict,
    "Texts": dict[str, str],
    "Rollouts": list[answers.RolloutAnswer],
}


def fleet_document(routes: Sequence[ApiRoute], version: str) -> dict[str, Any]:
    """Return the OpenAPI document. Args: routes: Every route that is served. version: The version of this program."""
    served = {(route.method, _PATTERN.sub(r"{\1}", route.path)) for route in routes}
    operations = Api(read_api(__package__, "openapi.yaml"), _TYPES, {}).operations
    operations += [
        Operation("GET", path, "The operators' page.", responses=(ApiResponse(200, {media_type(file): None}),))
        for path, file in page().items()
    ]
    found = [one for one in operations if (one.method, one.path) in served]
    return openapi_document("Causeway fleet", version, found, {"bearerFormat": "JWT"})
