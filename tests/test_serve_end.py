"""The command told to stop: what is under way ends with this API's error, and the process ends promptly and quietly."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import health, post, until

from engine.synthetic import tiny_config, write_checkpoint

TEXT = "/v1/completions"
ASKED = {"prompt": [1, 2, 3], "max_tokens": 100_000, "temperature": 0}
ENDS = {signal.SIGINT: 130, signal.SIGTERM: -signal.SIGTERM}
"""Exit statuses, which are those of a server that had nothing to do."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With room for answers and prompts that take far longer than a test."""
    config = tiny_config(hidden_size=64, experts=8, max_position_embeddings=1 << 17)
    folder = write_checkpoint(tmp_path_factory.mktemp("ended"), config, seed=1)
    # Without ids that end a turn, an answer goes on to its limit.
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        file = folder / name
        file.write_text(json.dumps(without_ends(json.loads(file.read_text(encoding="utf-8")))), encoding="utf-8")
    return folder


def without_ends(settings: Any) -> Any:
    """Settings without what names an end of turn."""
    if not isinstance(settings, dict):
        return settings
    return {key: without_ends(value) for key, value in settings.items() if key not in ("eos_token", "eos_token_id")}


@contextlib.contextmanager
def process(model: Path, said: Path) -> Iterator[tuple[subprocess.Popen, int]]:
    """The command and its port; its standard error goes to the file `said`."""
    with said.open("w", encoding="utf-8") as stderr:
        made = subprocess.Popen(
            [sys.executable, "-m", "engine", "serve", "--port", "0", "--model", str(model), "--block", "32"],
            cwd=Path(__file__).parents[1],
            stderr=stderr,
            stdin=subprocess.DEVNULL,
        )
    try:
        until(lambda: "/v1 (" in said.read_text(encoding="utf-8"), 120)
        yield made, int(said.read_text(encoding="utf-8").split("/v1 (")[0].rsplit(":", 1)[1])
    finally:
        made.kill()
        made.wait(30)


def sent(port: int, body: bytes, length: int | None = None) -> socket.socket:
    """A connection over which a request was sent, of which `length` bytes of body are promised."""
    made = socket.create_connection(("127.0.0.1", port), timeout=20)
    count = len(body) if length is None else length
    made.sendall(f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {count}\r\n\r\n".encode() + body)
    return made


def asked(port: int, **more: object) -> socket.socket:
    """A request that takes a while."""
    return sent(port, json.dumps(ASKED | more).encode())


def rest(connection: socket.socket) -> bytes:
    """All that still comes."""
    with connection:
        return b"".join(iter(lambda: connection.recv(65536), b""))


def error_of(answer: bytes) -> dict:
    """The error of a whole answer."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 "), answer[-300:]
    return json.loads(body)["error"]


def is_the_end(error: dict) -> bool:
    return error == {"message": "the server is shutting down", "type": "server_error", "param": None, "code": None}


@pytest.mark.parametrize("how", ENDS, ids=lambda how: how.name)
def test_requests_under_way_are_told_of_the_end(model, tmp_path, how):
    with process(model, tmp_path / "said") as (server, port):
        running = asked(port, stream=True)
        until(lambda: b"data: " in running.recv(65536))
        # One that waits, one that waits as a stream, and one whose body is still on its way.
        whole, waiting, owing = asked(port), asked(port, stream=True), sent(port, b'{"prompt": ', 100)
        idle = socket.create_connection(("127.0.0.1", port))
        until(lambda: health(port)["waiting"] == 2)
        started = time.monotonic()
        server.send_signal(how)
        for stream in (running, waiting):
            events = rest(stream).split(b"data: ")
            assert is_the_end(json.loads(events[-1].partition(b"\n\n")[0])["error"]), events[-1]
        assert is_the_end(error_of(rest(whole))) and is_the_end(error_of(rest(owing))) and rest(idle) == b""
        assert server.wait(20) == ENDS[how] and time.monotonic() - started < 3
    lines = (tmp_path / "said").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1 + (how is signal.SIGINT), lines


@pytest.mark.parametrize("how", ENDS, ids=lambda how: how.name)
def test_a_whole_answer_in_its_prompt_is_told_of_the_end(model, tmp_path, how):
    with process(model, tmp_path / "said") as (server, port):
        whole = asked(port, prompt=[5] * 100_000)
        until(lambda: health(port)["running"])
        started = time.monotonic()
        server.send_signal(how)
        assert is_the_end(error_of(rest(whole))) and server.wait(20) == ENDS[how]
        assert time.monotonic() - started < 3
    assert "Traceback" not in (tmp_path / "said").read_text(encoding="utf-8")


@pytest.mark.parametrize("how", ENDS, ids=lambda how: how.name)
def test_a_server_with_nothing_to_do_ends_as_quietly(model, tmp_path, how):
    with process(model, tmp_path / "said") as (server, port):
        assert post(port, TEXT, ASKED | {"max_tokens": 1})[0] == 200
        server.send_signal(how)
        assert server.wait(20) == ENDS[how]
    assert "Traceback" not in (tmp_path / "said").read_text(encoding="utf-8")
