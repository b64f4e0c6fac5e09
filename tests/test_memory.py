"""Memory arithmetic against byte counts of the real checkpoint and against published peaks."""

from __future__ import annotations

import pytest

from engine.config import ModelConfig
from engine.memory import (
    cache_bytes,
    largest_frontier,
    packed_bytes,
    prefill_room,
    run_bytes,
    scratch_bytes,
    weight_bytes,
)

REAL = ModelConfig()

# Peaks of MLX-LM on an M5 Max with 128 GB, Qwen3.6-35B-A3B-4bit, in GB, as a user reported them
# (https://github.com/ml-explore/mlx-lm, discussion 1480).
PUBLISHED_PEAKS = {8_192: 21.7, 32_768: 23.8, 65_536: 26.7, 130_000: 32.5, 196_608: 38.0}


def test_weights_of_the_real_model_to_the_byte() -> None:
    # The 4-bit text checkpoint holds 19,508,789,376 bytes with A_log in float32.
    assert weight_bytes(REAL) == 19_508_789_376
    # Raw bfloat16: 34,660,610,688 parameters, two bytes each, and A_log's two extra.
    assert weight_bytes(REAL, bits=None) == 2 * 34_660_610_688 + 2 * 30 * 32


def test_packed_matrix() -> None:
    # One group of 64: 32 bytes of 4-bit codes, one bfloat16 scale, one bfloat16 bias.
    assert packed_bytes(64, 4, 2) == 36
    assert packed_bytes(64, 8, 4) == 72
    assert packed_bytes(64, None, 2) == 128


def test_only_attention_layers_grow() -> None:
    # 10 of 40 layers, keys and values, 2 heads of 256, 2 bytes.
    assert cache_bytes(REAL, 1024) - cache_bytes(REAL, 512) == 512 * 20_480
    assert cache_bytes(REAL, 256) - 256 * 20_480 == REAL.state_bytes()
    assert cache_bytes(REAL, 257) == cache_bytes(REAL, 512)


@pytest.mark.parametrize("positions", PUBLISHED_PEAKS)
def test_peak_is_near_what_was_published(positions: int) -> None:
    assert run_bytes(REAL, positions) / 1e9 == pytest.approx(PUBLISHED_PEAKS[positions], rel=0.03)


def test_second_arm_costs_a_cache_and_no_weights() -> None:
    one, two = (run_bytes(REAL, 32_768, arms=arms) for arms in (1, 2))
    assert two - one == cache_bytes(REAL, 32_768)


def test_scratch_of_a_short_prompt_is_that_of_its_rows() -> None:
    assert scratch_bytes(REAL, 256, chunk=2048) == scratch_bytes(REAL, 256, chunk=256)
    # Heads x chunk x positions x 2 bytes of scores.
    assert scratch_bytes(REAL, 8192) - scratch_bytes(REAL, 4096) == 16 * 2048 * 4096 * 2
    assert scratch_bytes(REAL, 8192, chunk=4096) > scratch_bytes(REAL, 8192, chunk=2048)


def test_fused_attention_needs_the_same_at_any_length_and_less_in_shorter_chunks() -> None:
    for positions in (8_192, 131_072):
        needs = [scratch_bytes(REAL, positions, chunk, fused_attention=True) for chunk in (512, 1024, 2048, 4096, 8192)]
        assert needs == [prefill_room(REAL, chunk) for chunk in (512, 1024, 2048, 4096, 8192)] == sorted(needs)
        assert needs[2] <= 2.5e9


def test_largest_frontier_is_the_edge() -> None:
    budget = run_bytes(REAL, 16_384)
    assert largest_frontier(REAL, budget) == 16_384
    assert largest_frontier(REAL, budget - 1) == 8_192
    assert largest_frontier(REAL, run_bytes(REAL, 256) - 1) == 0
    # Never beyond what the model was made for, however large the machine.
    assert largest_frontier(REAL, 10**13) == REAL.max_position_embeddings
