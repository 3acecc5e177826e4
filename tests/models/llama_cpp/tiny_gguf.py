"""A small llama model of seeded random weights with a real byte-level BPE tokenizer, written with numpy and `gguf`.

Its answers are noise, but every path of the engine (tokenizer, KV cache, grammar, special tokens) is the real one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from gguf import GGUFWriter, TokenType
from numpy.typing import NDArray

WORDS = tuple(
    word
    for line in (
        "the turn on off light kitchen in and is it what who how play music set alarm for six seven time hello world",
        "stop",
        "name arguments true false null user assistant system please tell me about weather today tomorrow room table",
    )
    for word in line.split()
)
CONTROL = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|refuse|>")
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if tools %}<|system|>{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_letters() -> list[str]:
    """Return GPT-2's printable letter of each byte (Radford et al. 2019, encoder.py `bytes_to_unicode`)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters, spare = [""] * 256, 256
    for byte in range(256):
        if byte in plain:
            letters[byte] = chr(byte)
        else:
            letters[byte], spare = chr(spare), spare + 1
    return letters


def vocabulary(words: Iterable[str] = WORDS) -> tuple[list[str], list[str]]:
    """Return (tokens, merges) in which each word, with and without a space before it, is one token."""
    letters = byte_letters()
    tokens, merges = [*CONTROL, *letters], []
    known = set(tokens)
    for word in words:
        for text in (word, " " + word):
            pieces = [letters[byte] for byte in text.encode()]
            left = pieces[0]
            for right in pieces[1:]:
                if left + right not in known:
                    merges.append(f"{left} {right}")
                    tokens.append(left + right)
                    known.add(left + right)
                left += right
    return tokens, merges


def write_tiny_gguf(
    path: Path,
    *,
    seed: int = 7,
    width: int = 64,
    layers: int = 2,
    heads: int = 2,
    hidden: int = 128,
    context: int = 512,
    words: Iterable[str] = WORDS,
    template: str | None = TEMPLATE,
    padding: int = 0,
    marks: tuple[str, ...] = (),
    deltas: Mapping[str, NDArray[np.float32]] = {},
    architecture: str = "llama",
    window: int = 64,
) -> Path:
    """Write the model with float32 weights.

    `padding` adds unused tokens to the vocabulary, `marks` control tokens, `deltas` to the weights of those names.
    `architecture`: llama, qwen2 (q, k and v with biases), qwen2vl (positions with parts) or gemma3 (layers that see a
    `window` of tokens).
    """
    tokens, merges = vocabulary(words)
    tokens += [f"<unused{i}>" for i in range(padding)]
    tokens += marks
    types = [TokenType.CONTROL if token in (*CONTROL, *marks) else TokenType.NORMAL for token in tokens]
    draw = np.random.default_rng(seed)
    writer = GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(context)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_rope_dimension_count(width // heads)
    writer.add_layer_norm_rms_eps(1e-5)
    _write_attention(writer, architecture, width // heads, window)
    writer.add_vocab_size(len(tokens))
    writer.add_file_type(0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(CONTROL.index("<|end|>"))
    writer.add_pad_token_id(CONTROL.index("<|pad|>"))
    writer.add_add_bos_token(False)
    if template is not None:
        writer.add_chat_template(template)

    def matrix(name: str, rows: int, columns: int, scale: float) -> None:
        values = (draw.standard_normal((rows, columns)) * scale).astype(np.float32)
        writer.add_tensor(name, values + deltas[name] if name in deltas else values)

    def ones(name: str, count: int = width) -> None:
        writer.add_tensor(name, np.ones(count, np.float32))

    matrix("token_embd.weight", len(tokens), width, 1.0)
    ones("output_norm.weight")
    matrix("output.weight", len(tokens), width, 0.3)
    for block in range(layers):
        for name in ("attn_norm", "ffn_norm"):
            ones(f"blk.{block}.{name}.weight")
        if architecture == "gemma3":
            for name in ("post_attention_norm", "post_ffw_norm"):
                ones(f"blk.{block}.{name}.weight")
            for name in ("attn_q_norm", "attn_k_norm"):
                ones(f"blk.{block}.{name}.weight", width // heads)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            matrix(f"blk.{block}.{name}.weight", width, width, width**-0.5)
            if architecture == "qwen2" and name != "attn_output":
                writer.add_tensor(f"blk.{block}.{name}.bias", draw.standard_normal(width).astype(np.float32))
        for name in ("ffn_gate", "ffn_up"):
            matrix(f"blk.{block}.{name}.weight", hidden, width, width**-0.5)
        matrix(f"blk.{block}.ffn_down.weight", width, hidden, hidden**-0.5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_attention(writer: GGUFWriter, architecture: str, head_width: int, window: int) -> None:
    if architecture == "qwen2vl":
        part = head_width // 8
        writer.add_rope_dimension_sections([part, part, head_width // 2 - 2 * part, 0])
    elif architecture == "gemma3":
        writer.add_sliding_window(window)
