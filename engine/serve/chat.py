"""`python -m engine chat`: talk to the model in a terminal; /stats, /reset, Ctrl-C stops one answer."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import TextIO

import mlx.core as mx
import psutil

from engine.arguments import Arguments
from engine.generate import Engine, Sampling
from engine.serve.generation import Ask, Generation
from engine.serve.reuse import Prefixes
from engine.serve.source import DEFAULT, DRAFTERS, REAL, drafting, find
from engine.serve.text import CLOSE, OPEN, Answer
from engine.serve.worker import open_engine
from engine.tokenizer import Tokenizer

HELP = "/stats rates and memory · /reset forget the conversation · /exit leave · Ctrl-C stops an answer"


class ChatError(ValueError):
    """A conversation that cannot go on, or an option that cannot be used."""


@dataclass
class Stats:
    """Of the last answer: seconds to the first token and in all; tokens of prompt, reused, generated, and drafts."""

    first_s: float = 0.0
    total_s: float = 0.0
    prompt: int = 0
    cached: int = 0
    completed: int = 0
    accepted: int = 0
    rejected: int = 0

    def lines(self) -> list[str]:
        """What /stats shows."""
        peak, now = mx.get_peak_memory() / 2**20, mx.get_active_memory() / 2**20
        resident = psutil.Process().memory_info().rss / 2**20
        memory = f"memory: MLX {now:.0f} MiB now, {peak:.0f} MiB at most; process {resident:.0f} MiB"
        if not self.completed:
            return ["no answer yet", memory]
        # The first token's time is the prompt's; the rate is that of the tokens after it.
        after = self.total_s - self.first_s
        rate = (
            f"{(self.completed - 1) / after:.1f} tok/s" if self.completed > 1 and after > 0 else "no rate (one token)"
        )
        return [
            f"first token after {self.first_s:.3f} s, then {rate}; {self.completed} tokens in {self.total_s:.2f} s",
            f"prompt {self.prompt} tokens, {self.cached} of them reused",
            *([f"drafts: {self.accepted} right, {self.rejected} wrong"] if self.accepted + self.rejected else []),
            memory,
        ]


@dataclass
class Chat:
    """One conversation on one engine.

    Attributes:
        history: turns so far; an answer that was stopped stays as far as it came.
    """

    engine: Engine
    tokenizer: Tokenizer
    prefixes: Prefixes
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 1024
    seed: int | None = None
    thinking: bool | None = None
    history: list[dict[str, str]] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)

    def reset(self) -> None:
        """Forget the conversation."""
        self.history.clear()

    def say(self, text: str, out: TextIO) -> None:
        """Add a turn, write the answer to `out` as it comes, and keep it. Ctrl-C ends the answer only.

        Raises:
            ChatError: the conversation fills the context; the turn is taken back.
        """
        # What a terminal could not decode comes as lone surrogates, which no tokenizer takes.
        text = text.encode("utf-8", "replace").decode("utf-8")
        self.history.append({"role": "user", "content": text})
        rendered = self.tokenizer.render_chat(self.history, thinking=self.thinking)
        prompt = self.tokenizer.encode(rendered)
        room = self.engine.config.max_position_embeddings - len(prompt)
        if room < 1:
            self.history.pop()
            raise ChatError(f"{len(prompt)} tokens fill the context of {len(prompt) + room}; /reset starts anew")
        before = self.tokenizer.render_chat(self.history, add_generation_prompt=False, thinking=self.thinking)
        opening = rendered[len(before) :]
        answer = Answer(self.tokenizer, split=True, thinking=opening.rfind(OPEN) > opening.rfind(CLOSE))
        seed = secrets.randbits(64) if self.seed is None else self.seed
        ask = Ask(prompt, min(self.max_tokens, room), self.sampling, seed)
        self.history.append({"role": "assistant", "content": self._write(ask, answer, out)})

    def _write(self, ask: Ask, answer: Answer, out: TextIO) -> str:
        made = Generation(self.engine, self.prefixes, self.tokenizer.stop_ids, ask)
        show = _Show(out)
        started, first = time.perf_counter(), 0.0
        # Wherever the interrupt meets the generation, the generator closes in order and saves what is whole.
        with suppress(KeyboardInterrupt), closing(made.tokens()) as tokens:
            for token in tokens:
                first = first or time.perf_counter() - started
                show.add(answer.add(token.id))
        total = time.perf_counter() - started
        show.add(answer.finish())
        show.end({"stop": "", "length": "[cut off: --max-tokens]"}.get(made.finish or "", "[stopped]"))
        self.stats = Stats(first, total, len(ask.prompt), made.cached, made.completed, made.accepted, made.rejected)
        return show.content


class _Show:
    """Writes pieces as they come, reasoning dimmed where `out` is a terminal."""

    def __init__(self, out: TextIO):
        self._out, self._tty, self._part, self.content = out, out.isatty(), "", ""

    def add(self, pieces: list) -> None:
        for part, text in pieces:
            if part != self._part:
                self._turn(part)
            if part == "content":
                self.content += text
            self._out.write(text)
        self._out.flush()

    def _turn(self, part: str) -> None:
        if self._part == "reasoning":
            self._out.write("\033[0m\n" if self._tty else "\n[answer] ")
        elif part == "reasoning":
            self._out.write("\033[2m" if self._tty else "[thinking] ")
        self._part = part

    def end(self, note: str) -> None:
        self._out.write(("\033[0m" if self._tty and self._part == "reasoning" else "") + f" {note}".rstrip() + "\n")
        self._out.flush()


def talk(chat: Chat, ask: Callable[[str], str], out: TextIO) -> None:
    """Read lines with `ask` until it raises EOFError, or an interrupt at the prompt, or /exit."""
    while True:
        try:
            line = ask("> ").strip()
        except (EOFError, KeyboardInterrupt):
            out.write("\n")
            return
        if line == "/exit":
            return
        if line == "/reset":
            chat.reset()
            out.write("forgotten\n")
        elif line == "/stats":
            out.write("\n".join(chat.stats.lines()) + "\n")
        elif line.startswith("/"):
            out.write(f"{HELP}\n")
        elif line:
            try:
                chat.say(line, out)
            except ChatError as error:
                out.write(f"{error}\n")


def main(argv: list[str]) -> int:
    """The command. Returns its exit status.

    Raises:
        ValueError: one line for the user.
    """
    p = Arguments("python -m engine chat", description=__doc__)
    p.add_argument("--model", default=DEFAULT, help=f"{DEFAULT} (default), {REAL}, or a checkpoint's folder")
    p.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    p.add_argument("--top-k", type=int, default=0)
    p.add_argument("--top-p", type=float, default=1.0)
    p.add_argument("--seed", type=int)
    p.add_argument("--max-tokens", type=int, default=1024, help="of one answer")
    p.add_argument("--draft", choices=DRAFTERS, default="off", help="draft tokens and verify several in one pass")
    p.add_argument("--draft-depth", type=int, default=4, help="most tokens drafted at once, 1 to 7; fewer if they fail")
    p.add_argument("--thinking", choices=("on", "off"), help="whether to reason first (default: the template's)")
    given = p.parse_args(argv)
    if given.max_tokens < 1 or not 0 <= (given.seed or 0) < 2**64:
        raise ChatError("--max-tokens must be at least 1, --seed from 0 to 2**64 - 1")
    sampling = Sampling(given.temperature, given.top_k, given.top_p)
    source = find(given.model)
    engine, tokenizer, _ = open_engine(source, 512, drafting(given.draft, given.draft_depth))
    if not tokenizer.has_chat_template:
        raise ChatError(f"{source.path}: its tokenizer has no chat template, so there is no telling turns apart")
    thinking = None if given.thinking is None else given.thinking == "on"
    prefixes = Prefixes(engine, 512, 1 << 30)
    chat = Chat(engine, tokenizer, prefixes, sampling, given.max_tokens, given.seed, thinking)
    print(f"{source.name}. {HELP}", file=sys.stderr)
    with suppress(ImportError):
        import readline  # noqa: F401  (line editing and recall for input())
    try:
        talk(chat, input, sys.stdout)
    except BrokenPipeError:
        # Whoever read the answers has left; the interpreter must not try to flush to them at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
