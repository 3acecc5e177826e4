"""Devices with keys that follow from their number, so that server and load generator agree without a word."""

from __future__ import annotations

import hashlib
import time
from base64 import urlsafe_b64encode

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from causeway_server.fleet.server.tokens import ReportKeys
from causeway_server.router.bundle.protocol import MAC_HEADER, DeviceState, StatusReport, mac_header

STATUS = "/v1/status"
SERVER_KEY = Ed25519PrivateKey.from_private_bytes(hashlib.sha256(b"server").digest())
_KEYS = ReportKeys(SERVER_KEY)
_RUNNING = "a" * 64


def device_key(number: int) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(f"device {number}".encode()).digest())


def public_key(number: int) -> str:
    return _base64url(device_key(number).public_key().public_bytes_raw())


def device_name(number: int) -> str:
    return f"device-{number:06}"


def status_request(number: int, seq: int) -> bytes:
    """A whole HTTP request with its MAC; `seq` tells how the state changes, so that each report writes an event too."""
    states = (DeviceState.IDLE, DeviceState.CHECK, DeviceState.FETCH, DeviceState.VERIFY)
    report = StatusReport(
        device=device_name(number),
        boot="5f1c0f6e9a3b4c2d",
        seq=seq,
        sent=time.time(),
        state=states[seq % 4],
        running=_RUNNING,
        rollout="2026-11-22-kiosk",
        daemon="0.1.0",
        since=time.time(),
    )
    body = msgspec.json.encode(report)
    mac = mac_header(_KEYS.issue(device_name(number), time.time() + 600.0), STATUS, body)
    head = (
        f"POST {STATUS} HTTP/1.1\r\nHost: fleet\r\nContent-Type: application/json\r\n"
        f"{MAC_HEADER}: {mac}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _base64url(content: bytes) -> str:
    return urlsafe_b64encode(content).rstrip(b"=").decode()
