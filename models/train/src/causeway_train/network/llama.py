"""The llama architecture in torch: RMSNorm, rotary positions, SwiGLU, tied embeddings.

Touvron et al. 2023, arXiv 2302.13971.
"""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional

from causeway_server.models.catalog.artifact import ArtifactError

SUPERVISED_LAYERS = 2  # of the last blocks; attention_loss.py supervises their first heads


class LlamaConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes of a network. Widths are multiples of 32, so that every matrix row is a whole number of Q4_0 blocks."""

    vocabulary: int
    width: int = 256
    layers: int = 4
    heads: int = 4
    hidden: int = 768
    context: int = 2048  # tokens
    rope_base: float = 10_000.0
    epsilon: float = 1e-5

    @property
    def head_width(self) -> int:
        return self.width // self.heads


class AuxiliaryOutputs:
    """What a forward pass records for the auxiliary losses."""

    def __init__(self) -> None:
        self.attention_scores: list[Tensor] = []  # of each supervised head before softmax, [n, length, length]
        self.middle_states = torch.empty(0)  # [n, length, width]: input of the first supervised block
        self.answer_states = torch.empty(0)  # [n, width]: at the last position of each prompt


class Norm(nn.Module):
    def __init__(self, shape: LlamaConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape.width))
        self._epsilon = shape.epsilon

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self._epsilon)


class Block(nn.Module):
    def __init__(self, shape: LlamaConfig, dropout: float) -> None:
        super().__init__()
        width, hidden = shape.width, shape.hidden
        self.shape, self.dropout = shape, dropout
        self.attention_norm, self.feed_norm = Norm(shape), Norm(shape)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, scores: list[Tensor] | None = None) -> Tensor:
        """x [n, length, width] → same shape. Append the first head's scores, [n, length, length], to `scores`."""
        x = x + self._dropped(self._attend(self.attention_norm(x), cos, sin, scores))
        gate, up = self.gate_up(self.feed_norm(x)).chunk(2, -1)
        return x + self._dropped(self.down(functional.silu(gate) * up))

    def _dropped(self, x: Tensor) -> Tensor:
        return dropped(x, self.dropout) if self.training and self.dropout else x

    def _attend(self, x: Tensor, cos: Tensor, sin: Tensor, recorded: list[Tensor] | None) -> Tensor:
        n, length, width = x.shape
        parts = self.qkv(x).view(n, length, 3, self.shape.heads, self.shape.head_width).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)  # each [n, heads, length, head_width]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        # Written out: on sequences this short torch's fused kernel is slower on a CPU, especially backward.
        hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ k.transpose(-1, -2) * self.shape.head_width**-0.5).masked_fill(hidden, -torch.inf)
        if recorded is not None:
            recorded.append(scores[:, 0])
        mixed = scores.softmax(-1, dtype=v.dtype) @ v
        attended: Tensor = self.out(mixed.transpose(1, 2).reshape(n, length, width))
        return attended


class Llama(nn.Module):
    """Predicts the next token. Padding is on the right: causal attention hides it and the loss excludes it."""

    def __init__(self, shape: LlamaConfig, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape, dropout) for _ in range(shape.layers))
        self.norm = Norm(shape)
        self._initialise()

    def hidden(self, ids: Tensor, auxiliary: AuxiliaryOutputs | None = None) -> Tensor:
        """ids [n, length] → final states [n, length, width], normalised.

        Args:
            auxiliary: filled with the attention scores of the last blocks and the states before them.
        """
        x: Tensor = self.embedding(ids)
        if torch.is_autocast_enabled("cpu"):
            x = x.to(torch.bfloat16)
        cos, sin = rotary(self.shape, ids.shape[1], x.dtype)
        for index, block in enumerate(self.blocks):
            supervised = index >= len(self.blocks) - SUPERVISED_LAYERS
            if auxiliary and index == max(0, len(self.blocks) - SUPERVISED_LAYERS):
                auxiliary.middle_states = x
            x = block(x, cos, sin, auxiliary.attention_scores if auxiliary and supervised else None)
        normed: Tensor = self.norm(x)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., width] → [..., vocabulary], through the tied embedding."""
        return functional.linear(hidden, self.embedding.weight)

    def forward(self, ids: Tensor) -> Tensor:
        return self.logits(self.hidden(ids))

    def _initialise(self) -> None:
        nn.init.normal_(self.embedding.weight, std=0.02)
        for block in self.blocks:
            assert isinstance(block, Block)
            for linear in (block.qkv, block.gate_up):
                nn.init.normal_(linear.weight, std=self.shape.width**-0.5)
            # Residual branches start at zero: at any depth, the first step sees plain embeddings.
            nn.init.zeros_(block.out.weight)
            nn.init.zeros_(block.down.weight)


def dropped(x: Tensor, share: float) -> Tensor:
    """Drop whole channels of x [n, length, width] per sequence: one mask for all positions, cheap to draw."""
    kept = torch.rand(x.shape[0], 1, x.shape[2], device=x.device) >= share
    return x * (kept.to(x.dtype) / (1.0 - share))


def rotary(shape: LlamaConfig, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin [length, head_width / 2] of each position's angles (Su et al. 2021, arXiv 2104.09864)."""
    steps = torch.arange(0, shape.head_width, 2, dtype=torch.float32) / shape.head_width
    angles = torch.outer(torch.arange(length, dtype=torch.float32), shape.rope_base**-steps)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of each head; the GGUF export permutes q and k to llama.cpp's neighbouring pairs."""
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def grow(small: Llama, shape: LlamaConfig, dropout: float = 0.0) -> Llama:
    """Return a deeper network that computes the same function as `small`.

    The residual branches of new blocks start at zero; new blocks are spread evenly between the old ones (after Chen et
    al. 2016, Net2Net, arXiv 1511.05641).

    Raises:
        ArtifactError: `shape` is shallower than `small`, or differs from it in more than the depth.
    """
    if msgspec.structs.replace(shape, layers=small.shape.layers) != small.shape or shape.layers < small.shape.layers:
        current, requested = (_size(one) for one in (small.shape, shape))
        raise ArtifactError(f"cannot grow a network of {current} to {requested}: only the depth can grow")
    large = Llama(shape, dropout)
    large.embedding.load_state_dict(small.embedding.state_dict())
    large.norm.load_state_dict(small.norm.state_dict())
    for index, block in enumerate(small.blocks):
        position = index * shape.layers // small.shape.layers
        large.blocks[position].load_state_dict(block.state_dict())
    return large


def _size(shape: LlamaConfig) -> str:
    return f"{shape.layers} layers, width {shape.width}, hidden {shape.hidden}, {shape.vocabulary} tokens"
