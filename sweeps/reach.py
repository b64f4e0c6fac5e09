"""What decoding runs at the contexts that are timed, held against the references there.

A guard compares decoding behind a few hundred tokens. What attention runs may change with the context: keys are split
in other ways, parts grow or become more, tuned settings go by length. So at every timed context it is tried once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from engine.cache import ExactView, TracedView, bucket_for
from engine.generate import Engine
from engine.ops.bind import FOLDED, tile_of
from engine.ops.selftest import relative_rms
from engine.replay import room_for
from sweeps.guard import held, known
from sweeps.window import one_line

Line = tuple[str, str, str]
"""Op, variant and tile, as executed lines name them."""


@dataclass(frozen=True)
class Call:
    """A call of decode attention: `rows` new rows behind `start` positions.

    shown: positions that it is shown, those from the new rows on masked, as a traced step is; None: up to the last row.
    """

    rows: int
    start: int
    shown: int | None


def reached(
    engine: Engine, executed: list[list[str]], points: Iterable[tuple[int, int]]
) -> tuple[list[list[str]], list[list[Any]]]:
    """`executed` of decoding, and what the timed contexts run beside it; and what is wrong there.

    Attention alone is given more at a longer context, and may run by other settings there. Whatever it runs is held
    against its reference at that context, by one row and by as many as a verification has, its keys as the engine's
    cache shows them. Other ops are tried by the rows of a verification where those run something new.

    Args:
        points: tokens cached and tokens decoded of every timed point.

    Returns:
        The lines, and ``[op, variant, tile, tokens cached, why]`` of every one that is refuted or fails there.
    """
    made = {(str(op), str(variant), str(tile)) for op, variant, tile in executed}
    compared, off = {op for op, _, _ in made}, {}
    if "decode_attention" in compared:
        for frontier, tokens in sorted(set(points)):
            for line, call in _attention(engine, frontier, tokens):
                if (why := _refuted(engine, call)) is not None:
                    off.setdefault((*line, frontier), why)
                elif (*line, frontier) not in off:
                    made.add(line)
    folded = {"decode_attention", "prefill_attention", *FOLDED.get(engine.ops.fusion, ())}
    for rows in _verified(engine):
        for bound in engine.ops.all():
            if bound.op.name in compared - folded and not known(bound, rows, sorted(made)):
                for case in bound.op.timing(engine.config, rows, rows):
                    line = held(bound, case, engine.dtype, sorted(made))
                    made |= set() if line is None else {line}
    return [list(line) for line in sorted(made)], [[*where, why] for where, why in off.items()]


def _verified(engine: Engine) -> range:
    """Numbers of rows of an engine's verifications in one pass; none of one that makes none."""
    if engine.speculator is None or engine.speculator.idle or engine.engine.speculative.exact_verify:
        return range(0)
    return range(2, engine.engine.speculative.depth + 2)


def _attention(engine: Engine, frontier: int, tokens: int) -> list[tuple[Line, Call]]:
    """What decode attention runs in a window of `tokens` behind `frontier`, each with a call that runs it.

    One row and several are told apart, and the position on the host and on the device: they are other launches.
    """
    bound, c = engine.ops.decode_attention, engine.config
    made: dict[Any, tuple[Line, Call]] = {}
    for call in sorted(_calls(engine, frontier, tokens), key=lambda call: (-call.rows, call.shown or 0, call.start)):
        shown = call.start + call.rows if call.shown is None else call.shown
        # Nothing is computed: settings go by shapes.
        keys = mx.zeros((1, c.num_key_value_heads, shown, c.head_dim), engine.dtype)
        q = mx.zeros((1, c.num_attention_heads, call.rows, c.head_dim), engine.dtype)
        variant, settings, _ = bound.pick(call.rows, (q, keys, keys, 1.0, None))
        line = ("decode_attention", variant.name, tile_of(settings))
        made.setdefault((line, call.rows > 1, call.shown is None), (line, call))
    return list(made.values())


def _calls(engine: Engine, frontier: int, tokens: int) -> set[Call]:
    """The first and the last pass of every kind that a window may hold."""
    made, step = set(), engine.engine.cache.step
    for rows in (1, *_verified(engine)):
        for start in {frontier, max(frontier, frontier + tokens - rows)}:
            if engine.trace == "eager" or engine.speculator is not None:
                # Drafts are made so too, and verifications where an op reads back.
                made.add(Call(rows, start, None))
            if engine.trace != "eager":
                traced = {bucket_for(start + rows)} | ({room_for(start + rows)} if engine.replay is not None else set())
                # A cache with less room than that shows what it has; how much depends on what it held before.
                least = max(start + rows, -(-(frontier + tokens) // step) * step)
                made |= {Call(rows, start, shown) for most in traced for shown in (most, min(most, least))}
    return made


def _refuted(engine: Engine, call: Call) -> str | None:
    """Why what decode attention runs in a call is not to be believed; None if it agrees with its reference."""
    limit = engine.ops.decode_attention.op.tolerance[str(engine.dtype).rpartition(".")[2]]
    try:
        error = _attention_error(engine, call)
    except Exception as failed:
        # What cannot be tried here is not vouched for.
        return f"it cannot be tried there: {one_line(failed)}"
    return None if error <= limit else f"it is off by {error:.1e} there (limit {limit:.0e})"


def _attention_error(engine: Engine, call: Call) -> float:
    """Relative RMS error of decode attention over random keys that lie in a cache of the engine's own kind."""
    c, bound, start, end = engine.config, engine.ops.decode_attention, call.start, call.start + call.rows
    heads, kv, scale = c.num_attention_heads, c.num_key_value_heads, c.head_dim**-0.5
    q, k, v = (
        mx.random.normal((1, count, length, c.head_dim), key=mx.random.key(seed)).astype(engine.dtype)
        for seed, (count, length) in enumerate([(heads, call.rows), (kv, end), (kv, end)])
    )
    one = replace(c, num_hidden_layers=c.full_attention_interval)
    cache = type(engine.cache)(one, engine.dtype, engine.engine.cache.step)
    cache.reserve(start)
    cache.write(0, k[:, :, :start], v[:, :, :start], cache.place(start))
    cache.seek(start)
    # As in a window, where room for what is decoded is made behind the prompt.
    cache.reserve(end if call.shown is None else call.shown)
    mx.eval(cache.arrays())
    view = ExactView(cache, call.rows) if call.shown is None else TracedView(cache, call.shown)
    keys, values = view.append(one.attention_layers[0], k[:, :, start:], v[:, :, start:])
    arguments = (q, keys, values, scale, view.position)
    variant, settings, _ = bound.pick(call.rows, arguments)
    got = variant.run(*arguments, **settings)
    mx.eval(got)
    want = []
    for head in range(heads):
        # A head at a time: the reference widens keys and values to float32, for every query head.
        own = slice(head * kv // heads, head * kv // heads + 1)
        want.append(bound.op.reference.run(q[:, head : head + 1], k[:, own], v[:, own], scale))
        mx.eval(want[-1])
    return relative_rms(got, mx.concatenate(want, axis=1))
