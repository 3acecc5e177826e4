"""Which place of the prompt each token of an answer is read from, and that attention can be taught to look there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.train.requirements import need_training_packages

need_training_packages()

import torch  # noqa: E402

from models.function_calls.call import expected_call  # noqa: E402
from models.function_calls.dataset import Row  # noqa: E402
from models.train.assistant.mixture import Example  # noqa: E402
from models.train.assistant.trainer import AuxiliaryOutputs, Trainer, TrainingPlan, answer_logits, looked  # noqa: E402
from models.train.auxiliary_losses.attention_loss import NOWHERE, sources  # noqa: E402
from models.train.network.llama import POINTERS, Llama, LlamaConfig  # noqa: E402
from models.train.network.tokenizer import AssistantTokenizer  # noqa: E402

ROW = Row(
    "wake me at six am and at noon in the café hall",
    "alarm_set",
    (("house_place", "café hall"), ("time", "noon"), ("time", "six am")),
    source="hwu64",
)


@pytest.fixture(scope="module")
def vocabulary() -> AssistantTokenizer:
    return AssistantTokenizer.train([ROW.text, "six am noon"] * 4, ["alarm_set"], ["time", "house_place"], 60)


def example(row: Row, vocabulary: AssistantTokenizer) -> Example:
    target = vocabulary.call(expected_call(row))
    prompt = vocabulary.prompt(vocabulary.texts([row.text])[0])
    return Example(prompt, target, row.source, looks=sources(row, target, vocabulary))


def test_every_token_of_a_value_is_read_from_its_own_place(vocabulary: AssistantTokenizer) -> None:
    """Values, lists of values too, map piece to piece; what closes one looks at the piece after it."""
    one = example(ROW, vocabulary)
    name = vocabulary.tokenizer.id_to_token
    pairs = [
        (name(token), name(one.prompt[look])) for token, look in zip(one.target, one.looks, strict=True) if look >= 0
    ]
    copied = [(wanted, seen) for wanted, seen in pairs if not wanted.startswith(('"', ","))]
    assert "".join(wanted for wanted, _ in copied).replace("Ġ", "") == "sixamnooncafÃ©hall"
    assert all(wanted.removeprefix("Ġ") == seen.removeprefix("Ġ") for wanted, seen in copied)
    assert pairs[0][0] == '"time":["'
    assert pairs[-1] == ('"}}', "<|assistant|>")
    assert one.looks[:3] == [NOWHERE] * 3
    assert one.looks[-1] == NOWHERE


def test_without_places_there_is_no_lesson(vocabulary: AssistantTokenizer) -> None:
    """No arguments, or a value that does not stand in the text: nothing is taught."""
    plain = Row("wake me", "alarm_set", source="hwu64")
    assert set(example(plain, vocabulary).looks) == {NOWHERE}
    missing = Row("wake me", "alarm_set", (("time", "noon"),), source="hwu64")
    assert set(example(missing, vocabulary).looks) == {NOWHERE}


def test_attention_learns_to_look_where_it_is_told(vocabulary: AssistantTokenizer, tmp_path: Path) -> None:
    """Sixty steps on one row bring the pointing loss down; without the lesson's weight it is not computed."""
    batch = [example(ROW, vocabulary)] * 4
    torch.manual_seed(3)
    network = Llama(LlamaConfig(vocabulary=vocabulary.size, width=64, layers=2, heads=1, hidden=96))

    def loss() -> float:
        seen = AuxiliaryOutputs()
        with torch.no_grad():
            answer_logits(network, batch, seen=seen)
        assert len(seen.scores) == POINTERS
        return float(looked(batch, seen.scores))

    before = loss()
    plan = TrainingPlan(minutes=5, steps=60, threads=1, warmup_steps=5, dropout=0.0, pointing=1.0)
    Trainer(network, plan, tmp_path).run(lambda: batch, lambda *_: None)
    assert loss() < before / 4


def test_the_mean_of_the_weights_follows_them(vocabulary: AssistantTokenizer, tmp_path: Path) -> None:
    """What is kept is a running mean: off the last weights while they move, close to them, and resumed with them."""
    batch = [example(ROW, vocabulary)]
    network = Llama(LlamaConfig(vocabulary=vocabulary.size, width=64, layers=1, heads=1, hidden=96))
    trainer = Trainer(network, TrainingPlan(minutes=5, steps=8, threads=1, warmup_steps=1), tmp_path)
    trainer.run(lambda: batch, lambda *_: None)
    mean, last = trainer.average.embedding.weight, network.embedding.weight
    assert 0 < float((mean - last).detach().abs().max()) < 0.05
    again = Trainer(Llama(network.shape), TrainingPlan(minutes=5, threads=1), tmp_path)
    assert again.resume()
    assert torch.equal(again.average.embedding.weight, mean)
