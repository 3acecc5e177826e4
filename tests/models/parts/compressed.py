"""Compressed audio clips, made by PyAV (extra `voice`)."""

from __future__ import annotations

import importlib
import io
from collections.abc import Mapping
from typing import Any

import numpy as np

from .files import tone

COMPRESSED: Mapping[str, tuple[str, str]] = {  # kind → FFmpeg's names of the container and the codec
    "flac": ("flac", "flac"),
    "ogg": ("ogg", "libopus"),
    "webm": ("webm", "libopus"),
    "mp3": ("mp3", "libmp3lame"),
    "m4a": ("mp4", "aac"),
}


def compressed(kind: str) -> bytes:
    """A second of a tone in a file of this kind, one of `COMPRESSED`."""
    av: Any = importlib.import_module("av")
    file, rate = io.BytesIO(), 48_000
    container_format, codec = COMPRESSED[kind]
    with av.open(file, "w", format=container_format) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.layout = "mono"
        samples = np.round(tone(1.0, rate) * 32_767).astype(np.int16)[np.newaxis]
        frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
        frame.sample_rate = rate
        queue = av.AudioFifo()
        for part in av.AudioResampler(format=stream.format.name, layout="mono", rate=rate).resample(frame):
            queue.write(part)
        while (block := queue.read(stream.codec_context.frame_size or 1024, partial=True)) is not None:
            container.mux(stream.encode(block))
        container.mux(stream.encode(None))
    return file.getvalue()
