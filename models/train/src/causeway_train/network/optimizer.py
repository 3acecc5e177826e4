"""Muon for matrices, AdamW for all other weights.

Muon orthogonalises each matrix's momentum by a Newton-Schulz iteration (Jordan et al. 2024,
kellerjordan.github.io/posts/muon). On these sizes it needs about half the steps of AdamW.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

_STEPS = 5
_A, _B, _C = 3.4445, -4.7750, 2.0315  # the published coefficients of the quintic iteration


class Muon(torch.optim.Optimizer):
    """Momentum SGD with orthogonalised updates, for two-dimensional weights."""

    def __init__(self, weights: Iterable[tuple[nn.Parameter, int]], lr: float) -> None:
        """`weights`: each with the number of matrices that are fused in it; these are orthogonalised separately."""
        groups = [{"params": [weight], "parts": parts} for weight, parts in weights]
        super().__init__(groups, {"lr": lr, "momentum": 0.95, "decay": 0.01})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(weight)
                momentum = state["momentum"].lerp_(weight.grad, 1 - group["momentum"])
                parts = weight.grad.lerp(momentum, group["momentum"]).chunk(group["parts"])
                stretch = max(1.0, parts[0].shape[0] / parts[0].shape[1]) ** 0.5
                weight.mul_(1 - group["lr"] * group["decay"])
                weight.add_(torch.cat([orthogonal(part) for part in parts]), alpha=-group["lr"] * stretch)


def orthogonal(matrix: Tensor) -> Tensor:
    """Return approximately U Vᵀ of matrix = U S Vᵀ, computed in bf16."""
    x = matrix.to(torch.bfloat16)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(_STEPS):
        gram = x @ x.T
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    result: Tensor = (x.T if tall else x).to(matrix.dtype)
    return result


class Optimizers:
    """Both optimizers behind one step, with a shared schedule factor."""

    def __init__(
        self, network: nn.Module, matrix_lr: float, vector_lr: float, auxiliary: Sequence[nn.Module | None] = ()
    ) -> None:
        """`auxiliary`: modules that are trained along with the network, by AdamW."""
        named = list(network.named_parameters())
        matrices = [(p, _parts(name)) for name, p in named if p.ndim == 2 and "embedding" not in name]
        others = [p for name, p in named if p.ndim != 2 or "embedding" in name]
        others += [weight for module in auxiliary if module for weight in module.parameters()]
        self._muon = Muon(matrices, matrix_lr)
        self._adam = torch.optim.AdamW(others, lr=vector_lr, betas=(0.9, 0.98), eps=1e-9, weight_decay=0.0)
        self._lr = (matrix_lr, vector_lr)

    def step(self, factor: float) -> None:
        """Update all weights at `factor` times their learning rate, and clear the gradients."""
        for optimizer, lr in zip((self._muon, self._adam), self._lr, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = lr * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, object]:
        return {"muon": self._muon.state_dict(), "adam": self._adam.state_dict()}

    def load_state_dict(self, state: dict[str, dict[str, object]]) -> None:
        self._muon.load_state_dict(state["muon"])
        self._adam.load_state_dict(state["adam"])


def _parts(name: str) -> int:
    """Return how many matrices are stacked in a weight of `llama.Block`."""
    return 3 if "qkv" in name else 2 if "gate_up" in name else 1
