"""The stand-in subject does exactly what its options say."""

from __future__ import annotations

import pytest

from sweeps.subjects.base import SubjectError, SubjectOutOfMemory, chunk_lengths
from sweeps.subjects.stub import Stub, StubOptions


class Hand:
    """A clock that only work moves."""

    def __init__(self):
        self.now = 0

    def advance(self, nanoseconds: int) -> None:
        self.now += nanoseconds


def make(**options) -> tuple[Stub, Hand]:
    hand = Hand()
    return Stub(StubOptions.from_dict(options), hand.advance), hand


@pytest.mark.parametrize(
    "count, chunk, tail, expected",
    [
        (5, 2, False, [2, 2, 1]),
        (4, 2, False, [2, 2]),
        (4, 2, True, [2, 1, 1]),
        (1, 2, True, [1]),
        (5, 2, True, [2, 2, 1]),
    ],
)
def test_chunk_lengths(count, chunk, tail, expected):
    assert chunk_lengths(count, chunk, tail) == expected


def test_prefill_charges_rows_and_passes():
    stub, hand = make(ns_per_row=10, ns_per_chunk=1000, chunk=4)
    seen = []
    done = stub.prefill(list(range(10)), progress=lambda now, total: seen.append((now, total, hand.now)))
    assert done.chunks == [4, 4, 2]
    assert seen == [(4, 10, 1040), (8, 10, 2080), (10, 10, 3100)]


def test_decode_stamps_are_the_clock_at_each_token():
    stub, hand = make(ns_per_step=7, slowdown=2.0)
    made = stub.decode(3, 3, clock=lambda: hand.now)
    assert made.stamps == [14, 28, 42]
    assert len(made.tokens) == 3 and stub.position() == 3


def test_equal_histories_decode_alike_after_restore():
    stub, _ = make()
    first = stub.prefill([1, 2, 3]).next_token
    mark = stub.snapshot()
    a = stub.decode(first, 5).tokens
    stub.restore(mark)
    assert stub.decode(first, 5).tokens == a
    with pytest.raises(ValueError, match="no prefix"):
        stub.restore(99)


def test_whole_chunks_have_no_next_token():
    stub, _ = make(chunk=4, tail=True)
    assert stub.prefill([1, 2, 3, 4], last=False).next_token == -1
    assert stub.prefill([1, 2, 3, 4]).chunks == [3, 1]


def test_failures_come_at_their_frontier():
    stub, _ = make(oom_at=8, chunk=4)
    stub.prefill([0] * 4)
    with pytest.raises(SubjectOutOfMemory, match="8 tokens"):
        stub.prefill([0] * 4)
    failing, _ = make(fail_at=4, chunk=4)
    with pytest.raises(RuntimeError, match="failed at 4"):
        failing.prefill([0] * 4)


def test_noise_is_seeded():
    def total(seed):
        stub, hand = make(noise=0.1, seed=seed)
        stub.decode(0, 20)
        return hand.now

    assert total(1) == total(1) != total(2)


def test_unknown_option_is_named():
    with pytest.raises(SubjectError, match="slow_down"):
        StubOptions.from_dict({"slow_down": 2})
