"""A pretrained student in torch: a GGUF of the llama or Qwen 2 family with frozen weights, and LoRA on every matrix.

Hu et al. 2021, arXiv 2106.09685. Weights keep the layout of the GGUF, so an adapter needs no permutation on its way
back: rows of q and k are in the order that llama.cpp's RoPE expects for the architecture. A quantised file is
dequantised to bfloat16, and the adapter learns to make up for what its quantisation lost (Dettmers et al. 2023, arXiv
2305.14314).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import gguf
import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional

from causeway_server.models.catalog.artifact import ArtifactError

from ..export.averaging import open_gguf

MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
INTERLEAVED = {"llama": True, "qwen2": False, "qwen3": False}  # how RoPE pairs the values of a head


class Shape(msgspec.Struct, frozen=True):
    """The sizes of a student, from its GGUF's metadata."""

    architecture: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    epsilon: float
    rope_base: float


class LoRALinear(nn.Module):
    """A frozen matrix with an adapter of low rank: y = x W' + b + s (x A') B'."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, rank: int, scale: float) -> None:
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("bias", bias, persistent=False)
        self.scale = scale
        self.adapted = rank > 0
        if not self.adapted:
            return
        self.a = nn.Parameter(torch.randn(rank, weight.shape[1]) / weight.shape[1] ** 0.5)
        self.b = nn.Parameter(torch.zeros(weight.shape[0], rank))

    def forward(self, x: Tensor) -> Tensor:
        full = functional.linear(x, self.weight, self.bias)
        if not self.adapted:
            return full
        low = functional.linear(x, self.a.to(x.dtype))
        return full + functional.linear(low, (self.b * self.scale).to(x.dtype))


class StudentLayer(nn.Module):
    """One transformer layer."""

    attention_norm: Tensor
    ffn_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None

    def __init__(self, shape: Shape, tensors: dict[str, Tensor], rank: int, scale: float) -> None:
        super().__init__()
        self._shape = shape
        for name, tensor in (("attention_norm", "attn_norm"), ("ffn_norm", "ffn_norm")):
            self.register_buffer(name, tensors[f"{tensor}.weight"], persistent=False)
        for name, tensor in (("q_norm", "attn_q_norm"), ("k_norm", "attn_k_norm")):
            self.register_buffer(name, tensors.get(f"{tensor}.weight"), persistent=False)
        self.matrices = nn.ModuleDict(
            {one: LoRALinear(tensors[f"{one}.weight"], tensors.get(f"{one}.bias"), rank, scale) for one in MATRICES}
        )

    def named_matrices(self) -> Iterator[tuple[str, LoRALinear]]:
        """Yield the matrices by their names in the GGUF."""
        for name, matrix in self.matrices.items():
            assert isinstance(matrix, LoRALinear)
            yield name, matrix

    def forward(self, x: Tensor, rope: Tensor, prefix: int, rows: int, mask: Tensor) -> Tensor:
        x = x + self._attention(self._norm(x, self.attention_norm), rope, prefix, rows, mask)
        normed = self._norm(x, self.ffn_norm)
        gate, up = self.matrices["ffn_gate"](normed), self.matrices["ffn_up"](normed)
        result: Tensor = x + self.matrices["ffn_down"](functional.silu(gate) * up)
        return result

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), self._shape.epsilon)

    def _attention(self, x: Tensor, rope: Tensor, prefix: int, rows: int, mask: Tensor) -> Tensor:
        """`x` [prefix + rows * length, width]: the rows share the prefix, each attends to it and to itself."""
        shape = self._shape
        q = self.matrices["attn_q"](x).view(-1, shape.heads, shape.head_width)
        k = self.matrices["attn_k"](x).view(-1, shape.kv_heads, shape.head_width)
        v = self.matrices["attn_v"](x).view(-1, shape.kv_heads, shape.head_width)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self._norm(q, self.q_norm), self._norm(k, self.k_norm)
        q, k = _rotate(q, rope, shape.architecture), _rotate(k, rope, shape.architecture)
        group = shape.heads // shape.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)

        def split(one: Tensor) -> tuple[Tensor, Tensor]:  # [1, heads, prefix, width], [rows, heads, length, width]
            tail = one[prefix:].view(rows, -1, shape.heads, shape.head_width)
            return one[None, :prefix].transpose(1, 2), tail.transpose(1, 2)

        (q0, q1), (k0, k1), (v0, v1) = split(q), split(k), split(v)
        k1 = torch.cat((k0.expand(rows, -1, -1, -1), k1), 2)
        v1 = torch.cat((v0.expand(rows, -1, -1, -1), v1), 2)
        tails = functional.scaled_dot_product_attention(q1, k1, v1, attn_mask=mask)
        out = tails.transpose(1, 2).reshape(-1, shape.heads * shape.head_width)
        if prefix:
            head = functional.scaled_dot_product_attention(q0, k0, v0, is_causal=True)
            out = torch.cat((head.transpose(1, 2).reshape(prefix, -1), out))
        result: Tensor = self.matrices["attn_output"](out)
        return result


class Student(nn.Module):
    """A pretrained network; only its adapter has gradients.

    Args:
        rank: The rank of each adapter matrix.
        scale: The factor of the adapter, alpha / rank.
        seed: The seed of the adapter's first values.
    """

    embedding: Tensor
    output: Tensor
    norm: Tensor

    def __init__(
        self,
        path: Path,
        rank: int,
        first_layer: int = 0,
        scale: float = 2.0,
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 1,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.shape, tensors = read_student(path, dtype)
        self.rank, self.scale, self.first_layer, self._dtype = rank, scale, first_layer, dtype
        self.register_buffer("embedding", tensors["token_embd.weight"], persistent=False)
        self.register_buffer("output", tensors.get("output.weight", self.embedding), persistent=False)
        self.register_buffer("norm", tensors["output_norm.weight"], persistent=False)
        layers = []
        for index in range(self.shape.layers):
            start = f"blk.{index}."
            own = {name.removeprefix(start): one for name, one in tensors.items() if name.startswith(start)}
            layers.append(StudentLayer(self.shape, own, rank if index >= first_layer else 0, scale))
        self.blocks: Sequence[StudentLayer] = layers
        self._registered = nn.ModuleList(layers)
        half = torch.arange(0, self.shape.head_width, 2, dtype=torch.float32) / self.shape.head_width
        self._frequencies = self.shape.rope_base**-half

    def forward(self, prefix: Sequence[int], rows: Tensor, wanted: Tensor) -> Tensor:
        """Return logits [wanted tokens, vocabulary].

        Args:
            prefix: Tokens with which every row begins; they are computed once.
            rows: The rest of the rows, int64 [rows, length], padded at the end.
            wanted: bool [rows, length], the positions whose logits are returned, in the order of the rows.
        """
        return self.upper(self.lower(prefix, rows), len(prefix), wanted)

    def lower(self, prefix: Sequence[int], rows: Tensor) -> Tensor:
        """Return the states below the first layer with an adapter, [prefix + rows * length, width], without gradients.

        A row's states depend on nothing that is learned.
        """
        ids = torch.cat((torch.tensor(prefix, dtype=torch.int64), rows.flatten()))
        with torch.no_grad():
            return self._through(
                self.blocks[: self.first_layer], functional.embedding(ids, self.embedding), *rows.shape
            )

    def upper(self, states: Tensor, prefix: int, wanted: Tensor, vocabulary: Tensor | None = None) -> Tensor:
        """Return logits [wanted tokens, vocabulary] from the states that `lower` returns.

        Args:
            vocabulary: The tokens whose logits are computed, int64; None: all.
        """
        x = self._through(self.blocks[self.first_layer :], states, *wanted.shape)[prefix:][wanted.flatten()]
        x = functional.rms_norm(x, (x.shape[-1],), self.norm.to(x.dtype), self.shape.epsilon)
        return functional.linear(x, self.output if vocabulary is None else self.output[vocabulary])

    def _through(self, layers: Sequence[StudentLayer], x: Tensor, count: int, length: int) -> Tensor:
        start = len(x) - count * length
        positions = torch.cat((torch.arange(start), (start + torch.arange(length)).repeat(count)))
        angles = positions[:, None].float() * self._frequencies
        rope = torch.stack((angles.cos(), angles.sin())).to(self._dtype)[:, :, None]  # [2, tokens, 1, pairs]
        mask = torch.ones(length, start + length, dtype=torch.bool).tril(start)
        for layer in layers:
            x = layer(x, rope, start, count, mask)
        return x


def _rotate(x: Tensor, rope: Tensor, architecture: str) -> Tensor:
    """Apply RoPE to `x` [tokens, heads, width]."""
    cos, sin = rope
    if INTERLEAVED[architecture]:
        one, other = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((one * cos - other * sin, one * sin + other * cos), -1).flatten(-2)
    one, other = x.chunk(2, -1)
    return torch.cat((one * cos - other * sin, one * sin + other * cos), -1)


def read_student(path: Path, dtype: torch.dtype) -> tuple[Shape, dict[str, Tensor]]:
    """Read and dequantise a GGUF: matrices as `dtype`, vectors as float32.

    Raises:
        ArtifactError: The file is not a GGUF of a supported family.
    """
    reader = open_gguf(path)
    architecture = str(_field(reader, path, "general.architecture"))
    if architecture not in INTERLEAVED:
        raise ArtifactError(
            f"{path}: the architecture is {architecture}, but that of a student must be {', '.join(INTERLEAVED)}"
        )

    def number(key: str) -> float:
        return float(str(_field(reader, path, f"{architecture}.{key}")))

    heads, width = int(number("attention.head_count")), int(number("embedding_length"))
    explicit = reader.fields.get(f"{architecture}.attention.key_length")
    base = reader.fields.get(f"{architecture}.rope.freq_base")
    shape = Shape(
        architecture=architecture,
        layers=int(number("block_count")),
        width=width,
        heads=heads,
        kv_heads=int(number("attention.head_count_kv")),
        head_width=int(explicit.contents()) if explicit else width // heads,
        epsilon=number("attention.layer_norm_rms_epsilon"),
        rope_base=float(base.contents()) if base else 10_000.0,
    )
    tensors = {}
    for one in reader.tensors:
        values = torch.from_numpy(gguf.dequantize(one.data, one.tensor_type).copy())
        tensors[one.name] = values.to(dtype if values.ndim > 1 else torch.float32)
    if "rope_freqs.weight" in tensors:
        raise ArtifactError(f"{path}: scaled RoPE frequencies are not supported")
    biases = {name: values.to(dtype) for name, values in tensors.items() if name.endswith(".bias")}
    return shape, tensors | biases


def _field(reader: gguf.GGUFReader, path: Path, key: str) -> object:
    field = reader.fields.get(key)
    if field is None:
        raise ArtifactError(f"{path}: the GGUF has no {key}")
    return field.contents()
