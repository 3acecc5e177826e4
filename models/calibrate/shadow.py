"""Shadow answers: records of requests that both the device and the cloud answered, with agreement and features but no
content.

The daemon writes the file (`shadow-1.sqlite` in its state folder), and `causeway-models calibrate --from-shadow` reads
it, also while the daemon runs.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np

from causeway_server.router.types import Confidence, decode_row

from ..catalog.artifact import ArtifactError
from ..signals.pair import STRUCTURE, ModelIdentity
from . import SHADOW_FILE as FILE
from .fit import Rows
from .prompts import LabelledAnswer, Pair

MAX_ANSWERS = 5000  # the newest are kept: about 6 MB
SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (id INTEGER PRIMARY KEY AUTOINCREMENT, answer BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS spend (id INTEGER PRIMARY KEY, state TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS semantic (id INTEGER PRIMARY KEY, findings TEXT NOT NULL);
"""
PUT_ANSWER = "INSERT INTO answers (answer) VALUES (?)"
NEWEST_ANSWERS = "SELECT answer FROM answers ORDER BY id DESC LIMIT ?"
TRIM_ANSWERS = f"DELETE FROM answers WHERE id <= (SELECT max(id) - {MAX_ANSWERS} FROM answers)"


class ShadowAnswer(msgspec.Struct, frozen=True):
    """A request that both models of a pair answered.

    Attributes:
        small: The device's model.
        large: The name of the cloud's model.
        route: The route that the decision took.
        encoder_sha256: The hash of the sentence encoder of `inputs`.
        inputs: The inputs of `edge.quality`, float32: structure of the prompt, then the encoder's vector.
        agreed: Whether the device's answer agrees with the cloud's.
        confidence: The confidence of the device's first `after` tokens; None if it was not measured.
        after: The number of tokens that the handoff waits for.
        ended: `confidence` covers all tokens of the answer.
        signals_sha256: The hash of the calibrated signals that estimated `quality` and `score`; "" for none.
        quality: `edge.quality` of the prompt.
        score: The probability that the handoff compares.
    """

    small: ModelIdentity
    large: str
    route: str
    encoder_sha256: str
    inputs: bytes
    agreed: bool
    confidence: Confidence | None = None
    after: int = 0
    ended: bool = False
    signals_sha256: str = ""
    quality: float | None = None
    score: float | None = None


_decoder = msgspec.msgpack.Decoder(ShadowAnswer)


def decode_answer(data: object) -> ShadowAnswer | None:
    """Return the answer in a row of the file; None if another version wrote it in a form that this version cannot
    read.
    """
    return decode_row(_decoder, data)


def read_shadow_rows(state_dir: Path, pair: Pair, encoder_sha256: str) -> tuple[Rows, int]:
    """Return the answers of this pair as rows to fit on, and the number of tokens that their handoff waits for.

    Raises:
        ArtifactError: There is no such file, or it has no usable answer of this pair; the message lists the pairs that
            it has.
    """
    path = state_dir / FILE
    skipped: Counter[str] = Counter()
    usable: list[ShadowAnswer] = []
    for answer in _read(path):
        if fault := _fault(answer, pair, encoder_sha256):
            skipped[fault] += 1
        else:
            usable.append(answer)
    if not usable:
        found = "; ".join(f"{count} are {fault}" for fault, count in skipped.most_common()) or "it is empty"
        raise ArtifactError(f"{path}: no shadow answers of {pair.small.name} and {pair.large.name} to fit on: {found}")
    # Routes may wait for different numbers of tokens; confidences of one number are fitted together.
    after = Counter(answer.after for answer in usable).most_common(1)[0][0]
    chosen = [answer for answer in usable if answer.after == after]
    rows = Rows(
        [_labelled(answer) for answer in chosen],
        np.array([np.frombuffer(answer.inputs, np.float32).astype(np.float64) for answer in chosen]),
        np.array([float(answer.agreed) for answer in chosen]),
        np.ones(len(chosen)),
    )
    return rows, after


def _read(path: Path) -> Iterator[ShadowAnswer]:
    if not path.is_file():
        raise ArtifactError(
            f"{path}: no such file. The daemon writes it if its policy has `shadow`; see policies/README.md."
        )
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            for (data,) in database.execute(NEWEST_ANSWERS, (MAX_ANSWERS,)):
                if (answer := decode_answer(data)) is not None:
                    yield answer
    except sqlite3.Error as error:
        raise ArtifactError(f"{path}: {error}") from error


def _fault(answer: ShadowAnswer, pair: Pair, encoder_sha256: str) -> str:
    """Return the reason why an answer cannot be used for the fit, or ""."""
    if answer.small != pair.small or answer.large != pair.large.name:
        return f"of {answer.small.name} ({answer.small.sha256[:12]}) and {answer.large}"
    if answer.encoder_sha256 != encoder_sha256 or len(answer.inputs) <= 4 * STRUCTURE:
        return "made with another sentence encoder"
    return "" if answer.confidence is not None else "without confidence, because their route has no handoff"


def _labelled(answer: ShadowAnswer) -> LabelledAnswer:
    assert answer.confidence is not None
    return LabelledAnswer(
        "", answer.route, float(answer.agreed), 1.0, (answer.confidence,), confidences_end=answer.ended
    )
