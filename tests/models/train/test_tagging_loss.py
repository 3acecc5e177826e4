"""The lesson which word belongs to which argument: labels, places, and that a network learns it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.train.requirements import need_training_packages

need_training_packages()

import torch  # noqa: E402

from models.function_calls.dataset import Row  # noqa: E402
from models.train.assistant.mixture import Example  # noqa: E402
from models.train.assistant.trainer import Trainer, TrainingPlan, answer_logits  # noqa: E402
from models.train.auxiliary_losses.tagging_loss import OUTSIDE, SlotLabels, SlotTagger  # noqa: E402
from models.train.network.llama import Llama, LlamaConfig  # noqa: E402
from models.train.network.tokenizer import AssistantTokenizer  # noqa: E402

ROW = Row("wake me at six am in rome", "alarm_set", (("time", "six am"), ("house_place", "rome")), source="hwu64")
LABELS = SlotLabels(["house_place", "time"])


@pytest.fixture(scope="module")
def vocabulary() -> AssistantTokenizer:
    return AssistantTokenizer.train([ROW.text] * 4, ["alarm_set"], ["time", "house_place"], 60)


def test_a_value_begins_and_goes_on(vocabulary: AssistantTokenizer) -> None:
    """Each argument has one label for its first token and one for the others; every other word has none."""
    tags = LABELS.tags(ROW, vocabulary)
    (encoded,) = vocabulary.encodings([ROW.text])
    told = {
        (label, ROW.text[start:end].strip())
        for label, (start, end) in zip(tags, encoded.offsets, strict=True)
        if label != OUTSIDE
    }
    assert len(tags) == len(encoded.ids)
    assert {label for label, _ in told} <= {1, 2, 3, 4}
    assert (3, "six") in told
    assert (4, "am") in told
    assert "".join(text for label, text in sorted(told) if label < 3)[0] == "r"


def test_a_value_that_is_not_in_the_text_teaches_nothing(vocabulary: AssistantTokenizer) -> None:
    """Rather no lesson than a wrong one."""
    assert LABELS.tags(Row("wake me", "alarm_set", (("time", "noon"),), source="hwu64"), vocabulary) == []
    assert float(SlotTagger(8, LABELS.count).loss(torch.randn(1, 4, 8), [(1, [])])) == 0.0


def test_the_utterance_is_read_again_unless_it_is_long_or_an_earlier_turn(vocabulary: AssistantTokenizer) -> None:
    """The tags are those of the reading just before the answer."""
    ids = vocabulary.texts([ROW.text])[0]
    asked = vocabulary.asked(ROW.text, ids)
    assert asked == [vocabulary.user, *ids, vocabulary.again, *ids, vocabulary.assistant]
    assert vocabulary.once(asked) == vocabulary.prompt(ids)
    assert vocabulary.asked("x" * 1000, ids) == vocabulary.prompt(ids)
    old = AssistantTokenizer.train([ROW.text] * 4, ["alarm_set"], ["time", "house_place"], 60, twice=False)
    assert old.asked(ROW.text, ids) == old.prompt(ids) == old.once(old.prompt(ids))


def test_a_network_learns_to_mark_arguments_and_its_tagger_resumes(
    vocabulary: AssistantTokenizer, tmp_path: Path
) -> None:
    """Sixty steps bring the tagging loss down; the map to the labels is part of the checkpoint."""
    ids = vocabulary.texts([ROW.text])[0]
    tags = LABELS.tags(ROW, vocabulary)
    batch = [Example(vocabulary.asked(ROW.text, ids), [vocabulary.end], "hwu64", tags=tags)] * 2
    network = Llama(LlamaConfig(vocabulary=vocabulary.size, width=64, layers=3, heads=1, hidden=96))
    plan = TrainingPlan(minutes=5, steps=60, threads=1, warmup_steps=5, dropout=0.0, tagging=1.0)
    trainer = Trainer(network, plan, tmp_path, labels=LABELS.count)
    before = float(trainer._loss(batch).detach())
    trainer.run(lambda: batch, lambda *_: None)
    after = float(trainer._loss(batch).detach())
    assert after < before / 4
    again = Trainer(Llama(network.shape), plan, tmp_path, labels=LABELS.count)
    assert again.resume()
    assert float(again._loss(batch).detach()) == pytest.approx(after, rel=0.2, abs=0.1)
    with torch.no_grad():
        assert answer_logits(again.average, batch)[0].shape[1] == vocabulary.size
