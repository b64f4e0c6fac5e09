"""The server under many clients: no answer lost or mixed, memory flat, health prompt, and what serving itself costs."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import psutil
import pytest
from serving import Own, client, command, health, post, small_model, until

from engine.serve.source import find
from engine.serve.worker import open_engine

TOKENS = 4
PROMPTS = [[n, 3, n + 1, *range(20 + n)] for n in range(1, 13)]

# A process of its own: a busy interpreter would time its own threads, not the server.
POLL = """
import http.client, json, sys, time
port, seconds = int(sys.argv[1]), float(sys.argv[2])
took, end = [], time.monotonic() + seconds
while time.monotonic() < end:
    started = time.monotonic()
    c = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    c.request("GET", "/health")
    assert c.getresponse().status == 200
    c.close()
    took.append(time.monotonic() - started)
    time.sleep(0.05)
print(json.dumps(took))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("loaded"))


@pytest.fixture(scope="module")
def answers(model: Path) -> list[str]:
    """The engine's own answers to all prompts."""
    return answers_of(model)


def answers_of(model: Path) -> list[str]:
    """The engine's own answers to all prompts, by the model in that folder."""
    own = Own(model)
    return [own.tokenizer.decode(own.ids(prompt, TOKENS)) for prompt in PROMPTS]


async def ask_on(api: openai.AsyncOpenAI, model: str, first: int, end: float, answers: list[str]) -> int:
    """One client: asks until `end`, streaming every other time; how many answers it compared."""
    for count in itertools.count(1):
        at = (first + count) % len(PROMPTS)
        stream = count % 2 == 0
        made = await api.completions.create(
            model=model, prompt=PROMPTS[at], max_tokens=TOKENS, temperature=0, stream=stream
        )
        if stream:
            text = "".join([event.choices[0].text async for event in made])  # type: ignore[union-attr]
        else:
            text = made.choices[0].text  # type: ignore[union-attr]
        assert text == answers[at], f"client {first}, request {count}"
        if time.monotonic() > end:
            return count
    raise AssertionError


def hammer(model: Path, answers: list[str], clients: int, seconds: float) -> dict[str, float]:
    """Figures of `clients` at once for `seconds`."""
    with command("--model", str(model), "--block", "32", "--queue", str(clients)) as (port, pid, said):
        resident = psutil.Process(pid).memory_info

        async def everyone() -> tuple[list[int], int, int]:
            async with openai.AsyncOpenAI(
                base_url=f"http://127.0.0.1:{port}/v1", api_key="-", max_retries=0, timeout=120
            ) as api:
                end = time.monotonic() + seconds
                asked = asyncio.gather(*(ask_on(api, model.name, n, end, answers) for n in range(clients)))
                await asyncio.sleep(seconds / 3)
                before = resident().rss
                counts = await asyncio.wait_for(asked, seconds + 120)
                return counts, before, resident().rss

        argv = [sys.executable, "-c", POLL, str(port), str(seconds)]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as polling:
            counts, before, after = asyncio.run(everyone())
            took = sorted(json.loads(polling.communicate(timeout=60)[0]))
        state = health(port)
        assert (state["waiting"], state["running"], state["answered"]) == (0, False, sum(counts))
        assert not any("Traceback" in line or "error" in line.lower() for line in said), said
    return {
        "answers": sum(counts),
        "least_a_client": min(counts),
        "growth_mib": (after - before) / 2**20,
        "health_median_ms": 1e3 * statistics.median(took),
        "health_p99_ms": 1e3 * took[int(0.99 * len(took))],
        "health_most_ms": 1e3 * took[-1],
    }


def test_sixteen_clients_for_ten_seconds(model, answers):
    got = hammer(model, answers, 16, 10)
    assert got["least_a_client"] >= 1 and got["growth_mib"] < 64 and got["health_median_ms"] < 100, got


@pytest.mark.full
def test_sixty_four_clients_for_two_minutes_on_the_embedded_model(capsys):
    model = find().path
    got = hammer(model, answers_of(model), 64, 120)
    with capsys.disabled():
        print("\n64 clients, 120 s:", {k: round(v, 1) for k, v in got.items()})
    assert got["least_a_client"] >= 2 and got["growth_mib"] < 64 and got["health_most_ms"] < 100, got


def test_large_bodies_hold_nobody_up(model):
    """A long text is counted, and a long list looked at, while others are served."""
    words = json.dumps({"prompt": "all the long words " * 60_000}).encode()
    parts = [{"type": "image_url", "image_url": "x"}] * 60_000
    lists = json.dumps({"messages": [{"role": "user", "content": parts}]}).encode()
    with command("--model", str(model)) as (port, _, _), ThreadPoolExecutor() as pool:
        took = []
        asked = [
            pool.submit(post, port, "/v1/completions", words),
            pool.submit(post, port, "/v1/chat/completions", lists),
        ]
        while not all(a.done() for a in asked) or len(took) < 20:
            took.append(until(lambda: health(port)["status"] == "ok"))
        codes = [(a.result()[0], a.result()[1]["error"]["param"]) for a in asked]
    assert codes == [(400, "prompt"), (400, "messages[0].content[0].type")]
    assert max(took) < 1.0, max(took)


def leave(port: int, model: str, count: int, wait_s: float) -> None:
    """Connect, ask for a long answer, go away; every other one streaming."""
    for n in range(count):
        body = json.dumps({"model": model, "prompt": [n % 400] * 50, "max_tokens": 500, "stream": n % 2 == 0}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", port), timeout=20) as s:
            s.sendall(head.encode() + body)
            time.sleep(wait_s)


def after_leaving(model: Path, count: int, wait_s: float) -> tuple[float, float]:
    """Seconds until the queue was empty, and until the next request was answered."""
    with command("--model", str(model), "--block", "32", "--queue", "32") as (port, _, said):
        api = client(port)
        assert api.models.list().data  # what the client itself loads at its first call is not the server's
        leave(port, model.name, count, wait_s)
        empty = until(lambda: health(port)["waiting"] == 0 and not health(port)["running"])
        started = time.monotonic()
        made = api.completions.create(model=model.name, prompt=PROMPTS[0], max_tokens=TOKENS, temperature=0)
        served = time.monotonic() - started
        assert made.usage and made.usage.completion_tokens == TOKENS
    assert not any("Traceback" in line for line in said), said
    return empty, served


def test_clients_that_leave_leave_nothing_behind(model):
    empty, served = after_leaving(model, 60, 0.005)
    assert empty + served < 3


@pytest.mark.full
def test_a_thousand_clients_that_leave(model, capsys):
    empty, served = after_leaving(model, 1000, 0.002)
    with capsys.disabled():
        print(f"\n1,000 clients left: queue empty after {empty:.2f} s, next answer after {served:.2f} s more")
    assert empty + served < 1


@pytest.mark.full
def test_what_serving_costs_over_the_engines_own_decode(capsys):
    """Single stream on the embedded model: from the question to the last token, in alternating runs without reuse.

    Other work on a machine only ever adds time, on a busy one more than a tenth to most runs. So the cost is read off
    the fastest tenth of each side; quartiles, the median of the pairs and processor time are shown beside it.
    """
    source, count, pairs = find(), 40, 40
    engine, tokenizer, _ = open_engine(source, 512)

    def decode(prompt: list[int]) -> list[int]:
        """By the path that sweeps time."""
        engine.reset()
        first = engine.prefill(prompt)
        assert first is not None
        return [first, *engine.decode(first, count - 1)]

    # One whose answer does not end by itself.
    prompts = ([n, *range(5, 25)] for n in range(100))
    prompt = next(p for p in prompts if not tokenizer.stop_ids.intersection(decode(p)))
    fields = {"model": source.name, "prompt": prompt, "max_tokens": count, "temperature": 0, "stream": True}
    body = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()

    def own() -> float:
        started = time.perf_counter()
        assert len(decode(prompt)) == count
        return 1e3 * (time.perf_counter() - started) / count

    def served(port: int) -> float:
        with socket.create_connection(("127.0.0.1", port), timeout=120) as s:
            started, got = time.perf_counter(), b""
            s.sendall(head + body)
            while b"[DONE]" not in got:
                got += s.recv(65536)
            took = time.perf_counter() - started
        assert b'"finish_reason":"length"' in got
        return 1e3 * took / count

    def spent(pid: int) -> float:
        times = psutil.Process(pid).cpu_times()
        return times.user + times.system

    with command("--reuse-gib", "0") as (port, pid, _):
        own(), served(port)
        before = spent(pid), spent(os.getpid())
        both = [(served(port), own()) if n % 2 else (own(), served(port))[::-1] for n in range(pairs)]
        used = [1e3 * (spent(p) - b) / (pairs * count) for p, b in zip((pid, os.getpid()), before)]
    sides = [sorted(side) for side in zip(*both)]
    fast = [statistics.mean(side[: pairs // 10]) for side in sides]
    with capsys.disabled():
        for name, side, cpu in zip(("server", "engine"), sides, used):
            low, middle, high = statistics.quantiles(side, n=4)
            spread = f"{side[0]:.2f} at least, quartiles {low:.2f} {middle:.2f} {high:.2f}; CPU {cpu:.2f}"
            print(f"\n{name}: ms a token {spread}")
        paired = statistics.median(a / b for a, b in both)
        shown = ", ".join(f"{100 * (x - 1):+.1f} %" for x in (fast[0] / fast[1], paired, used[0] / used[1]))
        print(f"server over engine: fastest tenth, median of {pairs} pairs, processor time: {shown}")
    assert fast[0] / fast[1] < 1.05, both
