"""Launches of one decode step: predicted from its graph, without a device if need be, and counted by a profiler.

Nodes of a graph are not launches: views launch nothing, some operations launch twice. `launches_of` says what each
costs; the graph is the one that MLX is about to submit, elementwise operations already fused by `mx.compile`.

- `of_engine`: the next step of a live engine.
- `of_geometry`: a step on a device that is not here, with weights that are shapes alone. Our kernels, and those of
  MLX's operations that exist on a GPU only, are stood in for by a node that depends on the same inputs.
  A step that the engine records and replays by itself is told by its recording.
- `on_device`: what a profiler saw, on CUDA.

``python -m sweeps.launches FILE`` writes the steps of the real geometry on Metal, for predictions (`reports.predict`).

Stages are the longest chain of launches that need one another: what is left of a step on a device that runs
everything else side by side. Copies that MLX makes of inputs with strides are no nodes and are not predicted.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import engine as _engine  # noqa: F401  (chooses the BLAS before MLX loads)

# isort: split
import mlx.core as mx
from mlx.utils import tree_map

from ablations.arms import preset
from engine import generate
from engine.config import EngineConfig, ModelConfig
from engine.generate import Engine
from engine.kernels import loader
from engine.ops.choice import Tuned
from engine.replay import PHASES
from engine.synthetic import make_weights
from engine.weights import Weights
from sweeps.points import FRONTIERS
from sweeps.subjects.base import Subject

VIEWS = frozenset(
    (
        "AsStrided",
        "Broadcast",
        "BroadcastAxes",
        "Depends",
        "ExpandDims",
        "Flatten",
        "NumberOfElements",
        "Reshape",
        "Slice",
        "Split",
        "Squeeze",
        "StopGradient",
        "Transpose",
        "Unflatten",
        "View",
    )
)
"""Operations of a graph that move nothing (as MLX prints their names). `Flatten`, `Reshape` and `Unflatten` copy where
strides leave no other way; a step whose cache rows and heads stay in place has none of those."""

STAND_IN = "Depends"
"""Node that stands for a launch in the graph of a device that is not here; the engine itself never makes one."""

SHORT, LONG = 4, 12
"""Tokens of the two profiled stretches: their difference is steps alone, without what begins and ends a stretch."""

MOST_PROMPT = 4096
"""Longest prompt that is prefilled for a count."""

LONG_ATTENTION = 1024
"""Keys from which MLX's attention on a Max or Ultra makes a second pass (others: from 4,096 with shared heads)."""


class _Recorded(Exception):
    """A step has been recorded; where its arrays lie need not be known."""


class Uncounted(ValueError):
    """There is no count, and the message is why."""


@dataclass(frozen=True)
class Step:
    """What one decode step launches.

    Attributes:
        launches: in all. stages: the longest chain of them.
        by_operation: launches by MLX's name of the operation, or by the name of our kernel where it is stood in for.
    """

    launches: int
    stages: int
    by_operation: dict[str, int] = field(default_factory=dict)


def launches_of(operation: str, inputs: int, device: str, keys: int = 0) -> tuple[int, int]:
    """Launches and stages of one operation.

    Args:
        operation: as MLX prints it. inputs: arrays that it takes. device: kind. keys: positions that attention covers.

    The reasons are in MLX's own `eval_gpu` of each operation.
    """
    if operation in VIEWS:
        return 0, 0
    if operation == "Concatenate":
        # A copy for each part, none waiting for another.
        return inputs, 1
    if operation in ("DynamicSlice", "DynamicSliceUpdate"):
        # An offset computed from the position on the device, then the copy that uses it.
        return 2, 2
    if operation == "Pad":
        # The whole filled, then the inner part copied over it.
        return 2, 2
    if operation == "ScaledDotProductAttention" and device == "metal" and keys >= LONG_ATTENTION:
        # Blocks of keys, then their combination.
        return 2, 2
    # `SliceUpdate`, `Scatter` and `ScatterAxis` first copy what they write into, unless nothing else holds it: the
    # cache is held by the step alone, so they are one launch like everything else.
    return 1, 1


# -- graphs ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    """An operation of a graph: its name, how many arrays it takes, and places of the nodes that made them."""

    name: str
    inputs: int
    after: tuple[int, ...]


def nodes(dot: str) -> list[Node]:
    """Operations of a graph that `mx.export_to_dot` wrote, in the order in which they are computed."""
    names = re.findall(r'(\d+) \[label ="([^"]*)"', dot)
    place = {node: at for at, (node, _) in enumerate(names)}
    takes: dict[str, list[str]] = defaultdict(list)
    made_by: dict[str, int] = {}
    for source, target in re.findall(r'^("[^"]+"|\d+) -> ("[^"]+"|\d+)$', dot, re.M):
        if source.startswith('"'):
            takes[target].append(source)
        else:
            made_by[target] = place[source]
    return [
        Node(name, len(takes[node]), tuple(made_by[array] for array in takes[node] if array in made_by))
        for node, name in names
    ]


def counted(graph: Sequence[Node], cost: Callable[[Node], tuple[int, int]]) -> Step:
    """Launches and stages of a graph whose operations cost what `cost` says."""
    tally: Counter[str] = Counter()
    depth: list[int] = []
    for node in graph:
        launches, stages = cost(node)
        depth.append(stages + max((depth[before] for before in node.after), default=0))
        tally[node.name] += launches
    by_operation = {name: launches for name, launches in sorted(tally.items()) if launches}
    return Step(sum(tally.values()), max(depth, default=0), by_operation)


def written(*arrays: Any) -> list[Node]:
    """The graph behind arrays that have not been computed."""
    with io.StringIO() as text:
        mx.export_to_dot(text, *arrays)
        return nodes(text.getvalue())


# -- predictions -------------------------------------------------------------------------------------


def of_engine(engine: Engine, positions: int) -> Step:
    """The greedy step of an engine from an empty sequence of `positions` tokens; the sequence it had is forgotten.

    Raises:
        Uncounted: the step is not one graph, or the cache has no room for it.
    """
    _require_one_graph(engine)
    if engine.replay is not None:
        # Recorded long ago, perhaps; recorded again from shapes it is the same.
        return of_geometry(engine.config, engine.engine, engine.device, positions, engine.tuned)
    if positions >= engine.cache.capacity:
        raise Uncounted(f"the cache holds {engine.cache.capacity} positions")
    engine.reset()
    state = engine.cache.state
    held = tree_map(lambda array: array, state)
    engine.cache.seek(positions)
    try:
        return _step(engine, lambda node: launches_of(node.name, node.inputs, engine.device, positions))
    finally:
        # What was not computed must not stay in the cache.
        state.clear()
        state.update(held)
        engine.reset()


def of_geometry(
    config: ModelConfig, settings: EngineConfig, device: str, positions: int = 256, tuned: Tuned | None = None
) -> Step:
    """The greedy step of a model that need not be here, on a device of kind `device` that need not either.

    tuned: what ``best`` is there; None: nothing is tuned.

    Raises:
        Uncounted: the step is not one graph. VariantUnsupported: as `Engine`.
    """
    stand_ins: Counter[str] = Counter()

    def cost(node: Node) -> tuple[int, int]:
        return (1, 1) if node.name == STAND_IN else launches_of(node.name, node.inputs, device, positions)

    with _elsewhere(device, stand_ins):
        engine = Engine(config, shapes(config), settings, dtype=mx.bfloat16, tuned=tuned or Tuned(), refuses=None)
        _require_one_graph(engine)
        with mock.patch.object(mx, "eval", lambda *_: None):
            engine.cache.reserve(positions + 1)
        engine.cache.state.update(tree_map(lambda array: _shape(array.shape, array.dtype), engine.cache.state))
        engine.cache.seek(positions)
        try:
            step = _step(engine, cost)
        except _Recorded:
            # Launches of all phases, and each runs after the one before.
            each = {name: count // PHASES for name, count in sorted(stand_ins.items())}
            return Step(sum(each.values()), sum(each.values()), each)
    named = {name: launches for name, launches in step.by_operation.items() if name != STAND_IN}
    return Step(step.launches, step.stages, dict(sorted((named | stand_ins).items())))


@lru_cache(maxsize=1)
def shapes(config: ModelConfig) -> Weights:
    """Packed weights of a geometry that take no memory: every array is one value, seen over and over.

    Kept, since a job asks for each of its arms and contexts, of one model.
    """
    with mock.patch.object(mx, "eval", lambda *_: None):
        tensors = make_weights(config).tensors
    return Weights.from_tensors(config, {name: _shape(t.shape, t.dtype) for name, t in tensors.items()})


def _shape(shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    made = mx.broadcast_to(mx.zeros((), dtype), shape)
    mx.eval(made)
    return made


def _require_one_graph(engine: Engine) -> None:
    if reading := [op.op.name for op in engine.ops.all() if op.reads_host]:
        raise Uncounted(f"{', '.join(reading)} reads back to the host inside the step, so it is not one graph")
    if engine.speculator is not None:
        raise Uncounted("with a drafter a step is a round of drafts and their verification")


def _step(engine: Engine, cost: Callable[[Node], tuple[int, int]]) -> Step:
    mx.eval(engine.cache.arrays())
    with mock.patch.object(mx, "async_eval", lambda *_: None):
        out = engine.step()
    if not isinstance(out, mx.array):
        raise Uncounted("the step is submitted without MLX, so no graph of it exists")
    return counted(written(out, *engine.cache.arrays()), cost)


@contextmanager
def _elsewhere(device: str, tally: Counter[str]) -> Iterator[None]:
    """MLX as on `device` while a step is traced: what runs only there becomes a stand-in, counted in `tally`."""

    def launched(name: str, outputs: Sequence[tuple[Sequence[int], mx.Dtype]], inputs: Sequence[Any]) -> list[mx.array]:
        tally[name] += 1
        taken = [value for value in inputs if isinstance(value, mx.array)]
        return mx.depends([_held(tuple(shape), dtype) for shape, dtype in outputs], taken)

    takers: list[Callable[[loader.Launch], list[mx.array]]] = []

    @contextmanager
    def recorded(by: Callable[[loader.Launch], list[mx.array]]) -> Iterator[None]:
        takers.append(by)
        yield
        raise _Recorded

    def kernel(call: loader.Launch) -> list[mx.array]:
        if takers:
            tally[call.kernel.name] += 1
            return takers[-1](call)
        return launched(call.kernel.name, list(zip(call.shapes, call.dtypes, strict=True)), call.inputs)

    def like_first(name: str) -> Callable[..., mx.array]:
        return lambda x, *rest, **more: launched(name, [(x.shape, x.dtype)], [x, *rest, *more.values()])[0]

    def attention(q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: Any = None) -> mx.array:
        name, shape = "ScaledDotProductAttention", (*q.shape[:-1], v.shape[-1])
        (out,) = launched(name, [(shape, q.dtype)], [q, k, v, mask])
        for _ in range(launches_of(name, 3, device, k.shape[2])[0] - 1):
            (out,) = launched(name, [(shape, q.dtype)], [out])
        return out

    def delta(q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array) -> Any:
        return launched("GatedDeltaUpdate", [(v.shape, v.dtype), (state.shape, state.dtype)], [q, k, v, g, beta, state])

    def dequantize(w: mx.array, scales: mx.array, biases: mx.array, *, group_size: int, bits: int) -> mx.array:
        shape = (*w.shape[:-1], w.shape[-1] * 32 // bits)
        return launched("Dequantize", [(shape, scales.dtype)], [w, scales, biases])[0]

    with ExitStack() as patches:
        for place, name, stand_in in (
            (generate, "device_kind", lambda: device),
            (generate.cuda, "device", _Nowhere),
            (loader, "launch", kernel),
            (loader, "recorded", recorded),
            (mx.fast, "rms_norm", like_first("RMSNorm")),
            (mx.fast, "rope", like_first("RoPE")),
            (mx, "dequantize", dequantize),
        ):
            patches.enter_context(mock.patch.object(place, name, stand_in))
        if device == "metal":
            # On CUDA, MLX composes both from other operations for this model's heads, as it does on a CPU.
            patches.enter_context(mock.patch.object(mx.fast, "scaled_dot_product_attention", attention))
            patches.enter_context(mock.patch.object(mx.fast, "gated_delta_update", delta))
        yield


class _Nowhere:
    """A device for a recording that ends before anything of it is placed (`engine.replay.Backend`)."""

    def enter(self) -> None:
        """There is no device to enter."""

    def synchronize(self) -> None:
        """Nothing runs there."""

    def addresses(self, arrays: Sequence[mx.array]) -> list[tuple[int, tuple[int, ...]]]:
        """Nobody will read there."""
        return [(0, ()) for _ in arrays]

    def host_words(self, count: int) -> tuple[int, list[int]]:
        """Words that nobody writes."""
        return 0, [0] * count


@cache
def _held(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    return _shape(shape, dtype)


# -- the device --------------------------------------------------------------------------------------


def of_subject(
    subject: Subject, frontiers: Sequence[int], prompt: Callable[[int], Sequence[int]]
) -> dict[int, dict[str, Any]]:
    """What a decode step of a subject launches, for the rows of its decode frontiers; its sequence is forgotten.

    A profiler may leave a process slower than it was, so this comes after the last timed window.

    Args:
        frontiers: in tokens; the device is asked at the shortest, if that is not a long prompt.
        prompt: that many tokens of a fresh prompt.

    Returns:
        By frontier: ``launches_predicted`` and ``stages_predicted``, None where `launches_unpredicted` says why;
        ``operations``, predicted launches by name; and at one frontier ``launches_device`` and ``kernels``, counted
        launches by name, or `launches_uncounted` why not.
    """
    facts: dict[int, dict[str, Any]] = {at: {} for at in frontiers}
    engine = getattr(subject, "engine", None)
    if isinstance(engine, Engine):
        for at in frontiers:
            try:
                step = of_engine(engine, at)
                facts[at] |= {"launches_predicted": step.launches, "stages_predicted": step.stages}
                facts[at]["operations"] = step.by_operation
            except Uncounted as why:
                facts[at] |= {"launches_predicted": None, "launches_unpredicted": str(why)}
    shortest = min(frontiers)
    try:
        if shortest > MOST_PROMPT:
            raise Uncounted(f"counted at no more than {MOST_PROMPT} tokens")
        each, kernels = _profiled(subject, prompt(shortest))
        facts[shortest] |= {"launches_device": each, "kernels": kernels}
    except Uncounted as why:
        for at in frontiers:
            facts[at] |= {"launches_device": None, "launches_uncounted": str(why)}
    finally:
        subject.reset()
    return facts


def _profiled(subject: Subject, prompt: Sequence[int]) -> tuple[float, dict[str, float]]:
    _profiler()
    subject.reset()
    first = subject.prefill(prompt).next_token
    start = subject.snapshot()

    def decode(count: int) -> None:
        subject.restore(start)
        subject.decode(first, count)

    return on_device(decode)


def on_device(decode: Callable[[int], Any]) -> tuple[float, dict[str, float]]:
    """Launches a step that a profiler counts while `decode(n)` decodes `n` tokens, always from the same place.

    Returns:
        Launches a step, in all and by kernel.

    Raises:
        Uncounted: no profiler sees this device.
    """
    profile = _profiler()
    decode(LONG)
    few, many = (_records(profile, lambda count=count: decode(count)) for count in (SHORT, LONG))
    if not many:
        raise Uncounted("the profiler recorded no kernel of this process")
    many.subtract(few)
    by_kernel = {name: count / (LONG - SHORT) for name, count in many.most_common() if count}
    return sum(by_kernel.values()), by_kernel


def _profiler() -> Callable[[], Any]:
    if not mx.cuda.is_available() or mx.default_device().type != mx.DeviceType.gpu:
        raise Uncounted("launches are recorded on CUDA only")
    try:
        from torch.profiler import ProfilerActivity, profile, supported_activities
    except ImportError:
        raise Uncounted("torch, whose profiler records kernels, is not installed") from None
    if ProfilerActivity.CUDA not in supported_activities():
        raise Uncounted("torch is built without CUDA, so its profiler records no kernel")
    return lambda: profile(activities=[ProfilerActivity.CUDA])


def _records(profile: Callable[[], Any], work: Callable[[], Any]) -> Counter[str]:
    """Kernels by name; copies and fills that the driver makes are no launches."""
    mx.synchronize()
    with profile() as seen:
        work()
        mx.synchronize()
    return _kernels(seen)


def _kernels(seen: Any) -> Counter[str]:
    """Kernels of a finished profile by name, read from the profiler's own records.

    Torch's list of events takes about 0.1 ms for each of them, and most are calls of the host: for a drafting arm that
    was seconds.
    """
    records = seen.profiler.kineto_results.events()
    on_gpu = (record.name() for record in records if record.device_type().name == "CUDA")
    return Counter(name for name in on_gpu if not name.startswith(("Memcpy", "Memset")))


# -- for predictions ---------------------------------------------------------------------------------


def metal_steps() -> dict[str, dict[int, tuple[int, int]]]:
    """Launches and stages on Metal of the real geometry at every frontier, for three configurations."""
    fused = EngineConfig()
    fused.decode.fusion, fused.decode_attention.variant = "full", "metal"
    settings = {"fused": fused, "full": preset("full"), "mlx": preset("mlx")}
    made: dict[str, dict[int, tuple[int, int]]] = {}
    for name, config in settings.items():
        steps = {at: of_geometry(ModelConfig(), config, "metal", at) for at in FRONTIERS}
        made[name] = {at: (step.launches, step.stages) for at, step in steps.items()}
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Count and write the file."""
    parser = argparse.ArgumentParser(prog="python -m sweeps.launches", description="Launches of a step on Metal.")
    parser.add_argument("file", type=Path, metavar="FILE")
    given = parser.parse_args(argv)
    told = {"device_kind": "metal", "order": "launches, stages", "steps": metal_steps()}
    given.file.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    print(given.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
