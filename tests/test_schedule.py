"""Order of windows, and walks that stand for straight prompts."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sessions import Bench, arm, job, points

from sweeps.clock import ManualClock, Window, timed
from sweeps.points import Arm, Point
from sweeps.rows import tokens_per_second
from sweeps.schedule import ChunksDiffer, Walk, block_cells, block_order, groups, tail_start
from sweeps.subjects.base import chunk_lengths
from sweeps.subjects.stub import Stub, StubOptions


@given(st.integers(1, 6), st.integers(0, 99), st.text(max_size=5))
def test_every_block_is_its_own_mirror_image(arms, block, seed):
    """So that a linear drift of the machine cancels between any two arms."""
    names = [f"arm{i}" for i in range(arms)]
    order = block_order(names, seed, block)
    assert order == order[::-1]
    assert Counter(order) == dict.fromkeys(names, 2)
    places = {name: sum(i for i, other in enumerate(order) if other == name) for name in names}
    assert len(set(places.values())) == 1


def test_both_orders_come_up_and_the_coin_is_seeded():
    drawn = ["".join(block_order("AB", "seed", block)) for block in range(200)]
    assert set(drawn) == {"ABBA", "BAAB"}
    assert 60 < drawn.count("ABBA") < 140
    assert drawn == ["".join(block_order("AB", "seed", block)) for block in range(200)]
    assert drawn != ["".join(block_order("AB", "other", block)) for block in range(200)]


def test_on_a_walk_each_arm_goes_once_a_block_and_odd_blocks_mirror_even_ones():
    for block in range(0, 20, 2):
        first, second = (block_order("ABC", "s", b, walk=True) for b in (block, block + 1))
        assert sorted(first) == list("ABC")
        assert second == first[::-1]


def test_cells_leave_out_skipped_arms_and_llama_bench(tmp_path):
    made = job(tmp_path, [arm("a"), arm("b"), arm("c"), Arm("llama", "llama_bench")], points([256]))
    point = Point("p", "prefill", 256, 1, skip={"b": "too slow"})
    cells = block_cells(made, 0, point, 0)
    assert Counter(cell.arm for cell in cells) == {"a": 2, "c": 2}
    assert [cell.slot for cell in cells] == [0, 1, 2, 3]
    assert sorted((cell.arm, cell.turn) for cell in cells) == [("a", 0), ("a", 1), ("c", 0), ("c", 1)]


def test_groups_go_from_short_to_long_and_share_one_walk(tmp_path):
    made = job(tmp_path, [arm("a")], points([4096, 256, 32768, 16384], walk_from=16384))
    found = groups(made)
    assert [(group.straight, group.frontiers) for group in found] == [
        (True, [256]),
        (True, [4096]),
        (False, [16384, 32768]),
    ]
    assert all(set(group.prefill) == set(group.decode) == set(group.frontiers) for group in found)


@given(st.integers(1, 20_000), st.integers(1, 4096))
def test_the_last_chunk_begins_where_a_straight_prompt_begins_it(tokens, chunk):
    assert tokens - tail_start(tokens, chunk) == chunk_lengths(tokens, chunk)[-1]


FRONTIERS = [256, 512, 2048, 4096, 32768]


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("walk_from", [4096, 1 << 60], ids=["walk", "straight"])
def test_prefill_rates_equal_those_of_straight_prompts(tmp_path, tail, walk_from):
    """The clock charges by rows and by chunk, so a wrong number of chunks anywhere shows."""
    options = {"ns_per_row": 1000, "ns_per_chunk": 50_000, "chunk": 1024, "tail": tail}
    bench = Bench(job(tmp_path, [arm("a", **options)], points(FRONTIERS, blocks=1, walk_from=walk_from)))
    assert bench.run()
    for frontier in FRONTIERS:
        chunks = chunk_lengths(frontier, 1024, tail=tail)
        straight = frontier / ((frontier * 1000 + len(chunks) * 50_000) / 1e9)
        for row in bench.rows("prefill", frontier=frontier):
            assert row.chunks == chunks
            assert tokens_per_second(row) == pytest.approx(straight, rel=1e-12)
        assert bench.rows("prefill", frontier=frontier)


@settings(deadline=None)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=6, unique=True), st.integers(1, 900), st.booleans())
def test_a_walk_is_a_straight_prompt_at_any_frontiers(frontiers, chunk, tail):
    clock = ManualClock()
    stub = Stub(StubOptions(ns_per_row=10, ns_per_chunk=999, chunk=chunk, tail=tail), clock.advance)
    tokens = [i % 251 for i in range(max(frontiers))]
    walk = Walk(stub, tokens, chunk)
    for frontier in sorted(frontiers):
        reached = walk.to(frontier, lambda work, spent: timed(clock, work))
        chunks = chunk_lengths(frontier, chunk, tail=tail)
        assert reached.chunks == chunks
        assert reached.elapsed_ns == frontier * 10 + len(chunks) * 999
        assert stub.export_state().tokens == tokens[:frontier]
        stub.decode(reached.tail.next_token, 3)


def test_a_walk_that_runs_other_chunks_is_refused():
    """A subject whose chunk is not the one it tells would be given the time of another prompt."""
    clock = ManualClock()
    stub = Stub(StubOptions(chunk=512), clock.advance)
    walk = Walk(stub, list(range(256)) * 16, 1024)
    with pytest.raises(ChunksDiffer):
        walk.to(4096, lambda work, spent: timed(clock, work))


def test_time_before_the_tail_is_told_to_the_timer():
    """The cap of a window covers the whole prompt, not the last stretch of a walk."""
    clock = ManualClock()
    stub = Stub(StubOptions(ns_per_row=1, chunk=10), clock.advance)
    spent: list[int] = []

    def timer(work, before: int) -> Window:
        spent.append(before)
        return timed(clock, work)

    walk = Walk(stub, [0] * 100, 10)
    walk.to(50, timer)
    walk.to(100, timer)
    assert spent == [0, 40, 40, 90]
