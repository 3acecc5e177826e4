"""Synthetic parts: speech by espeak-ng, and invoices drawn by Pillow, straight and distorted."""

from __future__ import annotations

import io
import subprocess

LINES = (
    "INVOICE {number}",
    "Acme Bearings Ltd",
    "Due date: 15 March 2027",
    "2 x ball bearing     40.00",
    "1 x grease           19.50",
    "TOTAL EUR            99.50",
)


def speech(words: str, espeak: str, voice: str = "en-us", speed: int = 150) -> bytes:
    """A WAV file. `speed`: words per minute; each makes another file of the same words."""
    command = [*espeak.split(), "-v", voice, "-s", str(speed), "--stdout", words]
    return subprocess.run(command, capture_output=True, check=True).stdout


def invoice(number: int = 4711) -> bytes:
    """A PNG file."""
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (640, 60 + 60 * len(LINES)), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(28)
    for row, line in enumerate(LINES):
        draw.text((30, 30 + 60 * row), line.format(number=number), fill="black", font=font)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def distorted(data: bytes) -> bytes:
    """A JPEG file of the image turned by 4 degrees, blurred and coarsely compressed."""
    from PIL import Image, ImageFilter

    file = io.BytesIO()
    image = Image.open(io.BytesIO(data)).rotate(4, fillcolor="grey", expand=True)
    image.filter(ImageFilter.GaussianBlur(1)).save(file, "JPEG", quality=35)
    return file.getvalue()
