"""A stand-in for the control plane's operators' API: the documented JSON from a seeded generator, served with the page.

Its state changes as the real one's does: a pause pauses, a revoked device stays revoked, every change is a row of the
audit log.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web

from causeway_server.fleet.operators.routes import try_draft
from causeway_server.fleet.server.files import console_routes
from causeway_server.fleet.server.routes import errors_as_json
from causeway_server.router.errors import AuthenticationFailed, CausewayError, InvalidRequest, NotFound

TOKEN = "bootstrap-token"
NOW = time.time()
COHORTS = {"kiosk": 4200, "warehouse": 780, "lab": 20}
POLICY = """version: 1
name: kiosk
targets:
  small: {at: edge, model: assistant}
  large: {at: cloud, model: assistant-large, timeout: 4s}
constraints:
  - name: private-stays
    when: '"private" in request.tags'
    keep: on_device
routes:
  - name: hot-device
    when: device.temperature_c > 85.0
    use: [large, small]
  - name: short
    when: request.prompt_tokens < 30
    use: [small, large]
    handoff: {after_tokens: 8, below: 0.55}
  - name: otherwise
    use: [large, small]
cache:
  - when: request.temperature == 0.0
    exact: {ttl: 30s, stale_if_error: 10m}
limits: {concurrent: 16, queue: 64}
"""
NEW_POLICY = (
    POLICY.replace("85.0", "80.0")
    .replace("timeout: 4s", "timeout: 6s")
    .replace("< 30", "< 60")
    .replace("    exact: {ttl: 30s", "    exact: {ttl: 5m")
)


FIGURES = {
    "requests": 48_120,
    "on_device": 0.823,
    "usd": 0.41,
    "p95_s": 2.0,
    "hottest_c": 78.4,
    "drift": 0.02,
    "records": 4812,
    "recorded_devices": 388,
}


class Conflict(CausewayError):
    """The rollout is in a state that does not take this."""

    status = 409
    code = "conflict"
    type = "invalid_request_error"


def bundle(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


class FleetFixture:
    """The API's state. `role` is what the operator who signs in has."""

    def __init__(self, *, devices: int = 5000, role: str = "approver", oidc: bool = False, seed: int = 7) -> None:
        self.role = role
        self.oidc = oidc
        self.signed_in = False
        self.audit: list[dict[str, Any]] = []
        self.changes: list[tuple[str, str]] = []
        random_ = random.Random(seed)
        self.devices = _devices(random_, devices)
        self.rollouts = _rollouts(random_)
        for actor, action, what in (
            ("bootstrap", "session.begin", {}),
            ("anna@example.org", "rollout.begin", {"cohort": "kiosk", "to_bundle": bundle("b4")[:12]}),
            ("controller", "rollout.stage", {"rollout": "r-0107", "share": 1000}),
            ("ben@example.org", "device.hold", {"device": "device-00012", "reason": "is being moved"}),
            ("controller", "rollout.stage", {"rollout": "r-0107", "share": 5000}),
        ):
            self.record(actor, action, what)

    def record(self, actor: str, action: str, what: dict[str, Any]) -> None:
        previous = self.audit[-1]["hash"] if self.audit else "0" * 64
        row = {"n": len(self.audit) + 1, "at": NOW - 3600 + 60 * len(self.audit), "actor": actor, "action": action}
        row |= {"what": what, "previous": previous}
        row["hash"] = hashlib.sha256((previous + json.dumps(row, sort_keys=True)).encode()).hexdigest()
        self.audit.append(row)

    # --- handlers ----------------------------------------------------------------------------------------------------

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/session", self.session),
            web.post("/v1/session", self.sign_in),
            web.delete("/v1/session", self.sign_out),
            web.get("/v1/oidc/start", self.start_oidc),
            web.get("/issuer", self.issuer),
            web.get("/v1/fleet", self.fleet),
            web.get("/v1/rollouts", self.list_rollouts),
            web.post("/v1/rollouts", self.start_rollout),
            web.get("/v1/rollouts/{id}", self.one_rollout),
            web.post("/v1/rollouts/{id}/{action}", self.act),
            web.get("/v1/devices", self.list_devices),
            web.get("/v1/devices/{id}", self.one_device),
            web.post("/v1/devices/{id}/{action}", self.change_device),
            web.post("/v1/join-tokens", self.join_token),
            web.get("/v1/audit", self.list_audit),
            web.get("/v1/policies/diff", self.policies),
            web.post("/v1/policies/try", self.try_policy),
        ]

    def _check(self, http: web.Request) -> None:
        if not self.signed_in:
            raise AuthenticationFailed("sign in first")
        if http.method != "GET":
            assert http.headers.get("x-causeway-console") == "1"

    async def session(self, http: web.Request) -> web.Response:
        self._check(http)
        return web.json_response({"name": "anna@example.org", "role": self.role})

    async def sign_in(self, http: web.Request) -> web.Response:
        assert http.headers.get("x-causeway-console") == "1"
        if (await http.json())["token"] != TOKEN:
            raise AuthenticationFailed("this token is not known")
        self.signed_in = True
        return web.json_response({"name": "anna@example.org", "role": self.role})

    async def sign_out(self, http: web.Request) -> web.Response:
        self._check(http)
        self.signed_in = False
        return web.Response(status=204)

    async def start_oidc(self, http: web.Request) -> web.Response:
        if not self.oidc:
            raise NotFound("no single sign-on is configured")
        return web.Response(status=302, headers={"Location": "/issuer"})

    async def issuer(self, _http: web.Request) -> web.Response:
        self.changes.append(("sign_in", "issuer"))
        self.signed_in = True
        return web.Response(status=302, headers={"Location": "/console"})

    async def fleet(self, http: web.Request) -> web.Response:
        self._check(http)
        cohorts = []
        for name in COHORTS:
            devices = [device for device in self.devices.values() if device["cohort"] == name]
            live = [each["id"] for each in self.rollouts.values() if each["cohort"] == name and _is_live(each)]
            recently_seen = sum(1 for device in devices if device["last_seen"] > NOW - 900)
            running = Counter(device["running"] or "" for device in devices)
            cohorts.append(
                {
                    "name": name,
                    "devices": len(devices),
                    "recently_seen": recently_seen,
                    "running": running,
                    "ahead": 0,
                    "figures": FIGURES,
                    "rollout": (live or [None])[0],
                }
            )
        return web.json_response({"name": "stores", "cohorts": cohorts, "problems": []})

    async def list_rollouts(self, http: web.Request) -> web.Response:
        self._check(http)
        more = {"members", "events", "notes", "predictions"}
        rows = [
            {key: len(value) if key == "looks" else value for key, value in each.items() if key not in more}
            for each in self.rollouts.values()
        ]
        return web.json_response(rows)

    async def one_rollout(self, http: web.Request) -> web.Response:
        self._check(http)
        return web.json_response(_found(self.rollouts, http.match_info["id"]))

    async def start_rollout(self, http: web.Request) -> web.Response:
        self._check(http)
        body = await http.json()
        if body["to_bundle"] not in {bundle(f"b{number}") for number in range(1, 6)}:
            raise NotFound("the role artifacts has signed no such bundle")
        made = _rollout("r-0110", body["cohort"], "lint", to=body["to_bundle"])
        self.rollouts = {made["id"]: made, **self.rollouts}
        self.changes.append(("apply", body["cohort"]))
        return web.json_response(made, status=201)

    async def act(self, http: web.Request) -> web.Response:
        self._check(http)
        rollout, action = _found(self.rollouts, http.match_info["id"]), http.match_info["action"]
        allowed = {"pause": ("stage", "soak"), "resume": ("paused",), "accept": ("paused",)}.get(action)
        if allowed and rollout["state"] not in allowed:
            raise Conflict(f"a rollout in state {rollout['state']} does not allow {action}; allowed are: resume, abort")
        reason = (await http.json())["reason"]
        rollout["state"] = {"pause": "paused", "resume": "stage", "accept": "stage", "abort": "aborted"}[action]
        rollout["stage"] += action == "accept"
        rollout["reason"] = reason
        rollout["events"].append(
            {"at": NOW, "action": f"rollout.{action}", "actor": "anna@example.org", "reason": reason}
        )
        self.changes.append((action, rollout["id"]))
        self.record("anna@example.org", action, {"rollout": rollout["id"], "reason": reason})
        return web.json_response(rollout)

    async def list_devices(self, http: web.Request) -> web.Response:
        self._check(http)
        query = http.query
        found = [
            device
            for device in self.devices.values()
            if device["id"] > query.get("after", "")
            and all(query.get(key, device[key]) == device[key] for key in ("cohort", "state", "site"))
            and query.get("q", "") in device["id"]
        ]
        limit = int(query.get("limit", "100"))
        page = found[:limit]
        return web.json_response({"devices": page, "next": page[-1]["id"] if len(found) > limit else None})

    async def one_device(self, http: web.Request) -> web.Response:
        self._check(http)
        device = _found(self.devices, http.match_info["id"])
        states = ["fetch", "verify", "dry_run", "stage", "activate", "trial", device["state"]]
        history = [
            {"at": NOW - 3600 + 90 * index, "state": state, "running": bundle("b3"), "wanted": bundle("b4")}
            | {"code": "", "reason": "", "rollout": "r-0107"}
            for index, state in enumerate(states)
        ]
        return web.json_response({**device, "history": history})

    async def change_device(self, http: web.Request) -> web.Response:
        self._check(http)
        name, action = http.match_info["id"], http.match_info["action"]
        device = _found(self.devices, name)
        body = await http.json()
        if action == "revoke":
            device["revoked"] = NOW
        else:
            device |= {"held": action == "hold", "pin": body["bundle"] if action == "pin" else None}
        self.changes.append((action, name))
        return web.json_response(device)

    async def join_token(self, http: web.Request) -> web.Response:
        self._check(http)
        body = await http.json()
        if not isinstance(body["uses"], int) or body["uses"] < 1:
            raise InvalidRequest("Expected `int` >= 1 - at `$.uses`")
        return web.json_response({"token": "cwjoin_0123", "expires": NOW + 86400, "uses": body["uses"]}, status=201)

    async def list_audit(self, http: web.Request) -> web.Response:
        self._check(http)
        after = int(http.query.get("after", "0"))
        return web.json_response({"rows": [row for row in self.audit if row["n"] > after][:2]})

    async def policies(self, http: web.Request) -> web.Response:
        self._check(http)
        same = http.query["from"] == http.query["to"]
        return web.json_response({"from": POLICY, "to": POLICY if same else NEW_POLICY})

    async def try_policy(self, http: web.Request) -> web.Response:
        self._check(http)
        body = await http.json()
        assert body["bundle"] in {bundle(f"b{number}") for number in range(1, 6)}
        tried = try_draft(body["policy"], POLICY, (), {})
        return web.Response(body=msgspec.json.encode(tried), content_type="application/json")


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    async def run(same: web.Request) -> web.StreamResponse:
        return await handler(same)

    return await errors_as_json(run)(request)


@asynccontextmanager
async def serving(fixture: FleetFixture, port: int = 0) -> AsyncIterator[str]:
    """Serve the page and the API; yields the origin."""
    app = web.Application(middlewares=[_errors])
    for route in console_routes():
        app.router.add_route(route.method, route.path, route.handler)
    app.router.add_routes(fixture.routes())
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def _found(table: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    if name not in table:
        raise NotFound(f"there is no {name!r}")
    return table[name]


def _is_live(rollout: dict[str, Any]) -> bool:
    return rollout["state"] not in ("draft", "done", "reverted")


def _devices(random_: random.Random, count: int) -> dict[str, dict[str, Any]]:
    total = sum(COHORTS.values())
    bounds = [(name, sum(list(COHORTS.values())[: index + 1])) for index, name in enumerate(COHORTS)]
    devices: dict[str, dict[str, Any]] = {}
    for index in range(count):
        cohort = next(name for name, bound in bounds if index * total // count < bound)
        bad = random_.random() < 0.01
        state = "quarantine" if bad else random_.choices(["idle", "trial", "fetch"], [96, 3, 1])[0]
        device = {
            "id": f"device-{index:05}",
            "tenant": "stores",
            "cohort": cohort,
            "site": f"store-{index // 12:03}",
            "labels": {"role": cohort, "region": random_.choice(["eu", "us"])},
            "state": state,
            "state_since": NOW - 3600,
            "running_since": NOW - 86400,
            "history": [],
            "running": bundle("b4" if random_.random() < 0.05 else "b3"),
            "wanted": bundle("b4") if state != "idle" else None,
            "rollout": "r-0107" if state != "idle" else "",
            "last_seen": NOW - random_.uniform(0, 200 if random_.random() < 0.97 else 90_000),
            "code": "trial_errors" if bad else "",
            "reason": "7.1 % of answers failed, 0.4 % before" if bad else "",
            "quarantined": [bundle("b4")] if bad else [],
            "unproven": random_.random() < 0.01,
            "revoked": None,
            "erasure": None,
            "held": random_.random() < 0.004,
            "pin": None,
            "cloned": random_.random() < 0.002,
            "daemon": "0.1.0",
            "enrolled": NOW - 86400 * 40,
        }
        devices[str(device["id"])] = device
    return devices


def _rollout(name: str, cohort: str, state: str, *, to: str, stage: int = 0, **more: object) -> dict[str, Any]:
    stages = [1000, 5000, 25_000, 50_000, 100_000]
    began = NOW - 5400
    return {
        "id": name,
        "cohort": cohort,
        "state": state,
        "stage": stage,
        "stages": stages,
        "share": stages[min(stage, 4)],
        "began": began,
        "entered": began,
        "reason": "",
        "to_bundle": to,
        "from_bundle": bundle("b3"),
        "looks": [],
        "author": "anna@example.org",
        "created": NOW - 9000,
        "members": {},
        "events": [{"at": began, "action": "rollout.begin", "actor": "anna@example.org", "reason": ""}],
        "notes": [],
        "predictions": [],
        **more,
    }


def _rollouts(random_: random.Random) -> dict[str, dict[str, Any]]:
    events = [
        {"at": NOW - 9000, "action": "rollout.begin", "actor": "anna@example.org", "reason": ""},
        {"at": NOW - 8990, "action": "rollout.check_passed", "actor": "controller", "reason": "lint"},
        {
            "at": NOW - 8900,
            "action": "rollout.check_passed",
            "actor": "controller",
            "reason": "replay: 0 requests leave a device",
        },
        {
            "at": NOW - 5400,
            "action": "rollout.stage_passed",
            "actor": "controller",
            "reason": "every metric within its margin",
        },
    ]
    live = _rollout("r-0107", "kiosk", "stage", to=bundle("b4"), stage=1, events=events)
    live["looks"] = [
        _look(random_, index, drift=0.0, stage=stage) for stage, looks in ((0, 4), (1, 5)) for index in range(looks)
    ]
    live["notes"] = ["12 of 12 statements proved", "replayed 4812 recorded requests of 388 devices over 7 days"]
    live["predictions"] = [
        {"name": "on_device", "low": 0.78, "high": 0.85, "value": 0.82},
        {"name": "usd", "low": 0.3, "high": 0.4, "value": 0.47},
        {"name": "quality", "low": 0.93, "high": 0.97, "value": None},
    ]
    live["members"] = {"commit": 171, "trial": 22, "fetch": 9, "waiting": 5, "rollback": 3}
    paused = _rollout("r-0108", "warehouse", "paused", to=bundle("b4"), stage=2)
    paused["reason"] = "no verdict in 24 h: too few devices with requests"
    paused["looks"] = [_look(random_, index, drift=0.004, stage=2) for index in range(3)]
    paused["members"] = {"commit": 190, "silent": 4}
    bad = _rollout("r-0104", "kiosk", "reverted", to=bundle("b2"), stage=0)
    bad["reason"] = "errors: 5.6 % against 0.4 %, p 0.00001"
    bad["looks"] = [_look(random_, index, drift=0.05) for index in range(2)]
    done = _rollout("r-0101", "kiosk", "done", to=bundle("b3"), stage=5)
    done["reason"] = "the soak passed"
    refused = _rollout("r-0103", "lab", "draft", to=bundle("b2"))
    refused |= {"began": 0.0, "reason": "2 of 4812 recorded requests stayed on the device and would or may leave it"}
    return {each["id"]: each for each in (live, paused, bad, refused, done)}


def _look(random_: random.Random, index: int, *, drift: float, stage: int = 0) -> dict[str, Any]:
    metrics = []
    for name, base, margin in (("errors", 0.004, 0.02), ("degraded", 0.03, 0.05), ("latency", 0.05, 0.05)):
        width = 0.06 / 2**index**0.8 + 0.004
        middle = random_.uniform(-0.2, 0.2) * width + (drift if name == "errors" else 0.0)
        low, high = middle - width / 2, middle + width / 2
        outcome = "fail" if low > margin else "pass" if high < margin else "inconclusive"
        metrics.append(
            {"name": name, "outcome": outcome, "canary": base + middle, "control": base, "low": low, "high": high}
            | {"p": 0.00001 if outcome == "fail" else random_.uniform(0.2, 0.9), "margin": margin}
            | {"reason": f"{name}: at most {high * 100:.1f} points worse, margin {margin * 100:.0f}"}
        )
    for name in ("rolled_back", "silent"):
        missing = {"canary": None, "control": None, "low": None, "high": None, "margin": 0.02}
        metrics += [{"name": name, "outcome": "pass", "reason": "3 of 210 devices", "p": 0.4, **missing}]
    outcomes = {metric["outcome"] for metric in metrics}
    outcome = next((each for each in ("fail", "inconclusive") if each in outcomes), "pass")
    return {"at": NOW - 5400 + 150 * 2**index, "stage": stage, "outcome": outcome, "metrics": metrics}
