"""Drafting in the server: answers are those without it, their counts add up, and every end of an answer is clean."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from serving import BLOCK, Own, client, serving, small_model

from engine.config import DecodeConfig, EngineConfig, SpeculativeConfig
from engine.depth import GUESSED, Costs
from engine.device import device_kind
from engine.generate import Engine
from engine.sampling import Sampling
from engine.serve.generation import Ask, Generation
from engine.serve.reuse import Prefixes
from engine.serve.server import Server, parse
from engine.serve.source import SourceError, drafting
from engine.speculative import Draft
from engine.synthetic import make_weights, tiny_config, write_checkpoint

CONFIG = tiny_config(4, hidden_size=64, experts=8, max_position_embeddings=128)
IDS = np.random.default_rng(5).integers(0, 440, 40).tolist()
AGAIN = (IDS[:9] * 5)[:40]
KNOWN: dict = {}
CHEAP = Costs((1, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06, 1.07))


@pytest.fixture(scope="module")
def weights():
    return make_weights(CONFIG, 0, dtype=mx.float32, mtp=True)


def make(weights, drafter: Any = "off", depth=4, **more) -> Engine:
    speculative = SpeculativeConfig(drafter, depth, **more)
    return Engine(
        CONFIG,
        weights,
        EngineConfig(decode=DecodeConfig(trace="eager"), speculative=speculative),
        vocabulary=453,
        costs=None if drafter == "off" else CHEAP,
    )


def answer(prefixes, prompt, count, stops=(), most=None, sampling=None, seed=0):
    """One answer: its ids, and the generation; `most` tokens are taken before nobody wants it any more."""
    made = Generation(
        prefixes.engine, prefixes, frozenset(stops), Ask(prompt, count, sampling or Sampling(), seed=seed)
    )
    ids: list[int] = []
    ids.extend(scored.id for scored in made.tokens(lambda: most is None or len(ids) < most))
    return ids, made


def plain(weights, prompt, count):
    key = id(weights), tuple(prompt)
    if key not in KNOWN:
        KNOWN[key] = answer(Prefixes(make(weights), 16, 0), prompt, min(30, 128 - len(prompt)))[0]
    return KNOWN[key][:count]


class Knowing:
    """Drafts what plain decoding gives, so that a whole draft is right."""

    def __init__(self, text):
        self.text = text

    def draft(self, history, token, depth, sampling, key):
        found = self.text[len(history) + 1 : len(history) + 1 + depth]
        return Draft(mx.array(found, dtype=mx.uint32)) if found else None

    def observe(self, tokens, hidden): ...

    def snapshot(self): ...

    def restore(self, snapshot, position): ...

    def arrays(self):
        return []


def knowing(weights, prompt, **more) -> Prefixes:
    engine = make(weights, "ngram", **more)
    assert engine.speculator is not None
    engine.speculator.drafter = Knowing([*prompt, *plain(weights, prompt, 30)])
    return Prefixes(engine, 16, 1 << 28)


@pytest.mark.parametrize("budget", [0, 1 << 28], ids=["fresh", "reuse"])
@pytest.mark.parametrize("drafter", ["mtp", "ngram"])
def test_answers_are_those_without_drafts(weights, drafter, budget):
    """One after another on one engine: the same prompt again, a branch, short prompts, fewer tokens than a draft."""
    prefixes = Prefixes(make(weights, drafter, adaptive=True), 16, budget)
    asked = [
        (AGAIN, 20),
        (AGAIN, 20),
        ([*AGAIN[:33], *IDS[:5]], 12),
        (IDS[:1], 6),
        (IDS[:2], 6),
        (IDS[:3], 6),
        (IDS, 2),
    ]
    for prompt, count in asked:
        ids, made = answer(prefixes, prompt, count)
        assert ids == plain(weights, prompt, count)
        assert made.finish == "length" and made.completed == count and made.accepted <= count
    assert bool(budget) == (answer(prefixes, AGAIN, 3)[1].cached > 0)


def test_an_answer_counts_its_drafts(weights):
    ids, made = answer(knowing(weights, IDS), IDS, 21)
    assert len(ids) == 21
    # Four drafts and a choice at a time: 4 of each 5 tokens, and of the last the choice alone.
    assert (made.accepted, made.rejected) == (16, 0)
    engine = make(weights, "ngram", force="0")
    assert engine.speculator is not None
    _, made = answer(Prefixes(engine, 16, 0), AGAIN, 10)
    assert made.accepted == 0 and made.rejected > 10


@pytest.mark.parametrize("at", [3, 5])
def test_a_stop_id_within_a_draft_ends_the_answer(weights, at):
    tokens = plain(weights, IDS, 30)
    prefixes = knowing(weights, IDS)
    ids, made = answer(prefixes, IDS, 30, stops=[tokens[at]])
    assert ids == tokens[: tokens.index(tokens[at])] and made.finish == "stop"
    assert answer(prefixes, IDS, 12)[0] == tokens[:12], "and the next answer is whole"


@pytest.mark.parametrize("most", [2, 6])
def test_an_answer_given_up_within_a_draft_leaves_the_next_one_clean(weights, most):
    tokens, prefixes = plain(weights, IDS, 30), knowing(weights, IDS)
    ids, made = answer(prefixes, IDS, 30, most=most)
    assert ids == tokens[:most] and made.finish == "cancelled" and made.accepted <= most
    assert prefixes.engine.position <= len(IDS) + most
    assert answer(prefixes, IDS, 12)[0] == tokens[:12]
    assert answer(prefixes, [*IDS, *tokens[:3], 7], 9)[0] == plain(weights, [*IDS, *tokens[:3], 7], 9)


def test_the_context_ends_within_a_draft(weights):
    prompt = (IDS * 4)[:121]
    ids, made = answer(Prefixes(make(weights, "ngram", depth=7), 16, 0), prompt, 7)
    assert ids == plain(weights, prompt, 7) and made.finish == "length"


def test_a_seed_gives_the_same_drafted_answer_again(weights):
    prefixes = Prefixes(make(weights, "mtp", depth=2), 16, 0)
    hot = Sampling(1.0)
    runs = [answer(prefixes, IDS[:12], 10, sampling=hot, seed=seed)[0] for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_scores_are_of_plain_steps(weights):
    engine = make(weights, "mtp")
    made = Generation(engine, Prefixes(engine, 16, 0), frozenset(), Ask(IDS, 6, top=1))
    scored = list(made.tokens())
    assert [s.id for s in scored] == plain(weights, IDS, 6) and all(s.logprob is not None for s in scored)
    assert (made.accepted, made.rejected) == (0, 0)


def test_a_server_says_what_of_an_answer_was_drafted(tmp_path, monkeypatch):
    monkeypatch.setitem(GUESSED, device_kind(), CHEAP)
    model = write_checkpoint(tmp_path, tiny_config(hidden_size=64, experts=8), seed=1, mtp=True)
    own = Own(model)
    with serving(model, draft="mtp", draft_depth=1) as server:
        name = server.source.name
        made = client(server.port).completions.create(model=name, prompt=AGAIN, max_tokens=24, temperature=0)
    assert made.choices[0].text == own.tokenizer.decode(own.ids(AGAIN, 24))
    assert made.usage is not None and made.usage.completion_tokens_details is not None
    details: Any = made.usage.completion_tokens_details
    drafted = details.accepted_prediction_tokens + details.rejected_prediction_tokens
    assert made.usage.completion_tokens == 24 and drafted >= 1
    assert BLOCK < len(AGAIN)


def test_a_model_without_a_draft_head_is_refused_with_the_command(tmp_path):
    with pytest.raises(ValueError, match="python -m engine fetch mtp"), serving(small_model(tmp_path), draft="mtp"):
        raise AssertionError


def test_the_command_takes_a_drafter_and_a_depth():
    options = parse(["--draft", "mtp", "--draft-depth", "3"])
    assert drafting(options.draft, options.draft_depth) == SpeculativeConfig("mtp", 3, adaptive=True)
    assert drafting("off", 4) == SpeculativeConfig() and parse([]).draft == "off"
    with pytest.raises(SourceError, match="1 to 7, got 8"):
        Server(parse(["--draft", "ngram", "--draft-depth", "8"]))
