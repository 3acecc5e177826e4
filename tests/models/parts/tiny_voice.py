"""A Piper voice from nothing: each symbol becomes a short tone, longer where the length scale is larger."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from causeway_train.onnx_writer import FLOAT, INT64, Node, Port, write_onnx

RATE = 16_000
PER_SYMBOL = 40
"""Samples of a symbol at the scale 1.0."""
SYMBOLS = ("_", "^", "$", " ", *".?!,;:", *string.ascii_lowercase, "\u0301")
IDS = {symbol: [at] for at, symbol in enumerate(SYMBOLS)}


def settings(**changes: Any) -> dict[str, Any]:
    """What the voice's JSON says, with these changes."""
    return {
        "audio": {"sample_rate": RATE, "quality": "tiny"},
        "espeak": {"voice": "en-us"},
        "phoneme_type": "espeak",
        "inference": {"noise_scale": 0.667, "length_scale": 1.0, "noise_w": 0.8},
        "phoneme_id_map": IDS,
        "num_symbols": len(SYMBOLS),
        "num_speakers": 1,
        "speaker_id_map": {},
        "piper_version": "1.0.0",
        **changes,
    }


def write_voice(
    folder: Path,
    name: str = "tiny",
    *,
    speakers: dict[str, int] | None = None,
    level: float = 0.5,
    per_symbol: int = PER_SYMBOL,
    work: int = 0,
    **changes: Any,
) -> Path:
    """Write a voice's ONNX file and its JSON, and return the first.

    Args:
        speakers: the ids of several, by name; a speaker's id makes its tone higher.
        level: of the samples; what tells two voices' files apart.
        per_symbol: samples of a symbol at the scale 1.0.
        work: products of matrices before there is audio, each of [ids, ids]: a long sentence takes long.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.onnx"
    several = speakers is not None
    write_onnx(
        path,
        "tiny_voice",
        [
            Node("Gather", ["scales", "one"], ["length"]),
            Node("Mul", ["length", "per_symbol"], ["samples"]),
            Node("Range", ["zero", "samples", "step"], ["times"]),
            Node("Cast", ["sid"], ["speaker"], {"to": FLOAT}) if several else Node("Identity", ["nobody"], ["speaker"]),
            Node("Add", ["speaker", "step"], ["pitch"]),
            Node("Mul", ["times", "pitch"], ["phases"]),
            Node("Sin", ["phases"], ["wave"]),
            Node("Mul", ["wave", "level"], ["tone"]),
            Node("Cast", ["input"], ["values"], {"to": FLOAT}),
            Node("Reshape", ["values", "column"], ["symbols"]),
            Node("Mul", ["symbols", "zero"], ["column0"]),
            Node("Reshape", ["column0", "row"], ["row0"]),
            Node("Mul", ["column0", "row0"], ["worked0"]),
            *(Node("MatMul", [f"worked{at}", "worked0"], [f"worked{at + 1}"]) for at in range(work)),
            Node("ReduceSum", [f"worked{work}"], ["nothing"], {"keepdims": 0}),
            Node("Mul", ["symbols", "tone"], ["silent"]),
            Node("Add", ["silent", "nothing"], ["tones"]),
            Node("Reshape", ["tones", "audio"], ["output"]),
        ],
        inputs=[
            Port("input", INT64, ["batch", "phonemes"]),
            Port("input_lengths", INT64, ["batch"]),
            Port("scales", FLOAT, [3]),
            *([Port("sid", INT64, ["batch"])] if several else []),
        ],
        outputs=[Port("output", FLOAT, ["batch", "one_channel", "time"])],
        constants={
            "one": np.array(1, np.int64),
            "zero": np.array(0.0, np.float32),
            "step": np.array(1.0, np.float32),
            "nobody": np.array([0.0], np.float32),
            "per_symbol": np.array(float(per_symbol), np.float32),
            "level": np.array(level, np.float32),
            "column": np.array([-1, 1], np.int64),
            "row": np.array([1, -1], np.int64),
            "audio": np.array([1, 1, -1], np.int64),
        },
    )
    said = settings(num_speakers=len(speakers or [0]), speaker_id_map=speakers or {}, **changes)
    path.with_name(path.name + ".json").write_bytes(msgspec.json.encode(said))
    return path


def samples_of(text: str, scale: float = 1.0) -> int:
    """How many samples the voice makes of a clause of known symbols: also of its start, its end and each pad."""
    return (2 * len(text) + 3) * round(PER_SYMBOL * scale)
