"""The terminal chat: streaming, history, rates, and an interrupt that ends one answer only."""

from __future__ import annotations

import io
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from serving import BLOCK, CONTEXT, Own, small_model

from engine.serve.chat import Chat, ChatError, talk
from engine.serve.reuse import Prefixes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("talked"))


@pytest.fixture(scope="module")
def own(model: Path) -> Own:
    return Own(model)


@pytest.fixture
def chat(own: Own) -> Chat:
    return Chat(own.engine, own.tokenizer, Prefixes(own.engine, BLOCK, 1 << 30), max_tokens=10, thinking=False)


def typed(*lines: str):
    """An `input` that reads these lines, then the end of the file; an exception among them is raised."""
    rest = iter(lines)

    def ask(_: str) -> str:
        line = next(rest, None)
        if line is None:
            raise EOFError
        return line

    return ask


def test_answers_are_the_engines_own_and_history_is_kept(chat, own):
    out = io.StringIO()
    chat.say("hello there", out)
    want = own.tokenizer.decode(own.ids(own.chat("hello there"), 10))
    assert chat.history[-1] == {"role": "assistant", "content": want}
    assert out.getvalue() == want + " [cut off: --max-tokens]\n"
    chat.say("and then?", out)
    assert [t["role"] for t in chat.history] == ["user", "assistant"] * 2
    prompt = own.tokenizer.apply_chat(chat.history[:3], thinking=False)
    assert chat.history[-1]["content"] == own.tokenizer.decode(own.ids(prompt, 10))


def test_the_loop_and_its_commands(chat):
    out = io.StringIO()
    talk(chat, typed("", "/stats", "hello", "/stats", "/reset", "/what", "/exit", "never"), out)
    said = out.getvalue()
    assert (
        said.startswith("no answer yet\nmemory: MLX ") and "forgotten\n" in said and "/stats" in said.splitlines()[-1]
    )
    found = re.search(r"first token after ([\d.]+) s, then ([\d.]+) tok/s; 10 tokens in ([\d.]+) s", said)
    assert found and float(found[1]) > 0 and float(found[2]) > 0 and chat.history == []


def test_an_interrupt_stops_one_answer_and_keeps_what_came(chat, own, monkeypatch):
    whole = own.tokenizer.decode(own.ids(own.chat("hello"), 10))
    read, count = type(own.engine).step, 0

    def step(engine):
        nonlocal count
        count += 1
        if count == 6:
            raise KeyboardInterrupt
        return read(engine)

    out = io.StringIO()
    with monkeypatch.context() as m:
        m.setattr(type(own.engine), "step", step)
        talk(chat, typed("hello"), out)
    kept = chat.history[-1]["content"]
    assert "[stopped]" in out.getvalue() and 0 < len(kept) < len(whole) and whole.startswith(kept.rstrip("\ufffd"))
    chat.reset()
    talk(chat, typed("hello"), io.StringIO())
    assert chat.history[-1]["content"] == whole


def test_reasoning_is_shown_apart_and_not_kept(chat):
    chat.thinking = True
    out = io.StringIO()
    chat.say("hello", out)
    assert out.getvalue().startswith("[thinking] ") and chat.history[-1]["content"] == ""


def test_a_full_context_is_said_and_the_turn_taken_back(chat):
    out = io.StringIO()
    with pytest.raises(ChatError, match=f"context of {CONTEXT}"):
        chat.say("x" * CONTEXT, out)
    talk(chat, typed("x" * CONTEXT), out)
    assert "/reset starts anew" in out.getvalue() and chat.history == []


def test_the_command(model):
    argv = [sys.executable, "-m", "engine", "chat", "--model", str(model), "--max-tokens", "5", "--thinking", "off"]
    root = Path(__file__).parents[1]
    done = subprocess.run(argv, cwd=root, input="hello\n/stats\n", capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "5 tokens in" in done.stdout and "Ctrl-C" in done.stderr, done.stderr
    bad = subprocess.run([*argv, "--seed", "-1"], cwd=root, capture_output=True, text=True, timeout=60)
    assert bad.returncode == 2 and "--seed" in bad.stderr and bad.stderr.count("\n") == 1


def test_an_interrupt_from_the_keyboard_ends_the_answer_and_not_the_command(model):
    argv = [sys.executable, "-m", "engine", "chat", "--model", str(model), "--thinking", "off"]
    argv += ["--max-tokens", "100000", "--temperature", "1", "--seed", "3"]
    root = Path(__file__).parents[1]
    with subprocess.Popen(argv, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin and process.stdout
        process.stdin.write("hello\n")
        process.stdin.flush()
        # The prompt, and some of the answer: it is being written.
        process.stdout.read(12)
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate("/stats\n/exit\n", timeout=60)
    assert process.returncode == 0 and rest.count("[stopped]") == 1
    assert re.search(r"first token after .* tokens in", rest) and "prompt" in rest
