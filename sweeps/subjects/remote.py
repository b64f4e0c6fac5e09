"""The engine of another checkout as a subject: its own process, driven over pipes by this checkout's harness.

``base=CHECKOUT`` puts two engines side by side that cannot live in one process, since both are the package `engine`.
Each checkout gets a child process that imports everything from there; clock, schedule, prompts and statistics are this
checkout's. A call is one line of JSON each way (`remote_child`), which both sides of a contrast pay alike. One child
serves all subjects of its checkout and process name on one copy of the weights, and ends when its pipe closes.

What a checkout must offer is `sweeps.subjects.share` and `make`, or, in any other repository, a file
``lilybench_subject.py`` with ``make(arm, model)`` that returns a subject (`sweeps.subjects.base.Subject`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sweeps.points import Arm, Job
from sweeps.subjects.base import (
    CanonicalState,
    Decoded,
    Prefilled,
    Progress,
    SubjectError,
    SubjectOutOfMemory,
    SubjectUnsupported,
)

ROOT = Path(__file__).resolve().parents[2]
"""This checkout: the head."""

ADAPTER = "lilybench_subject.py"
"""What a repository without this project's packages offers at its top level."""

_CODE = (("engine", "*.py"), ("engine", "*.metal"), ("engine", "*.h"), ("sweeps/subjects", "*.py"))
_SOURCES = ("*.py", "*.metal", "*.h")
_CHILD = Path(__file__).with_name("remote_child.py")
_ENDED = 5.0


class RemoteError(RuntimeError):
    """The child failed in a way of its own, or is gone."""


def check_checkout(folder: Path, word: str = "base") -> None:
    """Refuse a folder that holds nothing to measure.

    Raises:
        SubjectError: what is missing, and the fix.
    """
    if (folder / ADAPTER).is_file():
        return
    for name in ("engine/generate.py", "sweeps/subjects/__init__.py"):
        if not (folder / name).is_file():
            raise SubjectError(
                f"{word}={folder} is no checkout of this project ({name} is missing) and has no {ADAPTER}: "
                "git worktree add FOLDER BRANCH makes one"
            )


def code_hash(folder: Path) -> str:
    """Hash of everything in a checkout that an engine's time can depend on.

    Behind an adapter that is any file that git tracks or would take in; without git, any source.
    """
    digest = hashlib.sha256()
    own = (folder / ADAPTER).is_file()
    listed = _files(folder) if own else [p for room, kind in _CODE for p in sorted((folder / room).rglob(kind))]
    for path in listed:
        digest.update(os.fsencode(path.relative_to(folder)) + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _files(folder: Path) -> list[Path]:
    git = ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(git, capture_output=True)
    names = {os.fsdecode(name) for name in done.stdout.split(b"\0") if name} if done.returncode == 0 else set()
    if ADAPTER in names:
        return [path for path in (folder / name for name in sorted(names)) if path.is_file()]
    return sorted({path for kind in _SOURCES for path in folder.rglob(kind)})


class Remote:
    """A subject whose work is done by a child process. The first call starts it; after a fault it is started anew."""

    name = "engine"

    def __init__(self, arm: Arm, job: Job):
        self._arm, self._job = arm, job
        self._key: tuple[str, str] = (str(arm.options["checkout"]), str(arm.options.get("process", "")))
        self._child: Child | None = None
        self._id = 0
        self._memory: tuple[int | None, int | None] = (None, None)
        # Building happens here, so that an arm that cannot run becomes skipped rows and not failed ones.
        try:
            self._connect()
        except (RemoteError, ValueError) as error:
            raise SubjectError(f"{arm.name}: {self._key[0]} cannot be loaded: {error}") from None

    def reset(self) -> None:
        """Forget the sequence; a child that is gone is started again."""
        self._connect().call(self._id, "reset")

    def prefill(self, tokens: Sequence[int], *, last: bool = True, progress: Progress | None = None) -> Prefilled:
        """The child's; `progress` is told once, at the end."""
        done = self._work("prefill", tokens=list(tokens), last=last)
        if progress:
            progress(len(tokens), len(tokens))
        return Prefilled(**done)

    def decode(self, first: int, count: int, *, clock: Callable[[], int] | None = None) -> Decoded:
        """The child's. Stamps are its readings of `time.perf_counter_ns`, which processes of a machine share."""
        return Decoded(**self._work("decode", first=first, count=count, stamps=clock is not None))

    def position(self) -> int:
        """Tokens in the cache."""
        return self._call("position")

    def snapshot(self) -> int:
        """A number by which the child knows its restore point; forgotten at `reset`."""
        return self._call("snapshot")

    def restore(self, snapshot: int) -> None:
        """Back to it."""
        self._call("restore", snapshot=snapshot)

    def export_state(self) -> CanonicalState:
        """Never: state stays in its process.

        Raises:
            SubjectUnsupported: always.
        """
        raise SubjectUnsupported("the state of an engine in a process of its own stays there")

    def import_state(self, state: CanonicalState) -> None:
        """Never, see `export_state`."""
        self.export_state()

    def logits(self, tokens: Sequence[int], phase: Literal["prefill", "decode"] = "decode") -> np.ndarray:
        """Teacher-forced logits float32 ``[len(tokens), vocabulary]``."""
        return self._call("logits", tokens=list(tokens), phase=phase)

    def executed(self) -> list[dict[str, Any]]:
        """The child's."""
        return self._call("executed")

    def reset_executed(self) -> None:
        """Start counting anew, and a new peak of memory."""
        self._call("reset_executed")

    def op(self, name: str, rows: int, context: int, passes: int) -> int:
        """Run one op so many times, on the shapes of `rows` new rows at `context` positions; returns calls a pass."""
        return self._call("op", op=name, rows=rows, context=context, passes=passes)

    def memory(self) -> tuple[int | None, int | None]:
        """(peak since `reset_executed`, active now) of the child's allocator, in bytes."""
        return self._memory

    def describe(self) -> dict[str, Any]:
        """The child's facts, with its checkout, commit, code hash, and the identity of each op."""
        return {**self._call("describe"), "code": code_hash(Path(self._key[0]))}

    def close(self) -> None:
        """Drop the subject; the last one of a child ends it."""
        if self._child is not None:
            self._child.release(self._id)
            self._child = None

    def _connect(self) -> Child:
        if self._child is None or not self._child.alive:
            self._child = Child.of(self._key, self._job)
            self._id = self._child.build(self._arm)
        return self._child

    def _call(self, name: str, **arguments: Any) -> Any:
        return self._connect().call(self._id, name, **arguments)

    def _work(self, name: str, **arguments: Any) -> dict[str, Any]:
        if self._child is None or not self._child.alive:
            raise RemoteError(f"{self._arm.name}: its process is gone and with it the sequence")
        done = self._child.call(self._id, name, **arguments)
        self._memory = tuple(done.pop("memory"))  # type: ignore[assignment]
        return done


class Child:
    """One process of one checkout, shared by the subjects that name it."""

    _running: dict[tuple[str, str], Child] = {}

    def __init__(self, key: tuple[str, str], job: Job):
        self.checkout, self.key = Path(key[0]), key
        # The child puts the checkout first on its path; -P keeps this folder off it. A group of its own keeps Ctrl-C
        # from it, so that the harness can finish its row; it ends by itself when its pipe closes.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-B", str(_CHILD), str(self.checkout)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=self.checkout,
            start_new_session=True,
        )
        self._users: set[int] = set()
        self.alive = True
        self._ask({"call": "start", "job": dataclasses.asdict(job)})

    @classmethod
    def of(cls, key: tuple[str, str], job: Job) -> Child:
        """The child of that checkout and process name, started if there is none."""
        found = cls._running.get(key)
        if found is None or not found.alive:
            found = cls._running[key] = cls(key, job)
        return found

    def build(self, arm: Arm) -> int:
        """Make a subject for `arm` in the child; returns its number.

        Raises:
            SubjectUnsupported, SubjectOutOfMemory: as the child's own adapter says.
        """
        number = self._ask({"call": "build", "arm": dataclasses.asdict(arm)})
        self._users.add(number)
        return number

    def call(self, number: int, name: str, **arguments: Any) -> Any:
        """One call of one subject."""
        return self._ask({"call": name, "subject": number, "arguments": arguments})

    def release(self, number: int) -> None:
        """Close a subject; ends the process with the last."""
        if self.alive and number in self._users:
            self._users.discard(number)
            self.call(number, "close")
        if not self._users:
            self.end()

    def end(self) -> None:
        """End the process; waits a little, then insists."""
        self.alive = False
        if Child._running.get(self.key) is self:
            del Child._running[self.key]
        process = self._process
        for pipe in (process.stdin, process.stdout):
            if pipe:
                pipe.close()
        try:
            process.wait(timeout=_ENDED)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _ask(self, message: dict[str, Any]) -> Any:
        """Send, wait, and return the value.

        Raises:
            SubjectUnsupported, SubjectOutOfMemory, ValueError: what the child raised. RemoteError: anything else it
            raised, or its death.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(json.dumps(message).encode() + b"\n")
            stdin.flush()
            head = stdout.readline()
            answer = json.loads(head) if head else None
            payload = _read(stdout, answer["bytes"]) if answer and answer.get("bytes") else b""
        except (BrokenPipeError, json.JSONDecodeError):
            answer, payload = None, b""
        except BaseException:
            # Interrupted in the middle of an answer (a cap, Ctrl-C): what comes later would answer another question.
            self._kill()
            raise
        if answer is None:
            raise RemoteError(f"the process of {self.checkout} {self._fate()}")
        if "error" in answer:
            kinds = {"unsupported": SubjectUnsupported, "oom": SubjectOutOfMemory, "value": ValueError}
            raise kinds.get(answer["error"], RemoteError)(answer["message"])
        if "shape" in answer:
            return np.frombuffer(payload, np.float32).reshape(answer["shape"])
        return answer["value"]

    def _kill(self) -> None:
        self.alive = False
        self._process.kill()
        self._process.wait()

    def _fate(self) -> str:
        self.alive = False
        try:
            code = self._process.wait(timeout=_ENDED)
        except subprocess.TimeoutExpired:
            self._kill()
            return "closed its pipe and was killed"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def _read(stream: Any, count: int) -> bytes:
    parts = []
    while count > 0:
        part = stream.read(count)
        if not part:
            raise BrokenPipeError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
