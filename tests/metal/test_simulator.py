"""The simulator's own arithmetic: simdgroup operations, positions and conversions against NumPy."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
import simulator
from simulator import Simulator

from engine.kernels import loader
from engine.kernels.loader import Launch

pytestmark = pytest.mark.skipif(simulator.missing() is not None, reason=str(simulator.missing()))

LANE = np.arange(128) % 32
FIRST = np.arange(128) - LANE
X = np.random.default_rng(0).standard_normal(128).astype(np.float32)
ROWS = X.reshape(4, 32)

BODIES = {
    "sum": ("simd_sum(v)", np.repeat(ROWS.sum(1), 32)),
    "max": ("simd_max(v)", np.repeat(ROWS.max(1), 32)),
    "shuffle": ("simd_shuffle(v, ushort((lane * 7u) & 31u))", X[FIRST + LANE * 7 % 32]),
    "shuffle xor": ("simd_shuffle_xor(v, ushort(5))", X[FIRST + (LANE ^ 5)]),
    "sums of 4 values": (
        "simd_sum_each<4>(four, lane)",
        np.repeat(ROWS.sum(1), 32) * (1 + LANE % 4),
    ),
    "half": ("float(float16_t(v))", X.astype(np.float16).astype(np.float32)),
    "exp2": ("exp2_of(v)", np.exp2(X)),
    "exp": ("exp_of(9.0f * v)", np.exp(9.0 * X)),
    "rsqrt": ("rsqrt_of(v * v + 1e-6f)", 1 / np.sqrt(X.astype(np.float64) ** 2 + 1e-6)),
    "sine": ("sin_of(50000.0f * v)", np.sin((np.float32(50000) * X).astype(np.float64))),
    "cosine": ("cos_of(50000.0f * v)", np.cos((np.float32(50000) * X).astype(np.float64))),
    "sigmoid": ("sigmoid_of(v)", 1 / (1 + np.exp(-X.astype(np.float64)))),
    "log1p over x": (
        "log1p_of(1e-4f + 0.1f * v * v) / (1e-4f + 0.1f * v * v)",
        np.log1p(1e-4 + X.astype(np.float64) ** 2 / 10) / (1e-4 + X.astype(np.float64) ** 2 / 10),
    ),
    "multiply and add": ("multiply_add(v, v, 1.0f)", X * X + 1),
    "bits": ("as_type<float>(as_type<uint>(v) ^ 0x80000000u)", -X),
    "simdgroup": ("float(simdgroup_index_in_threadgroup)", np.arange(128) // 32 % 2),
    "threadgroup": (
        "float(threadgroup_position_in_grid.x * 10u + threadgroups_per_grid.x)",
        np.arange(128) // 64 * 10 + 2,
    ),
}


def run(body: str, inputs: tuple, grid: tuple, threadgroup: tuple, shape: tuple, checked: bool) -> np.ndarray:
    text = f"// kernel: one\n// inputs: x\n// dense: x\n// outputs: y\n// template: typename T\n{body}\n"
    header = '#line 1 "portable.h"\n' + (loader.FOLDER / "portable.h").read_text(encoding="utf-8")
    kernel = loader.parse("probe", text, header)["one"]
    launch = Launch(kernel, inputs, kernel.arguments(T=mx.float32), grid, threadgroup, [shape], [mx.float32])
    simulator.check([simulator.source(launch)])
    return np.array(Simulator(checked=checked).launch(launch)[0])


def test_expressions_agree_with_numpy():
    lines = [
        "const uint at = thread_position_in_grid.x;",
        "const uint lane = thread_index_in_simdgroup;",
        "const float v = x[at];",
    ]
    for number, (expression, _) in enumerate(BODIES.values()):
        # An array of its own each time: the sums use theirs up.
        lines.append("{ float four[4] = {v, 2.0f * v, 3.0f * v, 4.0f * v};")
        lines.append(f"  y[at * {len(BODIES)}u + {number}u] = {expression}; }}")
    for checked in (False, True):
        got = run("\n".join(lines), (mx.array(X),), (128, 1, 1), (64, 1, 1), (128, len(BODIES)), checked)
        for number, (name, (_, want)) in enumerate(BODIES.items()):
            assert np.allclose(got[:, number], want, rtol=1e-5, atol=1e-6), name


def test_positions_in_three_dimensions():
    body = """
const uint3 at = thread_position_in_grid;
const uint3 in = thread_position_in_threadgroup;
const uint3 group = threadgroup_position_in_grid;
const bool right = at.x == group.x * 32u + in.x && at.y == group.y * 2u + in.y && at.z == group.z;
const uint index = thread_index_in_threadgroup;
y[(at.z * 4u + at.y) * 64u + at.x] = right && index == in.x + 32u * in.y ? x[0] : 0.0f;
"""
    assert (run(body, (mx.array([3.0] * 8),), (64, 4, 3), (32, 2, 1), (3, 4, 64), True) == 3).all()
    # Fewer than 8 elements come in as `constant`.
    assert (run(body, (mx.array([3.0]),), (64, 4, 3), (32, 2, 1), (3, 4, 64), True) == 3).all()


def test_bfloat16_is_rounded_to_nearest():
    body = "y[thread_position_in_grid.x] = float(bfloat16_t(x[thread_position_in_grid.x]));"
    want = np.array(mx.array(X).astype(mx.bfloat16).astype(mx.float32))
    assert np.array_equal(run(body, (mx.array(X),), (128, 1, 1), (32, 1, 1), (128,), False), want)
