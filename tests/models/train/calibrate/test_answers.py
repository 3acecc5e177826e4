"""The answers' file: a killed run goes on, and answers of other weights are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from causeway_server.models.catalog.artifact import ArtifactError
from causeway_server.models.signals.pair import ModelIdentity
from causeway_train.calibrate.prompts import AnswerLog, ModelAnswer, Pair, PairAnswers

PAIR = Pair(ModelIdentity("small", "a" * 64), ModelIdentity("large", "b" * 64))
ROWS = [PairAnswers(str(number), "task", ModelAnswer("yes"), ModelAnswer("no")) for number in range(3)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with three rows."""
    path = tmp_path / "run" / "answers.jsonl"
    with AnswerLog(path, PAIR) as log:
        for row in ROWS:
            log.append(row)
    return path


def test_a_row_that_a_killed_run_left_incomplete_is_cut_off(path: Path) -> None:
    """At any byte; the next row is whole again."""
    whole = path.read_bytes()
    for length in range(whole.rindex(b"\n", 0, -1) + 1, len(whole)):
        path.write_bytes(whole[:length])
        with AnswerLog(path, PAIR) as log:
            assert list(log.rows.values()) == ROWS[:2]
            log.append(ROWS[2])
        assert path.read_bytes() == whole


def test_a_run_that_was_killed_in_the_first_line_begins_again(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:10])
    with AnswerLog(path, PAIR) as log:
        assert not log.rows


def test_answers_of_other_weights_are_refused(path: Path) -> None:
    for other in (Pair(PAIR.small, ModelIdentity("large", "c" * 64)), Pair(PAIR.large, PAIR.small)):
        with pytest.raises(ArtifactError, match=r"not of the weights of this run\. Name another --run-dir folder"):
            AnswerLog(path, other)


def test_a_garbled_line_is_refused_with_its_number(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'{"id":"1"', b'{"id":1'))
    with pytest.raises(ArtifactError, match=f"{path}:3: "):
        AnswerLog(path, PAIR)
