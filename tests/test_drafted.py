"""What drafting touches, counted: as many experts as rows go to, and bytes that add up."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from engine.config import DecodeConfig, EngineConfig, SpeculativeConfig
from engine.generate import Engine
from engine.synthetic import make_weights, tiny_config
from sweeps import drafted
from sweeps.least import least_work
from sweeps.subjects.engine import EngineSubject

CONFIG = tiny_config(4, hidden_size=128, experts=8, num_experts_per_tok=2)
IDS = np.random.default_rng(3).integers(0, 440, 30).tolist()


@pytest.fixture(scope="module")
def weights():
    return make_weights(CONFIG, 2, dtype=mx.float32, mtp=True)


def make(weights, **fields) -> Engine:
    decode = EngineConfig(decode=DecodeConfig(trace="eager"), speculative=SpeculativeConfig(**fields))
    return Engine(CONFIG, weights, decode, vocabulary=453, dtype=mx.float32)


def told(weights, **fields):
    return drafted.of_subject(EngineSubject(make(weights, **fields)), [30], lambda count: IDS[:count])[30]


def test_rows_meet_more_experts_than_one_and_fewer_than_all_of_theirs(weights):
    some, more = (told(weights, drafter="mtp", depth=n, force="1") for n in (1, 5))
    assert (some["rows_per_verification"], some["experts_per_row"]) == (2, 2)
    assert 2 < some["experts_per_verification"] < 4 < more["experts_per_verification"] <= 8


def test_bytes_fall_with_what_is_accepted(weights):
    right, wrong = (told(weights, drafter="mtp", depth=3, force=f) for f in ("1", "0"))
    assert right["bytes_per_token"] < right["bytes_per_token_plain"] < wrong["bytes_per_token"]
    free, trimmed = (
        told(weights, drafter="ngram", depth=3, force="1"),
        told(weights, drafter="mtp", depth=3, force="1", draft_vocab=64),
    )
    assert free["bytes_per_token"] < trimmed["bytes_per_token"] < right["bytes_per_token"]


def test_a_plain_step_moves_what_the_least_work_says(weights):
    """Counted from the weights here, from the geometry there; scales in float32 are all that differs."""
    bfloat = make_weights(CONFIG, 2, dtype=mx.bfloat16, mtp=True)
    sizes = drafted.Bytes.of(bfloat, CONFIG.num_experts, CONFIG.num_hidden_layers)
    mine = sizes.common + CONFIG.num_hidden_layers * 2 * sizes.expert
    mine += CONFIG.cache_bytes_per_token() * 30 + 2 * CONFIG.state_bytes()
    assert mine == pytest.approx(least_work(CONFIG, "decode", 30, 1)[0], rel=0.01)


def test_the_count_leaves_the_engine_and_its_rows_alone(weights):
    engine = make(weights, drafter="ngram", depth=2)
    first = engine.prefill(IDS)
    want = engine.decode(first, 6)
    subject = EngineSubject(engine)
    assert drafted.of_subject(subject, [30, 8192], lambda count: IDS[:count]).keys() == {30}
    engine.reset()
    assert engine.decode(engine.prefill(IDS), 6) == want
    assert drafted.of_subject(EngineSubject(make(weights)), [30], lambda count: IDS[:count]) == {}
