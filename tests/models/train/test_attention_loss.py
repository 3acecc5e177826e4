"""Attention targets: the prompt position that each token of an answer is copied from, and training on them."""

from __future__ import annotations

from pathlib import Path

import pytest

from .requirements import need_training_packages

need_training_packages()

import torch  # noqa: E402

from causeway_train.assistant.batches import answer_logits, attention_loss  # noqa: E402
from causeway_train.assistant.mixture import Example  # noqa: E402
from causeway_train.assistant.trainer import Trainer, TrainingPlan  # noqa: E402
from causeway_train.auxiliary_losses.attention_loss import NO_TARGET, attention_targets  # noqa: E402
from causeway_train.function_calls.call import expected_call  # noqa: E402
from causeway_train.function_calls.dataset import Row  # noqa: E402
from causeway_train.network.llama import SUPERVISED_LAYERS, AuxiliaryOutputs, Llama, LlamaConfig  # noqa: E402
from causeway_train.network.tokenizer import AssistantTokenizer  # noqa: E402

pytestmark = pytest.mark.slow

ROW = Row(
    "wake me at six am and at noon in the café hall",
    "alarm_set",
    (("house_place", "café hall"), ("time", "noon"), ("time", "six am")),
    source="hwu64",
)


@pytest.fixture(scope="module")
def tokenizer() -> AssistantTokenizer:
    return AssistantTokenizer.train([ROW.text, "six am noon"] * 4, ["alarm_set"], ["time", "house_place"], 60)


def example(row: Row, tokenizer: AssistantTokenizer) -> Example:
    target = tokenizer.encode_call(expected_call(row))
    prompt = tokenizer.prompt(tokenizer.encode_batch([row.text])[0])
    return Example(prompt, target, row.source, attention_targets=attention_targets(row, target, tokenizer))


def test_every_token_of_a_value_attends_to_its_own_position(tokenizer: AssistantTokenizer) -> None:
    """Also in lists of values; the token that closes a value attends to the one after it."""
    one = example(ROW, tokenizer)

    def name(token: int) -> str:
        return tokenizer.bpe.id_to_token(token) or ""

    pairs = [
        (name(token), name(one.prompt[position]))
        for token, position in zip(one.target, one.attention_targets, strict=True)
        if position >= 0
    ]
    copied = [(token, source) for token, source in pairs if not token.startswith(('"', ","))]
    assert "".join(token for token, _ in copied).replace("Ġ", "") == "sixamnooncafÃ©hall"
    assert all(token.removeprefix("Ġ") == source.removeprefix("Ġ") for token, source in copied)
    assert pairs[0][0] == '"time":["'
    assert pairs[-1] == ('"}}', "<|assistant|>")
    assert one.attention_targets[:3] == [NO_TARGET] * 3
    assert one.attention_targets[-1] == NO_TARGET


def test_without_values_in_the_text_there_is_no_target(tokenizer: AssistantTokenizer) -> None:
    plain = Row("wake me", "alarm_set", source="hwu64")
    assert set(example(plain, tokenizer).attention_targets) == {NO_TARGET}
    missing = Row("wake me", "alarm_set", (("time", "noon"),), source="hwu64")
    assert set(example(missing, tokenizer).attention_targets) == {NO_TARGET}


def test_attention_learns_its_targets(tokenizer: AssistantTokenizer, tmp_path: Path) -> None:
    batch = [example(ROW, tokenizer)] * 4
    torch.manual_seed(3)
    network = Llama(LlamaConfig(vocabulary=tokenizer.size, width=64, layers=2, heads=1, hidden=96))

    def loss() -> float:
        outputs = AuxiliaryOutputs()
        with torch.no_grad():
            answer_logits(network, batch, auxiliary=outputs)
        assert len(outputs.attention_scores) == SUPERVISED_LAYERS
        return float(attention_loss(batch, outputs.attention_scores))

    before = loss()
    plan = TrainingPlan(minutes=5, steps=60, threads=1, warmup_steps=5, dropout=0.0, attention_weight=1.0)
    Trainer(network, plan, tmp_path).run(lambda: batch, lambda *_: None)
    assert loss() < before / 4


def test_the_averaged_weights_follow_and_resume(tokenizer: AssistantTokenizer, tmp_path: Path) -> None:
    """They differ from the last weights while these move, stay close to them, and are part of the checkpoint."""
    batch = [example(ROW, tokenizer)]
    network = Llama(LlamaConfig(vocabulary=tokenizer.size, width=64, layers=1, heads=1, hidden=96))
    trainer = Trainer(network, TrainingPlan(minutes=5, steps=8, threads=1, warmup_steps=1), tmp_path)
    trainer.run(lambda: batch, lambda *_: None)
    mean, last = trainer.averaged.embedding.weight, network.embedding.weight
    assert 0 < float((mean - last).detach().abs().max()) < 0.05
    resumed = Trainer(Llama(network.shape), TrainingPlan(minutes=5, threads=1), tmp_path)
    assert resumed.resume()
    assert torch.equal(resumed.averaged.embedding.weight, mean)
