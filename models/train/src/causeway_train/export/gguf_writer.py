"""Writer of a network as GGUF (github.com/ggml-org/ggml, docs/gguf.md), with llama.cpp's tensor names and layout."""

from __future__ import annotations

from pathlib import Path

import gguf
import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from ..network.llama import Block, Llama
from ..network.tokenizer import (
    ASSISTANT,
    END,
    MAX_REPEATED_CHARACTERS,
    PAD,
    REFUSE,
    REPEAT,
    SPECIAL,
    USER,
    AssistantTokenizer,
)

# Renders the last exchange and the last user message, as in training. System messages are skipped. `average` compares
# templates: with another text, new models could not be averaged with the published ones.
_TEMPLATE = (
    "{%- macro said(content) -%}"
    "{%- if content is string -%}{{ content | trim }}"
    "{%- elif content -%}{%- for part in content -%}{%- if part.type == 'text' -%}{{ part.text }}{%- endif -%}{%- "
    "endfor -%}"
    "{%- endif -%}{%- endmacro -%}"
    "{%- set turns = messages | selectattr('role', 'in', ['user', 'assistant']) | list -%}"
    "{%- for turn in turns[-3:] -%}{%- set text = said(turn.content) -%}"
    "{%- if turn.role == 'user' -%}" + USER + "{{ text }}<<repeat>>"
    "{%- else -%}" + ASSISTANT + "{{ text }}" + END + "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}" + ASSISTANT + "{%- endif -%}"
)
_IF_SHORT = "{%- if loop.last and text | length <= " + str(MAX_REPEATED_CHARACTERS) + " -%}"
_REPETITION = _IF_SHORT + REPEAT + "{{ text }}{%- endif -%}"


def chat_template(tokenizer: AssistantTokenizer) -> str:
    """Return the Jinja template of `AssistantTokenizer.last_prompt`, with or without repetition."""
    return _TEMPLATE.replace("<<repeat>>", _REPETITION if tokenizer.repeat_token is not None else "")


class GGUFMetadata(msgspec.Struct, frozen=True):
    """Metadata of a GGUF file that cannot be derived from the network."""

    name: str
    description: str
    refuses: bool = True  # trained to start a refusal with `<|refuse|>`
    licence: str = "apache-2.0"
    author: str = "Causeway"


def write_gguf(network: Llama, tokenizer: AssistantTokenizer, path: Path, metadata: GGUFMetadata) -> None:
    """Write an F32 GGUF without an output matrix: llama.cpp uses the tied embedding instead."""
    writer = gguf.GGUFWriter(path, "llama")
    _write_metadata(writer, network, metadata)
    _write_tokenizer(writer, tokenizer, metadata.refuses)
    for name, tensor in _tensors(network).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_metadata(writer: gguf.GGUFWriter, network: Llama, metadata: GGUFMetadata) -> None:
    shape = network.shape
    writer.add_name(metadata.name)
    writer.add_description(metadata.description)
    writer.add_license(metadata.licence)
    writer.add_author(metadata.author)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.hidden)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.heads)
    writer.add_layer_norm_rms_eps(shape.epsilon)
    writer.add_rope_dimension_count(shape.head_width)
    writer.add_rope_freq_base(shape.rope_base)


def _write_tokenizer(writer: gguf.GGUFWriter, tokenizer: AssistantTokenizer, refuses: bool) -> None:
    state = msgspec.json.decode(tokenizer.bpe.to_str())
    tokens = [""] * tokenizer.size
    for token, index in tokenizer.bpe.get_vocab().items():
        tokens[index] = token
    kinds = [int(gguf.TokenType.NORMAL)] * tokenizer.size
    for added in state["added_tokens"]:
        kinds[added["id"]] = int(_kind(added["content"], added["special"]))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in state["model"]["merges"]])
    ids = tokenizer.bpe.get_vocab()
    writer.add_bos_token_id(ids[END])
    writer.add_eos_token_id(ids[END])
    writer.add_eot_token_id(ids[END])
    writer.add_pad_token_id(ids[PAD])
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    writer.add_chat_template(chat_template(tokenizer))
    if refuses:
        # Our own key: the token whose probability at the first position means a refusal.
        writer.add_string("causeway.refuse_token", REFUSE)
        writer.add_uint32("causeway.refuse_token_id", ids[REFUSE])


def _kind(content: str, special: bool) -> gguf.TokenType:
    if not special:
        return gguf.TokenType.USER_DEFINED
    used = content in SPECIAL and "unused" not in content
    return gguf.TokenType.CONTROL if used else gguf.TokenType.UNUSED


def _tensors(network: Llama) -> dict[str, NDArray[np.float32]]:
    heads = network.shape.heads
    tensors = {"token_embd.weight": _array(network.embedding.weight), "output_norm.weight": _array(network.norm.weight)}
    for index, block in enumerate(network.blocks):
        assert isinstance(block, Block)
        q, k, v = np.split(_array(block.qkv.weight), 3)
        gate, up = np.split(_array(block.gate_up.weight), 2)
        parts = {
            "attn_norm": _array(block.attention_norm.weight),
            "attn_q": _neighbours(q, heads),
            "attn_k": _neighbours(k, heads),
            "attn_v": v,
            "attn_output": _array(block.out.weight),
            "ffn_norm": _array(block.feed_norm.weight),
            "ffn_gate": gate,
            "ffn_up": up,
            "ffn_down": _array(block.down.weight),
        }
        tensors |= {f"blk.{index}.{name}.weight": np.ascontiguousarray(part) for name, part in parts.items()}
    return tensors


def _neighbours(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Permute the rows of q or k from halves to neighbouring pairs, which is llama.cpp's layout for rotary
    positions.
    """
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def _array(weight: torch.Tensor) -> NDArray[np.float32]:
    array: NDArray[np.float32] = weight.detach().to(torch.float32).cpu().numpy()
    return array
