"""The sweep's rates of MLX-LM on the embedded model, against its generators timed by hand on the real clock."""

from __future__ import annotations

import time

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from sweeps import baseline, compose, models
from sweeps.clock import SystemClock
from sweeps.prompts import Prompts
from sweeps.subjects.mlx_lm import MlxLm
from sweeps.subjects.shared import Shared

PROMPT, STEPS, FEWEST, MOST = 64, 24, 6, 20


def by_hand(model, prompt, steps: int) -> baseline.Rates:
    """Timestamps around `generate_step`: the prompt up to the first token, then gaps between tokens."""
    stamps = [time.perf_counter()]
    for token, _ in generate_step(mx.array(prompt), model, max_tokens=steps + 1):
        int(token)
        stamps.append(time.perf_counter())
    first, last = stamps[1], stamps[-1]
    return baseline.Rates(len(prompt) / (first - stamps[0]), (len(stamps) - 2) / (last - first))


@pytest.fixture(scope="module")
def trials():
    """Rates by the sweep's clock, by hand and by `stream_generate`, side by side until their ratios are known."""
    shared = Shared(models.find(compose.request([])).to_dict(), baseline=True)
    prompts = Prompts(shared.tokenizer, 0, "text", shared.config.vocab_size)
    subject, tokenizer, clock = MlxLm(shared.lm_model, shared.config), baseline.plain_tokenizer(), SystemClock()
    ways = {
        "sweep": lambda prompt: baseline.measure(subject, prompt, STEPS, clock, mx.synchronize),
        "hand": lambda prompt: by_hand(shared.lm_model, prompt, STEPS),
        "stream_generate": lambda prompt: baseline.stream(shared.lm_model, tokenizer, prompt, STEPS),
    }
    made: dict[str, list[baseline.Rates]] = {name: [] for name in ways}
    for trial in range(MOST + 1):
        prompt = prompts.take(PROMPT, trial)
        names = list(ways)
        for name in names[trial % 3 :] + names[: trial % 3]:
            made[name].append(ways[name](prompt))
        if trial == 0:  # the first of each warmed up
            made = {name: [] for name in ways}
        elif trial >= FEWEST and all(baseline.settled(made["sweep"], made[other]) for other in names[1:]):
            break
    return made


@pytest.mark.parametrize("other", ["hand", "stream_generate"])
def test_rates_match_within_five_percent(trials, other):
    # A machine too noisy to tell them to 2.5 % is held to twice the tolerance.
    known = baseline.settled(trials["sweep"], trials[other])
    made = baseline.verdict(trials["sweep"], trials[other], baseline.TOLERANCE * (1 if known else 2))
    print({phase: made[phase]["ratio"] for phase in ("prefill", "decode")}, len(trials["sweep"]), "trials")
    assert made["passed"], made["reason"]
