"""The operators' side of one process: sign-in, controller, routes."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from ..controller.loop import Controller
from ..controller.publisher import Publisher
from ..repository.fleet_file import FleetDoc
from ..server.routes import ApiRoute
from ..store.database import Store
from ..trust.trust_file import TRUST_FILE
from .device_routes import device_routes
from .oidc import OidcClient
from .operators_file import read_operators
from .parts import OperatorParts
from .rollout_routes import rollout_routes
from .session_routes import session_routes
from .sign_in import SignIn, load_bootstrap_token

BOOTSTRAP_FILE = "bootstrap-token"
_log = logging.getLogger("causeway.fleet.operators")


def build_operators(
    folder: Path,
    keys: Path,
    data: Path,
    fleet: FleetDoc,
    store: Store,
    clock: Callable[[], float],
    published: Callable[[], Awaitable[None]],
    survey_s: float,
) -> OperatorParts:
    """Wire the operators' side.

    Args:
        folder: The fleet's folder.
        keys: The folder with the private keys of the online roles.
        data: This server's folder; the bootstrap token is made here at the first start.
        fleet: `fleet.yaml` as it was read.
        store: The database.
        clock: Unix seconds.
        published: Called after a plan was published; wakes the boxes whose polls wait in this process.
        survey_s: As `Controller`.

    Raises:
        ConfigError: `operators.yaml` or `trust.yaml` has errors, or an online role has no key in `keys`.
    """
    doc = read_operators(folder)
    file = data / BOOTSTRAP_FILE
    if not file.exists():
        _log.info("operators sign in with the token in %s", file)
    publisher = Publisher(folder, keys)
    if (folder / TRUST_FILE).exists():  # without it nothing is signed, and there is nothing to renew
        publisher.check()
    return OperatorParts(
        name=fleet.name,
        folder=folder,
        cohorts=tuple(fleet.cohorts),
        store=store,
        publisher=publisher,
        controller=Controller(store, folder, publisher, clock, published=published, survey_s=survey_s),
        sign_in=SignIn(store, doc, load_bootstrap_token(file), clock),
        clock=clock,
        oidc=None if doc.oidc is None else OidcClient(folder, doc, doc.oidc),
    )


def operator_routes(parts: OperatorParts) -> list[ApiRoute]:
    """Return every route for operators."""
    return [*rollout_routes(parts), *device_routes(parts), *session_routes(parts)]
