"""MLX's affine group quantisation in PyTorch, so that training can see the grid it will be stored on."""

from __future__ import annotations

import torch

GROUP = 64


def bits_of(name: str, shape: tuple[int, ...]) -> int | None:
    """Bits that MLX-LM's converter gives the tensor `name`, or None where it stays as it is.

    Router gates get 8, every other matrix whose last dimension 64 divides gets 4; norms, the convolution
    and the decay parameters are left alone.
    """
    if len(shape) < 2 or shape[-1] % GROUP or "conv1d" in name:
        return None
    return 8 if name.endswith(("mlp.gate.weight", "shared_expert_gate.weight")) else 4


def quantise(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales and biases as ``mx.quantize(weight.bfloat16, 64, bits)`` makes them.

    Args:
        weight: ``[..., inputs]``, any float type; rounded to bfloat16 first, as a saved checkpoint is.
        bits: 4 or 8.

    Returns:
        codes float32 ``[..., inputs / 64, 64]`` (whole numbers), scales and biases bfloat16 ``[..., inputs / 64]``.
    """
    w = weight.bfloat16().float().unflatten(-1, (-1, GROUP))
    low, high = w.amin(-1, keepdim=True), w.amax(-1, keepdim=True)
    top = float(2**bits - 1)
    # The end with the larger magnitude is met exactly, so that zero falls on the grid.
    negative = low.abs() > high.abs()
    scale = ((high - low) / top).clamp_min(1e-7)
    scale = torch.where(negative, scale, -scale)
    edge = torch.where(negative, low, high)
    steps = torch.round(edge / scale)
    on_grid = steps != 0
    scale = torch.where(on_grid, edge / torch.where(on_grid, steps, torch.ones_like(steps)), scale)
    bias = torch.where(on_grid, edge, torch.zeros_like(edge))
    codes = torch.round((w - bias) / scale).clamp(0.0, top)
    return codes, scale.squeeze(-1).bfloat16(), bias.squeeze(-1).bfloat16()


def round_to_grid(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """`weight` as it reads back from the packed form, same shape, float32."""
    codes, scales, biases = quantise(weight, bits)
    return (codes * scales.float().unsqueeze(-1) + biases.float().unsqueeze(-1)).flatten(-2)
