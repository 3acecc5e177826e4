"""Join tokens: what enrols a device, and each refusal with its code."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from causeway_server.fleet.store.devices import read_device
from causeway_server.fleet.store.generations import revoke
from causeway_server.router.bundle.protocol import EnrolmentRequest, enrolment_proof
from tests.fleet.repository.fleets import edit

from .conftest import Plane, serving
from .device import Answered

pytestmark = pytest.mark.slow


def refused(answer: Answered, status: int, code: str) -> bool:
    return (answer.status, answer.code) == (status, code)


async def test_a_request_that_is_repeated_takes_one_use(plane: Plane) -> None:
    """The answer may be lost; the token has one use."""
    token, device = await plane.join_token(), plane.device("till-1")
    first, again = await device.enrol(token), await device.enrol(token)
    assert first.status == again.status == 200
    assert first.body == again.body
    assert refused(await plane.device("till-2").enrol(token), 403, "join_token_used")


async def test_a_token_that_was_never_made_is_refused(plane: Plane) -> None:
    assert refused(await plane.device().enrol("cwjoin_guessed"), 401, "join_token_unknown")


async def test_an_expired_token_is_refused(plane: Plane) -> None:
    assert refused(await plane.device().enrol(await plane.join_token(expires_s=-1)), 403, "join_token_expired")


async def test_a_stolen_token_enrols_no_device_beyond_its_uses(plane: Plane) -> None:
    """Twenty thieves at once, a token with three uses."""
    token = await plane.join_token(uses=3)
    answers = await asyncio.gather(*(plane.device().enrol(token) for _ in range(20)))
    assert sorted(answer.status for answer in answers) == [200] * 3 + [403] * 17
    assert {answer.code for answer in answers} == {"", "join_token_used"}


async def test_a_device_proves_that_it_holds_its_key(plane: Plane) -> None:
    """A proof that was overheard is of another key."""
    token, honest, thief = await plane.join_token(), plane.device(), plane.device()
    overheard = honest.sign(enrolment_proof(token, honest.public_key))
    assert refused(await thief.enrol(token, proof=overheard), 401, "enrolment_proof_invalid")
    assert refused(await thief.enrol(token, proof="é?"), 401, "enrolment_proof_invalid")


async def test_a_name_that_is_taken_is_refused(plane: Plane) -> None:
    await plane.enrolled("till-1")
    assert refused(await plane.device("till-1").enrol(await plane.join_token()), 409, "device_name_taken")


async def test_one_key_is_one_device(plane: Plane) -> None:
    """A key that is enrolled does not get a second identity by another token."""
    device = await plane.enrolled("till-1")
    device.name = "till-2"
    assert refused(await device.enrol(await plane.join_token()), 409, "device_name_taken")


async def test_a_token_of_a_cohort_that_has_gone_is_refused(plane: Plane) -> None:
    assert refused(await plane.device().enrol(await plane.join_token(cohort="gone")), 403, "no_cohort")


async def test_a_device_that_no_cohort_matches_is_refused(fleet_folder: Path, database: str) -> None:
    """By its labels; the token keeps its use for one that matches."""
    edit(fleet_folder / "fleet.yaml", "  everyone:\n", "  everyone:\n    match: {role: till}\n")
    async with serving(fleet_folder, database) as plane:
        token = await plane.join_token()
        answer = await plane.device("door-1").enrol(token, labels={"role": "door"})
        assert refused(answer, 403, "no_cohort")
        assert "{'role': 'door'}" in answer.body["error"]["message"]
        assert (await plane.device("till-1").enrol(token, labels={"role": "till"})).status == 200


async def test_before_a_root_is_signed_no_device_enrols(fleet_folder: Path, database: str) -> None:
    """It could trust nothing; the answer says what is missing, and the token keeps its use."""
    root = fleet_folder / "published" / "tuf" / "metadata" / "1.root.json"
    content = root.read_bytes()
    root.unlink()
    async with serving(fleet_folder, database) as plane:
        token = await plane.join_token()
        answer = await plane.device("till-1").enrol(token)
        assert (answer.status, answer.code) == (503, "not_published"), answer
        assert "causeway-fleet sign" in answer.body["error"]["message"]
        root.write_bytes(content)
        assert (await plane.device("till-1").enrol(token)).status == 200


async def test_a_revoked_device_needs_a_new_key(plane: Plane) -> None:
    token, device = await plane.join_token(uses=2), plane.device("till-1")
    await device.enrol(token)
    async with plane.plane.store.write() as connection:
        assert await revoke(connection, "till-1", plane.plane.clock())
    assert refused(await device.enrol(token), 403, "device_revoked")
    assert (await plane.device("till-1b").enrol(token)).status == 200


async def test_a_device_without_a_name_gets_one(plane: Plane) -> None:
    device = await plane.enrolled(site="north", labels={"role": "kiosk"}, daemon="1.2.3")
    async with plane.plane.store.read() as connection:
        stored = await read_device(connection, device.name)
    assert stored is not None
    assert device.name.startswith("device-")
    assert (stored.cohort, stored.site, stored.daemon) == ("kiosk", "north", "1.2.3")
    assert (stored.labels, stored.last_seen > 0, stored.running) == ({"role": "kiosk"}, True, None)


async def test_malformed_requests_name_what_is_wrong(plane: Plane) -> None:
    device = plane.device()
    assert refused(await device.send("POST", "/v1/enroll", b"{"), 400, "invalid_json")
    assert refused(await device.send("POST", "/v1/enroll", b"\xff\xfe"), 400, "invalid_json")
    assert refused(await device.send("POST", "/v1/enroll", b'{"more":' + b"[" * 5000), 400, "invalid_json")
    answer = await device.send("POST", "/v1/enroll", b'{"token": "x"}')
    assert refused(answer, 400, "invalid_value")
    assert "public_key" in answer.body["error"]["message"]


def test_a_name_is_one_that_tokens_may_carry() -> None:
    pattern = str(EnrolmentRequest.__annotations__["name"])
    assert "{0,63}" in pattern
