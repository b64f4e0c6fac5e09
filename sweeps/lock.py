"""One timing at a time on an accelerator: a file lock that the kernel drops when its holder dies."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from sweeps.clock import Clock, SystemClock

POLL_SECONDS = 2.0
"""Pause between two tries while waiting for the lock, in seconds."""


class DeviceBusy(ValueError):
    """Another run is timing on this accelerator; the message names its process and run."""


@contextmanager
def device_lock(
    folder: Path, device: str, run: str, *, wait: bool = False, clock: Clock | None = None
) -> Iterator[None]:
    """Hold the lock of `device` (a short name such as ``cuda-0``) while timing run `run`.

    Args:
        folder: per-user folder for lock files. wait: wait for the other run instead of raising.

    Raises:
        DeviceBusy: another process holds the lock and `wait` is off.
    """
    clock = clock or SystemClock()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"lilybench-{device}.lock"
    with path.open("a+", encoding="utf-8") as file:
        while not _try(file):
            if not wait:
                raise DeviceBusy(_busy(file, device))
            clock.sleep(POLL_SECONDS)
        file.seek(0)
        file.truncate()
        json.dump({"pid": os.getpid(), "run": run}, file)
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)
            fcntl.flock(file, fcntl.LOCK_UN)


def _try(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _busy(file: IO[str], device: str) -> str:
    file.seek(0)
    try:
        holder = json.loads(file.read())
        who = f"process {holder['pid']} (run {holder['run']})"
    except (ValueError, KeyError, TypeError):
        who = "another process"
    return f"{device} is being timed by {who}; wait for it to end, or pass wait=true"
