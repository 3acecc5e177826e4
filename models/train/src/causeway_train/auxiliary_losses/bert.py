"""BERT's encoder (Devlin et al. 2018, arXiv 1810.04805) in torch, for fine-tuning a published BERT.

`causeway-train convert-bert` makes an ONNX graph of the same files for inference. All texts of a batch have the same
number of tokens, so there is no padding and no mask.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional

from causeway_server.models.catalog.artifact import ArtifactError
from causeway_server.models.signals.encoder import WordPieces

from ..signals.bert_to_onnx import BertConfig, read_safetensors

MAX_TOKENS = 64  # longer texts are truncated
_DROPOUT = 0.1
FROZEN_SHARE = 3  # one in so many layers, the lowest ones, is not trained


class BertSizes(BertConfig, frozen=True):
    """The settings in `config.json`, and the sizes that follow from the weight arrays."""

    vocabulary: int = 0
    hidden: int = 0


class Layer(nn.Module):
    """Attention and feed-forward, each followed by a residual connection and a norm."""

    def __init__(self, sizes: BertSizes, dropout: float) -> None:
        super().__init__()
        width, self.heads, self.dropout = sizes.hidden_size, sizes.num_attention_heads, dropout
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, sizes.hidden), nn.Linear(sizes.hidden, width)
        self.mixed_norm = nn.LayerNorm(width, eps=sizes.layer_norm_eps)
        self.norm = nn.LayerNorm(width, eps=sizes.layer_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = self.qkv(x).view(n, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        odds = (q @ k.transpose(-1, -2) * (width // self.heads) ** -0.5).softmax(-1, dtype=v.dtype)
        mixed = self.out((odds @ v).transpose(1, 2).reshape(n, length, width))
        x = self.mixed_norm(x + self._dropped(mixed))
        fed: Tensor = self.norm(x + self._dropped(self.down(functional.gelu(self.up(x)))))
        return fed

    def _dropped(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout, self.training)


class Bert(nn.Module):
    """Maps token ids to the mean of the last layer's states. The embeddings and the lowest layers are frozen, so that
    they stay general.
    """

    def __init__(self, sizes: BertSizes, dropout: float = 0.1) -> None:
        super().__init__()
        self.width, self.dropout = sizes.hidden_size, dropout
        self.words = nn.Embedding(sizes.vocabulary, self.width).requires_grad_(False)
        self.positions = nn.Embedding(sizes.max_position_embeddings, self.width).requires_grad_(False)
        self.norm = nn.LayerNorm(self.width, eps=sizes.layer_norm_eps)
        self.norm.requires_grad_(False)
        self.layers = nn.ModuleList(Layer(sizes, dropout) for _ in range(sizes.num_hidden_layers))
        self.layers[: sizes.num_hidden_layers // FROZEN_SHARE].requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [n, length] → [n, width]."""
        x = self.norm(self.words(ids) + self.positions.weight[: ids.shape[1]])
        x = functional.dropout(x, self.dropout, self.training)
        for layer in self.layers:
            x = layer(x)
        return x.mean(1)


class BertTokenizer(msgspec.Struct, frozen=True):
    """Splits texts into word pieces between [CLS] and [SEP]."""

    pieces: WordPieces
    cls_id: int
    sep_id: int

    def __call__(self, text: str) -> list[int]:
        return [self.cls_id, *self.pieces(text)[: MAX_TOKENS - 2], self.sep_id]


def load_bert(folder: Path) -> tuple[Bert, BertTokenizer]:
    """Load the published files in `folder`, the same that `convert-bert` reads.

    Raises:
        ArtifactError: the folder holds no BERT sentence encoder.
    """
    try:
        pieces = (folder / "vocab.txt").read_text(encoding="utf-8").rstrip("\n").split("\n")
        arrays = read_safetensors(folder / "model.safetensors")
        tensors = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
        sizes = msgspec.structs.replace(
            msgspec.json.decode((folder / "config.json").read_bytes(), type=BertSizes),
            max_position_embeddings=len(tensors["embeddings.position_embeddings.weight"]),
            vocabulary=len(tensors["embeddings.word_embeddings.weight"]),
            hidden=len(tensors["encoder.layer.0.intermediate.dense.weight"]),
        )
        bert = Bert(sizes, _DROPOUT)
        bert.load_state_dict(_rename(tensors, sizes.num_hidden_layers))
        return bert, BertTokenizer(WordPieces(pieces), pieces.index("[CLS]"), pieces.index("[SEP]"))
    except (OSError, KeyError, ValueError, RuntimeError, msgspec.DecodeError) as error:
        raise ArtifactError(f"{folder} is not a BERT sentence encoder ({error})") from error


def batches_by_length(ids: Sequence[Sequence[int]], tokens: int, draw: random.Random) -> Iterator[list[int]]:
    """Yield batches of indices of texts of equal length, about `tokens` tokens each, in random order."""
    by_length: dict[int, list[int]] = defaultdict(list)
    for index, one in enumerate(ids):
        by_length[len(one)].append(index)
    groups = []
    for length, indices in by_length.items():
        draw.shuffle(indices)
        size = max(1, tokens // length)
        groups += [indices[start : start + size] for start in range(0, len(indices), size)]
    draw.shuffle(groups)
    return iter(groups)


def _rename(tensors: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Rename the published tensors to the parameter names of `Bert`.

    The token type is always the first one, so its embedding is added to the positions.
    """
    kinds = tensors["embeddings.token_type_embeddings.weight"]
    renamed = {
        "words.weight": tensors["embeddings.word_embeddings.weight"],
        "positions.weight": tensors["embeddings.position_embeddings.weight"] + kinds[0],
    }
    for kind in ("weight", "bias"):
        renamed[f"norm.{kind}"] = tensors[f"embeddings.LayerNorm.{kind}"]
        for layer in range(layers):
            old, new = f"encoder.layer.{layer}", f"layers.{layer}"
            parts = [tensors[f"{old}.attention.self.{part}.{kind}"] for part in ("query", "key", "value")]
            renamed[f"{new}.qkv.{kind}"] = torch.cat(parts)
            renamed[f"{new}.out.{kind}"] = tensors[f"{old}.attention.output.dense.{kind}"]
            renamed[f"{new}.mixed_norm.{kind}"] = tensors[f"{old}.attention.output.LayerNorm.{kind}"]
            renamed[f"{new}.up.{kind}"] = tensors[f"{old}.intermediate.dense.{kind}"]
            renamed[f"{new}.down.{kind}"] = tensors[f"{old}.output.dense.{kind}"]
            renamed[f"{new}.norm.{kind}"] = tensors[f"{old}.output.LayerNorm.{kind}"]
    return renamed
