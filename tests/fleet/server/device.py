"""A device as the control plane sees it: a key, signed messages, a token."""

from __future__ import annotations

import itertools
import time
from base64 import urlsafe_b64encode
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import aiohttp
import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from multidict import CIMultiDict

from causeway_server.router.bundle.protocol import (
    LATENCY_BOUNDS_S,
    MAC_HEADER,
    SIGNATURE_HEADER,
    DeviceState,
    EnrolmentRequest,
    ReportKey,
    StatusReport,
    Telemetry,
    TelemetrySample,
    TokenRequest,
    enrolment_proof,
    mac_header,
    signed_bytes,
)


def base64url(content: bytes) -> str:
    return urlsafe_b64encode(content).rstrip(b"=").decode()


class Answered(msgspec.Struct, frozen=True):
    """A response. `code`: of the error, "" for none."""

    status: int
    body: Any
    headers: dict[str, str]

    @property
    def code(self) -> str:
        return self.body["error"]["code"] if isinstance(self.body, dict) and "error" in self.body else ""


class Device:
    """One device. Each message has the next `seq`. `report_key` None: it signs its reports."""

    def __init__(self, http: aiohttp.ClientSession, url: str, name: str = "") -> None:
        self._http = http
        self._url = url
        self._key = Ed25519PrivateKey.generate()
        self.public_key = base64url(self._key.public_key().public_bytes_raw())
        self.name = name
        self.boot = "boot-1"
        self.token = ""
        self.report_key: ReportKey | None = None
        self._seq = itertools.count(1)

    def sign(self, content: bytes) -> str:
        return base64url(self._key.sign(content))

    async def enrol(self, join_token: str, **fields: Any) -> Answered:
        proof = self.sign(enrolment_proof(join_token, self.public_key))
        fields = {"token": join_token, "public_key": self.public_key, "proof": proof, "name": self.name} | fields
        answer = await self.send("POST", "/v1/enroll", msgspec.json.encode(EnrolmentRequest(**fields)))
        if answer.status == 200:
            self.name = answer.body["device"]
        return answer

    async def ask_token(self, sent: float | None = None, **fields: Any) -> Answered:
        sent = time.time() if sent is None else sent
        request = TokenRequest(device=self.name, boot=self.boot, nonce=str(next(self._seq)), sent=sent, **fields)
        answer = await self.post("/v1/token", request)
        if answer.status == 200:
            self.token = answer.body["token"]
            self.report_key = msgspec.convert(answer.body["report_key"], ReportKey)
        return answer

    async def report(self, **fields: Any) -> Answered:
        return await self.post("/v1/status", self.status(**fields))

    def status(self, **fields: Any) -> StatusReport:
        usual = {"device": self.name, "boot": self.boot, "seq": next(self._seq), "sent": time.time()}
        return StatusReport(**{**usual, "state": DeviceState.IDLE, "running": None, **fields})

    async def count(self, *samples: TelemetrySample, seq: int | None = None, boot: str | None = None) -> Answered:
        seq = next(self._seq) if seq is None else seq
        return await self.post(
            "/v1/telemetry", Telemetry(device=self.name, boot=boot or self.boot, seq=seq, samples=samples)
        )

    async def wake(self, etag: str = "", wait_s: float | str = 0) -> Answered:
        headers = {"authorization": f"Bearer {self.token}"} | ({"if-none-match": etag} if etag else {})
        return await self.send("GET", f"/v1/wake?wait={wait_s}", headers=headers)

    async def post(self, path: str, message: msgspec.Struct, headers: dict[str, str] | None = None) -> Answered:
        body = msgspec.json.encode(message)
        if self.report_key is None or isinstance(message, TokenRequest):
            signed = {SIGNATURE_HEADER: self.sign(signed_bytes(path, body))}
        else:
            signed = {MAC_HEADER: mac_header(self.report_key, path, body)}
        return await self.send("POST", path, body, signed | (headers or {}))

    async def send(
        self,
        method: str,
        path: str,
        body: bytes | AsyncIterator[bytes] | None = None,
        headers: Mapping[str, str] | Sequence[tuple[str, str]] | None = None,
    ) -> Answered:
        sent = CIMultiDict(headers or {})
        if body is not None:
            sent.setdefault("content-type", "application/json")
        async with self._http.request(method, self._url + path, data=body, headers=sent) as response:
            content = await response.read()
            is_json = response.content_type == "application/json" and content
            found = msgspec.json.decode(content) if is_json else content
            names = {name.lower(): value for name, value in response.headers.items()}
            return Answered(response.status, found, names)


def sample(bundle: str | None = None, requests: int = 10, errors: int = 1, degraded: int = 2) -> TelemetrySample:
    """Requests that all took up to 50 ms."""
    latency = (requests, *(0 for _ in LATENCY_BOUNDS_S))
    return TelemetrySample(
        bundle=bundle, began=0.0, ended=60.0, requests=requests, errors=errors, degraded=degraded, latency=latency
    )
