"""BERT's encoder (Devlin et al. 2018, arXiv 1810.04805) in torch, to go on training where a published one ended.

`minilm` makes an ONNX graph of the same files, to run; this is to learn. Texts of one batch have the same number of
tokens, so nothing is padded and nothing is masked.
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

from ...catalog.artifact import ArtifactError
from ...signals.encoder import WordPieces
from ..signals.bert_to_onnx import BertConfig, read_safetensors

LONGEST = 64  # tokens of a text, the first ones
FROZEN = 3  # of so many layers, the lowest one stays as it was


class BertSizes(BertConfig, frozen=True):
    """What `config.json` says, and what the arrays say themselves."""

    vocabulary: int = 0
    hidden: int = 0


class Layer(nn.Module):
    """Attention and feed-forward, each normalised after it is added."""

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
    """Ids to the mean of the last layer. The words' table and the lowest layers stay as they were: general."""

    def __init__(self, sizes: BertSizes, dropout: float = 0.1) -> None:
        super().__init__()
        self.width, self.dropout = sizes.hidden_size, dropout
        self.words = nn.Embedding(sizes.vocabulary, self.width).requires_grad_(False)
        self.places = nn.Embedding(sizes.max_position_embeddings, self.width).requires_grad_(False)
        self.norm = nn.LayerNorm(self.width, eps=sizes.layer_norm_eps)
        self.norm.requires_grad_(False)
        self.layers = nn.ModuleList(Layer(sizes, dropout) for _ in range(sizes.num_hidden_layers))
        self.layers[: sizes.num_hidden_layers // FROZEN].requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [n, length] → [n, width]."""
        x = self.norm(self.words(ids) + self.places.weight[: ids.shape[1]])
        x = functional.dropout(x, self.dropout, self.training)
        for layer in self.layers:
            x = layer(x)
        return x.mean(1)


class BertTokenizer(msgspec.Struct, frozen=True):
    """How a text becomes ids: word pieces between two marks."""

    pieces: WordPieces
    before: int
    after: int

    def __call__(self, text: str) -> list[int]:
        return [self.before, *self.pieces(text)[: LONGEST - 2], self.after]


def load_bert(folder: Path, dropout: float = 0.1) -> tuple[Bert, BertTokenizer]:
    """The published files in `folder`, as `causeway-models minilm` reads them. Raises ArtifactError for others."""
    try:
        pieces = (folder / "vocab.txt").read_text(encoding="utf-8").rstrip("\n").split("\n")
        arrays = read_safetensors(folder / "model.safetensors")
        found = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
        sizes = msgspec.structs.replace(
            msgspec.json.decode((folder / "config.json").read_bytes(), type=BertSizes),
            max_position_embeddings=len(found["embeddings.position_embeddings.weight"]),
            vocabulary=len(found["embeddings.word_embeddings.weight"]),
            hidden=len(found["encoder.layer.0.intermediate.dense.weight"]),
        )
        bert = Bert(sizes, dropout)
        bert.load_state_dict(_renamed(found, sizes.num_hidden_layers))
        return bert, BertTokenizer(WordPieces(pieces), pieces.index("[CLS]"), pieces.index("[SEP]"))
    except (OSError, KeyError, ValueError, RuntimeError, msgspec.DecodeError) as error:
        raise ArtifactError(f"{folder}: no BERT sentence encoder ({error})") from error


def same_lengths(ids: Sequence[Sequence[int]], tokens: int, draw: random.Random) -> Iterator[list[int]]:
    """Which texts go together, about `tokens` tokens at a time: all of one length, in random order."""
    by_length: dict[int, list[int]] = defaultdict(list)
    for index, one in enumerate(ids):
        by_length[len(one)].append(index)
    groups = []
    for length, found in by_length.items():
        draw.shuffle(found)
        size = max(1, tokens // length)
        groups += [found[at : at + size] for at in range(0, len(found), size)]
    draw.shuffle(groups)
    return iter(groups)


def _renamed(found: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """From the published names to those of `Bert`; the kind of text is always the first, so it joins the places."""
    kinds = found["embeddings.token_type_embeddings.weight"]
    made = {
        "words.weight": found["embeddings.word_embeddings.weight"],
        "places.weight": found["embeddings.position_embeddings.weight"] + kinds[0],
    }
    for kind in ("weight", "bias"):
        made[f"norm.{kind}"] = found[f"embeddings.LayerNorm.{kind}"]
        for layer in range(layers):
            at, to = f"encoder.layer.{layer}", f"layers.{layer}"
            parts = [found[f"{at}.attention.self.{part}.{kind}"] for part in ("query", "key", "value")]
            made[f"{to}.qkv.{kind}"] = torch.cat(parts)
            made[f"{to}.out.{kind}"] = found[f"{at}.attention.output.dense.{kind}"]
            made[f"{to}.mixed_norm.{kind}"] = found[f"{at}.attention.output.LayerNorm.{kind}"]
            made[f"{to}.up.{kind}"] = found[f"{at}.intermediate.dense.{kind}"]
            made[f"{to}.down.{kind}"] = found[f"{at}.output.dense.{kind}"]
            made[f"{to}.norm.{kind}"] = found[f"{at}.output.LayerNorm.{kind}"]
    return made
