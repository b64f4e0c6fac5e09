"""Speculative decoding on the engine: rollback is exact, tokens are plain decoding's, every edge, every drafter."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from scipy import stats

import engine as package
from engine import proof
from engine.checkpoint import load
from engine.config import DecodeConfig, EngineConfig, ModelConfig, SpeculativeConfig
from engine.depth import GUESSED, Costs, DepthController
from engine.device import device_kind
from engine.generate import Engine, NonFinite
from engine.ops import VariantUnsupported
from engine.sampling import Sampling, kept_scores, sample
from engine.serve.reuse import Prefixes
from engine.speculative import Draft, MtpDrafter, accept_sampled
from engine.synthetic import make_weights, tiny_config

TINY = tiny_config(4)
IDS = np.random.default_rng(7).integers(0, 440, 60).tolist()
REPEATED = (IDS[:12] * 5)[:55]
CHEAP = Costs((1, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06, 1.07))
NEXT = 50
"""Tokens compared after a rollback."""
ENDS = (60, pytest.param(400, marks=pytest.mark.full))
"""Draws from end to end; 20,000 are drawn where the decision is made."""


class Oracle:
    """A drafter that knows what plain decoding gives, so that a rejection can be forced at any position."""

    def __init__(self, prompt, tokens):
        self.text = [*prompt, *tokens]

    def draft(self, history, token, depth, sampling, key):
        at = len(history) + 1
        assert self.text[:at] == [*history, token], "the history told to drafters is what was fed"
        found = self.text[at : at + depth]
        return Draft(mx.array(found, dtype=mx.uint32)) if found else None

    def observe(self, tokens, hidden): ...

    def snapshot(self): ...

    def restore(self, snapshot, position): ...

    def arrays(self):
        return []


@pytest.fixture(scope="module")
def weights():
    return make_weights(TINY, 0, dtype=mx.float32, mtp=True)


def make(weights, config=TINY, trace="eager", costs=None, draft=None, **fields) -> Engine:
    decode = EngineConfig(decode=DecodeConfig(trace=trace), speculative=SpeculativeConfig(**fields))
    return Engine(config, weights, decode, vocabulary=453, costs=costs, draft=draft)


def knowing(weights, tokens, prompt=IDS, **fields) -> Engine:
    made = make(weights, drafter="ngram", **fields)
    made.speculator.drafter = Oracle(prompt, tokens)
    return made


@pytest.fixture(scope="module")
def plain(weights):
    """Tokens of plain decoding, and its state after each of the first rows."""
    engine = make(weights)
    tokens, states = [engine.prefill(IDS)], []
    for _ in range(8):
        tokens += engine.decode(tokens[-1], 1)
        states.append(engine.export_state())
    tokens += engine.decode(tokens[-1], NEXT + 2)
    return tokens, states


def worst(got, want) -> float:
    return max(float((mx.abs(got[name] - want[name]).max() / mx.abs(want[name]).max()).item()) for name in want)


# -- contract one: rollback is exact -------------------------------------------------------------


@pytest.mark.parametrize("way", ["replay", "states", "exact"])
@pytest.mark.parametrize("trace", ["eager", "step"])
def test_a_rejection_at_every_position_leaves_what_plain_decoding_has(weights, plain, way, trace):
    """State and the next 50 tokens; bit for bit where the rows ran one at a time."""
    tokens, states = plain
    setting = {"exact_verify": True} if way == "exact" else {"rollback": way}
    engine = knowing(weights, tokens, depth=7, trace=trace, **setting)
    first = engine.prefill(IDS)
    start = engine.snapshot()
    for position in range(8):
        engine.restore(start)
        engine.speculator.judge = lambda drafts, choices, most=position: min(len(drafts), most)
        stream = engine.speculator.stream(first, 60)
        made = [next(stream) for _ in range(position + 1)]
        stream.close()
        assert made == tokens[1 : position + 2] and engine.position == len(IDS) + position + 1
        state = engine.export_state()
        if way == "exact" and trace == "eager":
            assert all(mx.array_equal(state[name], states[position][name]) for name in state)
        else:
            assert worst(state, states[position]) < 2e-5
        if (way, trace) == ("replay", "eager") or position == 4:
            engine.speculator._depth = lambda left: 0  # the next ones without drafts
            assert engine.decode(made[-1], NEXT) == tokens[position + 2 : position + 2 + NEXT]
            del engine.speculator._depth


def test_replayed_rows_equal_a_pass_of_those_rows_alone(weights, plain):
    """Replaying 3 of 6 rows gives the recurrent state, bit for bit, of both ways of taking rows back."""
    tokens, found = plain[0], []
    for way in ("replay", "states"):
        engine = knowing(weights, tokens, depth=5, rollback=way)
        fed = mx.array([engine.prefill(IDS), *tokens[1:6]], dtype=mx.uint32)
        engine.speculator.verifier.keep(engine.speculator.verifier.run(fed, False), 3)
        found.append(engine.export_state())
    alone = make(weights)
    alone.prefill(IDS)
    alone._pass(tokens[:3])
    for name in ("state", "conv"):
        assert mx.array_equal(found[0][name], found[1][name]), name
    assert worst(found[0], alone.export_state()) < 1e-6


def test_a_rejected_step_mixes_with_plain_ones(weights, plain):
    """Random rejections all along; nothing wrong builds up."""
    tokens, rng = plain[0], np.random.default_rng(3)
    engine = knowing(weights, tokens, depth=5)
    engine.speculator.judge = lambda drafts, choices: int(rng.integers(0, len(drafts) + 1))
    assert engine.decode(engine.prefill(IDS), NEXT) == tokens[1 : NEXT + 1]
    assert engine.speculation()["rollbacks"] > 3


# -- contract two: tokens are plain decoding's ---------------------------------------------------


@pytest.mark.parametrize("exact", [False, True], ids=["rows", "exact"])
@pytest.mark.parametrize("drafter", ["mtp", "ngram", "model"])
def test_greedy_tokens_are_those_of_plain_decoding(weights, drafter, exact):
    want = make(weights)
    first = want.prefill(REPEATED)
    expected = want.decode(first, 24)
    other = make(weights) if drafter == "model" else None
    engine = make(weights, drafter=drafter, depth=3, exact_verify=exact, draft=other)
    assert engine.prefill(REPEATED) == first
    assert engine.decode(first, 24) == expected
    assert engine.position == want.position
    counts = engine.speculation()
    assert counts["accepted"] + counts["steps"] + counts["plain"] == 24
    assert counts["rows"] == counts["drafted"] + counts["steps"]
    if drafter == "model":
        assert counts["accepted"] == counts["drafted"] > 0, "the same model drafts what it will choose"
    assert (engine.export_state()["state"] == want.export_state()["state"]).all().item() or not exact
    engine.reset_executed()
    assert engine.speculation()["steps"] == 0


def test_what_ran_is_on_record(weights):
    engine = make(weights, drafter="mtp", depth=2, rollback="replay")
    engine.decode(engine.prefill(REPEATED), 6)
    ran = {(row["op"], row["variant"], row["tile"]) for row in engine.executed()}
    assert {("draft", "mtp", "depth 2"), ("verify", "replay", "rows 3"), ("token_feedback", "device", "")} <= ran


# -- sampling ------------------------------------------------------------------------------------


def test_twenty_thousand_drafted_draws_are_distributed_as_plain_ones(weights, monkeypatch):
    """At one position, over all tokens: what the head draws, judged by the model's row, beside draws of that row."""
    how, total, batch = Sampling(temperature=1.0), 20_000, 5_000
    engine, rows = make(weights, drafter="mtp", depth=1), []
    drafter, pick = engine.speculator.drafter, MtpDrafter._pick
    engine.prefill(REPEATED[:-1], last=False)
    monkeypatch.setattr(MtpDrafter, "_pick", lambda self, h, *rest: (rows.append(h), pick(self, h, *rest))[1])
    drafter.draft(REPEATED[:-1], REPEATED[-1], 1, how, mx.random.key(0))
    h = mx.broadcast_to(rows[0], (1, batch, TINY.hidden_size))
    scores = kept_scores(make(weights).logits(REPEATED)[-1:], how)
    p = mx.softmax(scores, axis=-1)
    target = mx.broadcast_to(p[None], (batch, 2, p.shape[-1]))
    made, plain, kept = [], [], 0
    for seed in range(total // batch):
        keys = mx.random.split(mx.random.key(seed), 3)
        drafts, proposal, _ = pick(drafter, h, how, keys[0])
        right, after = accept_sampled(target, proposal[:, None], drafts[:, None], keys[1])
        made.append(np.array(mx.where(right > 0, drafts, after)))
        plain.append(np.array(sample(mx.broadcast_to(scores, (batch, scores.shape[-1])), how, keys[2])))
        kept += int(right.sum().item())
    assert 0.1 * total < kept < 0.9 * total, "what is kept and what replaces it both count"
    found, free = (np.bincount(np.concatenate(draws), minlength=p.shape[-1]) for draws in (made, plain))
    wanted = total * np.array(p[0]).astype(np.float64)
    often = wanted >= 10
    found, free, wanted = (np.append(x[often], x[~often].sum()) for x in (found, free, wanted))
    assert often.sum() > 100
    assert stats.chisquare(found, wanted * total / wanted.sum()).pvalue > 1e-4
    assert stats.chi2_contingency(np.array([found, free])[:, found + free > 0]).pvalue > 1e-4


class Sure:
    """A drafter that always proposes the same token, without having drawn it."""

    def __init__(self, token: int):
        self.token = token

    def draft(self, history, token, depth, sampling, key):
        return Draft(mx.array([self.token] * depth, dtype=mx.uint32))

    def observe(self, tokens, hidden): ...

    def snapshot(self): ...

    def restore(self, snapshot, position): ...

    def arrays(self):
        return []


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("drafter", ["mtp", "sure"])
def test_sampled_tokens_keep_their_distribution(embedded, drafter, ends):
    """From end to end, where the model hesitates between tokens that are drafted: most drafts are kept, not all."""
    how = Sampling(temperature=1.0, top_k=3)
    text = held_out(embedded, "code", 120)
    every = np.array(mx.softmax(kept_scores(trained(embedded).logits(text), how), axis=-1)).astype(np.float64)
    at = 20 + int(np.abs(every[20:].max(axis=-1) - 0.5).argmin())
    prompt, p = text[: at + 1], every[at]
    engine = trained(embedded, drafter="mtp" if drafter == "mtp" else "ngram", depth=1)
    if drafter == "sure":
        engine.speculator.drafter = Sure(int(p.argmax()))
    engine.prefill(prompt[:-1], last=False)
    start, draws = engine.snapshot(), []
    for seed in range(ends):
        draws.append(next(engine.generate(prompt[-1:], 2, how, seed=seed)))
        engine.restore(start)
    counts = np.bincount(draws, minlength=len(p))
    assert counts[p == 0].sum() == 0
    assert stats.chisquare(counts[p > 0], ends * p[p > 0] / p.sum()).pvalue > 1e-4
    told = engine.speculation()
    assert told["steps"] == ends and 0.2 * ends < told["accepted"] < 0.95 * ends


def test_a_seed_fixes_drafted_samples(weights):
    how = Sampling(temperature=0.9, top_k=20, top_p=0.95)
    runs = [list(make(weights, drafter="mtp", depth=2).generate(IDS[:20], 10, how, seed=s)) for s in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    assert max(max(run) for run in runs) < 453


# -- edges ---------------------------------------------------------------------------------------


def test_a_stop_id_within_a_draft_ends_the_stream_there(weights, plain):
    tokens = plain[0]
    for at in range(1, 7):
        stop = tokens[at]
        engine = knowing(weights, tokens, depth=6)
        want = tokens[: tokens.index(stop)]
        assert list(engine.generate(IDS, 20, stop_ids=[stop])) == want
        assert engine.position <= len(IDS) + len(want), "nothing past the stop is left in the cache"
        assert engine.speculation()["accepted"] == len(want), "drafts past the stop count for nothing"


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_fewer_tokens_than_a_draft_are_made_exactly(weights, plain, count):
    engine = knowing(weights, plain[0], depth=7)
    assert engine.decode(engine.prefill(IDS), count) == plain[0][1 : count + 1]
    assert engine.position == len(IDS) + count
    engine.reset()
    assert list(engine.generate(IDS, count)) == plain[0][:count]


def test_the_context_is_filled_to_its_end_and_not_past_it(weights, plain):
    small = dataclasses.replace(TINY, max_position_embeddings=len(IDS) + 9)
    engine = knowing(weights, plain[0], depth=6, config=small)
    first = engine.prefill(IDS)
    with pytest.raises(ValueError, match="context"):
        engine.decode(first, 10)
    assert engine.decode(first, 9) == plain[0][1:10]
    engine.reset()
    assert list(engine.generate(IDS, 100)) == plain[0][:9]


@pytest.mark.parametrize("drafter", ["mtp", "ngram", "model"])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_prompts_of_a_few_tokens(weights, drafter, length):
    want = list(make(weights).generate(IDS[:length], 9))
    engine = make(weights, drafter=drafter, depth=3, draft=make(weights) if drafter == "model" else None)
    assert list(engine.generate(IDS[:length], 9)) == want


@pytest.mark.parametrize("handed", [1, 2, 4])
def test_a_stream_closed_within_a_draft_leaves_a_usable_engine(weights, plain, handed):
    tokens = plain[0]
    engine = knowing(weights, tokens, depth=6)
    stream = engine.generate(IDS, 30)
    assert [next(stream) for _ in range(handed)] == tokens[:handed]
    stream.close()
    assert engine.position == len(IDS) + handed - 1
    assert engine.decode(tokens[handed - 1], 12) == tokens[handed : handed + 12], "the sequence goes on"
    engine.reset()
    assert list(engine.generate(IDS, 8)) == tokens[:8], "and a new one starts"


@pytest.mark.parametrize("drafter", ["mtp", "ngram"])
def test_a_restored_engine_drafts_what_it_drafted(weights, drafter):
    engine = make(weights, drafter=drafter, depth=3)
    first = engine.prefill(REPEATED)
    start = engine.snapshot()
    engine.reset_executed()
    want = engine.decode(first, 20)
    counts = engine.speculation()
    engine.restore(start)
    engine.reset_executed()
    assert engine.decode(first, 20) == want
    assert engine.speculation() == counts


@pytest.mark.parametrize("drafter", ["mtp", "ngram"])
def test_an_imported_sequence_is_drafted_without_its_past(weights, drafter):
    source = make(weights)
    first = source.prefill(REPEATED)
    engine = make(weights, drafter=drafter, depth=3)
    engine.prefill(IDS[:20])
    engine.import_state(source.export_state())
    assert engine.decode(first, 16) == source.decode(first, 16)


@pytest.mark.parametrize("drafter", ["mtp", "ngram"])
@pytest.mark.parametrize("budget", [0, 1 << 28], ids=["fresh", "reuse"])
def test_reused_prefixes_and_drafts_together(weights, drafter, budget):
    """Each is clean alone; together they must be too."""
    engine = make(weights, drafter=drafter, depth=3)
    prefixes, made = Prefixes(engine, 16, budget), []
    for prompt in (REPEATED[:40], [*REPEATED[:33], *IDS[40:50]], REPEATED[:40]):
        at, _ = prefixes.begin(prompt, None)
        for edge in prefixes.edges(at, prompt):
            engine.prefill(prompt[at:edge], last=False)
            prefixes.mark()
            at = edge
        made.append(list(engine.generate(prompt[-1:], 6)))
        prefixes.end()
    fresh = [list(make(weights).generate(p, 6)) for p in (REPEATED[:40], [*REPEATED[:33], *IDS[40:50]])]
    assert made == [*fresh, fresh[0]]


def test_plain_steps_between_drafts_keep_the_drafter_in_step(weights):
    """`step`, `score` and `logits` feed tokens too: drafts after them are those after one prefill."""
    engine, straight = (make(weights, drafter="mtp", depth=3) for _ in range(2))
    engine.prefill(IDS[:30], last=False)
    engine.logits(IDS[30:33], phase="decode")
    engine.logits(IDS[33:40])
    straight.prefill(IDS[:40], last=False)
    ask = lambda e: e.speculator.drafter.draft(e.speculator.history(), IDS[40], 3, Sampling(), None)  # noqa: E731
    assert engine.speculator.history() == IDS[:40]
    assert ask(engine).ids.tolist() == ask(straight).ids.tolist()


def test_the_guard_scores_verified_rows_too(weights):
    """Teacher-forced logits of a drafting arm pass through its verification, and are those of the plain step."""
    engine, want = make(weights, drafter="mtp", depth=3), make(weights).logits(IDS[:23], phase="decode")
    got = engine.logits(IDS[:23], phase="decode")
    assert got.shape == want.shape and float(mx.abs(got - want).max().item()) < 1e-4
    assert {"rows 2", "rows 3", "rows 4"} == {row["tile"] for row in engine.executed() if row["op"] == "verify"}
    assert engine.speculator.history() == IDS[:23]


def test_a_bad_state_stops_a_drafted_decode(weights):
    engine = make(weights, drafter="mtp", depth=2)
    first = engine.prefill(IDS[:20])
    engine.cache.state["recurrent"][1] = engine.cache.state["recurrent"][1] * float("nan")
    with pytest.raises(NonFinite, match="not finite"):
        engine.decode(first, 6)


# -- depth and forced acceptance -----------------------------------------------------------------


TABLES = {
    "cheap": CHEAP,
    "as guessed": GUESSED["cuda"],
    "dear but paying": dataclasses.replace(GUESSED["cpu"], draft=0.0),
    "few rows only": Costs((1, 1.2, 1.5, 4, 6, 8, 10, 12)),
    "dear": Costs((1, 2.1, 3.2, 4.3, 5.4, 6.5, 7.6, 8.7)),
}


def steered(engine: Engine, costs: Costs) -> None:
    """Forced acceptance of 100 % must draft wherever the table says it pays, at the depth that pays most."""
    first = engine.prefill(IDS)
    tokens = engine.decode(first, 90)
    counts, most = engine.speculation(), engine.engine.speculative.depth
    gains = [(depth + 1) / engine.speculator.costs.step(depth) for depth in range(most + 1)]
    best = max(range(most + 1), key=gains.__getitem__)
    assert len(tokens) == 90
    if gains[best] >= DepthController.MARGIN:
        assert counts["accepted"] == counts["drafted"] > 0
        assert max(counts["depths"], key=counts["depths"].get) == str(best), (counts, best)
    else:
        assert counts["steps"] == 0 and counts["plain"] == 90


@pytest.mark.parametrize("table", TABLES)
def test_right_drafts_are_made_wherever_the_table_says_they_pay(weights, table):
    costs = TABLES[table]
    steered(make(weights, drafter="ngram", depth=5, adaptive=True, force="1", costs=costs), costs)


@pytest.mark.parametrize("table", TABLES)
def test_wrong_drafts_stop_within_sixteen_tokens(weights, table):
    engine = make(weights, drafter="ngram", depth=5, adaptive=True, force="0", costs=TABLES[table])
    made = engine.speculator.stream(engine.prefill(IDS), 60)
    first = [next(made) for _ in range(16)]
    steps = engine.speculation()["steps"]
    rest = list(made)
    counts = engine.speculation()
    assert len(first + rest) == 60 and counts["accepted"] == 0
    # The rest of 60 tokens holds probes at most, one after each rest, which double.
    assert counts["steps"] - steps <= 2 and counts["plain"] >= 42
    made.close()


@pytest.mark.gpu
@pytest.mark.parametrize("drafter", ["mtp", "ngram"])
def test_the_depth_follows_the_table_at_full_width(drafter):
    """One period of layers of the real sizes, on the kernels of a GPU, under costs that are guessed for it."""
    config = dataclasses.replace(ModelConfig(), num_hidden_layers=4)
    weights = make_weights(config, 0, mtp=True)
    for table in ("as guessed", "dear"):
        for force in ("1", "0"):
            told = EngineConfig(speculative=SpeculativeConfig(drafter, 5, adaptive=True, force=force))
            engine = Engine(config, weights, told, costs=TABLES[table])
            if force == "1":
                steered(engine, TABLES[table])
            else:
                assert len(engine.decode(engine.prefill(IDS), 60)) == 60
                counts = engine.speculation()
                assert counts["accepted"] == 0 and counts["steps"] <= 18 and counts["plain"] >= 42


@pytest.mark.gpu
@pytest.mark.parametrize("unit", proof.CUDA_ONLY)
def test_recorded_steps_and_verifications_of_the_embedded_model(unit):
    if device_kind() != "cuda":
        pytest.skip("steps are recorded on CUDA")
    assert proof.UNITS[unit]() <= proof.BOUNDS[unit]


def test_forced_acceptance_is_what_was_asked_for(weights):
    engine = make(weights, drafter="ngram", depth=2, force="0.5")
    engine.decode(engine.prefill(IDS[:9]), 80)
    counts = engine.speculation()
    assert abs(counts["right"][0] / counts["tried"][0] - 0.5) < 0.2


def test_where_no_depth_can_pay_nothing_is_drafted_nor_primed(weights):
    dear = Costs((1, 2, 3, 4, 5, 6, 7, 8))
    engine = make(weights, drafter="mtp", depth=4, adaptive=True, costs=dear)
    assert len(engine.decode(engine.prefill(IDS), 10)) == 10
    assert engine.speculation()["steps"] == 0 and engine.speculator.drafter.cache.position == 0


# -- refusals ------------------------------------------------------------------------------------


def test_a_checkpoint_without_a_head_is_told_where_to_get_one():
    bare = make_weights(TINY, 0, dtype=mx.float32)
    with pytest.raises(VariantUnsupported, match="python -m engine fetch mtp"):
        make(bare, drafter="mtp")


@pytest.mark.parametrize("size", [453, 32_768])
def test_a_trimmed_vocabulary_that_trims_nothing_is_refused(weights, size):
    """It was measured as one of that size and ran as the whole."""
    with pytest.raises(VariantUnsupported, match=f"draft_vocab {size} .*453 tokens; take fewer"):
        make(weights, drafter="mtp", draft_vocab=size)


def test_a_draft_model_must_have_the_same_tokens(weights):
    with pytest.raises(VariantUnsupported, match="takes a second"):
        make(weights, drafter="model")
    other = Engine(TINY, weights, EngineConfig(decode=DecodeConfig(trace="eager")), vocabulary=440)
    with pytest.raises(VariantUnsupported, match="440 tokens.*same tokenizer"):
        make(weights, drafter="model", draft=other)
    with pytest.raises(VariantUnsupported, match="does not draft itself"):
        make(weights, drafter="model", draft=make(weights, drafter="ngram"))


# -- the embedded model --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def embedded():
    return load(Path(package.__file__).parent / "tiny/checkpoint", mx.float32)


def trained(embedded, **fields) -> Engine:
    config = EngineConfig(decode=DecodeConfig(trace="eager"), speculative=SpeculativeConfig(**fields))
    return Engine(embedded.config, embedded.weights, config, embedded.tokenizer.real_vocab)


def held_out(embedded, kind: str, count: int) -> list[int]:
    text = (Path(package.__file__).parent / f"tiny/heldout/{kind}.txt").read_text(encoding="utf-8")
    return embedded.tokenizer.encode(text[: 8 * count])[:count]


def first_difference(got: list[int], want: list[int], prompt: list[int], engine: Engine) -> tuple[int, float] | None:
    """Where tokens first differ, and the gap between the two logits there (the sequences are equal before)."""
    at = next((i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b), None)
    if at is None:
        return None
    row = engine.logits([*prompt, *want[:at]])[-1]
    return at, abs(float((row[got[at]] - row[want[at]]).item()))


@pytest.mark.parametrize(("kind", "drafter"), [("code", "mtp"), ("prose", "mtp"), ("prose", "ngram")])
def test_trained_drafts_are_accepted_and_change_nothing_but_near_ties(embedded, kind, drafter):
    prompt = held_out(embedded, kind, 150)
    want = trained(embedded)
    first = want.prefill(prompt)
    expected = want.decode(first, 32)
    engine = trained(embedded, drafter=drafter, depth=2)
    got = engine.decode(engine.prefill(prompt), 32)
    found = first_difference(got, expected, prompt + [first], trained(embedded))
    if found is not None:
        print(f"{kind}: first difference at token {found[0]}, gap {found[1]:.2e}")
        assert found[1] < 1e-3, found
    counts = engine.speculation()
    print(kind, drafter, counts)
    assert counts["right"][0] / counts["tried"][0] > 0.6


def test_the_head_agrees_with_the_trunk_as_its_card_says(embedded):
    """Teacher-forced on held-out code: the share of first drafts equal to the greedy token; 79 % on the card."""
    ids = held_out(embedded, "code", 600)
    engine = trained(embedded, drafter="mtp")
    engine.cache.reserve(len(ids))
    h = engine._pass(ids)
    greedy = mx.argmax(engine.model.head(h)[0], axis=-1)
    drafter = MtpDrafter(engine.model, engine.dtype, 256, None)
    shares = {}
    for name, rows in (("after", drafter._normed(h)), ("before", h)):
        drafter.restore(None, 0)
        out = drafter._norm(drafter._feed(rows[:, :-1], mx.array(ids[1:], dtype=mx.uint32)), drafter.head.norm)
        drafts = mx.argmax(engine.model.ops.linear(out, drafter.matrix, rows=out.shape[1])[0], axis=-1)
        shares[name] = float((drafts == greedy[1:]).mean().item())
    print(shares)
    assert 0.7 < shares["after"] < 0.9 and shares["before"] < shares["after"] - 0.04


def test_drafts_from_the_most_frequent_tokens_only(embedded):
    prompt = held_out(embedded, "code", 60)
    full, trimmed = (trained(embedded, drafter="mtp", depth=2, draft_vocab=n) for n in (0, 1024))
    first = full.prefill(prompt)
    assert trimmed.prefill(prompt) == first
    expected = full.decode(first, 16)
    assert trimmed.decode(first, 16) == expected
    asked = trimmed.speculator.drafter.draft(trimmed.speculator.history(), expected[-1], 5, Sampling(), None)
    assert max(asked.ids.tolist()) < 1024
    assert trimmed.speculator.drafter.matrix.shape == (1024, embedded.config.hidden_size)
    assert 0 < trimmed.speculation()["accepted"] <= full.speculation()["accepted"] + 4


def test_text_beyond_ascii_is_drafted_as_any_other(embedded):
    text = "naïve 日本語 🙂🙂 Ω≈ç√ 日本語 🙂🙂 Ω≈ç√ 日本語 🙂"
    ids = embedded.tokenizer.encode(text)
    want = list(trained(embedded).generate(ids, 10))
    for drafter in ("ngram", "mtp"):
        got = list(trained(embedded, drafter=drafter, depth=4).generate(ids, 10))
        assert embedded.tokenizer.decode(got) == embedded.tokenizer.decode(want)
