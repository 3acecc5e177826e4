"""The price of a model, and amounts of money as whole numbers, so that sums are exact.

Device, gateway and control plane count with `Usage.pico_usd` of `router.types`, and with nothing else.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Final

import msgspec
from msgspec import UNSET, Meta, UnsetType

PICO_USD: Final = 10**12
"""Amounts are whole numbers of 1e-12 US dollars. A price in USD per million tokens with up to six decimals is one per
token."""
_PER_MILLION: Final = PICO_USD // 10**6
Amount = Annotated[float, Meta(ge=0, le=1_000_000_000)]


class Price(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, dict=True):
    """The price of a model, in USD."""

    input: Amount = 0.0
    output: Amount = 0.0
    cached_input: Amount | UnsetType = UNSET
    per_request: Amount = 0.0
    audio_second: Amount = 0.0
    of: Annotated[
        str, Meta(pattern="^([A-Za-z0-9_.-]{1,64}/[A-Za-z0-9_.:/@+-]{1,128})?$", title="a model as PROVIDER/MODEL")
    ] = ""
    table: Annotated[str, Meta(max_length=64, title="a version")] = ""

    @cached_property
    def costs(self) -> bool:
        return any((self.input, self.output, self.cached_input or 0.0, self.per_request, self.audio_second))

    @cached_property
    def rates(self) -> tuple[int, int, int, int, int]:
        """Prices of a prompt token, a cached one, an answer's token, a request and a second of audio, 1e-12 USD."""
        cached = self.input if isinstance(self.cached_input, UnsetType) else self.cached_input
        per_token = [round(amount * _PER_MILLION) for amount in (self.input, cached, self.output)]
        prompt, known, answer = per_token
        return prompt, known, answer, round(self.per_request * PICO_USD), round(self.audio_second * PICO_USD)

    @property
    def problem(self) -> str:
        """The fault of the price, as the end of a sentence with advice; "" without one."""
        if self.of and not self.costs:
            return (
                f"names `{self.of}` without its prices: run `causeway-models prices FILE`, which writes them here, or "
                "write `input` and `output`, in USD per million tokens"
            )
        if not isinstance(self.cached_input, UnsetType) and self.cached_input > self.input:
            return "has a higher `cached_input` than `input`"
        return "" if self.of or not self.table else "has a `table` without `of`: name the model, or remove it"


FREE: Final = Price()
"""The price of a model that costs nothing."""
