"""Shadow answers of a daemon as rows to fit on."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np

from causeway_server.models.catalog.artifact import ArtifactError
from causeway_server.models.signals import SHADOW_FILE
from causeway_server.models.signals.shadow import MAX_ANSWERS, NEWEST_ANSWERS, ShadowAnswer, decode_answer
from causeway_server.models.signals.structure import STRUCTURE
from causeway_server.router.errors import ConfigError
from causeway_server.router.serving.at_rest.state_keys import StateKeys

from .fit import Rows
from .prompts import LabelledAnswer, Pair


def read_shadow_rows(state_dir: Path, pair: Pair, encoder_sha256: str) -> tuple[Rows, int]:
    """Return the answers of this pair as rows to fit on, and the number of tokens that their handoff waits for.

    Raises:
        ArtifactError: There is no such file, or it has no usable answer of this pair; the message lists the pairs that
            it has.
    """
    path = state_dir / SHADOW_FILE
    skipped: Counter[str] = Counter()
    usable: list[ShadowAnswer] = []
    for answer in _read(path):
        if fault := _fault(answer, pair, encoder_sha256):
            skipped[fault] += 1
        else:
            usable.append(answer)
    if not usable:
        found = "; ".join(f"{count} are {fault}" for fault, count in skipped.most_common()) or "it is empty"
        raise ArtifactError(
            f"{path} has no shadow answers of {pair.small.name} and {pair.large.name} to fit on: {found}"
        )
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
            f"{path} does not exist. The daemon writes this file if its policy has `shadow`; see "
            "docs/how-to/policies-for-quality.md."
        )
    keys = StateKeys(path.parent)
    try:
        keys.check()
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            database.create_function("opened", -1, keys.open)
            for (data,) in database.execute(NEWEST_ANSWERS, (MAX_ANSWERS,)):
                if (answer := decode_answer(data)) is not None:
                    yield answer
    except (sqlite3.Error, OSError, ConfigError) as error:
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
