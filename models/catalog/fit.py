"""Estimates of whether a model fits a device: weights, KV cache and working buffers, from the GGUF's metadata.

KV cache: layers · KV heads · (key width + value width) · 2 bytes (F16) · tokens. Buffers: logits and activations of one
batch of `UBATCH` tokens, which llama.cpp reserves at start.
"""

from __future__ import annotations

import msgspec
import psutil

from .gguf import GgufFile

UBATCH = 512  # tokens per llama.cpp micro batch, its default
CACHE_ELEMENT_BYTES = 2  # F16
PROCESS_BYTES = 80 * 2**20  # interpreter, libraries, tokenizer of one engine process
GIB = 2**30


class Device(msgspec.Struct, frozen=True):
    """A device with the memory that a model may take. A Jetson's GPU shares memory with everything else."""

    name: str
    total_bytes: int
    # share of memory that a model may take; the rest is for the system, camera pipelines and the daemon
    usable_share: float = 0.7

    @property
    def usable_bytes(self) -> int:
        return int(self.total_bytes * self.usable_share)


_memory = psutil.virtual_memory()
DEVICES = {
    device.name: device
    for device in (
        Device("orin-nano-8gb", 8 * GIB),
        Device("orin-nx-16gb", 16 * GIB, 0.8),
        Device("agx-orin-64gb", 64 * GIB, 0.9),
        Device("this-machine", _memory.total, _memory.available / _memory.total),
    )
}


class MemoryNeed(msgspec.Struct, frozen=True):
    """Bytes that a model takes, by purpose."""

    weights_bytes: int
    cache_bytes: int
    buffers_bytes: int
    process_bytes: int = PROCESS_BYTES

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.cache_bytes + self.buffers_bytes + self.process_bytes


def estimate_memory(model: GgufFile, *, context: int, batch: int) -> MemoryNeed:
    """Estimate the memory of `batch` sequences of `context` tokens."""
    per_token = model.layers * model.kv_heads * (model.key_width + model.value_width) * CACHE_ELEMENT_BYTES
    rows = min(UBATCH, context * batch)
    logits = rows * model.vocabulary * 4
    # Flash attention stores no scores, but a mask of every row against the whole cache (F16).
    mask = rows * context * batch * 2
    activations = rows * model.width * 4 * 8
    return MemoryNeed(model.tensors_bytes, per_token * context * batch, logits + mask + activations)


def largest_batch(model: GgufFile, device: Device, context: int, limit: int = 256, vision_bytes: int = 0) -> int:
    """Return how many sequences of `context` tokens fit, at most `limit`. `vision_bytes`: of the process for images."""
    fitting = 0
    for batch in range(1, limit + 1):
        need = estimate_memory(model, context=context, batch=batch).total_bytes + vision_bytes
        if need > device.usable_bytes:
            break
        fitting = batch
    return fitting
