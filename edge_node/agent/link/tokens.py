"""The device's token for its control plane and the cloud gateways: a JWT of ten minutes that is renewed automatically.

A wrong clock on the device does little harm: a token's life is measured in monotonic time from its arrival, and if the
control plane rejects a request as stale, its response includes its time.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass

import anyio

from causeway_server.router.bundle.protocol import IssuedToken, TokenRequest

from ...clock import Clock
from ...observability.logs import Fault
from .certificate import DeviceCertificate
from .control_plane import ControlPlane, FleetError, FleetRefused
from .identity import Identity

log = logging.getLogger(__name__)

Uniform = Callable[[float, float], float]
Sleep = Callable[[float], Awaitable[None]]
RETRY_S = (0.0, 60.0)
"""Range of the random wait before a retry, in seconds, so that the devices of a fleet do not retry together."""
REFUSED_S = (300.0, 900.0)
"""Range of the random wait after a refusal, such as that of a revoked device, in seconds."""
_RENEW_AT = (0.5, 0.7)  # share of the token's life
_FRESH_S = 30.0  # a refused token of this age has not expired, and a failed renewal is not repeated
_PATIENCE_S = 2.0  # maximum time that a request waits for another token before the next attempt
_SKEW_S = 120.0
_OTHER_TIME = ("request_stale", "token_request_replayed")


@dataclass(eq=False, repr=False)
class TokenKeeper:
    """Owns the token; `token` is "" while there is none."""

    identity: Identity
    plane: ControlPlane
    _: KW_ONLY
    boot: str  # the id of this run of the daemon
    clock: Clock
    uniform: Uniform  # function that returns a random number between two numbers
    sleep: Sleep
    changed: Callable[[], None]  # function that is called when `problems` may have changed
    certificate: DeviceCertificate  # the device's certificate, which is renewed with the token

    def __post_init__(self) -> None:
        self._renewal_wanted = asyncio.Event()
        self._attempted = asyncio.Event()  # set at the end of an attempt; each attempt has a new one
        self._attempted.set()
        self._tried = float("-inf")  # start of the last attempt, monotonic s
        self._there = asyncio.Event()
        self._expires = float("-inf")  # monotonic s
        self._life_s = 0.0
        self._sent = 0.0
        self._ahead_s = 0.0  # offset of the control plane's clock
        self._expired = Fault(log, logging.WARNING, self.clock.monotonic)
        self._refused = Fault(log, logging.ERROR, self.clock.monotonic)
        self._wrong_clock = Fault(log, logging.WARNING, self.clock.monotonic)
        self.token = ""

    @property
    def problems(self) -> tuple[str, ...]:
        faults = (self._refused, self._expired, self._wrong_clock)
        return tuple(fault.problem for fault in faults if fault.problem)

    @property
    def certificate_file(self) -> str:
        """The device's certificate and its key; the file may be missing."""
        return str(self.certificate.path)

    async def wait(self) -> str:
        """Return the token as soon as it is available."""
        await self._there.wait()
        return self.token

    async def run(self) -> None:
        """Get a token, and renew it before it expires or when it is refused, until cancelled."""
        while True:
            pause_s = await self._attempt()
            async with anyio.create_task_group() as waiting:
                waiting.start_soon(self._cancel_when_asked, waiting.cancel_scope)
                await self.sleep(pause_s)
                waiting.cancel_scope.cancel()

    async def renew(self, refused: str) -> bool:
        """Get another token than the one that was refused (HTTP 401); return whether there is one now.

        1. There is a newer token already.
        2. A renewal has just ended: a further one would not help.
        3. A renewal is running: wait for it, unless it takes long.
        4. Make `run` renew now, and wait for that.
        """
        if self.token and self.token != refused:  # (1)
            return True
        since_s = self.clock.monotonic() - self._tried
        if since_s < _FRESH_S and self._attempted.is_set():  # (2)
            return False
        if since_s >= _PATIENCE_S and not self._attempted.is_set():  # (3)
            return False
        attempted = self._attempted
        if attempted.is_set():  # (4)
            attempted = self._attempted = asyncio.Event()
            self._tried = self.clock.monotonic()
            self._renewal_wanted.set()
        with anyio.move_on_after(_PATIENCE_S):
            await attempted.wait()
        return bool(self.token) and self.token != refused

    def refused(self, error: FleetRefused) -> None:
        """Record that the control plane does not accept this device."""
        self._refused.begin(
            f"The fleet {self.identity.fleet} refuses this device. It keeps its bundle, but loses the "
            f"fleet's token for the cloud: {error}"
        )
        self._use("")

    # --- renewal -----------------------------------------------------------------------------------------------------

    async def _cancel_when_asked(self, scope: anyio.CancelScope) -> None:
        await self._renewal_wanted.wait()
        self._renewal_wanted.clear()
        scope.cancel()

    async def _attempt(self) -> float:
        """Renew the token; return the seconds until the next renewal."""
        if self._attempted.is_set():
            self._attempted = asyncio.Event()
        self._tried = self.clock.monotonic()
        try:
            await self._issue()
        except FleetError as error:
            self._note(error)
            return self.uniform(*(REFUSED_S if isinstance(error, FleetRefused) else RETRY_S))
        finally:
            self._attempted.set()
        return self._life_s * self.uniform(*_RENEW_AT)

    async def _issue(self) -> None:
        """Request a token and store it. Raises FleetError."""
        try:
            issued = await self._ask()
        except FleetRefused as error:
            if error.code not in _OTHER_TIME or error.now is None:
                raise
            self._ahead_s = error.now + 1.0 - self.clock.unix()  # the resolution of HTTP dates is one second
            self._sent = 0.0
            issued = await self._ask()
        self._life_s = issued.expires_in_s
        self._expires = self.clock.monotonic() + issued.expires_in_s
        self._ahead_s = issued.now - self.clock.unix()
        self._check_clock()
        self._expired.end("The fleet's token is renewed")
        self._refused.end(f"The fleet {self.identity.fleet} accepts this device again")
        self.certificate.store(issued.certificate)
        self._use(issued.token)
        self.plane.report_key = issued.report_key

    async def _ask(self) -> IssuedToken:
        self._sent = max(self._sent + 0.001, self.clock.unix() + self._ahead_s)
        return await self.plane.token(
            TokenRequest(
                device=self.identity.device,
                boot=self.boot,
                nonce=secrets.token_hex(16),
                sent=self._sent,
                certificate_request=self.certificate.request(),
            )
        )

    def _note(self, error: FleetError) -> None:
        if isinstance(error, FleetRefused):
            self.refused(error)
        elif self.clock.monotonic() >= self._expires:
            self._expired.begin(
                "The fleet's token has expired and cannot be renewed. The cloud refuses requests, so "
                f"they stay on this device: {error}"
            )
            self._use("")

    def _use(self, token: str) -> None:
        self.token = token
        self.plane.report_key = None
        if token:
            self._there.set()
        else:
            self._there.clear()
        self.changed()

    def _check_clock(self) -> None:
        if abs(self._ahead_s) > _SKEW_S:
            side = "behind" if self._ahead_s > 0 else "ahead of"
            self._wrong_clock.begin(
                f"This device's clock is {abs(self._ahead_s):.0f} s {side} the control plane's. Set it, "
                "because signed updates depend on the time."
            )
        else:
            self._wrong_clock.end("This device's clock is correct again")
