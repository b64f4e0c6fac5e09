"""A server on this machine for tests: in a thread, or as the command that people start; and the engine beside it."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai

from engine.generate import Sampling
from engine.serve.server import Options, Server
from engine.serve.source import Source
from engine.serve.worker import open_engine
from engine.synthetic import tiny_config, write_checkpoint

BLOCK = 32
CONTEXT = 1024
GREEDY = Sampling()
PLAIN = {"chat_template_kwargs": {"enable_thinking": False}}
"""Extra fields that make a chat answer start with content."""


def small_model(folder: Path) -> Path:
    """A checkpoint that answers in milliseconds, with a context that tests can fill."""
    return write_checkpoint(folder, tiny_config(hidden_size=64, experts=8, max_position_embeddings=CONTEXT), seed=1)


@contextlib.contextmanager
def serving(model: Path, **options: Any) -> Iterator[Server]:
    """A server in a thread of this process."""
    server = Server(Options(**{"model": str(model), "port": 0, "block": BLOCK} | options))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.uvicorn.started)
        yield server
    finally:
        server.stop()
        thread.join(30)
    assert not thread.is_alive()


@contextlib.contextmanager
def command(*argv: str) -> Iterator[tuple[int, int, list[str]]]:
    """`python -m engine serve` as a process: its port, its process id, its lines so far."""
    called = [sys.executable, "-m", "engine", "serve", "--port", "0", *argv]
    root = Path(__file__).parents[1]
    process = subprocess.Popen(called, cwd=root, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
    lines: list[str] = []
    assert process.stderr is not None
    reader = threading.Thread(target=lambda: lines.extend(process.stderr), daemon=True)
    try:
        reader.start()
        until(lambda: any("/v1 (" in line for line in lines) or process.poll() is not None, 120)
        found = re.search(r":(\d+)/v1 \(", "".join(lines))
        assert found, lines
        yield int(found[1]), process.pid, lines
    finally:
        process.terminate()
        process.wait(30)


def client(port: int, key: str = "none") -> openai.OpenAI:
    """The official client, without its own repeats."""
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0, timeout=120)


class Own:
    """The engine as the server drives it, asked directly."""

    def __init__(self, model: Path):
        self.engine, self.tokenizer, _ = open_engine(Source("own", model), BLOCK)

    def ids(self, prompt: list[int], count: int, sampling: Sampling = GREEDY, seed: int | None = None) -> list[int]:
        """Generated ids from an empty sequence."""
        self.engine.reset()
        return list(self.engine.generate(prompt, count, sampling, seed, tuple(self.tokenizer.stop_ids)))

    def chat(self, text: str, thinking: bool = False) -> list[int]:
        """Ids of a conversation of one turn."""
        return self.tokenizer.apply_chat([{"role": "user", "content": text}], thinking=thinking)


def raw(port: int, data: bytes, wait_s: float = 20.0) -> tuple[int, dict[str, Any]]:
    """Send bytes, read to the end of one answer: status and JSON body; (0, {}) if the connection just closed."""
    with socket.create_connection(("127.0.0.1", port), timeout=wait_s) as s:
        s.sendall(data)
        got = b""
        while b"\r\n\r\n" not in got:
            part = s.recv(65536)
            if not part:
                return 0, {}
            got += part
        head, _, body = got.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head.lower())
        assert length, head
        while len(body) < int(length[1]):
            part = s.recv(65536)
            assert part, "the answer was cut off"
            body += part
        return int(head.split()[1]), json.loads(body)


def post(port: int, path: str, body: bytes | dict[str, Any], **headers: str) -> tuple[int, dict[str, Any]]:
    """One POST over a socket of its own."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = {"Host": "127.0.0.1", "Content-Length": str(len(data)), **headers}
    head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in lines.items())
    return raw(port, f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + data)


def get(port: int, path: str, **headers: str) -> tuple[int, dict[str, Any]]:
    """One GET over a socket of its own."""
    lines = {"Host": "127.0.0.1", **headers}
    head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in lines.items())
    return raw(port, f"GET {path} HTTP/1.1\r\n{head}\r\n".encode())


def health(port: int) -> dict[str, Any]:
    """What /health says."""
    status, body = get(port, "/health")
    assert status == 200, body
    return body


def until(true: Callable[[], bool], wait_s: float = 20.0) -> float:
    """Seconds until it was true; fails when it was not in time."""
    started = time.monotonic()
    while not true():
        assert time.monotonic() - started < wait_s, "not in time"
        time.sleep(0.01)
    return time.monotonic() - started
