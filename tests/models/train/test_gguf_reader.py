"""A published GGUF is a place to go on from: same logits, same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.train.requirements import need_training_packages

need_training_packages()

import torch  # noqa: E402

from models.catalog.artifact import SHIPPED, ArtifactError  # noqa: E402
from models.train.export.gguf_reader import start_from  # noqa: E402
from models.train.export.gguf_writer import GGUFMetadata, write_gguf  # noqa: E402
from models.train.network.llama import Llama, LlamaConfig  # noqa: E402
from models.train.network.tokenizer import AssistantTokenizer  # noqa: E402

TEXTS = ["wake me up at six am", "turn on the light in the café", 'odd "quotes", {braces} and 12:45!', ""]


@pytest.mark.parametrize("twice", [True, False])
def test_weights_and_tokenizer_come_back(tmp_path: Path, twice: bool) -> None:
    """What was exported is read back bit by bit; only the way of reading may be chosen anew."""
    vocabulary = AssistantTokenizer.train(TEXTS, ["alarm_set"], ["time"], 60, twice=False)
    torch.manual_seed(4)
    network = Llama(LlamaConfig(vocabulary=vocabulary.size, width=128, layers=2, heads=2, hidden=96))
    path = tmp_path / "f32.gguf"
    write_gguf(network, vocabulary, path, GGUFMetadata("tiny", "a test"))
    found, known = start_from(path, read_twice=twice)
    assert found.shape == network.shape
    assert known.texts(TEXTS) == vocabulary.texts(TEXTS)
    assert (known.again is not None) == twice
    ids = torch.tensor([vocabulary.prompt(vocabulary.texts(TEXTS)[0])])
    with torch.no_grad():
        assert torch.equal(found(ids), network(ids))


def test_what_ships_can_be_gone_on_from() -> None:
    """The device's INT4 model is one: its weights are widened again."""
    network, vocabulary = start_from(SHIPPED / "assistant" / "model.gguf", read_twice=True)
    assert network.shape.vocabulary == vocabulary.size
    assert bool(torch.isfinite(network(torch.tensor([vocabulary.prompt(vocabulary.texts(TEXTS)[0])]))).all())


def test_a_file_of_another_make_is_refused(tmp_path: Path) -> None:
    """With its name in the message."""
    path = tmp_path / "other.gguf"
    path.write_bytes(b"GGUF but no more")
    with pytest.raises(ArtifactError, match=r"other\.gguf"):
        start_from(path, read_twice=True)
