"""Muon: momentum, orthogonalised by Newton-Schulz (Jordan et al. 2024), for stacks of matrices too."""

from collections.abc import Iterable

import torch
from torch import Tensor

from outpace.ops.fast import product_dtype

NS = (3.4445, -4.7750, 2.0315)


def orthogonalise(g: Tensor, steps: int = 5) -> Tensor:
    """[..., N, K] -> the nearest semi-orthogonal matrices, roughly (singular values in 0.7..1.2)."""
    a, b, c = NS
    x = g.to(product_dtype(g.device))
    wide = x.shape[-2] > x.shape[-1]
    x = x.mT if wide else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        s = x @ x.mT
        x = a * x + (b * s + c * s @ s) @ x
    return (x.mT if wide else x).to(g.dtype)


class Muon(torch.optim.Optimizer):
    """For weights of two or more dimensions, the last two being the matrix. `torch.optim.Muon` takes
    matrices only; experts are [E, N, K]."""

    def __init__(
        self, params: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                m = state["momentum"]
                m.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalise(p.grad.lerp(m, group["momentum"]))
                size = max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * size)
