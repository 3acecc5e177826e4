"""Go on from a published GGUF: its weights, whatever their precision, and its tokenizer."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from ...catalog.artifact import ArtifactError
from ..network.llama import Block, Llama, LlamaConfig
from ..network.tokenizer import AGAIN, ONCE, AssistantTokenizer


def start_from(path: Path, read_twice: bool) -> tuple[Llama, AssistantTokenizer]:
    """The network and the tokenizer of a GGUF that `export` wrote. `read_twice` gives the tokenizer the token for it.

    Raises ArtifactError for a file of another make.
    """
    try:
        reader = gguf.GGUFReader(path)
        return _network(reader), _vocabulary(reader, read_twice)
    except (KeyError, ValueError) as error:
        raise ArtifactError(f"{path}: not a model that was made here ({error})") from error


def _value(reader: gguf.GGUFReader, key: str) -> object:
    field = reader.fields.get(key)
    if field is None:
        raise KeyError(key)
    value: object = field.contents()
    return value


def _number(reader: gguf.GGUFReader, key: str) -> int:
    value = _value(reader, f"llama.{key}")
    if not isinstance(value, int):
        raise ValueError(f"llama.{key} is {value!r}")
    return value


def _network(reader: gguf.GGUFReader) -> Llama:
    shape = LlamaConfig(
        vocabulary=_number(reader, "vocab_size"),
        width=_number(reader, "embedding_length"),
        layers=_number(reader, "block_count"),
        heads=_number(reader, "attention.head_count"),
        hidden=_number(reader, "feed_forward_length"),
        context=_number(reader, "context_length"),
    )
    tensors = {one.name: gguf.dequantize(one.data, one.tensor_type).astype(np.float32) for one in reader.tensors}
    weights = {name: torch.from_numpy(np.array(array)) for name, array in tensors.items()}
    network = Llama(shape)
    with torch.no_grad():
        network.embedding.weight.copy_(weights["token_embd.weight"])
        network.norm.weight.copy_(weights["output_norm.weight"])
        for index, block in enumerate(network.blocks):
            assert isinstance(block, Block)
            _fill(block, {name: weights[f"blk.{index}.{name}.weight"] for name in _PARTS})
    return network


_PARTS = (
    "attn_norm attn_q attn_k attn_v attn_output ffn_norm ffn_gate ffn_up ffn_down".split()
)  # llama.cpp's names in a block


def _fill(block: Block, parts: dict[str, torch.Tensor]) -> None:
    heads = block.shape.heads
    block.attention_norm.weight.copy_(parts["attn_norm"])
    block.feed_norm.weight.copy_(parts["ffn_norm"])
    q, k = _halves(parts["attn_q"], heads), _halves(parts["attn_k"], heads)
    block.qkv.weight.copy_(torch.cat([q, k, parts["attn_v"]]))
    block.out.weight.copy_(parts["attn_output"])
    block.gate_up.weight.copy_(torch.cat([parts["ffn_gate"], parts["ffn_up"]]))
    block.down.weight.copy_(parts["ffn_down"])


def _halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q or k from rotated neighbours to rotated halves: what `export` did, undone."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _vocabulary(reader: gguf.GGUFReader, read_twice: bool) -> AssistantTokenizer:
    tokens, kinds, merges = (_value(reader, f"tokenizer.ggml.{key}") for key in ("tokens", "token_type", "merges"))
    if not (isinstance(tokens, list) and isinstance(kinds, list) and isinstance(merges, list)):
        raise ValueError("no byte-level BPE")
    if read_twice:
        tokens = [AGAIN if token == ONCE else token for token in tokens]
    pieces = [token for token, kind in zip(tokens, kinds, strict=True) if kind == gguf.TokenType.USER_DEFINED]
    controls = [
        token
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (gguf.TokenType.CONTROL, gguf.TokenType.UNUSED)
    ]
    rules = [(left, right) for left, right in (rule.split(" ", 1) for rule in merges)]
    fixed = set(pieces) - {left + right for left, right in rules}  # a piece may be one that merges make, too
    known = {token: index for index, token in enumerate(tokens) if token not in fixed}
    tokenizer = Tokenizer(models.BPE(vocab=known, merges=rules))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in controls])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in pieces])
    if tokenizer.get_vocab() != {token: index for index, token in enumerate(tokens)}:
        raise ValueError("the tokens are numbered otherwise than here")
    return AssistantTokenizer(tokenizer)
