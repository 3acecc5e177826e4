"""The judge that ships: pairs that were written before it was made, its bound, and its file."""

from __future__ import annotations

import math
import random
from pathlib import Path

import msgspec
import pytest

from causeway_server.models.catalog.artifact import ArtifactError, find_judged_artifact, find_signal, verify_artifact
from causeway_server.models.semantic.index import SemanticIndex
from causeway_server.models.semantic.judge import SAME_WORDS, Calibration, Judge, allowed_errors, read_judge
from causeway_train.evaluate.same_answer import label
from causeway_train.evaluate.semantic_stream import paraphrase, run_stream, stream, summarize
from causeway_train.function_calls.dataset import Row

HERE = Path(__file__).parent
REFUSED = [tuple(line.split("\t")) for line in (HERE / "refused_pairs.tsv").read_text().splitlines()]
SAME = [tuple(line.split("\t")) for line in (HERE / "same_pairs.tsv").read_text().splitlines()]
MOST_ERROR = 0.05  # the laxest promise that a policy can ask for


@pytest.fixture(scope="module")
def judge() -> Judge:
    artifact = find_signal("same-answer")
    return Judge.load(artifact, find_judged_artifact(artifact))


def hit(judge: Judge, stored: str, asked: str, max_error: float) -> bool:
    index = SemanticIndex(judge)
    first, second = judge.question(stored), judge.question(asked)
    assert first is not None
    assert second is not None
    assert judge.calibration is not None
    index.add(b"scope", first, b"key")
    match = index.find(b"scope", second)
    return match is not None and match.log_odds > judge.calibration.threshold(max_error)


def test_the_artifact_is_whole() -> None:
    verify_artifact(find_signal("same-answer"))


@pytest.mark.parametrize("kind", sorted({kind for kind, _, _ in REFUSED}))
def test_none_of_the_pairs_that_only_look_alike_is_a_hit(judge: Judge, kind: str) -> None:
    """208 opposites, numbers, names, ... in both directions, at the laxest threshold of all."""
    pairs = [(one, other) for of, one, other in REFUSED if of == kind]
    wrong = [(one, other) for one, other in pairs if hit(judge, one, other, MOST_ERROR)]
    wrong += [(other, one) for one, other in pairs if hit(judge, other, one, MOST_ERROR)]
    assert not wrong


def test_there_are_at_least_200_such_pairs() -> None:
    assert len(set(REFUSED)) >= 200


def test_politeness_and_contractions_are_hits(judge: Judge) -> None:
    """Refusing everything would pass the test above."""
    assert hit(judge, "turn on the lights in the kitchen", "could you please turn on the lights in the kitchen", 0.002)
    assert hit(judge, "what is the weather in paris", "what's the weather in paris?", 0.002)
    found = sum(hit(judge, stored, asked, 0.01) for stored, asked in SAME)
    assert found >= len(SAME) // 5


def test_the_same_words_are_certain(judge: Judge) -> None:
    one, other = judge.question("what is my name"), judge.question("What's my name?")
    assert one is not None
    assert other is not None
    assert judge.log_odds(one, [other], [1.0]).tolist() == [SAME_WORDS]


@pytest.mark.parametrize("text", ["", "  ", "?!", "word " * 200])
def test_a_text_without_words_or_too_long_is_never_compared(judge: Judge, text: str) -> None:
    assert judge.question(text) is None


@pytest.mark.parametrize(
    ("requests", "max_error", "allowed"), [(100, 0.01, -1), (229, 0.01, -1), (230, 0.01, 0), (1000, 0.01, 5)]
)
def test_the_count_of_errors_that_a_promise_allows(requests: int, max_error: float, allowed: int) -> None:
    """230: the first n with 0.99 ** n <= 0.1."""
    assert allowed_errors(requests, max_error) == allowed


def test_the_bound_holds_on_nine_of_ten_draws() -> None:
    """The true rate at the chosen threshold exceeds the promise in at most a tenth of the calibrations."""
    draw, exceeded = random.Random(1), 0
    for _ in range(200):
        # A request's answer is wrong above t with probability 0.05 * (1 - t), for t in [0, 1].
        scores = sorted((draw.random() for _ in range(2000) if draw.random() < 0.05), reverse=True)
        threshold = Calibration(2000, tuple(scores)).threshold(0.01)
        exceeded += 0.05 * (1 - threshold) > 0.01
    assert exceeded <= 20 + 12  # three standard deviations of 200 draws


def test_too_few_rows_promise_nothing() -> None:
    assert Calibration(100, (3.0, 2.0)).threshold(0.01) == math.inf


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff"])
def test_a_malformed_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "judge.json"
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match="for the semantic cache"):
        read_judge(path)


def test_a_judge_for_another_encoder_is_refused() -> None:
    artifact = find_signal("same-answer")
    other = msgspec.structs.replace(
        artifact, manifest=msgspec.structs.replace(artifact.manifest, judges_sha256="0" * 64)
    )
    with pytest.raises(ArtifactError, match="another version"):
        Judge.load(other, find_judged_artifact(artifact))


def test_a_stream_counts_hits_and_wrong_hits(judge: Judge) -> None:
    """Equal intent and slots are right; two data sets are two scopes."""
    texts = ["what is the weather", "tell me the weather", "what's the weather", "play jazz", "wake me at six am"]
    rows = label([Row(text=text, intent=text[-7:], source="hwu64") for text in texts * 3])
    assert len(rows) == len(texts)
    asks = [ask for part in ("train", "calibrate", "report") for ask in stream(rows, part)]
    scored, seconds = run_stream(judge, asks)
    result = summarize(asks, scored, seconds, 50.0)
    assert result.requests == len(texts)
    assert result.hits == pytest.approx(1 / 5)
    assert result.wrong == 0
    assert result.oracle == pytest.approx(2 / 5)


def test_a_paraphrase_is_another_text() -> None:
    draw = random.Random(1)
    assert all(paraphrase(text, draw) != text for text in ("what is the time", "lights on", "tell me a joke") * 9)
