"""`calibrate --from-shadow`: a device's own traffic is fitted on, and what cannot be is said."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

pytest.importorskip("onnxruntime")

from click.testing import CliRunner, Result

from causeway_server.models.catalog.artifact import find_artifact, find_signal
from causeway_server.models.cli.commands import main
from causeway_server.models.signals import SHADOW_FILE as FILE
from causeway_server.models.signals.agreement import answers_agree
from causeway_server.models.signals.drift import measure_drift
from causeway_server.models.signals.encoder import SentenceEncoder, Vector
from causeway_server.models.signals.pair import ModelIdentity, PairEstimator, prompt_features
from causeway_server.models.signals.shadow import PUT_ANSWER, SCHEMA, ShadowAnswer
from tests.edge_node.storage.encrypted import database_of

from .pairs import EASY, answered, prompts

pytestmark = pytest.mark.slow

SMALL = ModelIdentity("assistant", find_artifact("assistant").manifest.sha256)
ASKED = prompts(160)
AFTER = 3


@pytest.fixture(scope="module")
def learned() -> list[ShadowAnswer]:
    """What a device kept: the device is good at one kind of prompt, and its confidence tells."""
    encoder = find_artifact("encoder")
    encode, found = SentenceEncoder(encoder.path), answered(ASKED, seed=1)
    return [
        ShadowAnswer(
            small=SMALL,
            large="assistant-large",
            route="calibrated",
            encoder_sha256=encoder.manifest.sha256,
            inputs=np.array(prompt_features(one.question, encode), np.float32).tobytes(),
            agreed=found[one.id].small.text == one.answer,
            confidence=found[one.id].small.confidences[-1],
            after=AFTER,
        )
        for one in ASKED
    ]


def state(folder: Path, answers: Sequence[ShadowAnswer]) -> Path:
    with database_of(folder / FILE) as database:
        database.executescript(SCHEMA)
        database.executemany(PUT_ANSWER, [(msgspec.msgpack.encode(one),) for one in answers])
    return folder


def refit(folder: Path, large: str = "assistant-large") -> Result:
    names = ["--small", "assistant", "--large", large, "--keep", "0.8", "--to", str(folder / "to")]
    return CliRunner().invoke(main, ["calibrate", *names, "--from-shadow", str(folder)])


def test_a_device_s_own_traffic_is_fitted_on(tmp_path: Path, learned: list[ShadowAnswer]) -> None:
    """Rows that another version wrote are passed over; nothing is asked, and the artifact is a pair's as any other."""
    state(tmp_path, learned)
    with database_of(tmp_path / FILE) as database:
        database.execute(PUT_ANSWER, (b"another version",))
    result = refit(tmp_path)
    assert result.exit_code == 0, result.output
    assert f"handoff: {{after_tokens: {AFTER}, below: 0." in result.output
    signal = find_signal("pair", find_artifact("assistant"), (tmp_path / "to",))
    estimator = PairEstimator.for_models(signal, find_artifact("assistant"), find_signal("embedding"))
    easy, hard = (estimator.quality(one.question) for one in ASKED[:2])
    assert ASKED[0].task == EASY
    assert easy > hard + 0.2


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, "49 prompts are answered, but a fit needs at least 50"),
        ({"confidence": None}, "49 are without confidence, because their route has no handoff"),
        ({"encoder_sha256": "0"}, "49 are made with another sentence encoder"),
        ({"small": ModelIdentity("assistant", "0" * 64)}, "49 are of assistant (000000000000) and assistant-large"),
        ({"large": "another"}, "and another"),
    ],
)
def test_answers_that_cannot_be_fitted_on_are_said(
    tmp_path: Path, learned: list[ShadowAnswer], changes: dict[str, object], fault: str
) -> None:
    result = refit(state(tmp_path, [msgspec.structs.replace(one, **changes) for one in learned[:49]]))
    assert result.exit_code != 0
    assert fault in result.output


def test_a_folder_without_shadow_answers_and_wrong_options_are_refused(tmp_path: Path) -> None:
    assert "does not exist. The daemon writes this file" in refit(tmp_path).output
    (tmp_path / FILE).write_bytes(b"garbage" * 100)
    assert "not a database" in refit(tmp_path).output
    both = ["calibrate", "--small", "assistant", "--large", "assistant-large", "--to", str(tmp_path)]
    assert "name either --prompts or --from-shadow" in CliRunner().invoke(main, both).output
    (tmp_path / "p.jsonl").write_text('{"prompt": "x"}')
    asked = [*both, "--prompts", str(tmp_path / "p.jsonl")]
    assert "--prompts needs --run-dir" in CliRunner().invoke(main, asked).output


QUIZ = "Where is down?\nA. up\nB. below"


@pytest.mark.parametrize(
    ("question", "small", "large", "agrees"),
    [
        (QUIZ, "B", "B. below", True),
        (QUIZ, "A) up", "B. below", False),
        (QUIZ, "A good question", "A fine answer", False),  # no letter: compared as texts
        ("How many?", "12", "It is 12.", True),
        ("Who?", "The Beatles", "It was the Beatles", True),
        ("Who?", "me", "you", False),
    ],
)
def test_answers_are_compared_by_their_texts_alone(question: str, small: str, large: str, agrees: bool) -> None:
    def encode(text: str) -> Vector:
        return np.eye(256, dtype=np.float32)[len(text)]

    assert answers_agree(question, small, large, encode) is agrees


def test_drift_is_what_chance_does_not_explain() -> None:
    """True probabilities have an error too, but no drift to speak of."""
    draw = np.random.default_rng(1)
    stated = draw.uniform(0, 1, 200)
    true = measure_drift(stated.tolist(), (draw.uniform(0, 1, 200) < stated).tolist())
    assert true.error > 0.03
    assert true.drift < 0.03
    wrong = measure_drift(stated.tolist(), (draw.uniform(0, 1, 200) < 1 - stated).tolist())
    assert wrong.drift > 0.3
    assert measure_drift([], []).drift == 0.0
