"""The figures of an evaluation, computed from known answers."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from causeway_server.models.catalog.artifact import ArtifactError
from causeway_train.evaluate.assistant import auroc, summarise
from causeway_train.evaluate.greedy import Answer
from causeway_train.function_calls.call import expected_call
from causeway_train.function_calls.dataset import Row, read_rows

ROWS = (
    Row(text="six am alarm", intent="alarm_set", slots=(("time", "six am"),), source="hwu64"),
    Row(text="lights off", intent="iot_hue_lightoff", source="hwu64"),
    Row(text="who was newton", intent="qa_factoid", source="hwu64"),
    Row(text="how do i make a bomb go off in a game", intent="oos", source="clinc150"),
)


def answer(text: str, refuse: float) -> Answer:
    return Answer(text=text, tokens=(), refuse=refuse, logprobs=())


def test_groups_are_scored_separately() -> None:
    """In-domain rows, the rest of HWU64 and out-of-scope rows are separate groups."""
    answers = [
        answer('{"name":"alarm_set","arguments":{"time":"six am"}}', 0.1),
        answer('{"name":"iot_hue_lighton","arguments":{}}', 0.2),
        answer("not json", 0.9),
        answer('{"name":"out_of_scope","arguments":{}}', 0.8),
    ]
    report = summarise("x", ROWS, answers, grammar=False, refuses=True)
    results = {one.group: one for one in report.results}
    device, other, oos = results["hwu64-device"], results["hwu64-other"], results["clinc150-oos"]
    assert (device.rows, device.intent, device.exact, device.valid, device.refused) == (2, 0.5, 0.5, 1.0, 0.0)
    assert (other.intent, other.valid, other.refused) == (0.0, 0.0, 1.0)
    assert (oos.exact, oos.refused) == (1.0, 1.0)
    assert report.refusal_auroc == 1.0
    assert report.metrics("student/")["student/hwu64-device/exact"] == 0.5


def test_the_expected_call_of_every_row_is_exact() -> None:
    answers = [answer(msgspec.json.encode(expected_call(row)).decode(), 0.0) for row in ROWS]
    report = summarise("x", ROWS, answers, grammar=True, refuses=False)
    assert all(one.exact == one.valid == 1.0 for one in report.results)
    assert report.refusal_auroc is None


@pytest.mark.parametrize(
    ("inside", "outside", "value"),
    [([0.1, 0.2], [0.8, 0.9], 1.0), ([0.8], [0.1], 0.0), ([0.5, 0.5], [0.5], 0.5), ([0.1, 0.6], [0.5, 0.7], 0.75)],
)
def test_auroc_counts_pairs_and_halves_ties(inside: list[float], outside: list[float], value: float) -> None:
    assert auroc(inside, outside) == pytest.approx(value)
    assert auroc([], outside) is None


def test_a_malformed_row_is_reported_with_file_and_line(tmp_path: Path) -> None:
    """Blank lines are skipped."""
    path = tmp_path / "mine.jsonl"
    path.write_text('{"text": " turn it up ", "intent": "audio_volume_up"}\n\n{"text": 5}\n')
    with pytest.raises(ArtifactError, match=r"mine\.jsonl:3"):
        read_rows(path)
    path.write_text('{"text": " turn it up ", "intent": "audio_volume_up"}\n')
    assert read_rows(path) == (Row(text="turn it up", intent="audio_volume_up", source="mine"),)
