"""A small vision encoder of seeded random weights, as an `mmproj` file of one of four families."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from gguf import GGUFWriter

from causeway_server.models.catalog.projector import has_mtmd

needs_mtmd = pytest.mark.skipif(not has_mtmd(), reason="this build of llama.cpp has no mtmd")
Family = Literal["mlp", "idefics3", "qwen2vl_merger", "gemma3"]  # LLaVA, SmolVLM, Qwen2-VL, Gemma 3
LANGUAGE = {  # architectures of the model beside it
    "mlp": "llama",
    "idefics3": "llama",
    "qwen2vl_merger": "qwen2vl",
    "gemma3": "gemma3",
}
MARKS = {
    "mlp": (),
    "idefics3": (
        "<fake_token_around_image>",
        "<global-img>",
        *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
    ),
    "qwen2vl_merger": ("<|vision_start|>", "<|vision_end|>"),
    "gemma3": ("<start_of_image>", "<end_of_image>"),
}
_WIDTH, _HIDDEN, _PATCH, _BLOCKS = 32, 64, 14, 2
_SIDE = {"mlp": 56, "idefics3": 56, "qwen2vl_merger": 56, "gemma3": 112}  # of an image or tile, in pixels


def write_tiny_mmproj(path: Path, family: Family = "mlp", *, dimensions: int = 64, seed: int = 3) -> Path:
    """Write it with float32 weights; `dimensions`: of the language model's embeddings."""
    draw = np.random.default_rng(seed)
    writer = GGUFWriter(path, "clip")
    writer.add_name("tiny vision")
    writer.add_clip_has_vision_encoder(value=True)
    writer.add_clip_projector_type(family)
    writer.add_vision_image_size(_SIDE[family])
    writer.add_vision_patch_size(_PATCH)
    writer.add_vision_embedding_length(_WIDTH)
    writer.add_vision_feed_forward_length(_HIDDEN)
    writer.add_vision_block_count(_BLOCKS)
    writer.add_vision_head_count(2)
    writer.add_vision_projection_dim(dimensions)
    writer.add_vision_attention_layernorm_eps(1e-5)
    writer.add_vision_image_mean([0.5, 0.5, 0.5])
    writer.add_vision_image_std([0.5, 0.5, 0.5])
    writer.add_vision_use_gelu(value=True)
    if family in ("gemma3", "idefics3"):
        writer.add_vision_projector_scale_factor(2)
    if family == "idefics3":
        writer.add_vision_preproc_image_size(2 * _SIDE[family])

    def tensor(name: str, *shape: int) -> None:
        writer.add_tensor(name, (draw.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32))

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(_WIDTH, np.float32))
        writer.add_tensor(f"{name}.bias", np.zeros(_WIDTH, np.float32))

    def linear(name: str, columns: int, rows: int) -> None:
        tensor(f"{name}.weight", rows, columns)
        writer.add_tensor(f"{name}.bias", np.zeros(rows, np.float32))

    tensor("v.patch_embd.weight", _WIDTH, 3, _PATCH, _PATCH)
    if family == "qwen2vl_merger":
        tensor("v.patch_embd.weight.1", _WIDTH, 3, _PATCH, _PATCH)
    else:
        tensor("v.position_embd.weight", (_SIDE[family] // _PATCH) ** 2, _WIDTH)
    norm("v.post_ln")
    for block in range(_BLOCKS):
        for name in ("ln1", "ln2"):
            norm(f"v.blk.{block}.{name}")
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            linear(f"v.blk.{block}.{name}", _WIDTH, _WIDTH)
        linear(f"v.blk.{block}.ffn_up", _WIDTH, _HIDDEN)
        linear(f"v.blk.{block}.ffn_down", _HIDDEN, _WIDTH)
    if family == "gemma3":
        tensor("mm.input_projection.weight", _WIDTH, dimensions)
        writer.add_tensor("mm.soft_emb_norm.weight", np.ones(_WIDTH, np.float32))
    elif family == "idefics3":
        tensor("mm.model.fc.weight", dimensions, 4 * _WIDTH)
    else:
        merged = _WIDTH * (4 if family == "qwen2vl_merger" else 1)
        linear("mm.0", merged, _HIDDEN)
        linear("mm.2", _HIDDEN, dimensions)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
