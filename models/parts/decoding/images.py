"""Decoding of images with Pillow: PNG, JPEG, WebP and GIF, one frame, upright, without metadata.

The size that the header declares is checked before a pixel is decoded, so that a small file cannot become a large
image. Data after the image's end is dropped, as is everything else that is not a pixel.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from PIL import Image, ImageOps

from ..process.messages import ImagePixels, ImageSize, PartLimits, Refusal

# The first bytes of a file, and Pillow's name of the only decoder that may read it.
_KINDS: Mapping[bytes, str] = {
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"\xff\xd8\xff": "JPEG",
    b"GIF87a": "GIF",
    b"GIF89a": "GIF",
    b"RIFF": "WEBP",
}
# What makes an image a file of another kind as well, behind the image's end.
_END: Mapping[str, bytes] = {"PNG": b"IEND", "JPEG": b"\xff\xd9", "GIF": b"\x00\x3b"}
_FOREIGN = (b"PK\x03\x04", b"%PDF-", b"\x7fELF", b"<svg", b"<html", b"<script", b"<?php")
_SEND = "Send PNG, JPEG, WebP or GIF"


def decode_image(data: bytes, limits: PartLimits) -> ImagePixels:
    """Return the image's pixels, turned as its EXIF says, and scaled down to `limits.side`. Raises Refusal."""
    with _opened(data, limits) as image:
        if getattr(image, "n_frames", 1) > 1:
            raise Refusal("the image is animated. Send a single frame")
        image.draft("RGB", (limits.side, limits.side))  # a JPEG decoder then skips what scaling would drop
        image.load()
        upright = ImageOps.exif_transpose(image)
        if upright.mode in ("RGBA", "LA", "PA") or "transparency" in upright.info:
            upright = Image.alpha_composite(Image.new("RGBA", upright.size, "white"), upright.convert("RGBA"))
        upright = upright.convert("RGB")
        upright.thumbnail((limits.side, limits.side))
        return ImagePixels(upright.tobytes(), upright.width, upright.height)


def measure_image(data: bytes, limits: PartLimits) -> ImageSize:
    """Return the size that the file declares; no pixel is decoded. Raises Refusal, also beyond `limits.pixels`."""
    with _opened(data, limits) as image:
        return ImageSize(image.width, image.height)


@contextmanager
def _opened(data: bytes, limits: PartLimits) -> Iterator[Image.Image]:
    """Open an image. Errors while it is read become refusals, too."""
    kind = _kind_of(data)
    Image.MAX_IMAGE_PIXELS = limits.pixels
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            with Image.open(io.BytesIO(data), formats=(kind,)) as image:
                if image.width * image.height > limits.pixels:
                    raise _too_large(limits)
                yield image
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            raise _too_large(limits) from None
        except (OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, OverflowError, TypeError):
            raise Refusal(f"the image is broken or cut off. {_SEND}") from None


def _kind_of(data: bytes) -> str:
    kind = next((kind for start, kind in _KINDS.items() if data.startswith(start)), "")
    if kind == "WEBP" and data[8:12] != b"WEBP":
        kind = ""
    if not kind:
        what = "SVG, which is not accepted" if b"<svg" in data[:4096].lower() else "not an image of an accepted format"
        raise Refusal(f"the file is {what if data else 'empty'}. {_SEND}")
    tail = data[data.rfind(_END[kind]) :].lower() if kind in _END and _END[kind] in data else b""
    if any(foreign.lower() in tail for foreign in _FOREIGN):
        raise Refusal("a file of another kind follows after the image's end. Save the image again")
    return kind


def _too_large(limits: PartLimits) -> Refusal:
    return Refusal(f"the image has more than {limits.pixels / 1000000.0:g} megapixels. Send a smaller image")
