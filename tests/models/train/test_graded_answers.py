"""What the device's model gets right and wrong: real answers, judged, kept, and as sure as the engine would say."""

from __future__ import annotations

import queue
from pathlib import Path

import pytest

pytest.importorskip("llama_cpp")

from models.catalog.artifact import find_artifact
from models.chat.template import PromptRenderer
from models.evaluate.greedy import Answer, GreedyModel
from models.function_calls.dataset import Row
from models.llama_cpp.engine import Engine
from models.llama_cpp.protocol import Emission, EngineOptions, Job, Prompt
from models.train.signals.graded_answers import WATCH, answer_rows, is_right, judge, question, refuses
from router.types import Confidence, Message, Sampling

LIGHT = Row("turn off the lights", "iot_hue_lightoff", source="hwu64")
CALL = '{"name":"iot_hue_lightoff","arguments":{}}'
AWAY = '{"name":"out_of_scope","arguments":{}}'
SEEN = tuple(Confidence(n, 0.9, -0.1, 0.9, 0.1) for n in range(1, 6))
TEXTS = ("turn off the lights", "wake me up at six am", "what is the capital of france")


def answer(text: str, refuse: float = 0.0) -> Answer:
    return Answer(text, (1, 2, 3), refuse, (-0.1,), SEEN)


def test_right_is_intent_and_every_argument_and_never_a_refusal() -> None:
    """The device should have been left alone with what it answers rightly, and with nothing that it turns away."""
    assert is_right(answer(CALL), LIGHT)
    assert not is_right(answer(CALL.replace("off", "on")), LIGHT)
    assert not is_right(answer("turn it off"), LIGHT)
    assert not is_right(answer(CALL, refuse=0.9), LIGHT)
    outside = Row("who wrote it", "oos", source="clinc150")
    assert refuses(answer(AWAY))
    assert not is_right(answer(AWAY), outside), "rightly turned away is still asked elsewhere"
    assert not is_right(answer(AWAY), question("who wrote it"))


def test_of_a_refusal_only_the_first_token_counts() -> None:
    """The engine ends such an answer there, so that is all a handoff ever sees."""
    told, away = judge([LIGHT, LIGHT], [answer(CALL), answer(AWAY, 0.9)], lambda row: True)
    assert (told.right, told.confidences) == (True, SEEN)
    assert (away.right, away.confidences) == (False, SEEN[:1])
    assert not judge([question("why")], [answer(CALL)], lambda row: True)[0].own


def test_answers_are_kept_and_taken_up_again(tmp_path: Path) -> None:
    """A second call asks the model nothing; a half-written part is asked again."""
    model, rows, said = find_artifact("assistant"), [question(text) for text in TEXTS], list[str]()
    first = answer_rows(model, rows, tmp_path, say=said.append)
    assert len(said) == 1
    assert answer_rows(model, rows, tmp_path, say=said.append) == first
    assert len(said) == 1
    (kept,) = tmp_path.glob("answers-*.json")
    kept.rename(kept.with_suffix(".partial"))
    assert [one.text for one in answer_rows(model, rows, tmp_path, say=said.append)] == [one.text for one in first]
    assert len(said) == 2


@pytest.mark.engine
def test_confidence_is_what_the_engine_reports() -> None:
    """The same tokens, the same numbers: what a calibrator is fitted on is what it is asked about later."""
    artifact = find_artifact("assistant")
    with GreedyModel(artifact.path, slots=1, context=512, threads=1) as model:
        prompter = PromptRenderer(model.chat_template)
        judged = model.answers([model.tokenize(prompter.user(text)) for text in TEXTS], watch=WATCH)
    for text, one in zip(TEXTS, judged, strict=True):
        reported = _reported(artifact.path, artifact.manifest.refuse_token or "", text)
        expected = one.confidences[:1] if refuses(one) else one.confidences
        assert [seen.tokens for seen in reported] == [seen.tokens for seen in expected]
        for ours, theirs in zip(expected, reported, strict=True):
            for name in ("score", "logprob", "margin", "entropy", "refusal"):
                assert getattr(ours, name) == pytest.approx(getattr(theirs, name), abs=0.02), (text, ours.tokens, name)


def _reported(path: Path, refuse_token: str, text: str) -> list[Confidence]:
    emissions: queue.Queue[Emission] = queue.Queue()
    options = EngineOptions(model_path=str(path), threads=1, sequences=1, refuse_token=refuse_token)
    engine = Engine(options, lambda many: [emissions.put(one) for one in many] and None)
    engine.start()
    prompt = Prompt(messages=(Message("user", text),))
    greedy = Sampling(temperature=0.0)
    engine.submit(Job(id=1, prompt=prompt, max_tokens=128, sampling=greedy, confidence_tokens=WATCH, refusal="end"))
    found: list[Confidence] = []
    while True:
        emission = emissions.get(timeout=60)
        assert not emission.error, emission.detail
        if emission.confidence is not None:
            found.append(emission.confidence)
        if emission.finish_reason is not None:
            engine.close()
            return found
