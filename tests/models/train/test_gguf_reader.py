"""Reading a published GGUF as the start of training: same logits, same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from .requirements import need_training_packages

need_training_packages()

import torch  # noqa: E402

from causeway_server.models.catalog.artifact import SHIPPED, ArtifactError  # noqa: E402
from causeway_train.export.gguf_reader import read_network  # noqa: E402
from causeway_train.export.gguf_writer import GGUFMetadata, write_gguf  # noqa: E402
from causeway_train.network.llama import Llama, LlamaConfig  # noqa: E402
from causeway_train.network.tokenizer import AssistantTokenizer  # noqa: E402

pytestmark = pytest.mark.slow

TEXTS = ["wake me up at six am", "turn on the light in the café", 'odd "quotes", {braces} and 12:45!', ""]


@pytest.mark.parametrize("repeat", [True, False])
def test_weights_and_tokenizer_come_back(tmp_path: Path, repeat: bool) -> None:
    """Bit by bit; only whether prompts are repeated may change."""
    tokenizer = AssistantTokenizer.train(TEXTS, ["alarm_set"], ["time"], 60, repeat=False)
    torch.manual_seed(4)
    network = Llama(LlamaConfig(vocabulary=tokenizer.size, width=128, layers=2, heads=2, hidden=96))
    path = tmp_path / "f32.gguf"
    write_gguf(network, tokenizer, path, GGUFMetadata("tiny", "a test"))
    found, known = read_network(path, repeat_prompt=repeat)
    assert found.shape == network.shape
    assert known.encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)
    assert (known.repeat_token is not None) == repeat
    ids = torch.tensor([tokenizer.prompt(tokenizer.encode_batch(TEXTS)[0])])
    with torch.no_grad():
        assert torch.equal(found(ids), network(ids))


def test_a_shipped_model_can_be_read() -> None:
    """The device's 4-bit weights are dequantised."""
    network, tokenizer = read_network(SHIPPED / "assistant" / "model.gguf", repeat_prompt=True)
    assert network.shape.vocabulary == tokenizer.size
    assert bool(torch.isfinite(network(torch.tensor([tokenizer.prompt(tokenizer.encode_batch(TEXTS)[0])]))).all())


def test_another_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(b"GGUF but no more")
    with pytest.raises(ArtifactError, match=r"other\.gguf"):
        read_network(path, repeat_prompt=True)
