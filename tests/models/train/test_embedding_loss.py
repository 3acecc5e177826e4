"""The lesson in meaning: vectors are asked for once, and a network comes to say them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.models.train.requirements import need_training_packages

need_training_packages()

import torch  # noqa: E402

from models.train.assistant.mixture import Example  # noqa: E402
from models.train.assistant.trainer import Trainer, TrainingPlan  # noqa: E402
from models.train.auxiliary_losses.embedding_loss import (  # noqa: E402
    TEXTS,
    UNKNOWN,
    VECTORS,
    EmbeddingProjection,
    SentenceEmbeddings,
)
from models.train.network.llama import Llama, LlamaConfig  # noqa: E402

SAID = ["louder", "softer", "six am"]


def meanings() -> SentenceEmbeddings:
    return SentenceEmbeddings(
        SAID, torch.nn.functional.normalize(torch.randn(3, 16, generator=torch.manual_seed(2)), dim=-1)
    )


def test_vectors_are_kept_and_not_asked_for_again(tmp_path: Path) -> None:
    """What lies in the run's folder is taken as it is, scaled to length 1; other texts are unknown."""
    (tmp_path / TEXTS).write_text('["louder","softer"]')
    np.save(tmp_path / VECTORS, np.array([[3.0, 4.0], [0.0, 2.0]], dtype=np.float32))
    known = SentenceEmbeddings.of(tmp_path / "missing.onnx", ["anything"], tmp_path)
    assert known.vectors[known.at("louder")].tolist() == pytest.approx([0.6, 0.8])
    assert known.at("anything") == UNKNOWN


def test_unknown_texts_teach_nothing() -> None:
    """Their loss is zero, and they do not weigh on those that are known."""
    reader = EmbeddingProjection(8, meanings())
    states = torch.randn(2, 8)
    assert float(reader.loss(states, [UNKNOWN, UNKNOWN])) == 0.0
    assert float(reader.loss(states, [1, UNKNOWN]).detach()) == pytest.approx(
        float(reader.loss(states[:1], [1]).detach())
    )


def test_a_network_learns_to_say_meanings_and_its_reader_resumes(tmp_path: Path) -> None:
    """Forty steps bring the cosine up; the map to the vectors is part of the checkpoint."""
    batch = [Example([1, 5 + index, 2], [7, 3], "hwu64", meaning=index) for index in range(3)]
    network = Llama(LlamaConfig(vocabulary=64, width=64, layers=2, heads=1, hidden=96))
    plan = TrainingPlan(minutes=5, steps=40, threads=1, warmup_steps=2, dropout=0.0, meaning=1.0, vector_lr=1e-2)
    losses: list[float] = []
    trainer = Trainer(network, plan, tmp_path, meanings=meanings())
    batch_losses = [float(trainer._loss(batch).detach())]
    trainer.run(lambda: batch, lambda _, loss: losses.append(loss))
    assert float(trainer._loss(batch).detach()) < batch_losses[0] / 4
    again = Trainer(Llama(network.shape), plan, tmp_path, meanings=meanings())
    assert again.resume()
    assert float(again._loss(batch).detach()) == pytest.approx(float(trainer._loss(batch).detach()), rel=0.2, abs=0.1)
