"""What the device can do at best, measured for a moment in each session, for a rate to be held against.

A copy and a read give the memory bandwidth, a square product the arithmetic, a chain of tiny operations the cost of a
launch. They are what a program like this one can reach, a little under what the maker states. On a GPU the copy and the
read are MLX's and those of our own kernels (`engine.kernels.bandwidth`), whichever is faster: a ceiling that a better
kernel would lift is none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from sweeps.clock import Clock, WindowVoid, timed

REPEATS = 5

_COPY_ITEMS = {"cpu": 1 << 24, "metal": 1 << 26, "cuda": 1 << 28}
"""float32 items of the copied array, far beyond any cache: 64 MB, 256 MB, 1 GB."""

_SIZE = {"cpu": 1024, "metal": 4096, "cuda": 8192}
"""Rows of the square matrices."""

_CHAIN = {"cpu": 1, "metal": 8, "cuda": 8}
"""Copies, or products, in one window: on a GPU a single one would be measured with its launch and the wait for it."""


_LAUNCHES = 256
"""Tiny operations, each waiting for the one before, in the window that prices a launch."""


def measure(kind: str, clock: Clock) -> dict[str, float]:
    """Best of a few repeats of each on MLX's default device; about a second in all.

    Args:
        kind: ``"cpu"`` (float32 product), ``"metal"`` or ``"cuda"`` (bfloat16).

    Returns:
        ``bandwidth_bytes_per_second`` (copied: read and written), ``read_bytes_per_second``, ``flops_per_second``
        and ``launch_seconds`` (of one launch among dependent ones of a compiled step); empty for another kind.
    """
    if kind not in _SIZE:
        return {}
    import mlx.core as mx

    items, size, chain = _COPY_ITEMS[kind], _SIZE[kind], _CHAIN[kind]
    copied = _quickest(clock, partial(_copy, kind, items), partial(_own, "copy_metal", kind, items))
    read = _quickest(clock, partial(_read, kind, items), partial(_own, "read_metal", kind, items))
    matrix = mx.random.normal((size, size), key=mx.random.key(0)).astype(mx.float32 if kind == "cpu" else mx.bfloat16)
    mx.eval(matrix)
    multiplied = _best(clock, lambda: mx.eval([matrix @ matrix for _ in range(chain)]), mx.synchronize)
    launched = _best(clock, _launch_chain(), mx.synchronize)
    made = {
        "bandwidth_bytes_per_second": (chain * 2 * 4 * items, copied),
        "read_bytes_per_second": (chain * 4 * items, read),
        "flops_per_second": (chain * 2 * size**3, multiplied),
    }
    mx.clear_cache()
    rates = {name: amount / (best / 1e9) for name, (amount, best) in made.items() if best}
    return rates | ({"launch_seconds": launched / 1e9 / _LAUNCHES} if launched else {})


def _quickest(clock: Clock, *ways: Callable[[], Callable[[], Any] | None]) -> int:
    """The shortest window of several ways to the same in ns, each made when its turn comes; 0 if there is none."""
    import mlx.core as mx

    times = []
    for way in ways:
        work = way()
        times.append(0 if work is None else _best(clock, work, mx.synchronize))
        del work
        mx.clear_cache()
    return min((t for t in times if t), default=0)


def _own(name: str, kind: str, items: int) -> Callable[[], Any] | None:
    """The copy or the read of our own kernel; none on a CPU, nor where it does not compile."""
    if kind == "cpu":
        return None
    import mlx.core as mx

    from engine.kernels import bandwidth

    source, run = mx.ones((items,), mx.uint32), getattr(bandwidth, name)

    def copies() -> None:
        made = source
        for _ in range(_CHAIN[kind]):
            made = run(made)
        mx.eval(made)

    def reads() -> None:
        mx.eval([run(source) for _ in range(_CHAIN[kind])])

    try:
        mx.eval(run(source))
    except RuntimeError:  # as MLX says that a kernel does not compile; its own copy is measured still
        return None
    return copies if name == "copy_metal" else reads


def _read(kind: str, items: int) -> Callable[[], Any]:
    """Work that reads an array of float32 once and keeps next to nothing."""
    if kind == "cpu":
        import numpy as np

        held = np.ones(items, np.float32)
        return lambda: held.max()
    import mlx.core as mx

    source = mx.ones((items // 4096, 4096), mx.float32)
    mx.eval(source)
    return lambda: mx.eval([source.max(axis=-1) for _ in range(_CHAIN[kind])])


def _launch_chain() -> Callable[[], Any]:
    """Work that is nothing but launches: normalisations of 32 numbers, which MLX does not fuse with one another."""
    import mlx.core as mx

    def steps(x: mx.array) -> mx.array:
        for _ in range(_LAUNCHES):
            x = mx.softmax(x, axis=-1)
        return x

    compiled, start = mx.compile(steps), mx.ones((32,), mx.float32)
    mx.eval(start)
    return lambda: mx.eval(compiled(start))


def _copy(kind: str, items: int) -> Callable[[], Any]:
    """Work that reads and writes an array of float32 once."""
    if kind == "cpu":
        import numpy as np

        # MLX's own copy on a CPU takes fresh pages each time, which is what that would measure.
        held, target = np.zeros(items, np.float32), np.ones(items, np.float32)
        held[:] = 1.0
        return lambda: np.copyto(target, held)
    import mlx.core as mx

    source = mx.ones((items,), mx.float32)
    mx.eval(source)

    def work() -> None:
        made = source
        for _ in range(_CHAIN[kind]):
            made = made + 1.0
        mx.eval(made)

    return work


def _best(clock: Clock, work: Callable[[], Any], drain: Callable[[], None]) -> int:
    """The shortest of a few drained windows in ns, after one that warms up; 0 if the clock voided them all."""
    times = []
    for _ in range(1 + REPEATS):
        try:
            times.append(timed(clock, work, drain).elapsed_ns)
        except WindowVoid:
            continue
    return min(times[1:], default=0)
