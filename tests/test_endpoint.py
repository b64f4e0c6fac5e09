"""A /v1 endpoint as a subject: what a client can time is timed, and whatever is no measurement is refused by name."""

from __future__ import annotations

import http.server
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import client, serving, small_model

from engine.serve.server import Server
from engine.tokenizer import Tokenizer
from sweeps.__main__ import main
from sweeps.clock import SystemClock
from sweeps.points import Arm, Job, Point
from sweeps.prompts import Prompts, WordEncoder
from sweeps.rows import SampleRow, tokens_per_second
from sweeps.subjects import openai
from sweeps.subjects.openai import Address, EndpointError

PREFILL, DECODE = Point("p", "prefill", 64, 2), Point("d", "decode", 64, 2, decode_tokens=8)
ASKED = openai.LEAST_TOKENS + 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("endpoint"))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with serving(model) as made:
        yield made


def arm(port: int, **options: Any) -> Arm:
    return Arm("openai", "openai", options={"url": f"http://127.0.0.1:{port}/v1", **options}, hash="h")


def measured(what: Arm, *points: Point, encoder: Any = None, cap: float = 20.0, **more: Any) -> list[SampleRow]:
    """Rows of `points`; without a tokenizer prompts are ids of words."""
    job = Job("/run", "r1", {}, {}, [what], [], list(points), 1, 0, 600.0, cap)
    encoder = encoder or WordEncoder(200)
    return list(openai.measure(what, job, 0, points, Prompts(encoder, 0), encoder, SystemClock(), **more))


# -- against this project's own server ---------------------------------------------------------------


def test_its_own_server_takes_ids_and_every_window_has_a_row(server, model, monkeypatch):
    # The random model ends where it likes.
    monkeypatch.setattr(server.worker.tokenizer, "stop_ids", frozenset())
    rows = measured(arm(server.port), PREFILL, DECODE, encoder=Tokenizer.from_path(model))
    assert [(r.phase, r.slot, r.status) for r in rows] == [
        ("prefill", 0, "ok"),
        ("prefill", 1, "ok"),
        ("decode", 0, "ok"),
        ("decode", 1, "ok"),
    ]
    # Parts of characters wait for the rest, so an event may hold two tokens.
    assert all(r.work_tokens == 64 if r.phase == "prefill" else 30 <= r.work_tokens <= 32 for r in rows)
    assert {r.extra["completion_tokens"] for r in rows} == {1, ASKED}
    for row in rows:
        assert row.flags == [openai.FLAG] and row.block == -1 and (tokens_per_second(row) or 0) > 0
        assert row.extra["prompt_as"] == "ids" and row.extra["prompt_tokens"] == 64 and row.extra["cached_tokens"] == 0
        assert "not checked" in row.extra["quality"] and row.extra["served_model"] == server.source.name
    # A second run on the same server meets none of the first one's prompts.
    again = measured(arm(server.port), PREFILL)
    assert [r.status for r in again] == ["ok", "ok"]


def test_a_prompt_beyond_the_context_is_skipped_with_the_servers_words(server):
    (row,) = measured(arm(server.port), Point("p", "prefill", 2000, 1))
    assert row.status == "skipped" and "2000" in row.reason and "context" in row.reason


def test_the_first_question_finds_what_is_wrong_before_anything_is_timed(server, model, monkeypatch):
    openai.check(arm(server.port))
    with pytest.raises(EndpointError, match="has no model 'other'.*subject.model"):
        openai.check(arm(server.port, model="other"))
    wrong = Arm("openai", "openai", options={"url": f"http://127.0.0.1:{server.port}/v2"})
    with pytest.raises(EndpointError, match="404.*ends in /v1"):
        openai.check(wrong)
    with serving(model, api_key="sesam") as locked:
        with pytest.raises(EndpointError, match="401.*subject.key_env"):
            openai.check(arm(locked.port))
        monkeypatch.setenv("SECRET_OF_MINE", "sesam")
        openai.check(arm(locked.port, key_env="SECRET_OF_MINE"))
        assert client(locked.port, "sesam").models.list()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["subject=openai"], "url=http://HOST:PORT/v1"),
        (["subject=openai", "url=ftp://a/v1"], "ftp://a/v1 is no endpoint"),
        (["subject=openai", "url=127.0.0.1:8080"], "is no endpoint"),
        (["subject=openai", "url=http://a:b/v1"], "http://a:b/v1"),
        (["subject=openai", "url=http://me:secret@a/v1"], "subject.key_env"),
        (["subject=openai", "url=http://a/v1", "subject.key_env=NOT_THERE_1"], "NOT_THERE_1"),
        (["url=http://127.0.0.1:1/v1"], "it takes subject=openai"),
        (["subject.model=x"], "it takes subject=openai"),
        (["subject=openai", "url=http://a/v1", "subject.url=http://b/v1"], "set twice"),
        (["subject=openai", "url=http://127.0.0.1:1/v1"], "Connection refused; is the server running there?"),
    ],
)
def test_words_that_name_no_endpoint_are_one_line(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*words, "probe=false"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ") and said in line and "secret" not in line
    assert not list(tmp_path.iterdir())


def test_an_address_is_kept_without_its_key(monkeypatch):
    monkeypatch.setenv("SECRET_OF_MINE", "sesam")
    address = Address.read({"url": "http://[::1]:9", "key_env": "SECRET_OF_MINE"})
    assert str(address) == "http://[::1]:9/v1" and address.key == "sesam" and "sesam" not in repr(address)
    assert str(Address.read({"url": "https://host/api/v3/"})) == "https://host/api/v3"


def test_it_stands_beside_the_engine_in_a_report(server, model, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # other runs on this machine may go on
    run = tmp_path / "run"
    words = [f"model={model}", "subject=openai", f"url=http://127.0.0.1:{server.port}/v1", f"run_dir={run}"]
    assert main([*words, "frontiers=[32]", "probe=false", "blocks=1", "phases=[prefill]"]) == 0
    page = (run / "report.md").read_text(encoding="utf-8")
    assert "openai is an endpoint seen by a client" in page and "its output is not checked" in page
    rows = [json.loads(line) for line in (run / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [r["status"] for r in rows if r["arm"] == "openai"] == ["ok"]
    contrasts = (run / "contrasts.jsonl").read_text(encoding="utf-8")
    assert '"arm": "openai"' not in contrasts and '"reference": "openai"' not in contrasts


# -- against servers that misbehave ------------------------------------------------------------------


class Stand:
    """A server that speaks as little of the API as it is told to.

    events: of a whole answer, made from the request. list: names that /models gives, None for 404.
    """

    def __init__(self, events: Callable[[dict[str, Any]], Iterator[Any]], names: list[str] | None = None):
        self.asked: list[dict[str, Any]] = []
        stand = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def answer(self, status: int, kind: str, data: bytes) -> None:
                self.send_response(status)
                self.send_header("content-type", kind)
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self) -> None:
                if names is None:
                    return self.answer(404, "text/html", b"<html>no such page</html>")
                body = {"data": [{"id": name} for name in names]}
                return self.answer(200, "application/json", json.dumps(body).encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                stand.asked.append(body)
                started = False
                for event in events(body):
                    if isinstance(event, tuple):
                        return self.answer(event[0], "application/json", json.dumps(event[1]).encode())
                    if event is None:  # it dies
                        return self.connection.shutdown(socket.SHUT_RDWR)
                    if not started:
                        self.answer(200, "text/event-stream; charset=utf-8", b"")
                        started = True
                    data = event if isinstance(event, bytes) else b"data: " + json.dumps(event).encode() + b"\n\n"
                    self.wfile.write(data)
                return None

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]

    def __enter__(self) -> Stand:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.shutdown()
        self._server.server_close()


def text(word: str = "a", finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": word, "finish_reason": finish}]}


def counts(prompt: int, completion: int, cached: int | None = None) -> dict[str, Any]:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion, **details}}


def plain(
    made: int | None = None,
    finish: str = "length",
    usage: bool = True,
    cached: int | None = None,
    bundle: int = 1,
    gap_s: float = 0.001,
) -> Callable[[dict[str, Any]], Iterator[Any]]:
    """A whole answer; `made` tokens at most, `bundle` of them an event."""

    def events(body: dict[str, Any]) -> Iterator[Any]:
        wanted = body["max_tokens"] if made is None else min(made, body["max_tokens"])
        for first in range(0, wanted, bundle):
            if first:
                time.sleep(gap_s)
            yield text("a" * min(bundle, wanted - first))
        yield text("", finish)
        if usage:
            yield counts(len(body["prompt"]), wanted, cached)
        yield b"data: [DONE]\n\n"

    return events


def one(events: Callable[[dict[str, Any]], Iterator[Any]], point: Point, **more: Any) -> SampleRow:
    """The last row of a point, of which every window goes the same way."""
    with Stand(events, ["m"]) as stand:
        return measured(arm(stand.port), point, **more)[-1]


def test_what_is_asked_is_greedy_streamed_fresh_and_counted():
    with Stand(plain(), ["m"]) as stand:
        rows = measured(arm(stand.port), PREFILL, DECODE)
        asked = stand.asked
    assert {r.status for r in rows} == {"ok"}
    assert all((b["temperature"], b["stream"], b["model"]) == (0, True, "m") for b in asked)
    assert all(b["stream_options"] == {"include_usage": True} for b in asked)
    assert [b["max_tokens"] for b in asked[1:]] == [1] * 3 + [ASKED] * 3
    beginnings = [tuple(b["prompt"][:8]) for b in asked[1:]]
    assert len(set(beginnings)) == len(beginnings) and {len(b["prompt"]) for b in asked[1:]} == {64}


def test_rates_are_those_of_the_clock_at_the_client():
    def slow(body: dict[str, Any]) -> Iterator[Any]:
        time.sleep(0.2)
        yield from plain(gap_s=0.01)(body)

    prefill, decode = one(slow, PREFILL), one(slow, DECODE)
    assert 150 < (tokens_per_second(prefill) or 0) < 64 / 0.2 + 1
    assert 20 < (tokens_per_second(decode) or 0) < 101


@pytest.mark.parametrize(
    ("events", "point", "status", "said"),
    [
        (plain(cached=40), PREFILL, "error", "40 prompt tokens came out of the server's cache"),
        (plain(cached=1), DECODE, "error", "cache"),
        (plain(made=9, finish="stop"), DECODE, "error", "ended by itself after 9 of 33 tokens"),
        (plain(made=9, finish="content_filter"), DECODE, "error", "ended (content_filter) after 9"),
        (plain(made=20, usage=False), DECODE, "error", "after 20 of 33"),
        (plain(bundle=17), DECODE, "error", "33 tokens came in 2 events"),
        (plain(gap_s=30.0), DECODE, "timeout", "no end within 1 s"),
        (lambda body: iter([text(), text(), None]), DECODE, "error", "broke off after 2 events"),
        (lambda body: iter([text(), {"error": {"message": "the device is gone"}}]), DECODE, "error", "device is gone"),
        (lambda body: iter([b"data: {nonsense\n\n"]), PREFILL, "error", "no JSON object"),
        (lambda body: iter([b"data: [1]\n\n"]), PREFILL, "error", "no JSON object"),
        (lambda body: iter([b"data: [DONE]\n\n"]), PREFILL, "error", "broke off after 0 events"),
        (lambda body: iter([text("", "length"), counts(7, 1)]), PREFILL, "error", "counts 7 tokens in a prompt of 64"),
    ],
)
def test_what_is_no_measurement_is_a_row_with_its_reason(events, point, status, said):
    row = one(events, point, cap=1.0 if status == "timeout" else 20.0)
    assert row.status == status and said in (row.reason or "") and row.elapsed_ns is None
    assert row.flags == [openai.FLAG] and "\n" not in row.reason


def test_without_usage_events_are_counted():
    row = one(plain(usage=False), DECODE)
    assert row.status == "ok" and row.work_tokens == 32
    assert row.extra["prompt_tokens"] is None and row.extra["completion_tokens"] is None and row.extra["events"] == 33


def test_tokens_that_come_in_twos_are_counted_by_usage():
    row = one(plain(bundle=2), DECODE)
    assert row.status == "ok" and (row.extra["events"], row.work_tokens) == (17, 31)


def test_a_first_token_without_text_shows_at_the_end():
    row = one(lambda body: iter([text(""), text("", "length"), counts(64, 1)]), PREFILL)
    assert row.status == "ok" and row.work_tokens == 64


def test_a_server_that_takes_text_only_is_sent_text_and_its_count_is_taken(model):
    def events(body: dict[str, Any]) -> Iterator[Any]:
        if not isinstance(body["prompt"], str):
            yield 400, {"error": {"message": "prompt must be a string", "code": None}}
            return
        yield text()
        yield text("", "length")
        yield counts(len(body["prompt"].split()), 1)

    with Stand(events, ["m"]) as stand:
        rows = measured(arm(stand.port), Point("p", "prefill", 200, 2), encoder=Tokenizer.from_path(model))
        bare = measured(arm(stand.port), PREFILL)
    assert {r.extra["prompt_as"] for r in rows if r.status == "ok"} == {"text"}
    for row in rows:
        assert (row.status == "ok" and 180 <= row.work_tokens <= 220) or "tokens in a prompt made for 200" in row.reason
    assert {r.status for r in bare} == {"error"} and "no tokenizer to make text with" in bare[0].reason


def test_ids_are_not_sent_to_somebody_elses_tokenizer(model):
    def events(body: dict[str, Any]) -> Iterator[Any]:
        yield text("by text" if isinstance(body["prompt"], str) else "by ids")
        yield text("", "length")
        yield counts(len(body["prompt"]), 8)

    with Stand(events, ["m"]) as stand:
        measured(arm(stand.port), PREFILL, encoder=Tokenizer.from_path(model))
        assert all(isinstance(body["prompt"], str) for body in stand.asked[1:])


def test_a_server_that_fails_or_goes_away_costs_two_windows_a_point():
    broken = lambda body: iter([(500, {"error": {"message": "out of luck"}})])  # noqa: E731
    calls = 0

    def later(body: dict[str, Any]) -> Iterator[Any]:
        nonlocal calls
        calls += 1
        yield from plain()(body) if calls == 1 else broken(body)

    with Stand(later, ["m"]) as stand:
        rows = measured(arm(stand.port), Point("p", "prefill", 64, 5), DECODE)
    assert [r.phase for r in rows] == ["prefill"] * 2 + ["decode"] * 2
    assert all(r.status == "error" and "500: out of luck" in (r.reason or "") for r in rows)


def test_after_a_timeout_longer_prompts_are_not_tried_and_the_budget_ends_it():
    with Stand(plain(gap_s=30.0), ["m"]) as stand:
        rows = measured(arm(stand.port), DECODE, Point("d2", "decode", 128, 2), cap=0.5)
        assert [r.status for r in rows] == ["timeout", "timeout"] or [r.status for r in rows] == ["timeout", "skipped"]
    with Stand(plain(), ["m"]) as stand:
        rows = measured(arm(stand.port), PREFILL, DECODE, budget_seconds=-1.0)
        assert {(r.status, "budget=" in (r.reason or "")) for r in rows} == {("skipped", True)}


def test_which_model_is_asked():
    for names, model, said in (
        (["a", "b"], None, "does not say which.*a, b"),
        (["a", "b"], "c", "has no model 'c'.*a, b"),
        ([], None, "none"),
        (None, None, "404"),
    ):
        with Stand(plain(), names) as stand, pytest.raises(EndpointError, match=said):
            openai.check(arm(stand.port, **({"model": model} if model else {})))
    for names, model in ((["a", "b"], "b"), (["a"], None), (None, "a")):
        with Stand(plain(), names) as stand:
            openai.check(arm(stand.port, **({"model": model} if model else {})))
            assert stand.asked[0]["model"] == (model or "a")
