"""The clock: exact arithmetic, voided windows, and what is inside a window."""

from __future__ import annotations

import gc

import pytest

from sweeps.clock import JUMP_NS, ManualClock, SystemClock, WindowVoid, rate, timed
from sweeps.rows import SampleRow, tokens_per_second

SECOND = 1_000_000_000


def test_three_tokens_a_second_apart_are_one_token_a_second():
    """Dividing N tokens by N - 1 gaps gave 1.5 here in other tools."""
    assert rate([1 * SECOND, 2 * SECOND, 3 * SECOND]) == (1.0, None)


@pytest.mark.parametrize("stamps", [[], [5 * SECOND]])
def test_one_token_has_no_rate_but_a_reason(stamps):
    value, reason = rate(stamps)
    assert value is None
    assert "token" in str(reason)


@pytest.mark.parametrize("stamps", [[SECOND, SECOND], [2 * SECOND, SECOND], [SECOND, 3 * SECOND, 2 * SECOND]])
def test_a_clock_that_does_not_advance_gives_no_rate(stamps):
    value, reason = rate(stamps)
    assert value is None
    assert "did not advance" in str(reason)


def test_a_window_holds_the_drain_after_the_work_and_not_the_one_before():
    clock = ManualClock()
    pending = [7]

    def drain() -> None:
        clock.advance(sum(pending))
        pending.clear()

    def work() -> str:
        clock.advance(100)
        pending.append(20)
        return "done"

    window = timed(clock, work, drain)
    assert (window.value, window.elapsed_ns) == ("done", 120)


def test_garbage_collection_is_off_inside_and_back_afterwards():
    clock = ManualClock()
    seen = []

    def work() -> None:
        seen.append(gc.isenabled())
        clock.advance(1)

    gc.enable()
    timed(clock, work)
    assert (seen, gc.isenabled()) == ([False], True)
    gc.disable()
    try:
        timed(clock, work)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_garbage_collection_returns_after_an_error():
    def work() -> None:
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        timed(ManualClock(), work)
    assert gc.isenabled()


@pytest.mark.parametrize("step", [0, -5])
def test_zero_and_negative_intervals_void_the_window(step):
    clock = ManualClock()
    with pytest.raises(WindowVoid, match="clock moved"):
        timed(clock, lambda: clock.advance(step))


@pytest.mark.parametrize("jump", [JUMP_NS + 1, -JUMP_NS - 1, 3600 * SECOND])
def test_a_suspended_machine_voids_the_window(jump):
    clock = ManualClock()

    def work() -> None:
        clock.advance(SECOND)
        clock.jump(jump)

    with pytest.raises(WindowVoid, match="suspended"):
        timed(clock, work)


def test_small_corrections_of_the_wall_clock_do_not_void():
    clock = ManualClock()

    def work() -> None:
        clock.advance(100 * SECOND)
        clock.jump(SECOND // 2)

    assert timed(clock, work).elapsed_ns == 100 * SECOND


def test_the_system_clock_times_a_sleep():
    clock = SystemClock()
    assert timed(clock, lambda: clock.sleep(0.01)).elapsed_ns >= 10_000_000


@pytest.mark.parametrize(
    ("elapsed", "work", "expected"),
    [(2 * SECOND, 64, 32.0), (0, 64, None), (-1, 64, None), (None, 64, None), (5, 0, None)],
)
def test_rates_of_rows_need_time_and_work(elapsed, work, expected):
    row = SampleRow("r", 0, "p", "a", "h", "stub", "decode", 256, 0, 0, "ok", work_tokens=work, elapsed_ns=elapsed)
    assert tokens_per_second(row) == expected
