"""The child of `sweeps.subjects.remote`: ``python -P remote_child.py CHECKOUT``.

It belongs to the head, but everything it imports comes from the checkout that it serves. One request a line on stdin,
``{"call", "subject", "arguments"}``; one answer a line on stdout, ``{"value"}``, ``{"error", "message"}`` or
``{"shape", "bytes"}`` followed by float32 values. It ends when stdin closes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ADAPTER = "lilybench_subject.py"


class Server:
    """Subjects by number, on one copy of the weights."""

    def __init__(self, checkout: Path):
        self.checkout = checkout
        self.subjects: dict[int, Any] = {}
        self.snapshots: dict[int, list[Any]] = {}
        self.job: Any = None
        self.shared: Any = None
        self.adapter: Any = None
        self.calls: dict[tuple[int, str, int, int], list[tuple[Any, Any, Any]]] = {}

    def start(self, job: dict[str, Any]) -> str:
        """Load the checkout's own packages, or its adapter; no weights yet."""
        if (self.checkout / ADAPTER).is_file():
            spec = importlib.util.spec_from_file_location("lilybench_subject", self.checkout / ADAPTER)
            assert spec is not None and spec.loader is not None
            self.adapter = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(self.adapter)
            self.job = job
            return str(self.checkout / ADAPTER)
        import engine
        from sweeps import points, subjects

        home = Path(engine.__file__ or "").resolve()
        if not home.is_relative_to(self.checkout.resolve()):
            raise ValueError(f"engine was imported from {home.parent}, not from {self.checkout}")
        arms = [_only(points.Arm, arm) for arm in job["arms"] if arm["subject"] == "engine"]
        empty = {"contrasts": [], "points": [], "arms": arms}
        self.job = _only(points.Job, {**job, **empty})
        self.shared = subjects.share(self.job)
        return str(home)

    def build(self, arm: dict[str, Any]) -> int:
        """A subject for an arm; returns its number."""
        number = max(self.subjects, default=0) + 1
        if self.adapter is not None:
            self.subjects[number] = self.adapter.make(arm, self.job["model"])
        else:
            from sweeps import points, subjects

            options = {k: v for k, v in arm["options"].items() if k not in ("checkout", "process")}
            config = self._known(arm["config"])
            made = _only(points.Arm, {**arm, "options": options, "config": config})
            self.subjects[number] = subjects.make(made, self.job, self.shared)
        return number

    def _known(self, config: dict[str, Any]) -> dict[str, Any]:
        """The head's configuration without fields that this checkout's engine has not got."""
        from engine.config import EngineConfig

        return _shared_fields(config, EngineConfig().to_dict())

    def answer(self, number: int, name: str, given: dict[str, Any]) -> Any:
        """One call of subject `number`."""
        subject = self.subjects[number]
        if name == "reset":
            self.snapshots[number] = []
            return subject.reset()
        if name in ("prefill", "decode"):
            if given.pop("stamps", False):
                given["clock"] = time.perf_counter_ns
            done = _plain(getattr(subject, name)(**given))
            return {**done, "memory": _memory()}
        if name == "snapshot":
            kept = self.snapshots.setdefault(number, [])
            kept.append(subject.snapshot())
            return len(kept) - 1
        if name == "restore":
            return subject.restore(self.snapshots[number][given["snapshot"]])
        if name == "describe":
            return {**subject.describe(), **self.facts(subject)}
        if name == "close":
            del self.subjects[number]
            self.snapshots.pop(number, None)
            return subject.close()
        if name == "reset_executed":
            _reset_peak()
        if name == "op":
            return self.run_op(number, **given)
        return getattr(subject, name)(**given)

    def run_op(self, number: int, op: str, rows: int, context: int, passes: int) -> int:
        """Run the variant that a subject has bound to `op` on the shapes of its model; returns the calls of a pass.

        Inputs are made once and kept for the next question about the same shapes. Every pass is waited for.
        """
        if self.adapter is not None:
            raise ValueError("an engine behind an adapter has ops of its own")
        import mlx.core as mx

        key = (number, op, rows, context)
        if key not in self.calls:
            self.calls = {key: _op_calls(self.subjects[number].engine, op, rows, context)}
        for _ in range(passes):
            for variant, arguments, settings in self.calls[key]:
                mx.eval(_arrays(variant.run(*arguments, **settings)))
        return len(self.calls[key])

    def facts(self, subject: Any) -> dict[str, Any]:
        """Commit and time of the checkout, and a hash of the code behind each op."""
        told = subject.describe()
        git = ["git", "-C", str(self.checkout), "log", "-1", "--format=%H %ct"]
        done = subprocess.run(git, capture_output=True, text=True)
        commit, time = (done.stdout.split() + ["", ""])[:2] if done.returncode == 0 else ("", "")
        made: dict[str, Any] = {"checkout": str(self.checkout), "commit": commit or None}
        made["commit_time"] = int(time) if time.isdigit() else None
        if self.adapter is None:
            made["identity"] = op_identity(self.checkout)
        return made | {key: told[key] for key in ("identity", "commit", "commit_time") if key in told}


def op_identity(checkout: Path) -> dict[str, str]:
    """Op to a hash of the sources of its variants, of the kernel wrappers they import and of those wrappers' texts."""
    from engine.ops import OPS

    made = {}
    for op in OPS.values():
        files = {Path(sys.modules[v.run.__module__].__file__ or "") for v in op.variants.values()}
        for path in list(files):
            for name in re.findall(r"engine\.kernels(?:\.| import )(\w+)", path.read_text(encoding="utf-8")):
                files |= set((checkout / "engine" / "kernels").glob(f"{name}*"))
        digest = hashlib.sha256()
        for path in sorted(files):
            if path.is_file():
                digest.update(path.name.encode() + b"\0" + path.read_bytes())
        made[op.name] = digest.hexdigest()[:16]
    return made


def _op_calls(engine: Any, op: str, rows: int, context: int) -> list[tuple[Any, Any, Any]]:
    """(variant, arguments, settings) of each call of a pass, arguments ready in memory."""
    import mlx.core as mx

    bound = next(bound for bound in engine.ops.all() if bound.op.name == op)
    made = []
    for seed, case in enumerate(bound.op.timing(engine.config, rows, context)):
        arguments = bound.op.inputs(case, engine.dtype, seed)
        mx.eval(_arrays(arguments))
        variant, settings, _ = bound.pick(rows, arguments)
        made.append((variant, arguments, settings))
    return made


def _arrays(value: Any) -> list[Any]:
    """Every array in arguments or results, however nested."""
    if hasattr(value, "shape"):
        return [value]
    if isinstance(value, (tuple, list)):
        return [array for part in value for array in _arrays(part)]
    if dataclasses.is_dataclass(value):
        return [array for f in dataclasses.fields(value) for array in _arrays(getattr(value, f.name))]
    return []


def _shared_fields(given: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    made = {}
    for name, value in given.items():
        if name in known:
            nested = isinstance(value, dict) and isinstance(known[name], dict)
            made[name] = _shared_fields(value, known[name]) if nested else value
    return made


def _only(kind: Any, values: dict[str, Any]) -> Any:
    """A dataclass from values of which this checkout may not know all."""
    known = {f.name for f in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in values.items() if name in known})


def _plain(done: Any) -> dict[str, Any]:
    return dataclasses.asdict(done) if dataclasses.is_dataclass(done) else dict(done)  # type: ignore[arg-type]


def _memory() -> list[int | None]:
    if "mlx.core" not in sys.modules:
        return [None, None]
    import mlx.core as mx

    return [mx.get_peak_memory(), mx.get_active_memory()]


def _reset_peak() -> None:
    if "mlx.core" in sys.modules:
        import mlx.core as mx

        mx.reset_peak_memory()


def _kind(error: Exception) -> str:
    names = {cls.__name__ for cls in type(error).__mro__}
    if "SubjectUnsupported" in names or "ConfigError" in names:
        return "unsupported"
    if "SubjectOutOfMemory" in names or "MemoryError" in names:
        return "oom"
    return "value" if isinstance(error, ValueError) else "other"


def main() -> None:
    """Answer until stdin closes."""
    # Whatever a library prints must not get between the answers.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.path.insert(0, sys.argv[1])
    server = Server(Path(sys.argv[1]))
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        payload = b""
        try:
            if asked["call"] == "start":
                value = server.start(asked["job"])
            elif asked["call"] == "build":
                value = server.build(asked["arm"])
            else:
                value = server.answer(asked["subject"], asked["call"], asked["arguments"])
            answer: dict[str, Any] = {"value": value}
            if hasattr(value, "shape"):
                import numpy as np

                array = np.ascontiguousarray(np.array(value, dtype=np.float32))
                payload = array.tobytes()
                answer = {"shape": list(array.shape), "bytes": len(payload)}
        except Exception as error:
            text = " ".join(str(error).split())
            kind = _kind(error)
            answer = {"error": kind, "message": text if kind != "other" else f"{type(error).__name__}: {text}"}
        out.write(json.dumps(answer, default=str).encode() + b"\n" + payload)
        out.flush()


if __name__ == "__main__":
    main()
