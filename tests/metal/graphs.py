"""Kernels of tests launched as replayed steps are: by CUDA's driver, without MLX."""

from __future__ import annotations

import mlx.core as mx

from engine.kernels import cuda
from engine.kernels.loader import Launch


def run_as_graph(call: Launch) -> list[mx.array]:
    """One launch as `engine.replay` makes it, its outputs full of NaN (or ones) before."""
    device = cuda.device()
    floats = (mx.float32, mx.bfloat16, mx.float16)
    made = [
        mx.full(shape, float("nan"), dtype) if dtype in floats else mx.full(shape, -1, mx.int32).view(dtype)
        for shape, dtype in zip(call.shapes, call.dtypes)
    ]
    arrays = [*call.inputs, *made]
    mx.eval(arrays)
    mx.synchronize()
    device.enter()
    placed = device.addresses(arrays)
    graph = device.graph([(call, [at for at, _ in placed], [steps for _, steps in placed[: len(call.inputs)]])])
    device.wait(device.run(graph))
    device.drop(graph)
    return made
