"""Recorded and replayed steps, with the simulator in the place of CUDA: the same tokens, states and restore points."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import simulator
from graphs import run_as_graph
from rotary_cases import SIZES, agrees, arguments
from simulator import Simulator

from engine.cache import CacheError
from engine.config import DecodeConfig, EngineConfig, SpeculativeConfig
from engine.depth import Costs
from engine.folded import FoldedModel, unfit
from engine.generate import Engine
from engine.kernels import cuda, loader, rotary, step
from engine.kernels.loader import KernelError, Launch
from engine.ops import bind, relative_rms
from engine.ops.registry import VariantUnsupported
from engine.replay import Replay, ReplayedCache, RowsReplay, unsupported
from engine.sampling import Sampling
from engine.speculative import Draft, Speculator
from engine.synthetic import make_weights, tiny_config
from engine.weights import Matrix

pytestmark = pytest.mark.skipif(simulator.missing() is not None, reason=str(simulator.missing()))

TINY = dataclasses.replace(tiny_config(4), num_hidden_layers=4)
IDS = np.random.default_rng(3).integers(0, 440, 40).tolist()
VOCABULARY = 453


class Memory:
    """A device that is this process's own memory; launches run one by one on the simulator.

    It is as late as a device may be: nothing that is started has happened before it is waited for.
    """

    def __init__(self) -> None:
        self.simulator = Simulator()
        self.runs = self.graphs = 0
        self.started = self.ended = 0
        self.queue: deque[tuple[Any, Callable[[], None]]] = deque()

    entered = 0

    def enter(self) -> None:
        self.entered += 1

    def addresses(self, arrays: Sequence[mx.array]) -> list[tuple[int, tuple[int, ...]]]:
        mx.eval(list(arrays))
        views = [np.array(a.view(mx.uint16) if a.dtype == mx.bfloat16 else a, copy=False) for a in arrays]
        return [(v.ctypes.data, tuple(s // v.itemsize for s in v.strides)) for v in views]

    def graph(self, calls: Sequence[Any]) -> list[Any]:
        self.graphs += 1
        # Shapes and types stay, arrays go: a cache that something holds is not written in place by a prefill.
        return [(_shapes_only(call), addresses, strides) for call, addresses, strides in calls]

    def drop(self, graph: Any) -> None:
        assert all(of is not graph for of, _ in self.queue), "a graph that runs is not freed"
        self.graphs -= 1

    def start(self, graph: Any) -> None:
        self._later(graph, lambda: self._launch(graph))

    def run(self, graph: Any) -> int:
        self.runs += 1
        self.start(graph)
        return self.started

    def _later(self, of: Any, work: Callable[[], None]) -> None:
        self.started += 1
        self.queue.append((of, work))

    def _launch(self, graph: Any) -> None:
        for call, addresses, strides in graph:
            inputs = [_seen(at, array, steps) for at, array, steps in zip(addresses, call.inputs, strides)]
            there = addresses[len(inputs) :]
            sizes = [int(np.prod(shape)) * dtype.size for shape, dtype in zip(call.shapes, call.dtypes)]
            self.simulator.before = [ctypes.string_at(at, size) for at, size in zip(there, sizes)]
            made = self.simulator.launch(dataclasses.replace(call, inputs=inputs))
            for at, array in zip(there, made):
                plain = np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)
                ctypes.memmove(at, plain.tobytes(), plain.nbytes)

    def wait(self, event: int) -> None:
        while self.ended < event:
            self.ended += 1
            self.queue.popleft()[1]()

    def synchronize(self) -> None:
        self.wait(self.started)

    def copy(self, to: int, from_: int, size: int) -> None:
        self._later(None, lambda: ctypes.memmove(to, from_, size))

    def fill(self, to: int, word: int, count: int) -> None:
        words = np.full(count, word, np.uint32).tobytes()
        self._later(None, lambda: ctypes.memmove(to, words, len(words)))

    def host_words(self, count: int) -> tuple[int, Sequence[int]]:
        words = (ctypes.c_uint32 * count)()
        return ctypes.addressof(words), words


def _shapes_only(call: Launch) -> Launch:
    return dataclasses.replace(call, inputs=[mx.zeros(array.shape, array.dtype) for array in call.inputs], into=None)


def _seen(address: int, like: mx.array, strides: Sequence[int]) -> mx.array:
    """The array at an address, as the kernel would see it."""
    span = sum((n - 1) * s for n, s in zip(like.shape, strides)) + 1
    kind = {4: np.uint32, 2: np.uint16}[like.dtype.size]
    flat = np.frombuffer(ctypes.string_at(address, span * like.dtype.size), kind)
    return mx.as_strided(mx.array(flat).view(like.dtype), like.shape, strides)


@pytest.fixture(autouse=True)
def unrecorded_launches(monkeypatch):
    """Launches that nothing records, as of the logits after a prefill, run on the simulator too."""
    real, simulated = loader.launch, Simulator()

    def launch(call: Launch) -> list[mx.array]:
        recording = loader._recorder.get() is not None or call.into is not None
        return real(call) if recording else simulated.launch(call)

    monkeypatch.setattr(loader, "launch", launch)


@pytest.fixture(scope="module")
def weights():
    return make_weights(TINY, 0, dtype=mx.float32)


def engines(weights) -> tuple[Engine, Engine, Memory]:
    """An engine of separate ops, and one that replays."""
    config = EngineConfig(decode=DecodeConfig(trace="eager"))
    plain, made = (Engine(TINY, weights, config, vocabulary=VOCABULARY) for _ in "ab")
    folded = EngineConfig(decode=DecodeConfig(fusion="full"))
    folded.decode_attention.variant = "metal"
    # Prefill stays as a CPU has it.
    ours = bind(folded, "cuda")
    made.ops = dataclasses.replace(made.ops, fusion="full", decode_attention=ours.decode_attention, head=ours.head)
    made.ops.decode_attention.recorder.__dict__.update(made.ops.recorder.__dict__)
    made.model, memory = FoldedModel(TINY, weights, made.ops, VOCABULARY), Memory()
    made.cache, made.trace = ReplayedCache(TINY, made.dtype, 256), "replay"
    made.replay = Replay(TINY, made.model, made.cache, made.ops.recorder, memory)
    return plain, made, memory


def test_replayed_tokens_and_state_are_those_of_separate_ops(weights):
    plain, made, memory = engines(weights)
    first = plain.prefill(IDS)
    assert made.prefill(IDS) == first and memory.runs == 0, "a long pass is not replayed"
    assert made.decode(first, 6) == plain.decode(first, 6)
    assert memory.runs == 6 and memory.graphs == 4, "one graph a phase, recorded once"
    for name, want in plain.export_state().items():
        assert relative_rms(made.export_state()[name], want) <= 2e-5, name
    assert made.position == plain.position == 46
    assert made.cache.state["position"].tolist() == [46] * 4
    # From any phase on, and after a stretch that MLX prefills.
    for engine in (plain, made):
        engine.prefill(IDS[:9])
    assert made.decode(7, 5) == plain.decode(7, 5) and memory.graphs == 4


@pytest.mark.parametrize("drafter", ["ngram", pytest.param("mtp", marks=pytest.mark.full)])
def test_drafts_between_replayed_steps(drafter):
    """Forced wrong drafts make the depth step aside: rests are replayed, verifications are not, tokens are the same."""
    weights = make_weights(TINY, 0, dtype=mx.float32, mtp=True)
    plain, made, memory = engines(weights)
    first = plain.prefill(IDS)
    expected = plain.snapshot()
    want = plain.decode(first, 22)
    config = EngineConfig(decode=DecodeConfig(trace="eager"))
    config.speculative = SpeculativeConfig(drafter, 2, adaptive=True)
    drafting = Engine(TINY, weights, config, vocabulary=VOCABULARY, costs=Costs((1, *(1.2,) * 7)))
    drafting.cache, drafting.trace = ReplayedCache(TINY, drafting.dtype, 256), "replay"
    if drafter == "mtp":
        drafting.cache.state["hidden"] = mx.zeros((1, 1, TINY.hidden_size), drafting.dtype)
    drafting.replay = Replay(TINY, made.model, drafting.cache, drafting.ops.recorder, memory)
    speculator = drafting.speculator
    assert speculator is not None
    # Rests short enough that drafts come again between them, whatever was lost.
    assert speculator.controller is not None
    speculator.controller.SHARE = 1e9
    # Nothing is compiled here: that is for other tests.
    speculator.verifier._traced = lambda rows: False
    drafting._traced_step = drafting._eager_step
    speculator.judge = lambda drafts, choices: 0
    if drafter == "ngram":
        speculator.drafter.draft = lambda history, token, depth, *_: Draft(mx.array([token] * depth, dtype=mx.uint32))
    assert drafting.prefill(IDS) == first
    point = drafting.snapshot()
    assert drafting.decode(first, 22) == want and drafting.position == 62
    counts = drafting.speculation()
    # The first rest is replayed, but for the step after which the head drafts; what its probe leaves is too short.
    rest = speculator.controller.FIRST_REST
    assert counts["steps"] == 4 and memory.runs == rest - (drafter == "mtp") < counts["plain"], counts
    assert speculator.history() == [*IDS, first, *want[:-1]]
    ran = {(row["op"], row["variant"]) for row in drafting.executed()}
    assert ("decode_step", "replay") in ran and ("verify", "replay") in ran
    # Closed among replayed steps, and begun again from a restore point.
    drafting.restore(point)
    with closing(speculator.stream(first, 40)) as stream:
        got = [next(stream) for _ in range(3)]
    assert got == want[:3] and speculator.history() == [*IDS, first, *want][: drafting.position]
    drafting.restore(point)
    assert drafting.decode(first, 9) == want[:9]
    plain.restore(expected)
    # The guard sees both kinds of plain step, and verifications of every number of rows.
    drafting.restore(point)
    drafting.reset_executed()
    assert relative_rms(drafting.logits(want[:12], "decode"), plain.logits(want[:12], "decode")) <= 2e-5
    ran = {(row["op"], row["variant"], row["tile"]) for row in drafting.executed()}
    assert {("decode_step", "replay"), ("decode_step", "step")} <= {line[:2] for line in ran}
    assert {tile for op, _, tile in ran if op == "verify"} == {"rows 2", "rows 3"}


def verifying(weights, drafter: str = "ngram", depth: int = 3, **fields: Any) -> tuple[Engine, Engine, Memory]:
    """An engine of separate ops, and one that drafts, whose verifications are recorded passes."""
    plain, made, memory = engines(weights)
    config = EngineConfig(decode=DecodeConfig(trace="eager"))
    config.speculative = SpeculativeConfig(drafter, depth, **fields)  # pyright: ignore[reportArgumentType]
    drafting = Engine(TINY, weights, config, vocabulary=VOCABULARY, costs=Costs((1, *(1.2,) * 7)))
    drafting.cache, drafting.trace = ReplayedCache(TINY, drafting.dtype, 256), "replay"
    recorder = drafting.ops.recorder
    drafting.replay = RowsReplay(TINY, made.model, drafting.cache, recorder, memory, depth + 1)
    if drafter == "mtp":
        drafting.cache.state["hidden"] = mx.zeros((1, 1, TINY.hidden_size), drafting.dtype)
    # Nothing is compiled here: that is for other tests.
    assert drafting.speculator is not None
    drafting.speculator.verifier._traced = lambda rows: False
    drafting._traced_step = drafting._eager_step
    return plain, drafting, memory


def knowing(engine: Engine, text: list[int], right: Callable[[int], int]) -> None:
    """Draft the text that plain decoding makes, with the first `right` of each draft true and the next wrong."""

    def draft(history, token, depth, *_):
        at = len(history) + 1
        assert text[:at] == [*history, token], "the history told to drafters is what was fed"
        found = text[at : at + depth]
        most = right(len(found))
        wrong = [(each + 1) % 400 for each in found[most : most + 1]]
        found = [*found[:most], *wrong, *found[most + 1 :]]
        return Draft(tuple(found)) if found else None

    assert engine.speculator is not None
    engine.speculator.drafter.draft = draft


@pytest.mark.parametrize(("depth", "after"), [(2, 3), pytest.param(7, 50, marks=pytest.mark.full)])
def test_a_recorded_verification_is_taken_back_at_every_position(weights, depth, after):
    """State and the next tokens are plain decoding's, by further steps and by further verifications."""
    plain, made, memory = verifying(weights, depth=depth)
    first, states = plain.prefill(IDS), []
    assert made.prefill(IDS) == first
    tokens, start = [first], made.snapshot()
    for _ in range(depth + 1):
        tokens += plain.decode(tokens[-1], 1)
        states.append(plain.export_state())
    tokens += plain.decode(tokens[-1], after + depth)
    speculator = made.speculator
    assert speculator is not None
    for kept in range(depth + 1):
        made.restore(start)
        knowing(made, [*IDS, *tokens], lambda most, kept=kept: min(kept, most))
        with closing(speculator.stream(first, 20)) as stream:
            assert [next(stream) for _ in range(kept + 1)] == tokens[1 : kept + 2]
        assert made.position == len(IDS) + kept + 1
        state = made.export_state()
        for name, want in states[kept].items():
            assert relative_rms(state[name], want) <= 2e-5, (kept, name)
        # On from there by what is recorded, without looking at the state in between.
        made.restore(start)
        with closing(speculator.stream(first, 20)) as stream:
            for _ in range(kept + 1):
                next(stream)
        want = tokens[kept + 2 : kept + 2 + after]
        if kept % 2:
            speculator._depth = lambda left: 0
        assert made.decode(tokens[kept + 1], after) == want, kept
        speculator.__dict__.pop("_depth", None)
    ran = {(row["op"], row["variant"], row["tile"]) for row in made.executed()}
    assert {("verify", "recorded", f"rows {depth + 1}"), ("rollback", "recorded", "rows 1")} <= ran
    assert ("decode_step", "replay", "") in ran and memory.graphs == 1 + 2 * depth


def test_recorded_verifications_meet_everything_else(weights):
    """Drafts closed within, a look at the state in between, growth, samples, scores, a bad state."""
    plain, made, memory = verifying(weights, depth=2)
    first = plain.prefill(IDS)
    tokens = [first, *plain.decode(first, 20)]
    made.prefill(IDS)
    start, text, speculator = made.snapshot(), [*IDS, *tokens], made.speculator
    assert speculator is not None
    knowing(made, text, lambda most: most)
    with closing(speculator.stream(first, 20)) as stream:
        assert next(stream) == tokens[1]
        assert made.export_state()["keys"].shape[2] == made.position == len(IDS) + 3
    assert made.position == len(IDS) + 1, "what was not handed out is taken back"
    rng = np.random.default_rng(1)
    knowing(made, text, lambda most: int(rng.integers(0, most + 1)))
    assert made.decode(tokens[1], 8) == tokens[2:10]
    made.cache.reserve(700)
    assert made.decode(tokens[9], 4) == tokens[10:14] and made.speculation()["rollbacks"] > 1
    # Samples keep to what they were; greedy ones come back to the recorded passes after them.
    made.reset_executed()
    speculator.drafter.draft = lambda history, token, depth, *_: Draft(mx.array([token] * depth, dtype=mx.uint32))
    list(made.generate([tokens[13]], 3, Sampling(0.7)))
    ran = {row["variant"] for row in made.executed() if row["op"] == "verify"}
    assert ran and "recorded" not in ran
    made.restore(start)
    assert made.decode(first, 3) == tokens[1:4]
    # The guard scores recorded rows of every number.
    made.restore(start)
    plain.reset()
    plain.prefill(IDS)
    made.reset_executed()
    assert relative_rms(made.logits(tokens[:8], "decode"), plain.logits(tokens[:8], "decode")) <= 2e-5
    ran = {row["tile"] for row in made.executed() if row["op"] == "verify" and row["variant"] == "recorded"}
    assert ran == {"rows 2", "rows 3"}
    with pytest.raises(CacheError, match="not the last"):
        made.replay.keep(len(IDS), 1)
    # A stream whose sequence is gone takes nothing back from the next one, as long as it may be.
    made.restore(start)
    knowing(made, text, lambda most: most)
    stale = speculator.stream(first, 20)
    assert next(stale) == tokens[1]
    made.export_state()
    made.reset()
    made.prefill(text[: len(IDS) + 3])
    with pytest.raises(CacheError, match="not the last"):
        stale.close()
    assert made.position == len(IDS) + 3
    made.restore(start)
    made.cache.state["recurrent"][0] = made.cache.state["recurrent"][0] * float("nan")
    with pytest.raises(RuntimeError, match="not finite"):
        made.decode(first, 4)
    assert made.position == 0
    del made, speculator, stream, stale
    gc.collect()
    assert memory.graphs == 0


def test_the_draft_head_reads_the_hidden_rows_of_recorded_passes():
    """Its drafts, and what comes of them, are those it makes beside passes that MLX runs."""
    weights = make_weights(TINY, 0, dtype=mx.float32, mtp=True)
    plain, made, _ = verifying(weights, "mtp", depth=2)
    config = EngineConfig(decode=DecodeConfig(trace="eager"), speculative=SpeculativeConfig("mtp", 2))
    other = Engine(TINY, weights, config, vocabulary=VOCABULARY)
    first = plain.prefill(IDS)
    want = plain.decode(first, 8)
    drafts = []
    for engine in (made, other):
        assert engine.prefill(IDS) == first and engine.speculator is not None
        seen, draft = [], engine.speculator.drafter.draft
        engine.speculator.drafter.draft = lambda *a, seen=seen, draft=draft: seen.append(draft(*a)) or seen[-1]
        assert engine.decode(first, 4) == want[:4]
        engine.speculator._depth = lambda left: 0
        assert engine.decode(want[3], 1) == want[4:5]
        del engine.speculator._depth
        assert engine.decode(want[4], 3) == want[5:]
        drafts.append([each.ids.tolist() for each in seen])
    assert drafts[0] == drafts[1] and len(drafts[0]) > 2


def test_restore_points_growth_and_scores(weights):
    """A restore point is not touched by later steps; a longer cache is recorded anew; scores take forced tokens."""
    plain, made, memory = engines(weights)
    first = plain.prefill(IDS)
    made.prefill(IDS)
    point, expected = made.snapshot(), plain.snapshot()
    tokens = made.decode(first, 3)
    made.restore(point)
    plain.restore(expected)
    assert made.decode(first, 3) == tokens == plain.decode(first, 3)
    forced = [5, 9, 300]
    assert relative_rms(made.logits(forced, "decode"), plain.logits(forced, "decode")) <= 2e-5
    assert memory.graphs == 8, "with logits a step is another one"
    for engine in (plain, made):
        engine.cache.reserve(700)
    assert made.decode(11, 3) == plain.decode(11, 3)
    assert memory.graphs == 12
    assert list(made.generate(IDS[:12], 4)) == list(plain.generate(IDS[:12], 4))
    del made, engine
    gc.collect()
    assert memory.graphs == 0, "an engine that is gone leaves no graph behind"


def test_the_host_may_fall_behind(weights, monkeypatch):
    """Tokens are read from a ring; a step that would write over one that was not read waits for it to be."""
    monkeypatch.setattr(step, "RING", 8)
    plain, made, _ = engines(weights)
    made.prefill(IDS)
    made.cache.state["token"] = mx.array([3], mx.uint32)
    pending = [made.step() for _ in range(step.RING + 6)]
    tokens = [token.item() for token in pending]
    plain.prefill(IDS)
    assert tokens[-8:] == plain.decode(3, step.RING + 6)[-8:]


def test_a_logit_that_is_not_finite_is_told(weights):
    _, made, _ = engines(weights)
    first = made.prefill(IDS)
    broken = made.cache.state["recurrent"][0]
    made.cache.state["recurrent"][0] = broken * float("nan")
    with pytest.raises(RuntimeError, match="not finite"):
        made.decode(first, 2)
    assert made.position == 0


def test_what_mlx_computed_in_between_is_refused(weights):
    """It would be computed once, while recording, and never again."""
    _, made, memory = engines(weights)
    made.prefill(IDS)
    embed = made.model.embed
    made.model.embed = lambda ids: embed(ids) + 0.0
    for _ in "ab":
        with pytest.raises(KernelError, match="no recorded launch"):
            made.decode(3, 1)
        assert made.cache.away is None and made.export_state()["keys"].shape[2] == len(IDS)
        made.replay = RowsReplay(TINY, made.model, made.cache, made.ops.recorder, memory, 2)


def test_kernels_that_write_into_arrays_need_a_recorder():
    four = mx.zeros((4,), mx.uint32)
    with pytest.raises(KernelError, match="there already"):
        step.settle_metal(four[:1], mx.zeros((1,)), (four, mx.zeros((4,), mx.int32), four, mx.zeros((64,), mx.uint32)))


@pytest.fixture
def written():
    """What each launch leaves in the arrays that it writes into."""
    seen: list[list[mx.array]] = []

    def note(call: Launch) -> list[mx.array]:
        assert call.into is not None
        simulated = Simulator()
        simulated.before = [np.array(array.view(mx.uint16)).tobytes() for array in call.into]
        seen.append(simulated.launch(dataclasses.replace(call, into=None)))
        return list(call.into)

    with loader.recorded(note):
        yield seen


@pytest.mark.parametrize(("layers", "rows"), [(1, 1), (3, 2), (2, 3), (15, 8)])
def test_rows_of_convolutions_move_on_and_back(layers, rows, written):
    dtype = mx.float16 if layers == 1 else mx.float32
    made = lambda key, *shape: mx.random.normal(shape, key=mx.random.key(key)).astype(dtype)  # noqa: E731
    now, before = made(1, layers, 3, 136), made(2, layers, 3, 136)
    new = [made(3 + i, 1, rows, 136) for i in range(layers)]
    whole = mx.concatenate([now, mx.concatenate(new)], axis=1)
    step.slide_metal(new, mx.array([99] * 4, mx.uint32), now, before, back=False)
    after = written[0]
    assert mx.array_equal(after[0], whole[:, rows:]) and mx.array_equal(after[1], now)
    for kept in range(1, rows):
        step.slide_metal(new, mx.array([kept] * 4, mx.uint32), after[0], after[1], back=True)
        assert mx.array_equal(written[-1][0], whole[:, kept : kept + 3]) and mx.array_equal(written[-1][1], now)
    with pytest.raises(KernelError, match="one type"):
        step.slide_metal(new, mx.array([1] * 4, mx.uint32), now[:, :2], before, back=True)


def test_a_state_of_fewer_rows_becomes_the_state(written):
    states = mx.random.normal((2, 4, 1, 32, 64), key=mx.random.key(0))
    step.back_metal(mx.array([2] * 4, mx.uint32), states)
    ((after,),) = written
    assert mx.array_equal(after[:, 0], states[:, 2]) and mx.array_equal(after[:, 1:], states[:, 1:])
    with pytest.raises(KernelError, match="1024"):
        step.back_metal(mx.array([2] * 4, mx.uint32), states[..., :31, :])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_rows_of_the_embedding(bits, dtype, monkeypatch):
    checked = Simulator(checked=True)
    monkeypatch.setattr(loader, "launch", checked.launch)
    table = mx.random.normal((9, 576), key=mx.random.key(bits)).astype(dtype)
    packed = Matrix(*mx.quantize(table, group_size=64, bits=bits), bits, 64)
    ids = mx.array([8, 0, 3], mx.uint32)
    exact = (packed.weight[ids], packed.scales[ids].astype(mx.float32), packed.biases[ids].astype(mx.float32))
    want = mx.dequantize(*exact, group_size=64, bits=bits)
    assert relative_rms(step.embed_metal(ids, packed), want[None]) <= {4: 1e-6, 2: 4e-3}[dtype.size]
    ((_, traffic),) = checked.traffic
    assert traffic["weight"].loaded == 3 * 576 * bits // 8 * (8 // (32 // bits) if bits == 4 else 4)


def test_models_that_a_folded_step_runs_are_told_from_others(weights):
    assert unfit(TINY, weights, mx.float32) is None
    assert "float16" in str(unfit(TINY, weights, mx.float16))
    narrow = dataclasses.replace(TINY, linear_key_head_dim=64)
    assert "64" in str(unfit(narrow, weights, mx.float32))
    first = weights.layers[0]
    expert = dataclasses.replace(first.experts, gate_proj=Matrix(mx.zeros((8, 256))))
    layers = [dataclasses.replace(first, experts=expert), *weights.layers[1:]]
    assert "gate_proj" in str(unfit(TINY, dataclasses.replace(weights, layers=layers), mx.float32))
    dense = dataclasses.replace(weights, lm_head=Matrix(mx.zeros((8, 256))))
    assert "lm_head" in str(unfit(TINY, dense, mx.float32))
    model = engines(weights)[1].model
    assert unsupported(TINY, model, "contiguous") is None
    model.weights = dataclasses.replace(weights, embed=dense.lm_head)
    assert "embed" in str(unfit(TINY, model.weights, mx.float32))
    assert "packed embedding" in str(unsupported(TINY, model, "contiguous"))


def test_kernels_of_tests_may_be_launched_as_replay_launches_them(monkeypatch):
    """What ``--graphs`` does on CUDA."""
    memory, given = Memory(), arguments(SIZES[1], mx.float32)
    monkeypatch.setattr(cuda, "device", lambda: memory)
    with loader.recorded(run_as_graph):
        made = rotary.rotate_metal(*given, simdgroups=2)
    assert agrees(SIZES[1], given, made, "float32")
    assert (memory.runs, memory.graphs, memory.entered) == (1, 0, 1)


def test_a_replay_that_fails_its_self_test_gives_way_to_the_compiled_step(weights):
    made = engines(weights)[1]
    made.device, made.engine.decode.trace = "cuda", "best"
    assert made._no_replay() is None and made._trace() == "replay"
    reasons = {("unit", "replayed_step"): "its self-test failed here, wrong tokens"}
    made._refuses = lambda *part: reasons.get(part)
    assert made._trace() == "step"
    made.engine.decode.trace = "replay"
    with pytest.raises(VariantUnsupported, match=r"trace=replay .*wrong tokens"):
        made._trace()
    # Recorded passes of several rows have a self-test of their own.
    made.engine.speculative = SpeculativeConfig("ngram", 2)
    assert Speculator(made, costs=Costs((1,) * 8)).records
    reasons[("unit", "recorded_rows")] = "its self-test failed here, wrong tokens"
    assert not Speculator(made, costs=Costs((1,) * 8)).records


def test_a_tuned_tile_of_the_head_is_the_same_in_every_form(weights):
    """What the guard sees of the head is what a timed step runs: with logits, without, and recorded."""
    _, made, _ = engines(weights)
    made.ops = made.model.ops = dataclasses.replace(made.ops, folded={"head": {"tile": "2x2"}})
    first = made.prefill(IDS)
    made.decode(first, 1)
    made.logits([5], "decode")
    heads = {entry["tile"] for entry in made.executed() if entry["op"] == "head"}
    assert heads == {"folded tile 2x2"}
