"""Devices that speak the real protocol over real sockets, and run nothing: thousands of them in one process.

A device enrols with a key of its own, parks its poll, fetches metadata and plan when it is woken, asks for permission,
takes its time to activate, and reports. It verifies no signatures of the fleet: that is `edge_node/agent`'s, and costs
the devices, not the control plane.
"""

from __future__ import annotations

import asyncio
import base64
import random
import time
from collections.abc import Collection, Mapping
from typing import Any

import aiohttp
import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from causeway_server.router.bundle.manifest import RolloutPlan, assigned_bundle
from causeway_server.router.bundle.protocol import (
    LATENCY_BOUNDS_S,
    MAC_HEADER,
    SIGNATURE_HEADER,
    DeviceState,
    EnrolmentRequest,
    IssuedToken,
    ReportKey,
    StatusReply,
    StatusReport,
    Telemetry,
    TelemetrySample,
    TokenRequest,
    enrolment_proof,
    mac_header,
    signed_bytes,
)

FAST_BUCKET = 4  # the bucket of most requests
_ANSWERS = (200, 204, 304)


class Behaviour(msgspec.Struct, frozen=True):
    """How devices behave. Times are short so that a whole rollout takes minutes.

    Attributes:
        activation_s: Median time from permission to the new bundle's first answer; lognormal.
        trial_s: Until the device commits what it runs.
        poll_s: Longest poll; a device asks for a random time between half of it and all of it.
        reconnect_s: After a lost connection a device waits a random time up to this.
        telemetry_interval_s: Between two telemetry messages.
        requests: Of a device, each second.
        errors: Share of requests that fail under any bundle.
        bad_errors: Share that fails in addition, by bundle.
    """

    activation_s: float = 2.0
    trial_s: float = 3.0
    poll_s: float = 300.0
    reconnect_s: float = 60.0
    telemetry_interval_s: float = 5.0
    requests: float = 5.0
    errors: float = 0.01
    bad_errors: Mapping[str, float] = {}


class Refused(Exception):
    """The control plane refuses; `status` is the HTTP status."""

    def __init__(self, path: str, status: int, body: str) -> None:
        super().__init__(f"{path}: {status} {body[:300]}")
        self.status = status


class SimulatedDevice:
    """One device. `running` and `changed` (when it last changed, monotonic) are what it says it runs.

    `is_parked`: its poll waits at the control plane; `woken`: when the last one was answered; `connected`: when it got
    the first answer after its last lost connection.
    """

    def __init__(
        self, http: aiohttp.ClientSession, url: str, name: str, seed: str, behaviour: Behaviour, site: str = ""
    ) -> None:
        self.name = name
        self.site = site
        self.running: str | None = None
        self.ran: set[str] = set()
        self.changed = 0.0
        self.is_parked = False
        self.woken = 0.0
        self.connected = 0.0
        self.requests = 0
        self.acknowledged = 0  # requests in telemetry that the control plane acknowledged
        self.failures: list[str] = []
        self.behaviour = behaviour
        self._http = http
        self._url = url
        self._rng = random.Random(seed)
        self._key = Ed25519PrivateKey.from_private_bytes(self._rng.randbytes(32))
        self._boot = f"{self._rng.getrandbits(64):016x}"
        self._seq = 0
        self._telemetry_seq = 0
        self._token = ""
        self._token_ends = 0.0
        self._report_key: ReportKey | None = None
        self._cohort = ""
        self._etag = ""
        self._is_lost = True
        self._timestamp = b""
        self._plan: RolloutPlan | None = None

    async def enrol(self, join_token: str) -> None:
        public = _base64(self._key.public_key().public_bytes_raw())
        proof = _base64(self._key.sign(enrolment_proof(join_token, public)))
        request = EnrolmentRequest(
            token=join_token, public_key=public, proof=proof, name=self.name, site=self.site, daemon="0.1.0"
        )
        answer = await self._call("POST", "/v1/enroll", msgspec.json.encode(request))
        self._cohort = str(msgspec.json.decode(answer)["cohort"])

    async def live(self, telemetry: bool = True) -> None:
        """Until cancelled: poll, change, report."""
        async with asyncio.TaskGroup() as tasks:
            if telemetry:
                tasks.create_task(self._count())
            tasks.create_task(self._follow())

    async def _follow(self) -> None:
        await asyncio.sleep(self._rng.uniform(0.0, self.behaviour.telemetry_interval_s))
        while True:
            try:
                await self._step()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                self.failures.append(type(error).__name__)
                self._is_lost = True
                await asyncio.sleep(self._rng.uniform(0.0, self.behaviour.reconnect_s))
            except Refused as error:
                self.failures.append(str(error))
                await asyncio.sleep(self._rng.uniform(0.0, self.behaviour.reconnect_s))

    async def _step(self) -> None:
        await self._renew_token()
        plan = await self._read_plan()
        if self._is_lost:
            self._is_lost, self.connected = False, time.monotonic()
        wanted = self.running if plan is None else assigned_bundle(plan, self.name, self.running)
        if wanted is not None and wanted != self.running:
            reply = await self._report(DeviceState.CHECK, wanted)
            if not reply.may_change:
                await asyncio.sleep(min(reply.retry_after_s, 5.0))
                return
            await asyncio.sleep(self.behaviour.activation_s * self._rng.lognormvariate(0.0, 0.3))
            self.running = wanted
            self.ran.add(wanted)
            self.changed = time.monotonic()
            await self._report(DeviceState.TRIAL)
            await asyncio.sleep(self.behaviour.trial_s)
        await self._report(DeviceState.IDLE)
        await self._park()

    async def _park(self) -> None:
        wait_s = self._rng.uniform(self.behaviour.poll_s / 2, self.behaviour.poll_s)
        headers = {"if-none-match": self._etag} if self._etag else {}
        path = f"/v1/wake?wait={wait_s:.0f}"
        self.is_parked = True
        try:
            async with self._http.get(self._url + path, headers=headers | self._bearer()) as answer:
                body = await answer.read()
        finally:
            self.is_parked = False
        if answer.status not in _ANSWERS:
            raise Refused(path, answer.status, body.decode(errors="replace"))
        self._etag = answer.headers.get("etag", "")
        self.woken = time.monotonic()
        self.requests += 1

    async def _read_plan(self) -> RolloutPlan | None:
        """Fetch what the agent fetches: next root, timestamp, snapshot, rollout, plan; only two if nothing is new."""
        await self._call("GET", "/tuf/metadata/2.root.json", answers=(404,))
        timestamp = await self._file("tuf/metadata/timestamp.json")
        if timestamp == self._timestamp:
            return self._plan
        snapshot = _signed(await self._file(_named(_signed(timestamp), "snapshot")))
        rollout = _signed(await self._file(_named(snapshot, "rollout")))
        target = rollout["targets"].get(f"rollouts/{self._cohort}.json")
        if target is not None:
            path = f"tuf/targets/rollouts/{target['hashes']['sha256']}.{self._cohort}.json"
            self._plan = msgspec.json.decode(await self._file(path), type=RolloutPlan)
        self._timestamp = timestamp
        return self._plan

    async def _renew_token(self) -> None:
        if time.monotonic() < self._token_ends:
            return
        nonce = f"{self._rng.getrandbits(64):016x}"
        request = TokenRequest(device=self.name, boot=self._boot, nonce=nonce, sent=time.time())
        self._report_key = None
        issued = msgspec.json.decode(await self._signed_post("/v1/token", request), type=IssuedToken)
        self._token, self._report_key = issued.token, issued.report_key
        self._token_ends = time.monotonic() + issued.expires_in_s * 0.7

    async def _report(self, state: DeviceState, wanted: str | None = None) -> StatusReply:
        self._seq += 1
        now = time.localtime()
        report = StatusReport(
            device=self.name,
            boot=self._boot,
            seq=self._seq,
            sent=time.time(),
            state=state,
            running=self.running,
            wanted=wanted,
            rollout="" if self._plan is None else self._plan.rollout,
            daemon="0.1.0",
            local_weekday=now.tm_wday + 1,
            local_minute=now.tm_hour * 60 + now.tm_min,
        )
        return msgspec.json.decode(await self._signed_post("/v1/status", report), type=StatusReply)

    async def _count(self) -> None:
        """Send telemetry of drawn requests, from a random moment on."""
        began = time.time()
        await asyncio.sleep(self._rng.uniform(0.1, self.behaviour.telemetry_interval_s))
        while True:
            running, ended = self.running, time.time()
            requests = _poisson(self._rng, self.behaviour.requests * (ended - began))
            share = self.behaviour.errors + self.behaviour.bad_errors.get(running or "", 0.0)
            errors = sum(self._rng.random() < share for _ in range(requests))
            latency = [0] * (len(LATENCY_BOUNDS_S) + 1)
            latency[FAST_BUCKET] = requests
            sample = TelemetrySample(
                bundle=running,
                began=began,
                ended=ended,
                requests=requests,
                errors=errors,
                degraded=0,
                latency=tuple(latency),
            )
            self._telemetry_seq += 1
            message = Telemetry(device=self.name, boot=self._boot, seq=self._telemetry_seq, samples=(sample,))
            try:
                await self._signed_post("/v1/telemetry", message)
                began = ended
                self.acknowledged += requests
            except (aiohttp.ClientError, TimeoutError, OSError, Refused) as error:
                self.failures.append(f"telemetry: {error}")
            await asyncio.sleep(self.behaviour.telemetry_interval_s)

    # --- HTTP --------------------------------------------------------------------------------------------------------

    async def _signed_post(self, path: str, message: msgspec.Struct) -> bytes:
        body = msgspec.json.encode(message)
        if self._report_key is None:
            proof = {SIGNATURE_HEADER: _base64(self._key.sign(signed_bytes(path, body)))}
        else:
            proof = {MAC_HEADER: mac_header(self._report_key, path, body)}
        return await self._call("POST", path, body, proof | self._bearer())

    async def _file(self, path: str) -> bytes:
        return await self._call("GET", f"/{path}")

    async def _call(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        answers: Collection[int] = _ANSWERS,
    ) -> bytes:
        self.requests += 1
        typed = {} if body is None else {"content-type": "application/json"}
        async with self._http.request(method, self._url + path, data=body, headers=typed | (headers or {})) as answer:
            found = await answer.read()
            if answer.status not in answers:
                raise Refused(path, answer.status, found.decode(errors="replace"))
            return found

    def _bearer(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self._token}"} if self._token else {}


def _named(signed: dict[str, Any], role: str) -> str:
    return f"tuf/metadata/{signed['meta'][f'{role}.json']['version']}.{role}.json"


def _signed(content: bytes) -> dict[str, Any]:
    signed: dict[str, Any] = msgspec.json.decode(content)["signed"]
    return signed


def _base64(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def _poisson(rng: random.Random, mean: float) -> int:
    """Draw a Poisson number: by exponential gaps, as the means are small."""
    count, left = 0, mean
    while (left := left - rng.expovariate(1.0)) > 0:
        count += 1
    return count
