"""The operators' HTTP interface on a real control plane: roles, devices, tokens, the audit log, wrong requests."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from causeway_server.fleet.app import ServeSettings, running
from causeway_server.fleet.store.history import AuditRow, first_fault
from causeway_server.fleet.store.records import add_records
from causeway_server.fleet.trust.offline import signed_manifests
from causeway_server.router.bundle.manifest import bundle_id
from causeway_server.router.bundle.protocol import SampledRecord
from causeway_server.router.errors import ConfigError
from tests.fleet.cli.test_replay import records
from tests.fleet.server.device import sample
from tests.fleet.trust.signed_fleet import SignedFleet

from .conftest import Server

pytestmark = pytest.mark.slow

UNSAFE = (
    ("POST", "/v1/rollouts", "operator"),
    ("POST", "/v1/rollouts/r1/pause", "operator"),
    ("POST", "/v1/rollouts/r1/resume", "operator"),
    ("POST", "/v1/rollouts/r1/accept", "approver"),
    ("POST", "/v1/rollouts/r1/abort", "operator"),
    ("POST", "/v1/devices/device-0/revoke", "operator"),
    ("POST", "/v1/devices/device-0/hold", "operator"),
    ("POST", "/v1/devices/device-0/release", "operator"),
    ("POST", "/v1/devices/device-0/pin", "operator"),
    ("POST", "/v1/join-tokens", "operator"),
    ("POST", "/v1/policies/try", "operator"),
)
SAFE = ("/v1/fleet", "/v1/rollouts", "/v1/rollouts/r1", "/v1/devices", "/v1/devices/device-0", "/v1/audit")


def newest(server: Server) -> str:
    return bundle_id(signed_manifests(server.signed.published)["kiosk"])


async def test_every_route_knows_its_role(server: Server) -> None:
    """Without a token, with a wrong one, and with a role that does not suffice, nothing is answered or changed."""
    for method, path, role in (*UNSAFE, *(("GET", path, "viewer") for path in SAFE)):
        for unknown in ("", "wrong", "cwsession_wrong"):
            assert (await server.ask(method, path, {}, as_=unknown)).code == "invalid_api_key", path
        weaker = {"approver": "olga", "operator": "vera"}.get(role)
        if weaker is not None:
            assert (await server.ask(method, path, {}, as_=weaker)).code == "permission_denied", path
    assert (await server.get("/v1/audit"))["rows"] == []


async def test_the_bootstrap_token_is_made_once_for_its_owner_alone(server: Server) -> None:
    file = server.signed.path / "data" / "bootstrap-token"
    assert file.stat().st_mode & 0o777 == 0o600
    assert await server.get("/v1/session", as_=server.bootstrap) == {"name": "bootstrap", "role": "approver"}


async def test_a_browser_signs_in_with_a_cookie_that_no_other_site_can_use(server: Server) -> None:
    console = {"x-causeway-console": "1"}
    assert (await server.ask("POST", "/v1/session", {"token": "olga"}, as_="")).code == "permission_denied"
    assert (await server.ask("POST", "/v1/session", {"token": "no"}, as_="", headers=console)).status == 401
    answer = await server.ask("POST", "/v1/session", {"token": "olga"}, as_="", headers=console)
    assert answer.body == {"name": "olga", "role": "operator"}
    cookie = answer.headers["set-cookie"]
    for part in ("HttpOnly", "SameSite=Lax", "Path=/"):
        assert part in cookie
    secret = {"cookie": cookie.partition(";")[0]}
    assert (await server.ask("GET", "/v1/session", as_="", headers=secret)).body["name"] == "olga"
    for method, path, _ in UNSAFE:
        assert (await server.ask(method, path, {}, as_="", headers=secret)).code == "permission_denied"
    made = await server.ask("POST", "/v1/join-tokens", {}, as_="", headers=secret | console)
    assert made.status == 201
    assert (await server.ask("DELETE", "/v1/session", as_="", headers=secret)).code == "permission_denied"
    assert (await server.ask("DELETE", "/v1/session", as_="", headers=secret | console)).status == 204
    assert (await server.ask("GET", "/v1/session", as_="", headers=secret)).status == 401


async def test_devices_are_paged_filtered_and_acted_on(server: Server) -> None:
    bundle = newest(server)
    devices = await server.enrolled(5)
    for device in devices:
        assert (await device.report(running=bundle)).status == 200
    first = await server.get("/v1/devices?limit=2")
    assert [one["id"] for one in first["devices"]] == ["device-0", "device-1"]
    rest = await server.get(f"/v1/devices?limit=10&after={first['next']}")
    assert ([one["id"] for one in rest["devices"]], rest["next"]) == (["device-2", "device-3", "device-4"], None)
    for limit in ("x", "-1", "9" * 5000, "%D9%A1"):
        assert (await server.ask("GET", f"/v1/devices?limit={limit}")).code == "invalid_value"
    await server.post("/v1/devices/device-1/hold", {"reason": "being repaired"}, as_="olga")
    await server.post("/v1/devices/device-2/pin", {"bundle": bundle}, as_="olga")
    assert [one["id"] for one in (await server.get("/v1/devices?state=held"))["devices"]] == ["device-1"]
    assert [one["id"] for one in (await server.get("/v1/devices?state=pinned&q=DEVICE"))["devices"]] == ["device-2"]
    assert (await server.ask("POST", "/v1/devices/device-2/pin", {"bundle": "0" * 64})).code == "bundle_unknown"
    assert (await server.post("/v1/devices/device-2/release"))["pin"] is None
    assert (await server.ask("POST", "/v1/devices/unknown/hold", {})).code == "not_found"
    shown = await server.get("/v1/devices/device-0")
    assert (shown["running"], shown["history"][0]["running"]) == (bundle, bundle)
    fleet = await server.get("/v1/fleet")
    kiosk = next(one for one in fleet["cohorts"] if one["name"] == "kiosk")
    assert (kiosk["devices"], kiosk["recently_seen"], kiosk["running"]) == (5, 5, {bundle: 5})


async def test_names_that_the_fleet_does_not_have_are_refused(server: Server) -> None:
    """A token of such a cohort would enrol no device; no token is made."""
    answer = await server.ask("POST", "/v1/join-tokens", {"cohort": "kiosks"})
    assert (answer.status, answer.body["error"]["param"]) == (400, "cohort")
    assert "The fleet's cohorts: kiosk, others." in answer.body["error"]["message"]
    assert (await server.ask("GET", f"/v1/devices/{'x' * 129}")).code == "not_found"
    assert (await server.ask("POST", "/v1/rollouts/none/abort", {})).code == "not_found"
    assert (await server.get("/v1/audit"))["rows"] == []


async def test_a_revoked_device_is_refused_from_now_on(server: Server) -> None:
    device = (await server.enrolled(1))[0]
    await server.post("/v1/devices/device-0/revoke", {"reason": "stolen"})
    assert (await device.report()).status in (401, 403)
    assert (await device.ask_token()).status in (401, 403)
    assert (await server.get("/v1/fleet"))["cohorts"][0]["devices"] == 0


async def test_every_change_is_in_the_audit_log_with_its_author(server: Server) -> None:
    await server.enrolled(1)
    await server.post("/v1/devices/device-0/hold", {"reason": "why"}, as_="olga")
    await server.post("/v1/devices/device-0/release", as_="april")
    content = (await server.ask("GET", "/v1/audit?limit=2", as_="vera")).body["rows"]
    assert [(row["actor"], row["action"]) for row in content] == [("april", "join_token.new"), ("olga", "device.hold")]
    assert content[1]["what"] == {"device": "device-0", "reason": "why"}
    more = (await server.get(f"/v1/audit?after={content[-1]['n']}"))["rows"]
    assert [(row["actor"], row["action"]) for row in more] == [("april", "device.release")]
    exact = [
        row | {"what": msgspec.Raw(msgspec.json.encode(row["what"], order="deterministic"))} for row in content + more
    ]
    assert first_fault([AuditRow(**row) for row in exact]) == ""
    assert "cwjoin_" not in str(content), "secrets are not in the log"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"cohort": "kiosk", "to_bundle": "0" * 64}, "bundle_unknown"),
        ({"cohort": "kiosk", "to_bundle": "short"}, "invalid_value"),
        ({"cohort": "others", "to_bundle": "KIOSK"}, "invalid_value"),
        ({"cohort": "kiosk"}, "invalid_value"),
        ({"cohort": "kiosk", "to_bundle": "KIOSK", "allow_leaving": True}, "permission_denied"),
        ({"cohort": "kiosk", "to_bundle": "KIOSK", "without_replay": True}, "permission_denied"),
    ],
)
async def test_a_rollout_that_cannot_be_is_refused(server: Server, body: dict[str, object], code: str) -> None:
    bundle = newest(server)
    body = {key: bundle if value == "KIOSK" else value for key, value in body.items()}
    assert (await server.ask("POST", "/v1/rollouts", body, as_="olga")).code == code


async def test_a_rollout_is_paused_resumed_accepted_and_aborted(server: Server) -> None:
    """Each in its state; elsewhere a conflict names the events that the state takes."""
    bundle = newest(server)
    devices = await server.enrolled(2)
    for device in devices:
        await device.report()
        await device.count(sample(None))
    made = await server.post("/v1/rollouts", {"cohort": "kiosk", "to_bundle": bundle, "without_replay": True})
    again = await server.ask("POST", "/v1/rollouts", {"cohort": "kiosk", "to_bundle": bundle})
    assert (again.status, again.code) == (409, "wrong_state")
    path = f"/v1/rollouts/{made['id']}"
    while (await server.get(path))["state"] != "stage":  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    await server.post(f"{path}/pause", {"reason": "lunch"}, as_="olga")
    detail = await server.get(path)
    assert (detail["state"], detail["reason"]) == ("paused", "by olga: lunch")
    refused = await server.ask("POST", f"{path}/pause", {})
    assert (refused.status, refused.code) == (409, "wrong_state")
    assert "which does not allow pause. Allowed: resume, accept, abort" in refused.body["error"]["message"]
    await server.post(f"{path}/resume", as_="olga")
    await server.post(f"{path}/pause", as_="olga")
    accepted = await server.post(f"{path}/accept", {"reason": "looks good"}, as_="april")
    assert (accepted["state"], accepted["share"]) == ("stage", 100_000)
    await server.post(f"{path}/abort", as_="olga")
    while (await server.get(path))["state"] != "reverted":  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    actions = [event["action"] for event in (await server.get(path))["events"]]
    assert actions[:3] == ["rollout.begin", "rollout.replay", "rollout.stage"]
    assert actions[-3:] == ["rollout.abort", "rollout.reverting", "rollout.reverted"]
    assert (await server.ask("GET", "/v1/rollouts/none", as_="vera")).code == "not_found"
    assert [one["id"] for one in await server.get("/v1/rollouts?cohort=kiosk")] == [made["id"]]


async def test_without_records_a_rollout_waits_until_an_approver_accepts_it(server: Server) -> None:
    """The reason says where records belong; an operator can let the replay be tried again, and nothing more."""
    made = await server.post("/v1/rollouts", {"cohort": "kiosk", "to_bundle": newest(server)}, as_="olga")
    path = f"/v1/rollouts/{made['id']}"
    while (await server.get(path))["state"] != "paused":  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    detail = await server.get(path)
    assert (detail["began"], detail["share"], detail["looks"]) == (0.0, 0, [])
    assert "0 recorded requests of 0 devices over 0 days to replay" in detail["reason"]
    assert "records/kiosk/*.jsonl" in detail["reason"]
    assert (await server.ask("POST", f"{path}/accept", {}, as_="olga")).code == "permission_denied"
    await server.post(f"{path}/resume", as_="olga")
    while (await server.get(path))["state"] != "paused":  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    accepted = await server.post(f"{path}/accept", {"reason": "the first one"}, as_="april")
    assert (accepted["state"], accepted["stage"]) == ("stage", 0)


async def test_policies_side_by_side(server: Server) -> None:
    bundle = newest(server)
    texts = await server.get(f"/v1/policies/diff?from={bundle}&to={bundle}")
    assert texts["from"] == texts["to"] == (server.signed.path / "policies" / "kiosk.yaml").read_text()
    assert (await server.ask("GET", f"/v1/policies/diff?from={bundle}&to=no")).code == "bundle_unknown"
    assert (await server.ask("GET", "/v1/policies/diff")).code == "invalid_value"


async def test_a_draft_is_checked_replayed_and_proved(server: Server) -> None:
    """Over the records of the bundle's cohort, beside the bundle's policy; a draft with errors is only checked."""
    bundle, (device, *_) = newest(server), await server.enrolled(2)
    sent = [(device.name, SampledRecord(weight=1.0, record=msgspec.Raw(msgspec.json.encode(one)))) for one in records()]
    async with server.plane.store.write() as connection:
        await add_records(connection, sent, 0.0)
    text = (server.signed.path / "policies" / "kiosk.yaml").read_text()
    same = await server.post("/v1/policies/try", {"bundle": bundle, "policy": text}, as_="olga")
    assert (same["old"], same["problems"]) == (same["policy"], [])
    assert (same["replay"]["requests"], same["replay"]["leaving"]) == (3, [])
    draft = text.replace("targets:", "targets:\n  large: {at: cloud, model: big}").replace("[small]", "[large, small]")
    report = await server.post("/v1/policies/try", {"bundle": bundle, "policy": draft}, as_="olga")
    assert len(report["replay"]["leaving"]) == 3
    (refuted,) = [one for one in report["proofs"] if one["status"] == "refuted"]
    assert (refuted["name"], refuted["case"]["expect"]["holds"]) == ("leaves-no-more", "!outcome.leaves")
    report = await server.post("/v1/policies/try", {"bundle": bundle, "policy": text.replace("small", "a b")})
    assert (report["policy"], report["replay"], report["proofs"]) == ("", None, [])
    assert (await server.ask("POST", "/v1/policies/try", {"bundle": "0" * 64, "policy": ""})).code == "bundle_unknown"


async def test_the_openapi_document_has_every_route_of_operators(server: Server) -> None:
    document = await server.get("/openapi.json")
    for method, path, _ in UNSAFE:
        generic = path.replace("/r1/", "/{id}/").replace("/device-0/", "/{id}/")
        assert method.lower() in document["paths"][generic]


async def test_the_controllers_metrics(server: Server) -> None:
    """This process leads, and nothing is wrong."""
    text = b""
    while b"causeway_fleet_controller_leads 1.0" not in text:
        text = (await server.ask("GET", "/metrics", as_="")).body
    assert b"causeway_fleet_controller_problems 0.0" in text


async def test_devices_and_the_rollout_are_counted_by_cohort(server: Server) -> None:
    """At each survey of the process that leads."""
    for device in await server.enrolled(2):
        await device.report()
    await server.post("/v1/rollouts", {"cohort": "kiosk", "to_bundle": newest(server)}, as_="olga")
    text = b""
    while b'causeway_fleet_rollout_info{cohort="kiosk",state="paused"} 1.0' not in text:
        await asyncio.sleep(0.02)
        text = (await server.ask("GET", "/metrics", as_="")).body
    assert b'causeway_fleet_devices{cohort="kiosk"} 2.0' in text
    assert b'causeway_fleet_devices_recently_seen{cohort="kiosk"} 2.0' in text
    assert b'causeway_fleet_rollout_devices{cohort="kiosk"} 0.0' in text
    assert b'causeway_fleet_rollout_share_ratio{cohort="kiosk"} 0.0' in text


async def test_a_server_without_the_online_keys_does_not_start(signed: SignedFleet, tmp_path: Path) -> None:
    """It would answer, and renew nothing: after two days no device would take an update any more."""
    settings = ServeSettings(signed.path, tmp_path / "none", signed.path / "data", port=0)
    with pytest.raises(ConfigError, match=r"none: The role rollout needs one of these private keys: server \(\.pem\)"):
        async with running(settings):
            pass
