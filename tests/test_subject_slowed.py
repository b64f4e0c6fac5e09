"""A slowdown that is planted takes the time it says and changes nothing else."""

from __future__ import annotations

import pytest

from sweeps.clock import ManualClock
from sweeps.subjects.slowed import Slowed
from sweeps.subjects.stub import Stub, StubOptions


def slowed(slowdown: float) -> tuple[Slowed, Stub, ManualClock]:
    clock = ManualClock()
    stub = Stub(StubOptions(ns_per_row=1000, ns_per_step=3000), clock.advance)
    return Slowed(stub, slowdown, clock), stub, clock


def test_prefill_and_decode_take_the_share_longer_and_give_the_same():
    made, _, clock = slowed(1.05)
    plain = Stub(StubOptions(ns_per_row=1000, ns_per_step=3000), lambda ns: None)
    first, theirs = made.prefill([1, 2, 3]), plain.prefill([1, 2, 3])
    assert first == theirs and clock.now_ns() == pytest.approx(3000 * 1.05, abs=2)
    before = clock.now_ns()
    assert made.decode(first.next_token, 4) == plain.decode(theirs.next_token, 4)
    assert clock.now_ns() - before == pytest.approx(12_000 * 1.05, abs=2)


def test_everything_else_is_the_subjects():
    made, stub, _ = slowed(2)
    made.prefill([1, 2])
    assert made.position() == stub.position() == 2 and made.executed() == stub.executed() and made.name == "stub"


def test_a_speedup_cannot_be_planted():
    with pytest.raises(ValueError, match="slowdown=0.9"):
        slowed(0.9)
