"""The stand-in for the operators' API answers with the fields of the real one."""

from __future__ import annotations

from typing import Any

import aiohttp
import msgspec
import pytest

from causeway_server.fleet.operators import answers
from causeway_server.fleet.operators.operators_file import Operator

from .fleet_fixture import FleetFixture, bundle, serving


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/session", Operator),
        ("/v1/fleet", answers.FleetAnswer),
        ("/v1/rollouts", list[answers.RolloutAnswer]),
        ("/v1/rollouts/r-0107", answers.RolloutDetail),
        ("/v1/devices", answers.DevicePage),
        ("/v1/devices/device-00001", answers.DeviceAnswer),
        ("/v1/audit", answers.AuditPage),
        (f"/v1/policies/diff?from={bundle('b3')}&to={bundle('b4')}", answers.PolicyPair),
    ],
)
async def test_the_stand_in_has_the_fields_of_the_control_plane(path: str, kind: Any) -> None:
    fixture = FleetFixture(devices=3)
    fixture.signed_in = True
    async with serving(fixture) as origin, aiohttp.ClientSession() as http, http.get(origin + path) as response:
        body = await response.read()
    plain = msgspec.json.decode(body)
    # What the real API would have written of the same values: a missing or a superfluous field differs.
    real = msgspec.json.decode(msgspec.json.encode(msgspec.json.decode(body, type=kind)))
    assert _fields(plain) == _fields(real)


def _fields(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _fields(inner) for name, inner in value.items()}
    return [_fields(inner) for inner in value] if isinstance(value, list) else None
