"""Initial weights that can already copy: a previous-token head and induction heads, set by hand.

Copying arguments is the part of this task that a small network learns slowest: attend to where the current token
occurred before and repeat the token after it (induction heads: Olsson et al. 2022, arXiv 2209.11895). The circuit is
known, so it is written into the first two layers before training, which may then change it:

    layer 0, head 0      attends one position back (by rotary phase alone) and writes that token to the last 64 channels
                         of the residual stream (the note)
    layer 1, heads 0, 1  find the position whose note resembles the current token, and copy that position's token to
                         the output; they match in slowly rotating channels only, so that distance does not matter
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .llama import Block, Llama

NOTE = 64  # channels of the residual stream that hold the previous token
CONSTANT = 0.1  # channel 0 of every embedding: the same for all tokens
SPREAD = 0.02  # standard deviation of the embeddings' other channels
FAST = 8  # rotary pairs that separate neighbouring positions; the slower half is used to compare contents


def supports_induction_heads(network: Llama) -> bool:
    """Return whether the network is deep and wide enough for the hand-set heads."""
    shape = network.shape
    return shape.layers >= 2 and shape.head_width == 64 and shape.width >= 4 * NOTE


@torch.no_grad()
def write_induction_heads(network: Llama) -> None:
    """Overwrite three heads and the fixed embedding channels of a new network."""
    weight = network.embedding.weight
    weight[:, 0] = CONSTANT
    weight[:, -NOTE:] = 0.0
    content = network.shape.width - 1 - NOTE
    projection = _orthonormal(NOTE, content)
    first, second = network.blocks[0], network.blocks[1]
    assert isinstance(first, Block)
    assert isinstance(second, Block)
    embedding = SPREAD * math.sqrt(content)  # norm of an embedding's content
    note = 0.9 * embedding  # norm of the note
    _write_previous_token_head(first, projection, embedding, note)
    _write_induction(second, projection, embedding, note)


def _write_previous_token_head(block: Block, projection: Tensor, embedding: float, note: float) -> None:
    width, half = block.shape.width, block.shape.head_width // 2
    q, k, v = block.qkv.weight.chunk(3)
    scale = math.sqrt(width) / math.hypot(embedding, CONSTANT)  # gain of the norm before attention
    strength = 6.5 / (CONSTANT * scale)
    for part in (q, k, v):
        part[: 2 * half] = 0.0
    for pair in range(FAST):
        turn = block.shape.rope_base ** (-pair / half)  # radians per position
        q[pair, 0] = strength
        k[pair, 0], k[pair + half, 0] = strength * math.cos(turn), strength * math.sin(turn)
    v[:NOTE, 1:-NOTE] = projection
    read = embedding * scale * math.sqrt(NOTE / projection.shape[1])  # norm of the values
    block.out.weight[-NOTE:, :NOTE] = torch.eye(NOTE) * (note / read)


def _write_induction(block: Block, projection: Tensor, embedding: float, note: float) -> None:
    width, half = block.shape.width, block.shape.head_width // 2
    q, k, v = block.qkv.weight.chunk(3)
    scale = math.sqrt(width) / math.sqrt(embedding**2 + note**2 + CONSTANT**2)
    query_norm = embedding * scale * math.sqrt(NOTE / 2 / projection.shape[1])
    key_norm = note * scale / math.sqrt(2)
    sharpness = math.sqrt(
        18.0 * math.sqrt(2 * half) / (query_norm * key_norm)
    )  # a match scores 18, an unrelated token under 8
    slow = [*range(half // 2, half), *range(half + half // 2, 2 * half)]
    for head in range(2):
        start = head * 2 * half
        rows = torch.tensor([start + channel for channel in slow])
        for part in (q, k, v):
            part[start : start + 2 * half] = 0.0
        note_half = slice(head * NOTE // 2, (head + 1) * NOTE // 2)
        q[rows, 1:-NOTE] = sharpness * projection[note_half]
        k[rows, width - NOTE + note_half.start : width - NOTE + note_half.stop] = sharpness * torch.eye(NOTE // 2)
        channels = slice(1 + head * 2 * half, 1 + (head + 1) * 2 * half)
        v[start : start + 2 * half, channels] = torch.eye(2 * half)
        read = embedding * scale * math.sqrt(4 * half / projection.shape[1])
        block.out.weight[channels, start : start + 2 * half] = torch.eye(2 * half) * (3.0 * embedding / read)


def _orthonormal(rows: int, columns: int) -> Tensor:
    matrix: Tensor = torch.linalg.qr(torch.randn(columns, rows)).Q.T
    return matrix


def tie_space_variants(embedding: nn.Embedding, ids: dict[str, int]) -> None:
    """Initialise the tokens of a word with and without its leading space nearly alike.

    A value that is copied into a JSON string loses its leading space.
    """
    weight = embedding.weight
    with torch.no_grad():
        for piece, token in ids.items():
            bare = ids.get(piece[1:]) if piece.startswith("Ġ") else None
            if bare is not None:
                weight[token] = 0.95 * weight[bare] + 0.3 * weight[token]
