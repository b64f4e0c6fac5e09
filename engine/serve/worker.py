"""The one thread that owns MLX, and the bounded queue in front of it."""

from __future__ import annotations

import gc
import threading
from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from engine.checkpoint import load
from engine.config import EngineConfig, SpeculativeConfig
from engine.device import activation_dtype
from engine.generate import Engine
from engine.serve.generation import Ask, Generation, Scored
from engine.serve.reuse import Prefixes
from engine.serve.source import Source
from engine.serve.text import Answer, Part
from engine.tokenizer import Tokenizer


class QueueFull(RuntimeError):
    """More requests wait than the queue may hold."""


class Closing(RuntimeError):
    """The worker takes no more jobs."""


@dataclass(frozen=True)
class Piece:
    """News of an answer: texts by part, and the ids they came with."""

    texts: list[tuple[Part, str]] = field(default_factory=list)
    tokens: list[Scored] = field(default_factory=list)


@dataclass(frozen=True)
class Done:
    """An answer's end: why, and what it took. Counts are tokens; `reuse` says how cached ones were found.

    accepted, rejected: drafted tokens that are part of the answer, and those that are not.
    """

    finish: str
    prompt: int
    cached: int
    completion: int
    reasoning: int
    reuse: str
    accepted: int = 0
    rejected: int = 0


@dataclass(frozen=True)
class Failed:
    """An answer that broke off, with one line for the client."""

    message: str


class Job:
    """One request in the queue; `sink` is called on the worker's thread with each piece of news.

    None as news means that a block of the prompt is done.
    """

    def __init__(self, ask: Ask, answer: Answer, sink: Callable[[Piece | Done | Failed | None], None]):
        self.ask, self.answer, self.sink = ask, answer, sink
        self.cancelled = False

    def withdraw(self) -> None:
        """Tell the client that the answer ends here, without the counts that only a finished one has."""
        self.cancelled = True
        self.sink(Done("cancelled", len(self.ask.prompt), 0, 0, 0, ""))


class Worker(threading.Thread):
    """Loads a model and answers jobs one after another; every call into MLX happens on this thread.

    Args:
        source: the model. block: positions between restore points. budget: bytes for saved prompts, 0 for none.
        waiting: most jobs in the queue. drafting: how tokens are drafted, off by default.
    """

    def __init__(
        self,
        source: Source,
        block: int = 512,
        budget: int = 2 << 30,
        waiting: int = 128,
        drafting: SpeculativeConfig | None = None,
    ):
        super().__init__(name="mlx", daemon=True)
        self.drafting = drafting
        self.source, self.block, self.budget, self.waiting = source, block, budget, waiting
        self.tokenizer: Tokenizer
        self.context = 0
        self.vocabulary = 0
        self.defaults: dict[str, Any] = {}
        self.fingerprint = ""
        self.answered = 0
        self._jobs: deque[Job] = deque()
        self._running: Job | None = None
        self._change = threading.Condition()
        self._loaded = threading.Event()
        self._closing = False
        self._error: Exception | None = None

    # -- other threads -------------------------------------------------------------------------

    def wait(self) -> None:
        """Return when the model is loaded.

        Raises:
            ValueError: what loading raised.
        """
        self._loaded.wait()
        if self._error is not None:
            raise self._error

    def submit(self, job: Job) -> None:
        """Queue a job.

        Raises:
            QueueFull: no room.
            Closing: `stop` was called.
        """
        with self._change:
            if self._closing:
                raise Closing("the server is shutting down")
            if len(self._jobs) >= self.waiting:
                raise QueueFull(f"{len(self._jobs)} requests are waiting, as many as the queue holds; try again later")
            self._jobs.append(job)
            self._change.notify()

    def cancel(self, job: Job) -> None:
        """Nobody wants this answer any more: leaves the queue at once, or stops before its next token."""
        with self._change:
            job.cancelled = True
            if job in self._jobs:
                self._jobs.remove(job)

    def is_running(self, job: Job) -> bool:
        """Whether this job is the one being answered."""
        return self._running is job

    def state(self) -> dict[str, Any]:
        """Jobs waiting and running, answers so far, and whether the thread lives."""
        with self._change:
            running = self._running is not None
            return {"waiting": len(self._jobs), "running": running, "answered": self.answered, "alive": self.is_alive()}

    def stop(self) -> None:
        """Take no more jobs; those that run or wait end as cancelled at once, whatever the device is busy with."""
        with self._change:
            self._closing = True
            left = [*self._jobs] if self._running is None else [self._running, *self._jobs]
            self._jobs.clear()
            for job in left:
                if not job.cancelled:
                    job.withdraw()
            self._change.notify()

    def close(self) -> None:
        """`stop`, and return when the thread has ended: after its present token or block of a prompt."""
        self.stop()
        self.join()

    # -- this thread ---------------------------------------------------------------------------

    def run(self) -> None:
        """Load, then answer until closed."""
        try:
            engine, prefixes = self._load()
        except Exception as error:
            self._error = error
            return
        finally:
            self._loaded.set()
        while (job := self._next()) is not None:
            self._serve(engine, prefixes, job)
            with self._change:
                self._running = None
                self.answered += 1
        # MLX's own threads must have nothing left to do when the interpreter ends, or the process aborts there.
        del engine, prefixes
        gc.collect()
        mx.synchronize()
        mx.clear_streams()

    def _load(self) -> tuple[Engine, Prefixes]:
        engine, self.tokenizer, info = open_engine(self.source, self.block, self.drafting)
        self.context, self.vocabulary = engine.config.max_position_embeddings, engine.vocabulary
        self.defaults = info.get("generation_config") or {}
        self.fingerprint = f"{info.get('weights_hash', 'unknown')}-{engine.engine.hash()}"
        prefixes = Prefixes(engine, self.block, self.budget)
        # The first step of each kind traces and compiles; that is no request's business.
        for top in (None, 0):
            list(Generation(engine, prefixes, frozenset(), Ask([0, 1], 2, top=top)).tokens())
        if engine.speculator is not None:
            engine.speculator.warm()
        prefixes.clear()
        return engine, prefixes

    def _next(self) -> Job | None:
        with self._change:
            while not self._jobs and not self._closing:
                self._change.wait()
            self._running = None if self._closing else self._jobs.popleft()
            return self._running

    def _serve(self, engine: Engine, prefixes: Prefixes, job: Job) -> None:
        made = Generation(engine, prefixes, self.tokenizer.stop_ids, job.ask)
        answer = job.answer
        try:
            with closing(made.tokens(lambda: not job.cancelled, lambda *_: job.sink(None))) as tokens:
                for token in tokens:
                    job.sink(Piece(answer.add(token.id), [token]))
                    if answer.stopped:
                        made.finish = "stop"
                        break
        except Exception as error:  # whatever it is, this request fails and the thread goes on
            prefixes.clear()
            mx.clear_cache()
            job.sink(Failed(f"the engine failed: {type(error).__name__}: {error}".splitlines()[0]))
            return
        if rest := answer.finish():
            job.sink(Piece(rest))
        finish = made.finish or "cancelled"
        counts = len(job.ask.prompt), made.cached, made.completed, answer.reasoning_tokens
        job.sink(Done(finish, *counts, made.reuse, made.accepted, made.rejected))


def open_engine(
    source: Source, block: int, drafting: SpeculativeConfig | None = None
) -> tuple[Engine, Tokenizer, dict[str, Any]]:
    """Load a model into an engine that prefills in chunks of `block`: the engine, its tokenizer, what is known of it.

    Args:
        drafting: how tokens are drafted, by ``mtp`` or ``ngram``; None for not at all.

    Raises:
        ValueError: a checkpoint or tokenizer that cannot be used, or one without the draft head that was asked for.
    """
    drafting = drafting or SpeculativeConfig()
    # In the type that the engine computes in: mixed types would be promoted at every product.
    checkpoint = load(source.path, activation_dtype(), mtp=drafting.drafter == "mtp")
    config = EngineConfig(speculative=drafting)
    config.prefill.chunk = block
    tokenizer = checkpoint.tokenizer
    vocabulary = min(tokenizer.real_vocab, checkpoint.config.vocab_size)
    return Engine(checkpoint.config, checkpoint.weights, config, vocabulary), tokenizer, checkpoint.info
