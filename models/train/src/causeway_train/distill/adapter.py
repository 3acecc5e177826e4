"""A student's adapter as a GGUF in llama.cpp's form (convert_lora_to_gguf.py), and merged into the student."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from numpy.typing import NDArray

from .network import LoRALinear, Student

_FILE_KEYS = ("general.file_type", "general.quantization_version", "general.architecture")


def write_adapter(student: Student, path: Path, name: str) -> None:
    """Write the adapter. A's rows are Q8_0 where their length allows it, B's are F16."""
    writer = gguf.GGUFWriter(path, student.shape.architecture)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", student.scale * student.rank)
    writer.add_name(name)
    for weight, matrix in _adapted(student):
        a, b = matrix.a.detach().numpy(), matrix.b.detach().numpy()
        if a.shape[1] % 32:
            writer.add_tensor(f"{weight}.lora_a", a.astype(np.float16))
        else:
            packed = gguf.quantize(a, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(f"{weight}.lora_a", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(f"{weight}.lora_b", b.astype(np.float16))
    _finish(writer)


def write_merged(base: Path, student: Student, path: Path, name: str) -> None:
    """Write the student with the adapter's changes in its matrices, which are F16; its vectors stay as they are."""
    reader = gguf.GGUFReader(base)
    writer = gguf.GGUFWriter(path, student.shape.architecture)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key not in (*_FILE_KEYS, "general.name"):
            kind = field.types[0]
            sub_type = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), kind, sub_type)
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    changes = dict(_adapted(student))
    for tensor in reader.tensors:
        values: NDArray[np.float32] = gguf.dequantize(tensor.data, tensor.tensor_type)
        if tensor.name in changes:
            matrix = changes[tensor.name]
            with torch.no_grad():
                values = values + (matrix.scale * matrix.b @ matrix.a).numpy()
        writer.add_tensor(tensor.name, values.astype(np.float16 if values.ndim > 1 else np.float32))
    _finish(writer)


def _adapted(student: Student) -> list[tuple[str, LoRALinear]]:
    """Return the adapted matrices by their names in the GGUF."""
    return [
        (f"blk.{index}.{name}.weight", matrix)
        for index, layer in enumerate(student.blocks)
        for name, matrix in layer.named_matrices()
        if matrix.adapted
    ]


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
