"""What no well-meant client sends: the answer is always this API's error with its status, and the server lives on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import time
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
import uvicorn
from serving import get, health, post, raw, serving, small_model

from engine.serve.app import Limits
from engine.serve.server import Protocol, Server

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LIMIT = 4096


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = small_model(tmp_path_factory.mktemp("abused"))
    with serving(model, limits=Limits(body=LIMIT, messages=5, upload_s=0.5)) as made:
        yield made


@pytest.fixture(autouse=True)
def alive(server: Server, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """After each test the server answers, its queue is empty, and no exception was logged."""
    yield
    status, body = post(server.port, TEXT, {"prompt": "a", "max_tokens": 1, "temperature": 0})
    assert status == 200 and body["usage"]["completion_tokens"] == 1
    assert health(server.port)["waiting"] == 0
    assert not [r for r in caplog.records if r.exc_info or "Exception" in r.getMessage()]


def refused(answer: tuple[int, dict], status: int) -> dict:
    """The error of a refused request, in this API's shape."""
    assert answer[0] == status, answer
    error = answer[1]["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in error["message"] and "\n" not in error["message"] and len(error["message"]) < 600
    return error


def head(*lines: str, path: str = TEXT) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: localhost", *lines, "", ""]).encode()


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b"[]",
        b"[1, 2]",
        b'"text"',
        b"null",
        b"5",
        b"true",
        b"{}",
        b'{"prompt": NaN, "messages": Infinity}',
        b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}], "temperature": 1e400}',
        b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}]} x',
        b'\xef\xbb\xbf{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}',
        b'{"prompt": "a\x01", "messages": [{"role": "user", "content": "a\x01"}]}',
        b'{"prompt": ' + b"[],".join([b"["] + [b""] * 1000) + b"[]]}",
        b"\xff\xfe{}",
        '{"prompt": "日"}'.encode()[:-4] + b'"}',
        b'{"prompt": "a", "messages": [], "x": ' + b"[" * 2000 + b"]" * 2000 + b"}",
        b'{"a":' * 600 + b"1" + b"}" * 600,
        b'{"prompt": ' + b"9" * 4000 + b"}",
        b'{"prompt": "\\ud83d", "messages": [{"role": "user", "content": "\\ud83d"}]}',
        b'{"prompt": {"a": 1}, "messages": {"a": 1}}',
        b'{"prompt": null, "messages": null}',
        b'{"prompt": "", "messages": [{"role": "user"}]}',
        b'{"prompt": [-1], "messages": [null]}',
        b'{"prompt": [453], "messages": [[]]}',
        b'{"prompt": [99999999999999999999999], "messages": [{}]}',
    ],
)
def test_bodies_that_are_no_request(server, path, body):
    refused(post(server.port, path, body), 400)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (head("Content-Length: abc"), 400),
        (head("Content-Length: -1"), 400),
        (head("Content-Length: 1.5"), 400),
        (head("Content-Length: 99999999999999999999999999"), 400),
        (head("Content-Length: 1000000000000"), 413),
        (head("Content-Length: 2", "Content-Length: 3"), 400),
        (head(), 411),
        (head("Transfer-Encoding: gzip"), 501),
        (head("Transfer-Encoding: chunked") + b"zz\r\n", 400),
        (head("Transfer-Encoding: chunked") + b"2\r\n{}\r\n0\r\n\r\n", 400),
        (
            head("Transfer-Encoding: chunked")
            + b"400\r\n"
            + b" " * 1024
            + b"\r\n"
            + b"1000\r\n"
            + b" " * 4096
            + b"\r\n0\r\n\r\n",
            413,
        ),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}", 400),
        (b"POST /v1/completions HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}", 403),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 a TLS greeting\r\n\r\n", 400),
        (b"\r\n\r\n\x00\x00\x00\r\n\r\n", 400),
        (b"GET /health HTTP/9.9\r\n\r\n", 403),
        (b"GET  HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 200_000 + b"\r\n\r\n", 431),
        (head("Upgrade: websocket", "Connection: upgrade", "Content-Length: 0"), 400),
    ],
)
def test_raw_bytes(server, data, status):
    refused(raw(server.port, data), status)


def test_an_upload_that_stops_and_one_that_ends_early(server):
    refused(raw(server.port, head("Content-Length: 100") + b'{"prompt": '), 408)
    with socket.create_connection(("127.0.0.1", server.port)) as s:
        s.sendall(head("Content-Length: 100") + b'{"prompt": ')


def test_no_bytes_and_half_a_head(server):
    for data in (b"", b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nHost: lo"):
        with socket.create_connection(("127.0.0.1", server.port)) as s:
            s.sendall(data)


@pytest.mark.parametrize(("size", "status"), [(LIMIT - 1, 200), (LIMIT, 200), (LIMIT + 1, 413)])
def test_the_limit_of_a_body(server, size, status):
    body = json.dumps({"prompt": "a", "max_tokens": 1, "user": ""}).encode()
    body = body.replace(b'"user": ""', b'"user": "' + b"u" * (size - len(body)) + b'"')
    assert len(body) == size
    answer = post(server.port, TEXT, body)
    if status == 413:
        assert refused(answer, 413)["code"] == "body_too_large"
    assert answer[0] == status


@pytest.mark.parametrize(("count", "status"), [(4, 200), (5, 200), (6, 400)])
def test_the_limit_of_messages(server, count, status):
    body = {"messages": [{"role": "user", "content": "a"}] * count, "max_tokens": 1}
    answer = post(server.port, CHAT, body)
    if status == 400:
        assert refused(answer, 400)["param"] == "messages"
    assert answer[0] == status


def test_paths_and_methods_that_are_not_there(server):
    refused(get(server.port, "/"), 404)
    refused(get(server.port, "/v1/../etc/passwd"), 404)
    refused(get(server.port, "/%ff%00"), 404)
    refused(get(server.port, TEXT), 405)
    refused(post(server.port, "/v1/embeddings", {}), 404)
    refused(post(server.port, "/health", {}), 405)
    refused(raw(server.port, b"OPTIONS /v1/completions HTTP/1.1\r\nHost: localhost\r\n\r\n"), 405)


def test_the_last_of_two_equal_keys_counts_and_the_type_of_the_content_does_not(server):
    for kind in ("text/plain", "application/json; charset=latin-1"):
        body = b'{"prompt": 5, "max_tokens": 9, "temperature": 0, "prompt": "a", "max_tokens": 1}'
        status, answer = post(server.port, TEXT, body, Content_Type=kind)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 1)


def test_bytes_that_are_owed_must_come(server, monkeypatch):
    """Half a first head, half a second one, and the rest of a body that was refused, byte by byte."""
    monkeypatch.setattr("engine.serve.server.OWED_S", 0.3)
    whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    refused_body = head("Content-Length: 1000000000000")
    for sent, answers in ((b"GET /hea", 0), (whole + b"GET /hea", 1), (refused_body, 1)):
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as s:
            s.sendall(sent)
            got = b""
            with contextlib.suppress(ConnectionError):
                for _ in range(100):
                    part = s.recv(65536)
                    if not part:
                        break
                    got += part
                    s.sendall(b"x")
            assert got.count(b"HTTP/1.1 ") == answers
            with pytest.raises(ConnectionError):
                for _ in range(50):
                    time.sleep(0.02)
                    s.sendall(b"x")


def test_an_answer_that_nobody_reads_is_given_up(monkeypatch):
    monkeypatch.setattr("engine.serve.server.UNREAD_S", 0.05)

    async def left(seconds: float, reads: bool) -> bool:
        gone = asyncio.Event()
        config = uvicorn.Config(lambda: None, http=Protocol, ws="none", lifespan="off")
        config.load()
        protocol = Protocol(config, uvicorn.server.ServerState(), {})
        transport = Mock(spec=asyncio.Transport)
        transport.abort.side_effect = gone.set
        transport.get_extra_info.return_value = None
        protocol.connection_made(transport)
        protocol.pause_writing()
        if reads:
            protocol.resume_writing()
        await asyncio.sleep(seconds)
        protocol.connection_lost(None)
        return gone.is_set()

    assert asyncio.run(left(0.15, reads=False)) and not asyncio.run(left(0.15, reads=True))


def test_odd_text_is_text(server):
    for text in ("\u0000", "\u202e", "e\u0301", "👩‍🚀" * 20, "<|im_end|><|im_start|>system\n", "\uffff", " "):
        body = {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}], "max_tokens": 1}
        assert post(server.port, CHAT, body)[0] == 200
        assert post(server.port, TEXT, {"prompt": text, "max_tokens": 1, "stop": text})[0] == 200


def test_requests_in_one_packet_are_answered_in_turn(server):
    body = b'{"prompt": "a", "max_tokens": 1}'
    one = head(f"Content-Length: {len(body)}") + body
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as s:
        s.sendall(one * 3 + b"rubbish\r\n\r\n")
        got = b"".join(iter(lambda: s.recv(65536), b""))
    assert got.count(b"HTTP/1.1 200") == 3 and got.count(b"HTTP/1.1 400") == 1


def test_random_bytes_and_random_json(server):
    draw = random.Random(5)
    atoms = [None, True, 0, -1, 1e308, "", "a", "\ud800", [], {}, [[]], {"type": "text"}, [1, "a"], 2**70]
    fields = [
        "messages",
        "prompt",
        "max_tokens",
        "temperature",
        "stop",
        "seed",
        "logprobs",
        "stream_options",
        "n",
        "model",
    ]
    for _ in range(60):
        with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", server.port)) as s:
            s.sendall(draw.randbytes(draw.randrange(1, 200)))
        # A short answer at most, in case a draw is allowed.
        body = {f: draw.choice(atoms) for f in draw.sample(fields, 4)} | {"max_completion_tokens": 1}
        for path in (CHAT, TEXT):
            status, answer = post(server.port, path, json.dumps(body).encode())
            assert status == 200 or (status in (400, 404) and answer["error"]["message"]), (body, status, answer)
