"""Reader of a published GGUF as the start of further training: its weights, at any precision, and its tokenizer."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from causeway_server.models.catalog.artifact import ArtifactError

from ..network.llama import Block, Llama, LlamaConfig
from ..network.tokenizer import NO_REPEAT, REPEAT, AssistantTokenizer


def read_network(path: Path, repeat_prompt: bool) -> tuple[Llama, AssistantTokenizer]:
    """Return the network and the tokenizer of a GGUF that `export` wrote.

    Args:
        repeat_prompt: add the repetition token to a tokenizer without it.

    Raises:
        ArtifactError: the file is unreadable, or was not written by `export`.
    """
    try:
        reader = gguf.GGUFReader(path)
        return _network(reader), _tokenizer(reader, repeat_prompt)
    except (KeyError, ValueError) as error:
        raise ArtifactError(f"{path} is not a GGUF written by `causeway-train export` ({error})") from error


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


# llama.cpp's tensor names in a block.
_PARTS = "attn_norm attn_q attn_k attn_v attn_output ffn_norm ffn_gate ffn_up ffn_down".split()


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
    """Permute the rows of q or k from llama.cpp's neighbouring pairs to halves, for rotary positions: the inverse of
    `export`.
    """
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _tokenizer(reader: gguf.GGUFReader, repeat_prompt: bool) -> AssistantTokenizer:
    tokens, kinds, merges = (_value(reader, f"tokenizer.ggml.{key}") for key in ("tokens", "token_type", "merges"))
    if not (isinstance(tokens, list) and isinstance(kinds, list) and isinstance(merges, list)):
        raise ValueError("the tokenizer is not a byte-level BPE tokenizer")
    if repeat_prompt:
        tokens = [REPEAT if token == NO_REPEAT else token for token in tokens]
    pieces = [token for token, kind in zip(tokens, kinds, strict=True) if kind == gguf.TokenType.USER_DEFINED]
    controls = [
        token
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (gguf.TokenType.CONTROL, gguf.TokenType.UNUSED)
    ]
    rules = [(left, right) for left, right in (rule.split(" ", 1) for rule in merges)]
    fixed = set(pieces) - {left + right for left, right in rules}  # a piece may also be the result of a merge
    vocabulary = {token: index for index, token in enumerate(tokens) if token not in fixed}
    bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=rules))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in controls])
    bpe.add_tokens([AddedToken(token, normalized=False) for token in pieces])
    if bpe.get_vocab() != {token: index for index, token in enumerate(tokens)}:
        raise ValueError("the token ids differ from the tokenizer's")
    return AssistantTokenizer(bpe)
