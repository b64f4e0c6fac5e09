"""What the server is made of, without a server: stop strings, the reasoning split, token bytes, reuse, the queue."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import BLOCK, Own, small_model, until

from engine.generate import NonFinite, Sampling
from engine.serve.generation import Ask, Generation
from engine.serve.requests import ChatRequest, Refused, TextRequest, parse
from engine.serve.reuse import MOST_SNAPSHOTS, Prefixes
from engine.serve.source import Source
from engine.serve.text import Answer, Offsets, StopStrings, TokenBytes
from engine.serve.worker import Done, Job, Piece, QueueFull, Worker


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("parts"))


@pytest.fixture(scope="module")
def own(model: Path) -> Own:
    return Own(model)


# -- stop strings ------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text("abc", max_size=4), max_size=12), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_stop_strings_do_not_depend_on_how_text_is_cut(pieces, stops):
    text = "".join(pieces)
    ends = [(text.index(s) + len(s), text.index(s)) for s in stops if s in text]
    cut = StopStrings(stops)
    got = [cut.add(p) for p in pieces]
    got.append(cut.finish())
    by_letter = StopStrings(stops)
    letters = "".join(by_letter.add(c) for c in text) + by_letter.finish()
    assert "".join(got) == letters == (text[: min(ends)[1]] if ends else text)
    assert cut.found == by_letter.found == bool(ends)


def test_only_what_may_become_a_stop_string_is_held_back():
    cut = StopStrings(["END"])
    assert [cut.add(p) for p in ("xE", "N", "E", "N", "o")] == ["x", "", "EN", "", "ENo"]


# -- reasoning ---------------------------------------------------------------------------------------


def split(own: Own, text: str, thinking: bool, **more) -> tuple[str, str, Answer]:
    answer = Answer(own.tokenizer, split=True, thinking=thinking, **more)
    parts = {"reasoning": "", "content": ""}
    for token in own.tokenizer.encode(text):
        for part, piece in answer.add(token):
            parts[part] += piece
    for part, piece in answer.finish():
        parts[part] += piece
    return parts["reasoning"], parts["content"], answer


@pytest.mark.parametrize(
    ("text", "thinking", "reasoning", "content"),
    [
        ("so\n\nthen \n</think>\n\nYes. \n", True, "so\n\nthen", "Yes. \n"),
        ("still at it \n", True, "still at it \n", ""),
        ("</think>Yes.", True, "", "Yes."),
        ("<think>\nso\n</think>\n\nYes.", False, "so", "Yes."),
        ("Say <think> to think.", False, "", "Say <think> to think."),
        ("a</think>b</think>c <think>", True, "a", "b</think>c <think>"),
        ("日本 e\u0301 👩‍🚀</think>👩‍🚀", True, "日本 é 👩‍🚀", "👩‍🚀"),
    ],
)
def test_reasoning_and_content(own, text, thinking, reasoning, content):
    assert split(own, text, thinking)[:2] == (reasoning, content)


def test_reasoning_is_counted_and_holds_no_stop_string(own):
    reasoning, content, answer = split(own, "a stop b</think>c stop d", True, stops=["stop"])
    assert (reasoning, content, answer.stopped) == ("a stop b", "c ", True)
    assert answer.reasoning_tokens == len(own.tokenizer.encode("a stop b</think>"))


def test_without_a_split_think_tags_are_text(own):
    answer = Answer(own.tokenizer)
    pieces = [p for t in own.tokenizer.encode("<think>a</think>") for p in answer.add(t)] + answer.finish()
    assert "".join(text for _, text in pieces) == "<think>a</think>"


def test_bytes_of_tokens_add_up_to_the_text(own):
    text = "naïve 日本 👩‍🚀<|im_end|></think>\x00\t\n"
    data = b"".join(map(TokenBytes(own.tokenizer), own.tokenizer.encode(text)))
    assert data.decode() == text and TokenBytes(own.tokenizer)(511) == b""


def places(own: Own, ids: list[int]) -> list[tuple[int, bytes]]:
    """Offset and shown bytes of each token."""
    data, offsets = TokenBytes(own.tokenizer), Offsets()
    shown = [b"" if i in data.hidden else data(i) for i in ids]
    return [(offsets.add(d), d) for d in shown]


def test_offsets_of_any_tokens_point_into_their_text(own):
    draw, checked = random.Random(4), 0
    whole = own.tokenizer.encode("naïve 日本 👩\u200d🚀 \ufffd<|im_end|></think>")
    # Single bytes, of which every mistake in a character can be made, beside all other tokens.
    pools = (range(256), range(own.engine.vocabulary), whole)
    for _ in range(400):
        ids = [draw.choice(draw.choice(pools)) for _ in range(draw.randrange(1, 30))]
        text, before = own.tokenizer.decode(ids), 0
        for at, data in places(own, ids):
            assert before <= at <= len(text)
            before = at
            shown = data.decode(errors="replace")
            if data and "\ufffd" not in shown:
                checked += 1
                assert text[at : at + len(shown)] == shown, (ids, at)
    assert checked > 1000


def test_pieces_of_one_character_share_its_offset():
    offsets = Offsets()
    tokens = [b"a", b"\xc3", b"\xa9b", b"\xf0\x9f", b"", b"\x9a", b"\x80", b"\xe6", b"c", b"\xef\xbf", b"\xbd", b"d"]
    assert [offsets.add(t) for t in tokens] == [0, 1, 1, 3, 3, 3, 3, 4, 5, 6, 6, 7]


# -- reuse -------------------------------------------------------------------------------------------


def answer(own: Own, prefixes: Prefixes, prompt: list[int], key: str | None = None) -> tuple[list[int], int, list]:
    made = Generation(own.engine, prefixes, frozenset(), Ask(prompt, 6, top=0, key=key))
    tokens = list(made.tokens())
    return [t.id for t in tokens], made.cached, [t.logprob for t in tokens]


def test_reuse_changes_no_bit(own):
    """A+B, then A+C, then A+B…: ids and log-probabilities are those of a fresh sequence."""
    draw, trunk, fresh = random.Random(2), list(range(3, 3 + 4 * BLOCK)), Prefixes(own.engine, BLOCK, 0)
    reused = 0
    for _ in range(2):
        saved = Prefixes(own.engine, BLOCK, 1 << 30)
        for _ in range(7):
            at = draw.choice([BLOCK, 2 * BLOCK, draw.randrange(len(trunk)), len(trunk)])
            prompt = trunk[:at] + [draw.randrange(400) for _ in range(draw.choice([1, 2, 30]))]
            want, got = answer(own, fresh, prompt), answer(own, saved, prompt)
            assert (got[0], got[2]) == (want[0], want[2]) and want[1] == 0
            reused += got[1] > 0
    assert reused > 5


def test_a_branch_has_memory_of_its_own_where_steps_are_replayed(own, monkeypatch):
    """Such a step writes rows where they lie, which would be those of the saved prompt."""
    prefixes, prompt = Prefixes(own.engine, BLOCK, 1 << 30), list(range(2 * BLOCK + 9))
    answer(own, prefixes, prompt)
    monkeypatch.setattr(own.engine, "replay", object())
    assert prefixes.begin(prompt[: BLOCK + 1], None) == (BLOCK, "reused")
    (saved,) = prefixes._saved
    for mine, held in zip(own.engine.cache.state["keys"], saved.keys):
        assert np.array(mine, copy=False).ctypes.data != np.array(held, copy=False).ctypes.data


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_logit_that_is_not_finite_ends_the_answer(own, temperature):
    def spoil(done: int, total: int) -> None:
        state = own.engine.cache.state["recurrent"]
        state[0] = state[0] * float("nan")

    ask = Ask([5, 6, 7], 4, Sampling(temperature=temperature))
    with pytest.raises(NonFinite, match="token 1 is not finite"):
        list(Generation(own.engine, Prefixes(own.engine, BLOCK, 0), frozenset(), ask).tokens(progress=spoil))
    assert own.engine.position == own.engine.cache.capacity == 0


def test_what_is_reused_and_why_not(own):
    prefixes = Prefixes(own.engine, BLOCK, 1 << 30)
    prompt = list(range(2 * BLOCK + 9))
    assert [answer(own, prefixes, p)[1] for p in (prompt, prompt, [*prompt, 1], [0], prompt)] == [
        0,
        len(prompt) - 1,
        2 * BLOCK,
        0,
        # The longer prompt took the shorter one over, up to the edge they share.
        2 * BLOCK,
    ]
    assert prefixes.begin([*prompt[:5], 400, 401], None) == (0, "agrees for 5 tokens, no edge before")
    assert prefixes.begin([400, 401], None) == (0, "nothing in common")
    assert prefixes.begin(prompt, "another key") == (0, "nothing in common")
    assert Prefixes(own.engine, BLOCK, 0).begin(prompt, None) == (0, "off")


def test_reuse_keeps_to_its_budget(own):
    prefixes = Prefixes(own.engine, BLOCK, 1 << 30)
    answer(own, prefixes, list(range(200)))
    one = prefixes.nbytes
    prefixes = Prefixes(own.engine, BLOCK, int(2.5 * one))
    for first in range(4):
        answer(own, prefixes, [first, *range(200)])
        assert prefixes.nbytes <= prefixes.budget
    assert answer(own, prefixes, [3, *range(200)])[1] == 200 and answer(own, prefixes, [0, *range(200)])[1] == 0
    small = Prefixes(own.engine, BLOCK, one // 3)
    answer(own, small, list(range(200)))
    assert small.nbytes <= one // 3


def test_restore_points_of_a_long_prompt_are_thinned(own):
    prefixes = Prefixes(own.engine, 4, 1 << 30)
    answer(own, prefixes, [1] * 160)
    kept = [s.position for s in prefixes._saved[0].snapshots]
    assert len(kept) == MOST_SNAPSHOTS and kept[-1] == 159 and max(b - a for a, b in zip(kept, kept[1:])) <= 40


def test_a_generation_that_is_left_saves_what_is_whole(own):
    prefixes = Prefixes(own.engine, BLOCK, 1 << 30)
    prompt, asked = list(range(4 * BLOCK)), []
    made = Generation(own.engine, prefixes, frozenset(), Ask(prompt, 6))
    assert list(made.tokens(lambda: len(asked) < 2, lambda done, _: asked.append(done))) == []
    assert made.finish == "cancelled" and asked == [BLOCK, 2 * BLOCK]
    assert answer(own, prefixes, prompt)[:2] == (own.ids(prompt, 6), 2 * BLOCK)


def test_draws_are_the_engines_own(own):
    how = Sampling(0.8, 12, 0.9)
    made = Generation(own.engine, Prefixes(own.engine, BLOCK, 0), frozenset(), Ask([1, 2, 3], 20, how, seed=5))
    assert [t.id for t in made.tokens()] == own.ids([1, 2, 3], 20, how, 5)


def test_many_answers_keep_memory_flat(own):
    prefixes = Prefixes(own.engine, BLOCK, 8 << 20)
    for n in range(12):
        answer(own, prefixes, [n, *range(60)])
        if n == 5:
            mx.clear_cache()
            before = mx.get_active_memory()
    mx.clear_cache()
    assert mx.get_active_memory() - before < (8 << 20)


# -- the worker --------------------------------------------------------------------------------------


def test_the_worker_answers_in_order_and_skips_what_was_cancelled(model):
    worker = Worker(Source("small", model), BLOCK, 0, waiting=3)
    worker.start()
    worker.wait()
    news, held = [], threading.Event()

    def job(name: str, wait: bool = False) -> Job:
        def sink(item) -> None:
            if wait and isinstance(item, Piece):
                held.wait(20)
            news.append((name, item))

        return Job(Ask([1, 2, 3], 3), Answer(worker.tokenizer), sink)

    jobs = {name: job(name, wait=name == "a") for name in "abcde"}
    worker.submit(jobs["a"])
    until(lambda: worker.is_running(jobs["a"]))
    for name in "bcd":
        worker.submit(jobs[name])
    with pytest.raises(QueueFull, match="3 requests"):
        worker.submit(jobs["e"])
    worker.cancel(jobs["c"])
    worker.submit(jobs["e"])
    held.set()
    until(lambda: worker.state()["answered"] == 4)
    assert [name for name, item in news if isinstance(item, Done)] == ["a", "b", "d", "e"]
    worker.close()
    assert worker.state()["alive"] is False


def test_a_model_that_cannot_be_loaded_is_told_to_the_caller(tmp_path):
    worker = Worker(Source("none", tmp_path))
    worker.start()
    with pytest.raises(ValueError, match="config.json"):
        worker.wait()


# -- requests ----------------------------------------------------------------------------------------

HELLO = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": {}}, "messages"),
        ({"messages": ["a"]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]}, "messages[0].content[0].text"),
        ({"messages": [*HELLO, {"role": "user", "content": None}]}, "messages[1].content"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"stop": list("abcde")}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"n": 2}, "n"),
        ({"tools": [{}]}, "tools"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"min_p": 0.1}, "min_p"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"messages": [*HELLO, {"role": "tool", "content": "a", "tool_call_id": "1"}]}, "messages[1].role"),
        ({"seed": 2**70}, "seed"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.type"),
        ({"response_format": {"type": "json_object"}}, "response_format.type"),
        ({"prompt_cache_key": "k" * 1025}, "prompt_cache_key"),
        ({"model": 5}, "model"),
        ({"stop": "\ud83d"}, "stop"),
        ({"stop": ["a", "b\udc00"]}, "stop"),
        *(
            ({"messages": [{"role": "assistant", "content": text, name: calls}, *HELLO]}, f"messages[0].{name}")
            for text in (None, "a")
            for name, calls in (("tool_calls", [{"id": "1"}]), ("function_call", {"name": "f"}))
        ),
        (
            {"messages": [{"role": "assistant", "content": "a", "reasoning_content": "\ud83d"}, *HELLO]},
            "messages[0].reasoning_content",
        ),
    ],
)
def test_a_wrong_field_is_named(change, param):
    with pytest.raises(Refused) as error:
        parse(ChatRequest, {"messages": HELLO} | change)
    assert (error.value.status, error.value.param) == (400, param), str(error.value)
    assert param in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(("kind", "given"), [(ChatRequest, {"messages": HELLO}), (TextRequest, {"prompt": "a"})])
@pytest.mark.parametrize(
    ("name", "changes", "neutral"),
    [
        ("tools", [{}], []),
        ("functions", [{}], []),
        ("tool_choice", "required", "auto"),
        ("response_format", {"type": "json_object"}, {"type": "text"}),
        ("guided_json", {}, False),
        ("guided_regex", "a", None),
        ("guided_choice", ["a"], None),
        ("guided_grammar", "a", None),
        ("structured_outputs", {"json": {}}, None),
        ("min_tokens", 1, 0),
        ("ignore_eos", True, False),
        ("include_stop_str_in_output", True, False),
        ("stop_token_ids", [1], []),
        ("allowed_token_ids", [1], []),
        ("bad_words", ["a"], []),
        ("best_of", 2, 1),
        ("use_beam_search", True, False),
        ("echo", True, False),
        ("suffix", "a", ""),
        ("typical_p", 0.5, 1),
        ("min_p", 0.5, 0.0),
        ("repeat_penalty", 1.1, 1.0),
        ("length_penalty", 0, 1),
        ("presence_penalty", -1, 0),
        ("logit_bias", {"1": 1}, {}),
        ("modalities", ["audio"], ["text"]),
        ("chat_template", "{{ messages }}", ""),
        ("continue_final_message", True, False),
        ("add_generation_prompt", False, True),
        ("enable_thinking", False, None),
        ("enable_thinking", True, None),
    ],
)
def test_what_would_change_the_answer_is_refused_on_both_endpoints(kind, given, name, changes, neutral):
    with pytest.raises(Refused, match=f"^{name}") as error:
        parse(kind, given | {name: changes})
    assert (error.value.status, (error.value.param or "").partition(".")[0]) == (400, name)
    for passes in (neutral, None):
        parse(kind, given | {name: passes})


def test_a_field_in_the_wrong_place_is_told_the_right_one():
    with pytest.raises(Refused, match="enable_thinking: belongs in chat_template_kwargs"):
        parse(ChatRequest, {"messages": HELLO, "enable_thinking": True})


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens": 1},
        {"temperature": 0},
        {"temperature": 2},
        {"top_p": 1},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"stop": list("abcd")},
        {"logprobs": True, "top_logprobs": 20},
        {"logprobs": True, "top_logprobs": 0},
        {"prompt_cache_key": "k" * 1024},
        {"tool_choice": "auto", "modalities": ["text"], "repetition_penalty": 1.0, "min_p": 0},
        {"max_tokens": 2**70},
        {"n": 1, "presence_penalty": 0, "tools": [], "response_format": {"type": "text"}, "logit_bias": {}},
        {"messages": [{"role": "assistant", "content": None}, {"role": "user", "content": []}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
        dict.fromkeys(
            ("max_tokens", "temperature", "top_p", "seed", "stop", "stream", "stream_options", "logprobs", "n")
        ),
    ],
)
def test_what_is_just_allowed(change):
    parse(ChatRequest, {"messages": HELLO} | change)


def test_prompts_of_completions():
    assert parse(TextRequest, {"prompt": ["a"]}).one == "a" and parse(TextRequest, {"prompt": [[1, 2]]}).one == [1, 2]
    assert parse(TextRequest, {"prompt": "a", "max_tokens": None}).limit == 16
    for prompt in (["a", "b"], [], [[1], [2]]):
        with pytest.raises(Refused, match="prompts; send one"):
            parse(TextRequest, {"prompt": prompt}).one  # noqa: B018
    for bad in ({}, {"prompt": None}, {"prompt": [1, "a"]}, {"prompt": {"a": 1}}, {"prompt": [True]}):
        with pytest.raises(Refused, match="prompt"):
            parse(TextRequest, bad)
    for extra in ({"echo": True}, {"suffix": "x"}, {"best_of": 2}, {"logprobs": 6}, {"logprobs": True}):
        with pytest.raises(Refused, match=next(iter(extra))):
            parse(TextRequest, {"prompt": "a"} | extra)
