"""Tuning: what is chosen under clocks whose verdict is known, what is kept, and what the engine makes of the file."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from ablations.arms import preset
from engine import folded
from engine import tuned as files
from engine.config import DecodeConfig, EngineConfig, SpeculativeConfig
from engine.depth import GUESSED, Costs, DepthController, break_even, draft_cost
from engine.doctor import tuned_findings
from engine.generate import Engine
from engine.kernels import loader
from engine.ops import OPS, bind
from engine.ops.choice import Choice, Tuned, nearest
from engine.synthetic import make_weights, tiny_config
from sweeps import compose, forecast, models, plan
from sweeps.bench import Bench, Timing, winner
from sweeps.clock import ManualClock, SystemClock
from sweeps.compose import UsageError
from sweeps.guard import elsewhere, longer, paths, same_path
from sweeps.tune import COSTS, DRAFTS, PLAIN, RULE, STEP, Cell, Tuner, _drafts_of, _rounds_of, tune

CONFIG = tiny_config(max_position_embeddings=1024)
POINTS = [(name, variant.name) for name, op in OPS.items() for variant in op.variants.values()]
CAPTURED: dict[str, Any] = {"capture_output": True, "text": True, "check": True}
NO_VARIANT = ("bandwidth", "recent_decode", "rotary_decode", "step_decode")
OWN_TILE = {"tile": "2x4"}
Cost = Callable[[str, Mapping[str, Any]], int]


@pytest.fixture(scope="module")
def weights():
    return make_weights(CONFIG, dtype=mx.float32, mtp=True)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch, clock: ManualClock) -> Callable[[Cost], None]:
    """Ops whose variants compute nothing and take the time that a function of variant and settings says."""

    def install(cost: Cost) -> None:
        monkeypatch.setattr(mx, "compile", lambda function: function)
        # Fewer rounds and rows of the same kind.
        monkeypatch.setattr("sweeps.bench.ROUNDS", 1)
        monkeypatch.setattr("sweeps.bench.FINAL_ROUNDS", 3)
        monkeypatch.setattr("sweeps.tune.ROWS", {"metal": (1, 4)})
        for name, op in OPS.items():
            variants = {v.name: dataclasses.replace(v, run=_running(v.name, cost, clock)) for v in op.variants.values()}
            fake = dataclasses.replace(op, variants=variants, inputs=lambda case, dtype, seed: (mx.zeros((2,)),))
            monkeypatch.setitem(OPS, name, fake)
        files.identity.cache_clear()

    return install


def _running(name: str, cost: Cost, clock: ManualClock) -> Callable[..., mx.array]:
    def run(x: mx.array, **settings: Any) -> mx.array:
        clock.advance(cost(name, settings))
        return mx.ones((2,))

    return run


@pytest.fixture(autouse=True)
def fresh_identities() -> Iterator[None]:
    yield
    files.identity.cache_clear()


def tuner(weights: Any, folder: Path, clock: ManualClock, kind: str = "metal", **fields: Any) -> Tuner:
    """On a Mac that there is none of: nothing but the fake ops runs."""
    made = Tuner(CONFIG, weights, "tiny", folder, clock, kind=kind, dtype=mx.float32, drain=lambda: None, **fields)
    made.__dict__["sentinel"] = _Calm()
    return made


class _Calm:
    def before_block(self, frontier: int) -> Any:
        return type("Reading", (), {"ns": 1, "hot": False})


def ours_at(factor: float) -> Cost:
    return lambda name, settings: round(1_000_000 * (1 if name == "mlx" else factor))


FOREVER = 10**18


# -- what is chosen ----------------------------------------------------------------------------------


def test_where_every_kernel_of_ours_is_twice_as_slow_full_binds_what_mlx_binds(faked, weights, clock, tmp_path):
    faked(ours_at(2))
    made = tuner(weights, tmp_path, clock, steps=False)
    assert made.run(FOREVER) == []
    full = bind(preset("full"), "metal", files.read([made.path], made.geometry))
    mlx = bind(preset("mlx"), "metal")
    keys = mx.zeros((1, 1, 300, 256))
    for ours, theirs in zip(full.all(), mlx.all(), strict=True):
        assert ours.op.name == theirs.op.name
        for rows in (1, 2, 3, 8, 9, 300, 2048, 9000):
            got, settings, chosen = ours.pick(rows, (keys, keys))
            assert (got.name, settings) == (theirs.pick(rows)[0].name, {}), (ours.op.name, rows)
            assert chosen == "tuned" or not ours.op.timing(CONFIG, rows, 300)
    assert full.fusion == mlx.fusion == "off" and full.chosen() == mlx.chosen()


def test_where_one_setting_of_ours_is_fastest_it_is_bound(faked, weights, clock, tmp_path):
    faked(lambda name, settings: 400_000 if (name, settings) == ("metal", OWN_TILE) else 1_000_000)
    made = tuner(weights, tmp_path, clock, steps=False)
    made.run(FOREVER)
    bound = bind(EngineConfig(), "metal", files.read([made.path], made.geometry))
    variant, settings, chosen = bound.linear.pick(1)
    assert (variant.name, settings, chosen) == ("metal", OWN_TILE, "tuned")
    named = bind(EngineConfig(linear="metal"), "metal", files.read([made.path], made.geometry))
    assert named.linear.pick(1)[1:] == (OWN_TILE, "")
    told = next(c for c in made.entry(made.known())["choices"] if c["op"] == "linear" and c["rows"] == 1)
    assert told["base"] == "mlx" and told["us"] == 400 and told["base_us"] == 1000


@pytest.mark.parametrize(("gain", "noise", "ours"), [(1.3, 0.05, True), (1.05, 0.5, False), (1.015, 0.0, False)])
def test_a_gain_counts_beyond_the_noise_and_two_percent(gain, noise, ours, clock):
    coins = random.Random(3)
    bench = Bench(clock, lambda: None, window_ns=1, seconds=1e9)
    works = {}
    for name, ns in (("mlx", 1e6), ("metal", 1e6 / gain)):
        works[name] = lambda passes, ns=ns: clock.advance(round(passes * ns * coins.uniform(1, 1 + noise)))
    timings = bench.compare(works, "mlx", failed=lambda *_: pytest.fail("nothing fails"))
    assert winner(timings, "mlx", ["mlx", "metal"]) == ("metal" if ours else "mlx")


def test_of_equals_the_preferred_is_taken_and_without_a_base_the_fastest():
    timings = {name: Timing(ns, finals=(ns,) * 3) for name, ns in (("reference", 99.5), ("plain", 100), ("mlx", 200))}
    assert winner(timings, "mlx", ["plain", "mlx", "reference"]) == "plain"
    del timings["plain"], timings["mlx"]
    assert winner(timings, "mlx", ["plain", "mlx", "reference"]) == "reference"


def test_contenders_take_turns_in_an_order_that_the_seed_decides(clock):
    def order(seed: int) -> list[str]:
        seen: list[str] = []

        def work(name: str) -> Callable[[int], None]:
            return lambda passes: (seen.append(name), clock.advance(passes * 10**6))[1]

        bench = Bench(clock, lambda: None, window_ns=1, seconds=1e9, seed=seed)
        bench.compare({name: work(name) for name in "abc"}, "a", failed=lambda *_: None)
        return seen[6:]

    first = order(0)
    assert first == order(0) != order(1)
    assert all(sorted(first[i : i + 3]) == ["a", "b", "c"] for i in range(0, len(first), 3))


def test_one_that_fails_in_its_rounds_is_refused_and_the_rest_are_timed(clock):
    runs = {"a": 0, "b": 0, "c": 0, "d": 0}

    def work(name: str) -> Callable[[int], None]:
        def once(passes: int) -> None:
            runs[name] += 1
            clock.advance(10**6)
            if name == "b" and runs[name] > 2:
                raise MemoryError("no room")

        return once

    refused: list[str] = []
    bench = Bench(clock, lambda: None, window_ns=1, seconds=1e9)
    timings = bench.compare({n: work(n) for n in runs}, "a", failed=lambda name, _: refused.append(name))
    assert timings.keys() == {"a", "c", "d"} and refused == ["b"] and timings["c"].finals


def test_a_variant_that_reads_the_host_is_timed_and_not_chosen_for_a_step(faked, weights, clock, tmp_path):
    faked(lambda name, settings: 100 if name == "host" else 1_000_000)
    made = tuner(weights, tmp_path, clock, steps=False)
    row = made.measure(Cell("route"), {})
    assert min(row["contenders"], key=lambda c: c["first"])["why_not"] == "it reads back to the host"
    assert made._choice(Cell("route"), row)["variant"] == "mlx"


@pytest.mark.parametrize(("kind", "chosen"), [("cuda", "registers"), ("cpu", "chunked")])
def test_a_variant_that_some_inputs_upset_in_16_bits_is_timed_and_not_chosen_on_a_gpu(
    kind, chosen, faked, weights, clock, tmp_path, monkeypatch
):
    faked(lambda name, settings: {"chunked": 100, "registers": 200}.get(name, 1_000_000))
    monkeypatch.setattr("sweeps.tune.ROWS", {kind: (1, 512)})
    made = tuner(weights, tmp_path, clock, kind, steps=False)
    cell = next(c for c in made.cells if c.op == "gated_delta" and c.rows == 512)
    row = made.measure(cell, {})
    reasons = {c["why_not"] for c in row["contenders"] if c["variant"] == "chunked"}
    assert reasons == ({""} if kind == "cpu" else {OPS["gated_delta"].variants["chunked"].unsteady})
    assert made._choice(cell, row)["variant"] == chosen


def test_steps_are_chosen_like_ops(weights, clock, tmp_path):
    made = tuner(weights, tmp_path, clock)
    cell = next(c for c in made.cells if c.op == STEP)

    def step(**ns: float) -> dict[str, Any]:
        rows = [
            {"label": f"{fusion}/step", "fusion": fusion, "trace": "step", "why_not": "", "first": t, "rounds": []}
            for fusion, t in ns.items()
        ]
        contenders = [row | {"finals": [row["first"]] * 3} for row in rows]
        row = {"base": "off/step", "calls": 1, "contenders": contenders, "refused": []}
        return made.entry({made.key(cell): row})["step"]

    assert step(off=100.0, full=50.0)["fusion"] == "full"
    assert step(off=100.0, full=99.0)["fusion"] == "off"
    told = Tuned(fusion="full")
    assert bind(EngineConfig(), "metal", told).fusion == "full"
    # On a CPU, and beside an op that was named, fusion has no place, and a trace that was timed with it none either.
    assert bind(EngineConfig(), "cpu", told).fusion == bind(EngineConfig(linear="mlx"), "metal", told).fusion == "off"
    traces = [Engine(CONFIG, weights, tuned=Tuned(fusion=fusion, trace="eager")).trace for fusion in ("off", "full")]
    assert traces[0] == "eager" and traces[1] == Engine(CONFIG, weights).trace


def test_tiles_of_a_fused_step_are_chosen_kept_and_handed_to_its_kernels(weights, clock, tmp_path, monkeypatch):
    made = tuner(weights, tmp_path, clock)
    cells = {c.op: c for c in made.cells}

    def row(base: str, *told: tuple[str, float, dict[str, Any]]) -> dict[str, Any]:
        rows = [{"label": n, "why_not": "", "first": t, "rounds": [], "finals": [t] * 3} | more for n, t, more in told]
        return {"base": base, "calls": 1, "contenders": rows, "refused": []}

    rule, tile = (RULE, 100.0, {"settings": {}}), {"up_tile": [4, 8]}
    known = {
        made.key(cells[STEP]): row("off/step", ("full/step", 1.0, {"fusion": "full", "trace": "step"})),
        made.key(cells["step.experts.up"]): row(RULE, rule, ("up", 50.0, {"settings": tile})),
        made.key(cells["step.head"]): row(RULE, rule, ("head", 99.0, {"settings": {"tile": "8x8"}})),
    }
    told = made.tuned(json.loads(json.dumps(known)))
    assert told.fusion == "full" and told.folded == {"experts.up": {"up_tile": (4, 8)}}
    ops = bind(EngineConfig(), "cuda", told)
    assert ops.fusion == "full"
    seen: dict[str, Any] = {}
    monkeypatch.setattr(folded.linear, "products_metal", lambda *_, **__: (mx.zeros((1, 1, 32)),) * 4)
    monkeypatch.setattr(folded.experts, "experts_metal", lambda *_, **given: seen.update(given))
    model = folded.FoldedModel(CONFIG, weights, ops, 400)
    model._mix(weights.layers[0].experts, weights.norm, mx.zeros((1, 1, CONFIG.hidden_size)))
    assert seen["up_tile"] == (4, 8) and "down_tile" not in seen
    assert ("experts", "metal", "folded up_tile (4, 8)") in ops.recorder.counts


def test_no_tile_of_a_fused_step_is_tried_where_none_is_fused(weights, clock, tmp_path):
    row = tuner(weights, tmp_path, clock).measure(Cell("step.head", context=256), {})
    assert not row["contenders"] and "wholly fused" in row["refused"][0]["message"]


# -- what is kept --------------------------------------------------------------------------------------


def test_a_killed_tuning_goes_on_where_it_was(faked, weights, clock, tmp_path):
    faked(ours_at(2))
    whole = tuner(weights, tmp_path / "whole", clock, steps=False)
    whole.run(FOREVER)
    killed = tuner(weights, tmp_path, clock, steps=False)
    measure, done = killed.measure, []

    def dying(cell: Cell, known: Mapping[str, Any]) -> dict[str, Any]:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(cell)
        return measure(cell, known)

    killed.measure = dying  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        killed.run(FOREVER)
    with killed.record.open("a", encoding="utf-8") as file:
        file.write('{"key": "cut of')
    again = tuner(weights, tmp_path, clock, steps=False)
    seen: list[Cell] = []
    measure = again.measure
    again.measure = lambda cell, known: seen.append(cell) or measure(cell, known)  # type: ignore[method-assign]
    assert again.run(FOREVER) == []
    assert seen == again.cells[3:] and done == again.cells[:3]
    assert again.entry(again.known())["choices"] == whole.entry(whole.known())["choices"]
    seen.clear()
    assert again.run(FOREVER) == [] and not seen


def test_nothing_is_begun_after_the_budget(faked, weights, clock, tmp_path):
    faked(ours_at(2))
    made = tuner(weights, tmp_path, clock, steps=False)
    assert made.run(clock.now_ns()) == made.cells and not made.path.exists()
    left = made.run(clock.now_ns() + 1)
    assert left == made.cells[1:]
    told = json.loads(made.path.read_text(encoding="utf-8"))["models"][made.geometry]
    assert len(told["choices"]) == 1 and told["not_measured"] == [cell.text for cell in left]


@pytest.mark.parametrize("fault", ["raises", "is wrong"])
def test_a_variant_that_fails_is_refused_by_name_and_the_rest_go_on(
    fault, faked, weights, clock, tmp_path, monkeypatch
):
    faked(ours_at(0.5))
    bad = OPS["experts"].variants["metal"]

    def run(x: mx.array, **settings: Any) -> mx.array:
        if fault == "raises":
            raise RuntimeError("no such function: up_4x8")
        return mx.full((2,), 3.0)

    op = dataclasses.replace(
        OPS["experts"], variants=OPS["experts"].variants | {"metal": dataclasses.replace(bad, run=run)}
    )
    monkeypatch.setitem(OPS, "experts", op)
    made = tuner(weights, tmp_path, clock, steps=False)
    row = made.measure(Cell("experts"), {})
    messages = {r["message"] for r in row["refused"] if r["variant"] == "metal"}
    assert len([r for r in row["refused"] if r["variant"] == "metal"]) == len(bad.points)
    assert all(("no such function" if fault == "raises" else "off by 2") in message for message in messages)
    assert {c["variant"] for c in row["contenders"]} >= {"mlx", "expanded"}


def test_every_kernel_text_is_part_of_what_identifies_an_op_or_the_step():
    by_op = {name: set().union(*map(files._sources, files._modules(op))) for name, op in OPS.items()}
    assert {p.name for p in by_op["decode_attention"]} >= {"attention.py", "attention_decode.metal", "portable.h"}
    texts = {path for path in loader.FOLDER.glob("*.metal")}
    # What only the fused step runs is part of the step's identity.
    assert texts - set().union(*by_op.values()) <= {loader.FOLDER / f"{t}.metal" for t in NO_VARIANT}


def test_identities_are_the_same_in_every_process():
    code = "from engine import tuned; print(tuned.identities())"
    seen = {
        subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, **CAPTURED).stdout
        for seed in ("1", "2")
    }
    assert seen == {f"{files.identities()}\n"}


def test_a_comment_is_no_change_and_a_line_of_code_is(tmp_path, monkeypatch):
    path = tmp_path / "op.metal"
    monkeypatch.setattr(files, "_sources", lambda module: {path})

    def identity(text: str) -> str:
        path.write_text(text, encoding="utf-8")
        files.identity.cache_clear()
        return files.identity("linear")

    first = identity("#define A 1\n// one\nx = A;\n")
    assert identity("#define A 1\n\n// two words\nx = A;\n") == first
    assert identity("#define A 2\n// one\nx = A;\n") != first


def test_a_change_of_the_code_or_of_mlx_makes_a_comparison_new(faked, weights, clock, tmp_path, monkeypatch):
    faked(ours_at(2))
    made = tuner(weights, tmp_path, clock, steps=False)
    before = {cell: made.key(cell) for cell in made.cells}
    monkeypatch.setattr(files, "identity", lambda name: "changed" if name == "linear" else "same")
    other = {cell: made.key(cell) for cell in made.cells}
    monkeypatch.setattr(files, "mlx_version", lambda: "9.9")
    assert not {made.key(cell) for cell in made.cells} & {*before.values(), *other.values()}


# -- what the engine makes of it -----------------------------------------------------------------------


def written(path: Path, key: str, **changes: Any) -> Path:
    """A tuned file in which the reference of `linear` and `head` won, and a step and its costs were measured."""
    choice = {"phase": "decode", "rows": 1, "context": None, "variant": "reference", "settings": {}, "measured": {}}
    entry = {
        "mlx": files.mlx_version(),
        "identities": {name: files.identity(name) for name in ("linear", "head", STEP)},
        "choices": [choice | {"op": op} for op in ("linear", "head")],
        "step": {"fusion": "off", "trace": "eager", "costs": {"rows": [1, *range(2, 9)], "replay": 0.5, "states": 0.1}},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {"format": files.FORMAT, "models": {key: entry | changes}}
    path.write_text(json.dumps(whole), encoding="utf-8")
    return path


def test_the_users_file_comes_first_and_the_shipped_one_fills_in(tmp_path):
    user, shipped = (written(tmp_path / name / "chip.json", "key") for name in ("user", "shipped"))
    told = json.loads(user.read_text(encoding="utf-8"))
    told["models"]["key"]["choices"] = [told["models"]["key"]["choices"][0] | {"variant": "expanded"}]
    user.write_text(json.dumps(told), encoding="utf-8")
    read = files.read([user, shipped], "key")
    assert {op: choices[0].variant for op, choices in read.choices.items()} == {
        "linear": "expanded",
        "head": "reference",
    }
    assert read.files == (user, shipped) and not read.notes
    assert files.read([user, shipped], "another geometry") == Tuned()


@pytest.mark.parametrize(
    ("changes", "holds", "note"),
    [
        ({"mlx": "0.1"}, set(), "measured with MLX 0.1"),
        (
            {"identities": {"linear": "old", "head": files.identity("head"), STEP: "old"}},
            {"head"},
            "linear has changed",
        ),
        ({"choices": [{"op": "linear"}]}, set(), "cannot be used"),
    ],
)
def test_what_no_longer_holds_is_passed_over_with_a_note(changes, holds, note, tmp_path):
    read = files.read([written(tmp_path / "chip.json", "key", **changes)], "key")
    assert read.choices.keys() == holds and read.trace is None
    assert any(note in line for line in read.notes)


def faults(path: Path) -> list[str]:
    """What a shipped file says that no engine could follow."""
    told = json.loads(path.read_text(encoding="utf-8"))
    choices = [choice for entry in told["models"].values() for choice in entry["choices"]]
    made = [] if (told["format"], told.get("chip")) == (files.FORMAT, path.stem) else [f"it is not of {path.stem}"]
    return made + [c["op"] for c in choices if c["op"] not in OPS or c["variant"] not in OPS[c["op"]].variants]


def test_shipped_files_name_their_chip_and_variants_that_there_are(tmp_path):
    assert {path.name: faults(path) for path in files.SHIPPED.glob("*.json") if faults(path)} == {}
    path = written(tmp_path / "chip.json", "key")
    assert faults(path) == ["it is not of chip"]
    path.write_text(path.read_text(encoding="utf-8").replace("reference", "referees"), encoding="utf-8")
    assert faults(path) == ["it is not of chip", "linear", "head"]


def test_the_doctor_names_what_holds_and_what_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "USER", tmp_path)
    assert [(f.level, f.topic) for f in tuned_findings()] == [("note", "tuned")]
    path = written(tmp_path / f"{files.chip()}.json", "key", name="tiny", dtype="float32")
    (found,) = tuned_findings()
    assert found.level == "ok" and found.text.endswith("tiny (float32): decides head, linear, step")
    written(path, "key", name="tiny", identities={"linear": "old", "head": files.identity("head"), STEP: "old"})
    (found,) = tuned_findings()
    assert found.level == "note" and "decides head; linear has changed" in found.text
    path.write_text("{", encoding="utf-8")
    (found,) = tuned_findings()
    assert "cannot be read" in found.text


def test_the_engine_says_what_was_tuned(weights, tmp_path, monkeypatch):
    def engine(**fields: Any) -> Engine:
        made = Engine(CONFIG, weights, EngineConfig(**fields), dtype=mx.float32)
        made.decode(made.prefill([1, 2, 3]) or 0, 2)
        return made

    def said(made: Engine) -> set[tuple[str, str, str]]:
        return {(e["op"], e["variant"], e.get("chosen", "")) for e in made.executed() if e["op"] in ("linear", "route")}

    untuned = engine(decode=DecodeConfig(trace="eager"))
    assert {chosen for _, _, chosen in said(untuned)} == {"untuned"} and untuned.tuning()["linear"] == "untuned"
    assert untuned.tuning()["decode.trace"] == "named"
    monkeypatch.setattr(files, "USER", tmp_path)
    written(tmp_path / f"{files.chip()}.json", files.geometry(CONFIG, weights, mx.float32))
    made = engine()
    assert ("linear", "reference", "tuned") in said(made) and ("route", "topk", "untuned") in said(made)
    assert made.tuning()["linear"] == "tuned | untuned" and made.trace == "eager"
    assert made.tuning()["decode.trace"] == "tuned" and made.chosen()["linear"].startswith("reference")
    named = engine(linear="mlx", decode=DecodeConfig(trace="eager"))
    assert {line for line in said(named) if line[0] == "linear"} == {("linear", "mlx", "")}


def test_costs_of_several_rows_are_read_and_guessed_without_a_file(weights):
    config = EngineConfig(decode=DecodeConfig(trace="eager"), speculative=SpeculativeConfig(drafter="ngram", depth=2))
    guessed = Engine(CONFIG, weights, config, dtype=mx.float32)
    assert guessed.speculator is not None and guessed.speculator.costs.rows == GUESSED["cpu"].rows
    assert (guessed.speculation() or {})["costs"] == "untuned"
    costs = {"rows": [1, *range(2, 9)], "replay": 0.5, "states": 0.1}
    read = Engine(CONFIG, weights, config, dtype=mx.float32, tuned=Tuned(costs=costs))
    assert read.speculator is not None and read.speculator.costs.rows == (1, *range(2, 9))
    assert (read.speculation() or {})["costs"] == "tuned" and (read.speculation() or {})["draft_cost"] == "untuned"
    told = Engine(CONFIG, weights, config, dtype=mx.float32, tuned=Tuned(costs=costs | {"draft": {"ngram": 0.03}}))
    assert told.speculator is not None and told.speculator.costs.draft == 0.03
    assert (told.speculation() or {})["draft_cost"] == "tuned"


def test_drafts_cost_what_whole_steps_took_in_plain_ones_of_the_same_round():
    """A machine that slows down by half in the second of three rounds changes nothing."""
    pace, steps = (1.0, 1.5, 1.0), {1: 1.9, 2: 2.6, 3: 3.3, 5: 5.0, 7: 7.0}

    def row(label: str, cost: float) -> dict:
        return {"label": label, "first": 1.0, "rounds": [], "finals": [100.0 * cost * p for p in pace]}

    told = [row("plain", PLAIN), *(row(f"mtp {d}", cost) for d, cost in steps.items()), row("ngram 1", 1.0)]
    made = _drafts_of(_rounds_of({"contenders": told}), rows := [1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5])
    assert made.keys() == {"mtp"}, "a drafter of which a depth failed is left out"
    costs = Costs(tuple(rows), tuple(made["mtp"]), replay=0.2, states=0.0)
    assert [costs.step(d) for d in range(1, 8)] == pytest.approx([1.9, 2.6, 3.3, 4.15, 5.0, 6.0, 7.0])
    assert DepthController(costs, 7).can_pay() and break_even(costs, 1) == pytest.approx(1.1 / 1.2)


def test_a_trimmed_draft_vocabulary_costs_what_lies_between():
    measured = {"mtp": 0.3, "mtp/1000": 0.1, "ngram": 0.01}
    assert [draft_cost(measured, "mtp", n, 3000) for n in (0, 3000, 1000)] == [0.3, 0.3, pytest.approx(0.1)]
    assert draft_cost(measured, "mtp", 2000, 3000) == pytest.approx(0.2)
    by_depth = {"mtp": [0.3] * 7, "mtp/1000": [0.1] * 7}
    assert draft_cost(by_depth, "mtp", 0, 3000) == (0.3,) * 7
    assert draft_cost(by_depth, "mtp", 2000, 3000) == pytest.approx((0.2,) * 7)
    assert draft_cost(measured, "model", 0, 3000) is None and draft_cost({"mtp": 0.2}, "mtp", 100, 3000) == 0.2


def test_a_run_begun_before_tuning_is_not_gone_on_with_after_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    request = compose.request(["model=tiny", "subject=none"])
    model, machine = models.find(request), forecast.this_machine()
    before = plan.make(request, model, machine).job.run_id.rpartition("-")[2]
    assert plan.make(request, model, machine).job.run_id.rpartition("-")[2] == before
    monkeypatch.setattr(files, "USER", tmp_path)
    written(tmp_path / f"{files.chip()}.json", "key")
    assert plan.make(request, model, machine).job.run_id.rpartition("-")[2] != before


def test_the_nearest_point_speaks():
    points = [Choice("decode", rows, at, f"{rows}at{at}", {}) for rows in (1, 4) for at in (256, 32_768)]
    assert [nearest(points, "decode", rows, at).variant for rows, at in ((1, 300), (1, 20_000), (3, 131_072))] == [
        "1at256",
        "1at32768",
        "4at32768",
    ]
    assert nearest(points, "prefill", 512, 512) is None


def test_a_step_tuned_by_context_is_guarded_at_all_of_them(weights):
    points = [("mlx", {}, 256), ("matmul", {"split": "chunks"}, 32_768)]
    choices = tuple(Choice("decode", 1, at, name, told) for name, told, at in points)
    config = EngineConfig(decode=DecodeConfig(trace="eager"))
    engine = Engine(CONFIG, weights, config, dtype=mx.float32, tuned=Tuned({"decode_attention": choices}))
    engine.decode(engine.prefill([1, 2, 3]) or 0, 1)
    seen = elsewhere(engine, paths(engine.executed()))
    far = [{"op": "decode_attention", "variant": "matmul", "tile": "chunks", "calls": 1}]
    assert same_path({"figures": {"executed": seen}}, far) is None
    assert "matmul chunks" in str(same_path({"figures": {"executed": paths(engine.executed())}}, far))
    # What the op's own reference refutes stays out.
    wrong = dataclasses.replace(OPS["decode_attention"].variants["matmul"], run=lambda q, *_, **__: 2 * q)
    op = dataclasses.replace(OPS["decode_attention"], variants=OPS["decode_attention"].variants | {"matmul": wrong})
    attention = dataclasses.replace(engine.ops.decode_attention, op=op)
    engine.ops = dataclasses.replace(engine.ops, decode_attention=attention)
    assert ["decode_attention", "matmul", "chunks"] not in elsewhere(engine, paths(engine.executed()))


def test_a_prefill_whose_variants_go_by_length_is_guarded_at_all_timed_lengths(weights):
    choices = tuple(Choice("prefill", rows, rows, name, {}) for rows, name in ((12, "mlx"), (48, "grouped")))
    config = EngineConfig(decode=DecodeConfig(trace="eager"))
    engine = Engine(CONFIG, weights, config, dtype=mx.float32, tuned=Tuned({"experts": choices}))
    engine.prefill(list(range(12)))
    short = paths(engine.executed())
    engine.reset()
    engine.reset_executed()
    engine.prefill(list(range(48)))
    there = engine.executed()
    as_prefill = {"phase": "prefill", "lengths": [12, 48]}
    assert "grouped" in str(same_path({"figures": {"executed": short} | as_prefill}, there))
    assert same_path({"figures": {"executed": longer(engine, short, [12, 48])} | as_prefill}, there) is None
    assert longer(engine, short, [12]) == short
    # A last chunk of one row takes the variant of decoding, which is tried like the others.
    engine.engine.prefill.chunk = 48
    assert ["experts", engine.ops.experts.decode.name, ""] in longer(engine, short, [49])
    engine.engine.prefill.chunk = 2048
    # What fails, or what the op's own reference refutes, stays out.
    for run in (lambda *_, **__: 1 / 0, lambda x, *_, **__: 2 * x):
        bad = dataclasses.replace(OPS["experts"].variants["grouped"], run=run)
        op = dataclasses.replace(OPS["experts"], variants=OPS["experts"].variants | {"grouped": bad})
        engine.ops = dataclasses.replace(engine.ops, experts=dataclasses.replace(engine.ops.experts, op=op))
        assert longer(engine, short, [12, 48]) == short


# -- spaces, and the command ---------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", folded.TILES)
def test_a_space_of_a_fused_kernel_too(kernel):
    assert 1 < len(folded.TILES[kernel]) <= 12


@pytest.mark.parametrize(("op", "name"), POINTS)
def test_a_space_holds_about_twelve_points(op, name):
    points = OPS[op].variants[name].points[1:]
    assert len(points) <= 13 and len({str(point) for point in points}) == len(points)
    assert all(point for point in points), "its own rule is tried anyway"


def test_it_walks_the_ops_and_every_variant_is_timed_or_refused(faked, weights, clock, tmp_path):
    faked(ours_at(2))
    made = tuner(weights, tmp_path, clock, steps=False)
    timed = [op for op in OPS.values() if op.timing(CONFIG, 1, 256) or op.timing(CONFIG, 512, 512)]
    assert {cell.op for cell in made.cells} == {op.name for op in timed} == OPS.keys() - {"norm"}
    for op in timed:
        cell = next(c for c in made.cells if c.op == op.name)
        row = made.measure(cell, {})
        seen = {c["variant"] for c in row["contenders"]} | {r["variant"] for r in row["refused"]}
        assert seen == op.variants.keys()


def test_on_this_machine_the_command_measures_writes_and_then_has_nothing_left(tmp_path, capsys, monkeypatch):
    # A whole tuning takes a minute; this is an op of each phase, with few rounds.
    monkeypatch.setattr(Tuner, "cells", [Cell("linear"), Cell("route", "prefill", 512)])
    monkeypatch.setattr("sweeps.bench.FINAL_ROUNDS", 3)
    # Its lock is its own: a sweep beside this test would otherwise be waited for.
    monkeypatch.setattr("sweeps.environment.runtime_dir", lambda: tmp_path)
    assert tune([f"run_dir={tmp_path}"]) == 0
    shown = capsys.readouterr()
    path = Path(shown.out.strip())
    (entry,) = json.loads(path.read_text(encoding="utf-8"))["models"].values()
    assert [choice["op"] for choice in entry["choices"]] == ["linear", "route"] and not entry["not_measured"]
    assert all(choice["us"] > 0 and choice["base_us"] > 0 for choice in entry["choices"])
    assert len(shown.err.strip().splitlines()) == 2
    assert tune([f"run_dir={tmp_path}"]) == 0 and not capsys.readouterr().err


def test_whole_steps_and_their_costs_are_measured(weights, tmp_path, monkeypatch):
    # Tracing would call a compiler for every number of rows.
    monkeypatch.setattr("sweeps.tune.FUSIONS", (("off", "eager"), ("full", "eager")))
    monkeypatch.setattr("sweeps.tune.STEPS", {"cpu": 2})
    monkeypatch.setattr("sweeps.bench.FINAL_ROUNDS", 3)
    made = Tuner(CONFIG, weights, "tiny", tmp_path, SystemClock(), dtype=mx.float32)
    made.__dict__["cells"] = [cell for cell in made.cells if cell.op in (STEP, COSTS, DRAFTS)]
    assert made.run(FOREVER) == []
    entry = made.entry(made.known())
    step = entry["step"]
    assert (step["fusion"], step["trace"]) == ("off", "eager")
    assert any(r["op"] == STEP and "not on a CPU" in r["message"] for r in entry["refused"])
    assert len(step["costs"]["rows"]) == 8 and step["costs"]["rows"][0] == 1 and min(step["costs"]["rows"]) > 0
    assert step["costs"]["draft"].keys() == {"ngram", "mtp"}
    for drafts in step["costs"]["draft"].values():
        made = Costs(tuple(step["costs"]["rows"]), tuple(drafts), step["costs"]["replay"], step["costs"]["states"])
        assert min(made.step(depth) for depth in range(1, 8)) > 0


@pytest.mark.parametrize("word", ["frontiers=[256]", "engine=mlx", "toggle.fusion=off"])
def test_what_tuning_does_not_take_is_refused(word):
    with pytest.raises(UsageError, match=f"tune does not take {word.split('=')[0]}=; it takes model"):
        tune([word])
