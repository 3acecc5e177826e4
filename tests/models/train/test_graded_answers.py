"""Graded answers of the device's model: correctness, caching, and the confidence that the engine would report."""

from __future__ import annotations

import queue
from pathlib import Path

import pytest

pytest.importorskip("llama_cpp")

from causeway_server.models.catalog.artifact import find_artifact
from causeway_server.models.llama_cpp.engine import Engine
from causeway_server.models.llama_cpp.protocol import Emission, EngineOptions, Prompt, SequenceRequest
from causeway_server.router.types import Confidence, Message, Sampling
from causeway_train.data.prompt_renderer import PromptRenderer
from causeway_train.evaluate.greedy import Answer, GreedyModel
from causeway_train.function_calls.dataset import Row
from causeway_train.signals.graded_answers import (
    CONFIDENCE_TOKENS,
    answer_rows,
    grade,
    is_correct,
    is_refusal,
    question,
)

LIGHT = Row("turn off the lights", "iot_hue_lightoff", source="hwu64")
CALL = '{"name":"iot_hue_lightoff","arguments":{}}'
REFUSAL = '{"name":"out_of_scope","arguments":{}}'
CONFIDENCES = tuple(Confidence(n, 0.9, -0.1, 0.9, 0.1) for n in range(1, 6))
TEXTS = ("turn off the lights", "wake me up at six am", "what is the capital of france")


def answer(text: str, refuse: float = 0.0) -> Answer:
    return Answer(text, (1, 2, 3), refuse, (-0.1,), CONFIDENCES)


def test_an_answer_is_correct_by_intent_and_arguments_and_never_a_refusal() -> None:
    assert is_correct(answer(CALL), LIGHT)
    assert not is_correct(answer(CALL.replace("off", "on")), LIGHT)
    assert not is_correct(answer("turn it off"), LIGHT)
    assert not is_correct(answer(CALL, refuse=0.9), LIGHT)
    outside = Row("who wrote it", "oos", source="clinc150")
    assert is_refusal(answer(REFUSAL))
    assert not is_correct(answer(REFUSAL), outside), "a justified refusal is still deferred"
    assert not is_correct(answer(REFUSAL), question("who wrote it"))


def test_only_the_first_confidence_of_a_refusal_is_kept() -> None:
    """The engine ends such an answer there, so a handoff sees no more."""
    answered, refused = grade([LIGHT, LIGHT], [answer(CALL), answer(REFUSAL, 0.9)], lambda row: True)
    assert (answered.correct, answered.confidences) == (True, CONFIDENCES)
    assert (refused.correct, refused.confidences) == (False, CONFIDENCES[:1])
    assert not grade([question("why")], [answer(CALL)], lambda row: True)[0].in_domain


def test_answers_are_kept_and_reused(tmp_path: Path) -> None:
    """A second call does not run the model; a partly written file is made again."""
    model, rows, messages = find_artifact("assistant"), [question(text) for text in TEXTS], list[str]()
    first = answer_rows(model, rows, tmp_path, progress=messages.append)
    assert len(messages) == 1
    assert answer_rows(model, rows, tmp_path, progress=messages.append) == first
    assert len(messages) == 1
    (kept,) = tmp_path.glob("answers-*.json")
    kept.rename(kept.with_suffix(".partial"))
    assert [one.text for one in answer_rows(model, rows, tmp_path, progress=messages.append)] == [
        one.text for one in first
    ]
    assert len(messages) == 2


@pytest.mark.engine
def test_confidence_equals_the_one_that_the_engine_reports() -> None:
    """A calibrator is fitted on the values that it receives in service."""
    artifact = find_artifact("assistant")
    with GreedyModel(artifact.path, slots=1, context=512, threads=1) as model:
        prompter = PromptRenderer(model.chat_template)
        answers = model.answers(
            [model.tokenize(prompter.user(text)) for text in TEXTS], confidence_tokens=CONFIDENCE_TOKENS
        )
    for text, answered in zip(TEXTS, answers, strict=True):
        reported = _reported(artifact.path, artifact.manifest.refuse_token or "", text)
        expected = answered.confidences[:1] if is_refusal(answered) else answered.confidences
        assert [one.tokens for one in reported] == [one.tokens for one in expected]
        for ours, theirs in zip(expected, reported, strict=True):
            for name in ("score", "logprob", "margin", "entropy", "refusal"):
                assert getattr(ours, name) == pytest.approx(getattr(theirs, name), abs=0.02), (text, ours.tokens, name)


def _reported(path: Path, refuse_token: str, text: str) -> list[Confidence]:
    emissions: queue.Queue[Emission] = queue.Queue()
    options = EngineOptions(model_path=str(path), threads=1, sequences=1, refuse_token=refuse_token)

    def keep(many: list[Emission]) -> None:
        for one in many:
            emissions.put(one)

    engine = Engine(options, keep)
    engine.start()
    prompt = Prompt(messages=(Message("user", text),))
    greedy = Sampling(temperature=0.0)
    engine.submit(
        SequenceRequest(
            id=1, prompt=prompt, max_tokens=128, sampling=greedy, confidence_tokens=CONFIDENCE_TOKENS, refusal="end"
        )
    )
    found: list[Confidence] = []
    while True:
        emission = emissions.get(timeout=60)
        assert not emission.error, emission.detail
        if emission.confidence is not None:
            found.append(emission.confidence)
        if emission.finish_reason is not None:
            engine.close()
            return found
