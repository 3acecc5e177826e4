"""The worker that decodes parts: audio, images and text files. Decoders of audio and images are imported when the first
part of their kind arrives.

Text is UTF-8, or UTF-16 with a byte order mark. Every other file is refused with a message that names its kind.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping

from causeway_server.router.types import Fact

from ..process.child import Link
from ..process.messages import Decode, Found, MeasureImage, Refusal, WorkerJob, WorkerResult, WorkerSpec

# The first bytes of files that clients send as text.
_OTHERS: Mapping[bytes, str] = {
    b"%PDF-": "a PDF, which is not read",
    b"PK\x03\x04": "a ZIP archive or an office document, which is not read",
    b"\xd0\xcf\x11\xe0": "an office document, which is not read",
    b"\x7fELF": "a program",
    b"\x89PNG": "an image",
    b"\xff\xd8\xff": "an image",
    b"GIF8": "an image",
}
_SEND = "Send its text, or its pages as images"
_IMAGE = "Send it as `data:image/png;base64,…`, or as `image_url`"
_ALLOWED = "\t\n\r\f"


class PartDecoder:
    """Decodes audio, images and text within `spec.limits`."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._limits = spec.limits

    def run(self, job: WorkerJob, link: Link) -> WorkerResult:
        if isinstance(job, Decode):
            if job.kind == "audio":
                from .audio import decode_audio

                return decode_audio(job.data, self._limits.audio_s)
            if job.kind == "image":
                from .images import decode_image

                return decode_image(job.data, self._limits)
            return decode_text(job.data, self._limits.text_bytes)
        if isinstance(job, MeasureImage):
            from .images import measure_image

            return measure_image(job.data, self._limits)
        raise Refusal(f"a decoder does not handle {type(job).__name__}")


def decode_text(data: bytes, max_bytes: int) -> Found:
    """Return the text, with line ends as `\n`. Raises Refusal if it is longer than `max_bytes`, empty, or not text."""
    if len(data) > max_bytes:
        raise Refusal(f"the file has more than {max_bytes / 1024:g} KiB. Send a smaller file")
    other = next((name for start, name in _OTHERS.items() if data.startswith(start)), "")
    if other:
        raise Refusal(f"the file is {other}. {_IMAGE if other == 'an image' else _SEND}")
    if b"<svg" in data[:4096].lower():
        raise Refusal("the file is an SVG image, which is not accepted. Send the image rendered as PNG")
    wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        text = data.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError:
        raise Refusal(f"the file is not text in UTF-8. {_SEND}") from None
    if any(character < " " and character not in _ALLOWED for character in text):
        raise Refusal(f"the file has control characters, which text does not contain. {_SEND}")
    text = text.replace("\r\n", "\n").replace("\r", "\n").strip()
    if not text:
        raise Refusal(f"the file is empty. {_SEND}")
    return Found(Fact(text, 1.0))
