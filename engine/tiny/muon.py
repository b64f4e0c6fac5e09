"""Muon: momentum whose update is the nearest orthogonal matrix, for the matrices inside the layers."""

from __future__ import annotations

import torch


def orthogonalise(x: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Push the singular values of each matrix ``[n, r, c]`` (r <= c) towards 1 by a quintic iteration.

    In bfloat16 on a GPU, where it is enough and fast; in the given type elsewhere.
    """
    if x.is_cuda:
        x = x.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


class Muon:
    """Nesterov momentum, orthogonalised, scaled to the update size of AdamW (root mean square 0.2 x rate).

    Matrices of one shape are updated as one batch. `pieces` says into how many row blocks a parameter is cut
    (heads of a projection, gate and up of an expert); leading dimensions are a batch of their own.
    """

    def __init__(self, parameters: list[tuple[torch.nn.Parameter, int]], momentum: float = 0.95, decay: float = 0.1):
        self.momentum, self.decay = momentum, decay
        self.groups: dict[tuple[int, int], list[tuple[torch.nn.Parameter, int]]] = {}
        for parameter, pieces in parameters:
            rows, columns = parameter.shape[-2] // pieces, parameter.shape[-1]
            self.groups.setdefault((min(rows, columns), max(rows, columns)), []).append((parameter, pieces))
        self.buffers: dict[tuple[int, int], torch.Tensor] = {}

    @staticmethod
    def _matrices(x: torch.Tensor, pieces: int) -> torch.Tensor:
        x = x.unflatten(-2, (pieces, -1)).reshape(-1, x.shape[-2] // pieces, x.shape[-1])
        return x.mT if x.shape[-2] > x.shape[-1] else x

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Apply one update to every parameter that has a gradient."""
        for shape, members in self.groups.items():
            gradient = torch.cat([self._matrices(p.grad, n) for p, n in members])  # type: ignore[arg-type]
            buffer = self.buffers.setdefault(shape, torch.zeros_like(gradient))
            buffer.lerp_(gradient, 1 - self.momentum)
            update = orthogonalise(gradient.lerp(buffer, self.momentum)) * (0.2 * shape[1] ** 0.5 * rate)
            start = 0
            for p, n in members:
                count = p.numel() // (shape[0] * shape[1])
                piece = update[start : start + count]
                start += count
                if p.shape[-2] // n > p.shape[-1]:
                    piece = piece.mT
                p.mul_(1 - self.decay * rate)
                p.sub_(piece.reshape(p.shape).to(p.dtype))

    def state(self) -> dict[tuple[int, int], torch.Tensor]:
        """The momentum buffers, by matrix shape."""
        return self.buffers
