"""Synthetic instrument panels: three cells side by side, each a dial with a needle or a display with two digits.

A dial shows a multiple of 5 from 0 to 95 on a scale of 0 to 100; a display any number from 0 to 99.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter, ImageFont

CELLS = ("left", "middle", "right")
SIDE = 160  # pixels of a cell as it is drawn
_SWEEP, _START = 270.0, 225.0  # degrees of the scale, and of its zero, against the clock from 3 o'clock
_PALETTES = (((235, 235, 228), (20, 20, 24)), ((24, 26, 30), (240, 240, 235)), ((40, 62, 80), (250, 250, 250)))
_NEEDLES = ((200, 30, 30), (230, 120, 20), (30, 90, 200))
_LAMPS = ((90, 255, 120), (255, 190, 60), (240, 240, 240))

Kind = Literal["dial", "display"]


class Instrument(msgspec.Struct, frozen=True):
    kind: Kind
    value: int

    @property
    def digits(self) -> str:
        return f"{self.value:02d}"


class Panel(msgspec.Struct, frozen=True):
    """What a panel shows; `seed` is of everything else about its drawing."""

    instruments: tuple[Instrument, ...]  # one per cell
    seed: int


def panels(count: int, seed: int) -> list[Panel]:
    """Return panels, equal ones for an equal seed."""
    draw = random.Random(seed)
    return [Panel(tuple(_instrument(draw) for _ in CELLS), draw.getrandbits(32)) for _ in range(count)]


def caption(values: Sequence[str]) -> str:
    """Return a panel in words, as a language model reads it. `values`: the digits of each cell."""
    said = ", ".join(f"{cell} {digits}" for cell, digits in zip(CELLS, values, strict=True))
    return f" {said}."


def draw_panel(panel: Panel) -> Image.Image:
    """Return the picture, RGB, `SIDE` × 3 wide."""
    draw = random.Random(panel.seed)
    back, ink = draw.choice(_PALETTES)
    image = Image.new("RGB", (SIDE * len(CELLS), SIDE), back)
    for index, instrument in enumerate(panel.instruments):
        left = index * SIDE
        (_dial if instrument.kind == "dial" else _display)(image, left, instrument, ink, draw)
    image = image.filter(ImageFilter.GaussianBlur(draw.uniform(0.0, 0.8)))
    noise = np.random.default_rng(panel.seed).normal(0.0, draw.uniform(0.0, 8.0), (SIDE, SIDE * len(CELLS), 1))
    return Image.fromarray(np.clip(np.asarray(image, np.float32) + noise, 0, 255).astype(np.uint8))


def as_input(panel: Panel, side: int) -> NDArray[np.uint8]:
    """Return the picture as an encoder sees it: [side, 3 · side, 3]."""
    return np.asarray(draw_panel(panel).resize((side * len(CELLS), side), Image.Resampling.BILINEAR), np.uint8)


def _instrument(draw: random.Random) -> Instrument:
    if draw.random() < 0.5:
        return Instrument("dial", 5 * draw.randrange(20))
    return Instrument("display", draw.randrange(100))


def _dial(image: Image.Image, left: int, instrument: Instrument, ink: tuple[int, ...], draw: random.Random) -> None:
    pen = ImageDraw.Draw(image)
    x, y = left + SIDE / 2 + draw.uniform(-4, 4), SIDE / 2 + draw.uniform(-4, 4)
    radius, turn = SIDE * draw.uniform(0.42, 0.46), draw.uniform(-2.0, 2.0)
    font = ImageFont.load_default(13)

    def at(value: float, share: float) -> tuple[float, float]:
        angle = math.radians(_START - _SWEEP * value / 100.0 + turn)
        return x + radius * share * math.cos(angle), y - radius * share * math.sin(angle)

    pen.ellipse((x - radius, y - radius, x + radius, y + radius), outline=ink, width=2)
    for mark in range(0, 101, 5):
        pen.line((*at(mark, 1.0), *at(mark, 0.86 if mark % 20 == 0 else 0.93)), fill=ink, width=2)
    for mark in range(0, 101, 20):
        pen.text(at(mark, 0.7), str(mark), fill=ink, font=font, anchor="mm")
    pen.line((x, y, *at(instrument.value, 0.9)), fill=draw.choice(_NEEDLES), width=4)
    pen.ellipse((x - 5, y - 5, x + 5, y + 5), fill=ink)


def _display(image: Image.Image, left: int, instrument: Instrument, ink: tuple[int, ...], draw: random.Random) -> None:
    pen = ImageDraw.Draw(image)
    x, y = left + SIDE / 2 + draw.uniform(-6, 6), SIDE / 2 + draw.uniform(-6, 6)
    pen.rectangle((x - 62, y - 42, x + 62, y + 42), fill=(12, 14, 12), outline=ink, width=2)
    font = ImageFont.load_default(draw.randint(56, 68))
    pen.text((x, y), instrument.digits, fill=draw.choice(_LAMPS), font=font, anchor="mm")
