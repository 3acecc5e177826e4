"""What a request may use, what was reserved for it, and what it has used."""

from __future__ import annotations

import msgspec

from router.types import Usage


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """What a request may use. A run names its job and its fence: the job's next run takes the reservation over."""

    sequences: int = 1  # prompts × n
    tokens: int  # prompt and answer together
    micro_usd: int = 0  # at most
    lifetime_s: float = 60.0  # of the reservation, if the process is killed
    job: str = ""
    fence: int = 0


class Reservation(msgspec.Struct, frozen=True):
    """What was reserved for a request, before it: tokens, and what it may cost."""

    tenant: str
    tokens: int
    micro_usd: int = 0
    id: str = ""  # of the reserved cost; "": nothing was reserved of a budget
    fence: int = 0
    sequences: int = 1  # taken from the rate of requests

    @property
    def release(self) -> str:
        """What gives the reserved cost back; "" if there is nothing to give back."""
        return f"{self.id}.{self.fence}" if self.id else ""


class Charge(msgspec.Struct, frozen=True):
    """What a request has used, and its cost."""

    reservation: Reservation
    tier: str
    route: str  # chat, completion, job
    usage: Usage
    micro_usd: int

    @property
    def amounts(self) -> dict[str, int]:
        """The fields of the tenant's usage that this request adds to."""
        suffix = f"{self.tier}|{self.route}"
        return {
            f"requests|{suffix}": 1,
            f"prompt|{suffix}": self.usage.prompt_tokens,
            f"completion|{suffix}": self.usage.completion_tokens,
            f"micro_usd|{suffix}": self.micro_usd,
            TOTAL: self.micro_usd,
        }


TOTAL = "micro_usd"
"""The field of a day's sum of all tiers and routes."""
