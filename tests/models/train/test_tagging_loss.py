"""The slot-tagging loss: labels, positions, and that a network learns them."""

from __future__ import annotations

from pathlib import Path

import pytest

from .requirements import need_training_packages

need_training_packages()

import torch  # noqa: E402

from causeway_train.assistant.batches import answer_logits  # noqa: E402
from causeway_train.assistant.mixture import Example  # noqa: E402
from causeway_train.assistant.trainer import Trainer, TrainingPlan  # noqa: E402
from causeway_train.auxiliary_losses.tagging_loss import OUTSIDE, SlotLabels, SlotTagger  # noqa: E402
from causeway_train.function_calls.dataset import Row  # noqa: E402
from causeway_train.network.llama import Llama, LlamaConfig  # noqa: E402
from causeway_train.network.tokenizer import AssistantTokenizer  # noqa: E402

pytestmark = pytest.mark.slow

ROW = Row("wake me at six am in rome", "alarm_set", (("time", "six am"), ("house_place", "rome")), source="hwu64")
LABELS = SlotLabels(["house_place", "time"])


@pytest.fixture(scope="module")
def tokenizer() -> AssistantTokenizer:
    return AssistantTokenizer.train([ROW.text] * 4, ["alarm_set"], ["time", "house_place"], 60)


def test_the_first_token_of_a_value_has_a_label_of_its_own(tokenizer: AssistantTokenizer) -> None:
    tags = LABELS.tags(ROW, tokenizer)
    (encoded,) = tokenizer.encode_with_offsets([ROW.text])
    labelled = {
        (label, ROW.text[start:end].strip())
        for label, (start, end) in zip(tags, encoded.offsets, strict=True)
        if label != OUTSIDE
    }
    assert len(tags) == len(encoded.ids)
    assert {label for label, _ in labelled} <= {1, 2, 3, 4}
    assert (3, "six") in labelled
    assert (4, "am") in labelled
    assert "".join(text for label, text in sorted(labelled) if label < 3)[0] == "r"


def test_a_value_that_is_not_in_the_text_has_no_loss(tokenizer: AssistantTokenizer) -> None:
    assert LABELS.tags(Row("wake me", "alarm_set", (("time", "noon"),), source="hwu64"), tokenizer) == []
    assert float(SlotTagger(8, LABELS.count).loss(torch.randn(1, 4, 8), [(1, [])])) == 0.0


def test_the_message_is_repeated_unless_it_is_long_or_an_earlier_turn(tokenizer: AssistantTokenizer) -> None:
    ids = tokenizer.encode_batch([ROW.text])[0]
    prompt = tokenizer.last_prompt(ROW.text, ids)
    assert prompt == [tokenizer.user, *ids, tokenizer.repeat_token, *ids, tokenizer.assistant]
    assert tokenizer.earlier_prompt(prompt) == tokenizer.prompt(ids)
    assert tokenizer.last_prompt("x" * 1000, ids) == tokenizer.prompt(ids)
    single = AssistantTokenizer.train([ROW.text] * 4, ["alarm_set"], ["time", "house_place"], 60, repeat=False)
    assert single.last_prompt(ROW.text, ids) == single.prompt(ids) == single.earlier_prompt(single.prompt(ids))


def test_a_network_learns_slot_tags_and_its_tagger_resumes(tokenizer: AssistantTokenizer, tmp_path: Path) -> None:
    """The tagger is part of the checkpoint."""
    ids = tokenizer.encode_batch([ROW.text])[0]
    tags = LABELS.tags(ROW, tokenizer)
    batch = [Example(tokenizer.last_prompt(ROW.text, ids), [tokenizer.end], "hwu64", slot_tags=tags)] * 2
    network = Llama(LlamaConfig(vocabulary=tokenizer.size, width=64, layers=3, heads=1, hidden=96))
    plan = TrainingPlan(minutes=5, steps=60, threads=1, warmup_steps=5, dropout=0.0, tagging_weight=1.0)
    trainer = Trainer(network, plan, tmp_path, slot_labels=LABELS.count)
    before = float(trainer.loss(batch).detach())
    trainer.run(lambda: batch, lambda *_: None)
    after = float(trainer.loss(batch).detach())
    assert after < before / 4
    resumed = Trainer(Llama(network.shape), plan, tmp_path, slot_labels=LABELS.count)
    assert resumed.resume()
    assert float(resumed.loss(batch).detach()) == pytest.approx(after, rel=0.2, abs=0.1)
    with torch.no_grad():
        assert answer_logits(resumed.averaged, batch)[0].shape[1] == tokenizer.size
