"""Prompts: real text, enough of it, no passage twice, no shared openings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweeps import prompts
from sweeps.prompts import KINDS, PromptError, Prompts, WordEncoder, digest

LONGEST = 131_072 + 256


class Letters:
    """A tokenizer of single characters, so that ids can be read back as text."""

    real_vocab = 0x110000

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


def text_of(ids: list[int]) -> str:
    return "".join(map(chr, ids))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_reaches_the_longest_frontier_and_is_deterministic(kind):
    made = Prompts(WordEncoder(1000), 5, kind, vocabulary=1024).take(LONGEST, 3)
    assert len(made) == LONGEST
    assert made == Prompts(WordEncoder(1000), 5, kind, vocabulary=1024).take(LONGEST, 3)
    assert all(0 <= i < (1024 if kind == "lily" else 1000) for i in made)


def test_there_are_a_million_tokens_of_text():
    """Counted in words and marks, of which a real tokenizer makes more tokens, not fewer."""
    assert len(Prompts(WordEncoder(1000)).take(1_000_000)) == 1_000_000


@pytest.mark.parametrize("kind", ["text", "code", "prose"])
def test_no_passage_comes_twice_in_a_prompt(kind):
    """Repeated text sends tokens to the same experts and makes drafts easy."""
    text = text_of(Prompts(Letters(), 0, kind).take(300_000, 1))
    passages = [text[at : at + 600] for at in range(0, len(text) - 600, 600)]
    assert len(set(passages)) == len(passages)
    whole = prompts._passages(kind)
    assert len(set(whole)) == len(whole)


@given(st.sampled_from(["text", "code", "prose", "repetitive", "random"]), st.integers(0, 10**7), st.integers(0, 10**7))
def test_no_two_trials_share_their_opening(kind, one, other):
    made = Prompts(WordEncoder(50_000), 0, kind)
    first, second = made.take(8, one), made.take(8, other)
    assert (first == second) == (one == other)


def test_a_longer_prompt_of_a_trial_continues_the_shorter():
    made = Prompts(WordEncoder(1000))
    assert made.take(5000, 7)[:300] == made.take(300, 7)


def test_documentation_comes_before_sources():
    text = text_of(Prompts(Letters(), 0, "text").take(2_000_000, 4))
    assert "import" in text[1_000_000:]
    opening = text[200:600]
    assert opening in prompts._documentation()


def test_repetitive_text_repeats_one_passage():
    text = text_of(Prompts(Letters(), 0, "repetitive").take(20_000, 2))
    probe = text[3000:3400]
    assert text.count(probe) >= 4


def test_the_published_sequence_is_as_published():
    made = Prompts(WordEncoder(1000), kind="lily", vocabulary=248_320).take(5, 9)
    assert made == [i * 2_654_435_761 % 2**32 % 248_320 for i in range(5)]
    assert made[:3] == [0, 2_654_435_761 % 248_320, 5_308_871_522 % 2**32 % 248_320]


def test_only_real_ids_are_drawn():
    """Ids of the padded tail crash some engines and mean nothing to any."""
    assert max(Prompts(WordEncoder(300), kind="random", vocabulary=512).take(10_000)) < 300


def test_passages_are_tokenised_once_a_process():
    class Counting(WordEncoder):
        calls = 0

        def encode(self, text: str) -> list[int]:
            self.calls += 1
            return super().encode(text)

    encoder = Counting(1000)
    made = Prompts(encoder)
    made.take(20_000, 1)
    first = encoder.calls
    made.take(20_000, 1)
    assert encoder.calls == first + 1


def test_unknown_kind_and_too_long_a_prompt_are_refused():
    with pytest.raises(PromptError, match="prompt=poem: must be one of text"):
        Prompts(WordEncoder(10), kind="poem")
    with pytest.raises(PromptError, match="prompt=prose has .* 50000000 were asked for; use prompt=text"):
        Prompts(WordEncoder(10), kind="prose").take(50_000_000)


def test_a_digest_tells_order_and_values_apart():
    assert len({digest([1, 2]), digest([2, 1]), digest([1, 2, 0]), digest([258])}) == 4
