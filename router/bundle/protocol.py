"""The messages between a device and its control plane: JSON over HTTP. Times are unix seconds.

    POST /v1/enroll            EnrolmentRequest → Enrolment           a join token, once
    POST /v1/token             TokenRequest → IssuedToken             every few minutes
    GET  /v1/wake?wait=SECONDS If-None-Match → Wake + ETag, or 304     an unsigned hint that there is news
    POST /v1/status            StatusReport → StatusReply             after each change of state, and with each wake
    POST /v1/telemetry         Telemetry → 204                        counts of requests by bundle, some records
    POST /v1/erasures          ErasureDone → 204                      the receipt of an ordered erasure
    GET  /v1/revocations       If-None-Match → Revocations + ETag     for cloud gateways, as /.well-known/jwks.json
    GET  /tuf/… /blobs/…       static files, see `router.bundle.manifest`

The body of `POST /v1/token` is signed: the header `SIGNATURE_HEADER` holds the device key's Ed25519 signature
(base64url) over the path, a newline and the body's exact bytes. The answer brings a report key, with which the device
authenticates `/v1/status` and `/v1/telemetry` while the token is valid: `MAC_HEADER` holds the key's id and the
HMAC-SHA256 over the same bytes. Without a report key, or if it is refused, the device signs them instead. Nothing that
a device does with its bundle rests on these messages: it obeys only signed metadata. `POST /v1/enroll` repeated with
the same token and key gives the same identity again, because the first answer may have been lost.
"""

from __future__ import annotations

import hashlib
import hmac
from base64 import urlsafe_b64encode
from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from .manifest import Device, Name, Sha256

SIGNATURE_HEADER = "x-causeway-signature"
MAC_HEADER = "x-causeway-mac"
MAX_MESSAGE_BYTES = 64 * 1024
MAX_RECORDS = 32
"""Maximum number of decision records in a message."""
LATENCY_BOUNDS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Upper bounds of the latency buckets in seconds; a further bucket holds slower requests."""

Text = Annotated[str, Meta(max_length=1000)]
Key = Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{43}$")]  # a raw Ed25519 public key, base64url
Labels = Annotated[dict[Annotated[str, Meta(max_length=63)], Annotated[str, Meta(max_length=63)]], Meta(max_length=32)]
Count = Annotated[int, Meta(ge=0, le=1 << 53)]
UNMEASURED = 32
"""The cell of labelled answers without a confidence."""
LabelCounts = tuple[Count, Count, Count, Count]
"""Labelled answers: good, bad; of them those that the device gave: good, bad."""


def confidence_cell(confidence: float | None) -> int:
    """Return the cell of a confidence, 0 to 1: as many of equal width as `UNMEASURED`."""
    return UNMEASURED if confidence is None else min(max(int(confidence * UNMEASURED), 0), UNMEASURED - 1)


def base64url(data: bytes) -> str:
    """Return base64url without padding, the encoding of keys and signatures."""
    return urlsafe_b64encode(data).rstrip(b"=").decode()


def key_id(public: str) -> str:
    """Return the thumbprint (RFC 7638) of a public Ed25519 key: the same key always has the same `kid`."""
    canonical = f'{{"crv":"Ed25519","kty":"OKP","x":"{public}"}}'
    return base64url(hashlib.sha256(canonical.encode()).digest())


class DeviceState(StrEnum):
    """The agent's states: first those of a successful update in their order, then those of a failed one."""

    IDLE = "idle"
    CHECK = "check"
    FETCH = "fetch"
    VERIFY = "verify"
    DRY_RUN = "dry_run"
    STAGE = "stage"
    ACTIVATE = "activate"
    TRIAL = "trial"
    COMMIT = "commit"
    ROLLBACK = "rollback"
    QUARANTINE = "quarantine"


class _Message(msgspec.Struct, frozen=True, kw_only=True):
    """The base of all messages. Unknown fields are ignored, so that an older version reads messages of a newer one."""


class EnrolmentRequest(_Message, frozen=True):
    """A device asks for an identity.

    Attributes:
        token: The one-time join token.
        public_key: The public part of the key that the device made.
        proof: The key's signature (base64url) over `enrolment_proof`.
        name: The requested device id, at most as long as a token's subject; "": the control plane chooses.
        labels: The device's own labels, such as its role and region; a label of the join token wins.
        site: The device's site; "": a site of its own.
    """

    token: Annotated[str, Meta(max_length=256)]
    public_key: Key
    proof: Annotated[str, Meta(max_length=128)]
    name: Annotated[str, Meta(pattern="^([A-Za-z0-9][A-Za-z0-9._-]{0,63})?$")] = ""
    labels: Labels = {}
    site: Annotated[str, Meta(max_length=128)] = ""
    daemon: Annotated[str, Meta(max_length=64)] = ""


class Enrolment(_Message, frozen=True):
    """The identity of a device.

    Attributes:
        root: The fleet's root metadata (JSON text), which anchors the device's trust in updates.
        cohort: The cohort whose plan the device follows.
    """

    device: Device
    tenant: Name
    cohort: Name
    fleet: Name
    root: str


class TokenRequest(_Message, frozen=True):
    """A request for a token, signed by the device key. `sent` and `nonce` make each request unique.

    `sent` is the device's estimate of the control plane's clock. If it is off by more than five minutes, the request is
    refused as `request_stale`, and the header `Date` of that answer has the time. `sent` must grow with each request,
    or the request is refused as `token_request_replayed`. `certificate_request`: PEM of a PKCS #10 signing request; ""
    while the device needs no certificate.
    """

    device: Device
    boot: Annotated[str, Meta(max_length=64)]
    nonce: Annotated[str, Meta(max_length=64)]
    sent: float
    certificate_request: Annotated[str, Meta(max_length=4096)] = ""


class ReportKey(_Message, frozen=True):
    """A symmetric key for reports and telemetry; `key` in hex. Only the device and the control plane know it."""

    id: str
    key: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class IssuedToken(_Message, frozen=True):
    """A JWT for the control plane and the cloud gateways.

    Attributes:
        now: The control plane's clock.
        report_key: The key that authenticates reports until the token expires; None: the device signs its reports.
        certificate: PEM of the device's certificate for TLS; "" without a request, or if the fleet issues none.
    """

    token: str
    expires_in_s: float
    now: float
    cohort: Name
    report_key: ReportKey | None = None
    certificate: str = ""


class Wake(_Message, frozen=True):
    """A notice that the cohort's signed metadata or pace has changed. The request carries the bearer token."""

    cohort: Name
    now: float


class StatusReport(_Message, frozen=True):
    """The device's bundle and state.

    Attributes:
        boot: The id of this run of the daemon, which tells apart two devices with the same identity.
        seq: Grows with each report of a boot; an older one is a replay.
        state: The agent's state.
        running: The bundle that serves requests now; None: the factory's files.
        wanted: The bundle that the plan assigns, if that is another one.
        rollout: The rollout whose plan the device follows.
        code: The code of the last refusal or failed trial; `requests_leave` while the device changes to a bundle under
            which some of its requests would leave it; "" for none.
        reason: The reason as text for people.
        quarantined: Bundles that the device rolled back and does not try again.
        unproven: The running bundle was committed without enough requests to prove it.
        local_minute: Minute of the device's day; `local_weekday`: ISO, Monday is 1.
        since: The time at which the state was entered.
        temperature_c: The device's temperature; None if it cannot read it.
        drift: The largest drift of its calibrated signals, as `shadow.max_drift` bounds it; None without labels.
    """

    device: Device
    boot: Annotated[str, Meta(max_length=64)]
    seq: Count
    sent: float
    state: DeviceState
    running: Sha256 | None
    wanted: Sha256 | None = None
    rollout: Annotated[str, Meta(max_length=64)] = ""
    code: Annotated[str, Meta(max_length=64)] = ""
    reason: Text = ""
    quarantined: Annotated[tuple[Sha256, ...], Meta(max_length=64)] = ()
    unproven: bool = False
    since: float = 0.0
    daemon: Annotated[str, Meta(max_length=64)] = ""
    local_weekday: Annotated[int, Meta(ge=1, le=7)] = 1
    local_minute: Annotated[int, Meta(ge=0, lt=1440)] = 0
    temperature_c: Annotated[float, Meta(ge=-300, le=1000)] | None = None
    drift: Annotated[float, Meta(ge=-1, le=1)] | None = None


class ErasureOrder(_Message, frozen=True):
    """An operator's order to erase what a device stores of a client. `client`: "" for all; `at`: when it was given."""

    device: Device
    id: Annotated[str, Meta(max_length=64)]
    at: float
    client: Annotated[str, Meta(max_length=256)] = ""


class SignedOrder(_Message, frozen=True):
    """An `ErasureOrder` as JSON text, signed (Ed25519, hex) by a key of the fleet's role rollout. `key`: its keyid."""

    order: str
    key: str
    signature: str


class ErasureDone(_Message, frozen=True):
    """A device has carried out an order. `receipt`: its receipt, as a compact JWS."""

    device: Device
    order: Annotated[str, Meta(max_length=64)]
    receipt: Annotated[str, Meta(max_length=32 * 1024)]


class StatusReply(_Message, frozen=True):
    """The answer to a status report: hints about the pace of changes, on which no device's safety depends.

    Attributes:
        may_change: The device may begin to change to `wanted` now: the maintenance window is open and not too many
            devices of its site change.
        retry_after_s: The pause before the next request, if the device may not change yet.
        now: The control plane's clock.
        cloned: The control plane sees two devices with this identity.
        erasure: An order that the device has not carried out yet. It obeys the signature, not the reply.
        records_per_hour: The number of decision records that the control plane takes from the device; 0: none.
    """

    may_change: bool
    now: float
    cohort: Name
    retry_after_s: float = 60.0
    cloned: bool = False
    erasure: SignedOrder | None = None
    records_per_hour: float = 0.0


class TelemetrySample(_Message, frozen=True):
    """Requests under one bundle in an interval.

    Attributes:
        bundle: The bundle; None: the factory's files.
        latency: Requests by bucket of `LATENCY_BOUNDS_S`.
        on_device: Requests that were answered without the cloud, with those of the cache; None from earlier versions,
            which measure none of the fields from here on.
        cached: Requests that the cache answered.
        private: Requests that were bound to the device or to regions, of which no record is sent.
        micro_usd: The cost in millionths of a US dollar.
        labels: Labelled answers by cell of confidence: good, bad, and as many of answers that the device gave.
    """

    bundle: Sha256 | None
    began: float
    ended: float
    requests: Count
    errors: Count
    degraded: Count
    latency: Annotated[
        tuple[Count, ...], Meta(min_length=len(LATENCY_BOUNDS_S) + 1, max_length=len(LATENCY_BOUNDS_S) + 1)
    ]
    on_device: Count | None = None
    cached: Count = 0
    private: Count = 0
    micro_usd: Count = 0
    labels: dict[Annotated[int, Meta(ge=0, le=UNMEASURED)], LabelCounts] = {}


class SampledRecord(_Message, frozen=True):
    """The decision record (`router.types.DecisionRecord`) of a request, without content, client and parts.

    Attributes:
        weight: The number of requests that it stands for.
        record: The record; one that the control plane cannot read is left out.
    """

    weight: Annotated[float, Meta(ge=1, le=1 << 30)]
    record: msgspec.Raw


class Telemetry(_Message, frozen=True):
    """Samples since the last telemetry. Idempotent: `(device, boot, seq)` is counted once.

    Attributes:
        records: Records of a random sample of the requests that are not private.
    """

    device: Device
    boot: Annotated[str, Meta(max_length=64)]
    seq: Count
    samples: Annotated[tuple[TelemetrySample, ...], Meta(max_length=256)]
    records: Annotated[tuple[SampledRecord, ...], Meta(max_length=MAX_RECORDS)] = ()


class Revocations(_Message, frozen=True):
    """The tokens and devices that cloud gateways refuse, in the form of the gateway's list. None is withdrawn.

    Attributes:
        epoch: A number that grows when a backup of the control plane is restored; `version` grows with each change.
        tokens: `jti` → unix time of its expiry, after which the entry may be left out.
        devices: `tenant/device` → unix time; tokens issued until then are refused.
    """

    epoch: Count = 0
    version: Count = 0
    tokens: dict[str, float] = {}
    devices: dict[str, float] = {}


def signed_bytes(path: str, body: bytes) -> bytes:
    """Return the bytes that the device key signs for a request."""
    return path.encode() + b"\n" + body


def mac_header(key: ReportKey, path: str, body: bytes) -> str:
    """Return the value of `MAC_HEADER` for a request."""
    return f"{key.id}.{hmac.digest(bytes.fromhex(key.key), signed_bytes(path, body), 'sha256').hex()}"


def enrolment_proof(token: str, public_key: str) -> bytes:
    """Return the bytes that a new device key signs, which proves that the device holds it."""
    return f"causeway-enrol\n{token}\n{public_key}".encode()
