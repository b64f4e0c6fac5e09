"""The server as the official client sees it: answers are the engine's own, whole and streamed ones agree."""

from __future__ import annotations

import itertools
import json
import math
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from serving import CONTEXT, PLAIN, Own, client, command, get, health, post, serving, small_model, until

from engine.generate import Sampling
from engine.serve.app import Limits
from engine.serve.server import ServeError, Server, parse
from engine.serve.source import SourceError, find

TEXT = "Tell me about the sea, and why it is salt."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def own(model: Path) -> Own:
    return Own(model)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with serving(model) as made:
        yield made


@pytest.fixture(scope="module")
def api(server: Server) -> openai.OpenAI:
    return client(server.port)


@pytest.fixture(scope="module")
def name(server: Server) -> str:
    return server.source.name


def chat(api: openai.OpenAI, name: str, text: str = TEXT, thinking: bool = False, **more: Any) -> Any:
    """A chat answer, whole."""
    body = {"chat_template_kwargs": {"enable_thinking": thinking}} | more.pop("extra_body", {})
    more = {"max_tokens": 24, "temperature": 0} | more
    return api.chat.completions.create(
        model=name, messages=[{"role": "user", "content": text}], extra_body=body, **more
    )


def streamed(api: openai.OpenAI, name: str, **more: Any) -> SimpleNamespace:
    """A chat answer put together from its events."""
    made = SimpleNamespace(content="", reasoning="", finish=None, usage=None, logprobs=[], events=0)
    for event in chat(api, name, stream=True, stream_options={"include_usage": True}, **more):
        made.events += 1
        if not event.choices:
            assert made.usage is None
            made.usage = event.usage
            continue
        assert event.usage is None
        choice = event.choices[0]
        made.content += choice.delta.content or ""
        made.reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        made.finish = choice.finish_reason or made.finish
        made.logprobs += choice.logprobs.content if choice.logprobs else []
    return made


# -- answers -----------------------------------------------------------------------------------------


def test_greedy_chat_is_the_engines_own(api, name, own):
    prompt = own.chat(TEXT)
    ids = own.ids(prompt, 24)
    answer = chat(api, name)
    assert answer.choices[0].message.content == own.tokenizer.decode(ids)
    assert answer.usage.prompt_tokens == len(prompt) and answer.usage.completion_tokens == len(ids) == 24
    assert answer.usage.total_tokens == len(prompt) + 24 and answer.choices[0].finish_reason == "length"
    details = answer.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)


@pytest.mark.parametrize("thinking", [False, True])
def test_stream_and_whole_answer_agree(api, name, thinking):
    whole, parts = chat(api, name, thinking=thinking), streamed(api, name, thinking=thinking)
    message = whole.choices[0].message
    assert parts.content == message.content
    assert parts.reasoning == (getattr(message, "reasoning_content", None) or "")
    assert bool(parts.reasoning) == thinking and bool(parts.content) != thinking
    assert parts.finish == whole.choices[0].finish_reason and parts.events > 5
    ours, theirs = parts.usage.model_dump(), whole.usage.model_dump()
    assert ours.pop("prompt_tokens_details")["cached_tokens"] >= theirs.pop("prompt_tokens_details")["cached_tokens"]
    assert ours == theirs and theirs["completion_tokens_details"]["reasoning_tokens"] == 24 * thinking


@pytest.mark.parametrize("count", [1, 2, 5])
def test_counts_at_the_limit_are_exact(api, name, count):
    assert chat(api, name, max_tokens=count).usage.completion_tokens == count
    assert streamed(api, name, max_tokens=count).usage.completion_tokens == count
    assert chat(api, name, max_tokens=9, max_completion_tokens=count).usage.completion_tokens == count


def test_completion_of_text_and_of_ids(api, name, own):
    ids = own.tokenizer.encode(TEXT)
    want = own.tokenizer.decode(own.ids(ids, 16))
    for prompt in (TEXT, [TEXT], ids, [ids]):
        answer = api.completions.create(model=name, prompt=prompt, temperature=0)
        assert answer.choices[0].text == want and answer.usage.completion_tokens == 16
    events = list(api.completions.create(model=name, prompt=TEXT, temperature=0, stream=True))
    assert "".join(e.choices[0].text for e in events) == want
    assert all("usage" not in e.model_fields_set for e in events)


def test_an_end_of_turn_ends_it(own, model, api, name, server, monkeypatch):
    # Whatever greedy decoding says fifth is made an end-of-turn id.
    ids = own.ids(own.chat(TEXT), 12)
    end = next(i for i in ids[4:] if i not in ids[:4])
    monkeypatch.setattr(server.worker.tokenizer, "stop_ids", frozenset({end}))
    at = ids.index(end)
    answer, parts = chat(api, name, max_tokens=24), streamed(api, name, max_tokens=24)
    assert answer.choices[0].finish_reason == parts.finish == "stop"
    assert answer.usage.completion_tokens == parts.usage.completion_tokens == at
    assert answer.choices[0].message.content == parts.content == own.tokenizer.decode(ids[:at])


def test_a_stop_string_across_a_token_border(api, name, own):
    ids = own.ids(own.chat(TEXT), 60)
    full = own.tokenizer.decode(ids)
    tried = 0
    for at in range(1, len(ids)):
        left, right = own.tokenizer.decode([ids[at - 1]]), own.tokenizer.decode([ids[at]])
        stop = left[-1:] + right[:1]
        if (
            len(stop) < 2
            or "\ufffd" in stop
            or own.tokenizer.decode(ids[: at + 1])[-len(left + right) :] != left + right
        ):
            continue
        tried += 1
        answer, parts = chat(api, name, max_tokens=60, stop=stop), streamed(api, name, max_tokens=60, stop=[stop, "€"])
        assert answer.choices[0].message.content == parts.content == full[: full.index(stop)]
        assert answer.choices[0].finish_reason == parts.finish == "stop"
        assert answer.usage.completion_tokens == parts.usage.completion_tokens <= at + 1
        if tried == 3:
            return
    assert tried


def test_a_stop_string_that_does_not_come_takes_nothing_away(api, name):
    plain = chat(api, name).choices[0].message.content
    almost = plain[-1] + "\x00never"
    assert chat(api, name, stop=[almost]).choices[0].message.content == plain
    assert streamed(api, name, stop=[almost]).content == plain


def test_seeds(api, name, own):
    hot = {"temperature": 1.0, "top_p": 0.95, "seed": 7, "extra_body": {"top_k": 20}}
    first, again = (chat(api, name, **hot).choices[0].message.content for _ in range(2))
    ids = own.ids(own.chat(TEXT), 24, Sampling(1.0, 20, 0.95), 7)
    assert first == again == own.tokenizer.decode(ids)
    assert chat(api, name, **hot | {"seed": 8}).choices[0].message.content != first
    free = hot | {"seed": None}
    assert len({chat(api, name, **free).choices[0].message.content for _ in range(3)}) > 1
    assert chat(api, name, **hot | {"seed": -1}).choices[0].message.content


def test_what_a_request_leaves_out_comes_from_the_checkpoint(api, name):
    given = {"temperature": 1.0, "top_p": 0.95, "extra_body": {"top_k": 20}}
    left_out = chat(api, name, temperature=openai.NOT_GIVEN, seed=3)
    assert left_out.choices[0].message.content == chat(api, name, seed=3, **given).choices[0].message.content


def test_chat_logprobs(api, name, own):
    ids = own.ids(own.chat(TEXT), 8)
    whole = chat(api, name, max_tokens=8, logprobs=True, top_logprobs=3)
    entries = whole.choices[0].logprobs.content
    assert len(entries) == 8
    own.engine.reset()
    prompt = own.chat(TEXT)
    own.engine.prefill(prompt[:-1], last=False)
    rows = own.engine.logits([prompt[-1], *ids[:-1]], phase="decode").tolist()
    for entry, row, token in zip(entries, rows, ids, strict=True):
        norm = math.log(sum(math.exp(x) for x in row))
        assert entry.logprob == pytest.approx(row[token] - norm, abs=1e-4)
        assert [t.logprob for t in entry.top_logprobs] == sorted((t.logprob for t in entry.top_logprobs), reverse=True)
        assert entry.top_logprobs[0].token == entry.token and len(entry.top_logprobs) == 3
    assert b"".join(bytes(e.bytes) for e in entries).decode(errors="replace") == whole.choices[0].message.content
    parts = streamed(api, name, max_tokens=8, logprobs=True, top_logprobs=3)
    assert [e.model_dump() for e in parts.logprobs] == [e.model_dump() for e in entries]
    assert chat(api, name, max_tokens=2, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    assert chat(api, name, max_tokens=2).choices[0].logprobs is None


def test_completion_logprobs_have_their_own_shape(api, name):
    answer = api.completions.create(model=name, prompt=TEXT, temperature=0, logprobs=2, max_tokens=6)
    scores = answer.choices[0].logprobs
    assert len(scores.tokens) == len(scores.token_logprobs) == len(scores.text_offset) == 6
    assert all(
        len(t) == 2 and max(t.values()) == pytest.approx(v) for t, v in zip(scores.top_logprobs, scores.token_logprobs)
    )
    events = list(api.completions.create(model=name, prompt=TEXT, temperature=0, logprobs=2, max_tokens=6, stream=True))
    parts = [e.choices[0].logprobs for e in events if e.choices[0].logprobs]
    assert sum((p.tokens for p in parts), []) == scores.tokens
    assert sum((p.text_offset for p in parts), []) == scores.text_offset


def test_offsets_of_scores_index_into_the_text(api, name):
    """Also where a character is spread over tokens, or generation leaves one unfinished."""
    fields = {"prompt": "é é é", "temperature": 1.6, "seed": 0, "logprobs": 0, "max_tokens": 900, "top_p": 1}
    fields["extra_body"] = {"top_k": 0}
    choice = api.completions.create(model=name, **fields).choices[0]
    scores, text = choice.logprobs, choice.text
    shared = sum(a == b for a, b in itertools.pairwise(scores.text_offset))
    assert shared > 1 and len(text) > 200
    for token, at in zip(scores.tokens, scores.text_offset, strict=True):
        if token.startswith("bytes:"):
            assert at < len(text)
        elif not token.startswith("<|"):
            assert text[at : at + len(token)] == token
    events = list(api.completions.create(model=name, stream=True, **fields))
    parts = [e.choices[0].logprobs for e in events if e.choices[0].logprobs]
    assert sum((p.text_offset for p in parts), []) == scores.text_offset


def test_models(api, name):
    assert [m.id for m in api.models.list()] == [name] and api.models.retrieve(name).id == name
    with pytest.raises(openai.NotFoundError):
        api.models.retrieve("other")
    with pytest.raises(openai.NotFoundError) as error:
        chat(api, "gpt-5")
    assert error.value.code == "model_not_found" and name in str(error.value)


def test_the_usage_event_comes_only_when_asked_for(server, name):
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "stream": True}
    for options, wanted in (
        (None, False),
        ({}, False),
        ({"include_usage": False}, False),
        ({"include_usage": True}, True),
    ):
        events = lines(server.port, body | {"stream_options": options})
        assert events[-1] == "[DONE]" and events.count("[DONE]") == 1
        counted = [e for e in map(json.loads, events[:-1]) if not e["choices"]]
        assert len(counted) == wanted


def lines(port: int, body: dict[str, Any], comments: bool = False) -> list[str]:
    """Data of the events of a streamed chat answer, with its comments if wanted, read without a client library."""
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.0\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=60) as s:
        s.sendall(head.encode() + data)
        got = b"".join(iter(lambda: s.recv(65536), b""))
    parts = [e for e in got.partition(b"\r\n\r\n")[2].decode().split("\n\n") if e]
    return parts if comments else [e[6:] for e in parts if e.startswith("data: ")]


# -- reuse -------------------------------------------------------------------------------------------


def test_long_prompts_and_what_is_reused(api, name, own):
    text = "all the long words " * 12
    want = own.tokenizer.decode(own.ids(own.chat(text), 12))
    count = len(own.chat(text))
    assert count > 3 * 32
    first, again = (chat(api, name, text, max_tokens=12) for _ in range(2))
    assert first.choices[0].message.content == again.choices[0].message.content == want
    assert again.usage.prompt_tokens_details.cached_tokens == count - 1
    longer = text + "and then some more"
    third = chat(api, name, longer, max_tokens=12)
    assert third.choices[0].message.content == own.tokenizer.decode(own.ids(own.chat(longer), 12))
    cached = third.usage.prompt_tokens_details.cached_tokens
    assert cached % 32 == 0 and count - 32 - 10 < cached < count
    # Another continuation of the same beginning, then the first one again.
    other = "all the long words " * 8 + "but not the short ones"
    assert chat(api, name, other, max_tokens=12).choices[0].message.content == own.tokenizer.decode(
        own.ids(own.chat(other), 12)
    )
    fourth = chat(api, name, text, max_tokens=12)
    assert fourth.choices[0].message.content == want and fourth.usage.prompt_tokens_details.cached_tokens == count - 1


def test_a_key_keeps_prompts_apart(api, name):
    text = "private words " * 20
    assert chat(api, name, text, prompt_cache_key="a").usage.prompt_tokens_details.cached_tokens == 0
    assert chat(api, name, text, prompt_cache_key="b").usage.prompt_tokens_details.cached_tokens == 0
    assert chat(api, name, text, prompt_cache_key="a").usage.prompt_tokens_details.cached_tokens > 0


def test_reuse_can_be_switched_off(model, own):
    with serving(model, reuse_bytes=0) as off:
        api = client(off.port)
        for _ in range(2):
            answer = chat(api, off.source.name)
            assert answer.usage.prompt_tokens_details.cached_tokens == 0
            assert answer.choices[0].message.content == own.tokenizer.decode(own.ids(own.chat(TEXT), 24))


# -- limits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "fits"), [(CONTEXT - 2, True), (CONTEXT - 1, True), (CONTEXT, False), (CONTEXT + 1, False)]
)
def test_the_prompt_must_leave_room_for_an_answer(api, name, server, length, fits):
    prompt = [7] * length
    if fits:
        answer = api.completions.create(model=name, prompt=prompt, max_tokens=50, temperature=0)
        assert answer.usage.completion_tokens == CONTEXT - length and answer.choices[0].finish_reason == "length"
        return
    before = health(server.port)["answered"]
    with pytest.raises(openai.BadRequestError) as error:
        api.completions.create(model=name, prompt=prompt, max_tokens=50)
    assert error.value.code == "context_length_exceeded"
    assert str(length) in str(error.value) and str(CONTEXT) in str(error.value)
    assert health(server.port)["answered"] == before


def test_a_full_queue_answers_429_and_cancelling_makes_room(model):
    with serving(model, queue=1) as small:
        # The random model must not end by itself.
        small.worker.tokenizer.stop_ids = frozenset()
        open_calls = []
        for _ in range(2):  # one runs, one waits
            s = socket.create_connection(("127.0.0.1", small.port))
            body = json.dumps({"prompt": "go on", "max_tokens": 900, "temperature": 1}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            s.sendall(head.encode() + body)
            open_calls.append(s)
            until(lambda: health(small.port)["running"])
        until(lambda: health(small.port)["waiting"] == 1)
        with pytest.raises(openai.RateLimitError) as error:
            chat(client(small.port), small.source.name)
        assert error.value.code == "queue_full"
        # The waiting one leaves first, then the running one; neither is worked on to its end.
        for s in reversed(open_calls):
            s.close()
        until(lambda: not health(small.port)["running"] and not health(small.port)["waiting"], 5)
        assert chat(client(small.port), small.source.name, max_tokens=2).usage.completion_tokens == 2


def test_a_client_that_leaves_a_stream_stops_it(api, name, server, monkeypatch):
    monkeypatch.setattr(server.worker.tokenizer, "stop_ids", frozenset())
    stream = chat(api, name, stream=True, max_tokens=900, temperature=1)
    for _, _ in zip(range(3), stream):
        pass
    stream.close()
    assert until(lambda: not health(server.port)["running"]) < 5
    assert chat(api, name, max_tokens=2).usage.completion_tokens == 2


def test_health_answers_during_prefill_and_a_prefill_can_be_left(model):
    with serving(model, block=8, reuse_bytes=0) as slow:
        s = socket.create_connection(("127.0.0.1", slow.port))
        body = json.dumps({"prompt": [5] * (CONTEXT - 2), "stream": True}).encode()
        s.sendall(
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".replace(
                "x", "localhost"
            ).encode()
            + body
        )
        until(lambda: health(slow.port)["running"])
        # The stream's head comes at once, long before its first token.
        assert s.recv(65536).startswith(b"HTTP/1.1 200")
        assert health(slow.port)["running"]
        s.close()
        assert until(lambda: not health(slow.port)["running"]) < 5


def test_silence_is_filled_and_a_stall_ends(model, monkeypatch):
    """An engine that is stuck: comments keep the line open, then the answer is given up; the next one is served."""
    stuck = threading.Event()
    with serving(model, limits=Limits(comment_s=0.1, stall_s=0.6)) as held:
        with monkeypatch.context() as m:
            m.setattr("engine.serve.generation.Generation._prefill", lambda *_: stuck.wait(20) and False)
            events = lines(held.port, {"messages": [{"role": "user", "content": "a"}], "stream": True}, comments=True)
            assert events.count(": still at work") >= 3 and "no progress for 0.6 s" in events[-1]
            assert "[DONE]" not in events[-1]
            stuck.set()
            until(lambda: not health(held.port)["running"])
            stuck.clear()
            status, body = post(held.port, "/v1/completions", {"prompt": "a"})
            assert status == 500 and "no progress" in body["error"]["message"]
            stuck.set()
        assert post(held.port, "/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200


def test_an_engine_that_fails_is_an_error_and_the_next_request_is_served(api, name, server, monkeypatch):
    def broken(*_: Any) -> None:
        raise RuntimeError("the device is gone\nand more lines")

    with monkeypatch.context() as m:
        m.setattr("engine.serve.generation.Generation._prefill", broken)
        with pytest.raises(openai.InternalServerError) as error:
            chat(api, name)
        assert "the device is gone" in str(error.value) and "Traceback" not in str(error.value)
        with pytest.raises(openai.APIError):
            streamed(api, name)
    assert chat(api, name, max_tokens=2).usage.completion_tokens == 2


# -- who may ask -------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST:80", "[::1]:1", "127.0.0.1:8080"])
def test_hosts_of_this_machine(server, host):
    assert get(server.port, "/health", Host=host)[0] == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "10.0.0.1", "localhost@evil"]
)
def test_foreign_hosts_are_refused(server, host):
    status, body = get(server.port, "/v1/models", Host=host)
    assert status == 403 and body["error"]["code"] == "host_not_allowed"


def test_pages_are_refused_and_no_origin_is_allowed(server):
    for origin in ("https://evil.example", "null", "http://localhost:3000"):
        status, body = get(server.port, "/v1/models", Origin=origin)
        assert status == 403 and body["error"]["code"] == "origin_not_allowed"


def test_an_api_key(model):
    with serving(model, api_key="sesam", allow_host=("box.local",)) as locked:
        assert get(locked.port, "/health", Host="box.local")[0] == 200
        for given in (None, "Bearer wrong", "sesam", "bearer", "bearer SESAM", "Basic sesam", "bearersesam"):
            headers = {} if given is None else {"Authorization": given}
            status, body = post(locked.port, "/v1/completions", {"prompt": "a"}, **headers)
            assert status == 401 and body["error"]["code"] == "invalid_api_key"
        for scheme in ("Bearer", "bearer", "BEARER"):
            assert get(locked.port, "/v1/models", Authorization=f"{scheme} sesam")[0] == 200
        with pytest.raises(openai.AuthenticationError):
            client(locked.port, "open").models.list()
        assert chat(client(locked.port, "sesam"), locked.source.name, max_tokens=1).usage.completion_tokens == 1


# -- the command -------------------------------------------------------------------------------------


def test_the_command_serves_and_warns_when_bound_wider(model):
    with command("--model", str(model), "--host", "0.0.0.0") as (port, _, said):
        assert any(line.startswith("WARNING: bound to 0.0.0.0") and "ANYONE" in line for line in said)
        assert (
            get(port, "/health", Host="10.1.2.3:80")[0] == 200 and get(port, "/health", Host="evil.example")[0] == 403
        )
        assert chat(client(port), model.name, max_tokens=2).usage.completion_tokens == 2
    assert not any("Traceback" in line for line in said)


def test_options_out_of_range_are_named():
    for argv in (["--queue", "0"], ["--block", "-1"], ["--port", "70000"], ["--reuse-gib", "nan"], ["--api-key", " "]):
        with pytest.raises(ServeError, match=argv[0]):
            parse(argv)


def test_an_address_in_use_is_one_line(server, model):
    argv = [sys.executable, "-m", "engine", "serve", "--model", str(model), "--port", str(server.port)]
    done = subprocess.run(argv, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and f"port {server.port}" in done.stderr and done.stderr.count("\n") == 1


def test_a_folder_that_is_not_there_is_named():
    with pytest.raises(SourceError, match="nowhere: no such folder"):
        find("nowhere")


def test_plain_extra_fields_are_let_through(api, name):
    answer = chat(api, name, max_tokens=1, user="me", extra_body={"keep_alive": 5, "store": True} | PLAIN)
    assert answer.usage.completion_tokens == 1
