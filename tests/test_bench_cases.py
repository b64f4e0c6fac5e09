"""The benchmarks leave no op and no variant out, and are no part of the default run."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.ops.registry import OPS

BENCH = Path(__file__).parent / "bench" / "bench_ops.py"


class Seen:
    """Keeps what pytest collects."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.names = [item.name for item in session.items]


def collected(*arguments: str) -> list[str]:
    seen = Seen()
    quiet = ["--collect-only", "-q", "-p", "no:cacheprovider"]
    assert pytest.main([*quiet, *arguments], plugins=[seen]) == 0
    return seen.names


def test_every_op_and_variant_is_a_benchmark() -> None:
    names = collected(str(BENCH))
    for op in OPS.values():
        for variant in op.variants:
            assert any(name.startswith(f"test_op[{op.name}-{variant}-") for name in names), (op.name, variant)


def test_benchmarks_run_on_demand_only() -> None:
    # No name of theirs is what pytest looks for when it is given a folder.
    assert not list(BENCH.parent.glob("test_*.py")) and not list(BENCH.parent.glob("*_test.py"))
