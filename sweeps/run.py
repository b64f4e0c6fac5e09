"""One job from its plan to its report: lock the device, one worker process a session, contrasts, report.

A worker that dies leaves the window in flight as an error row with the signal; what is left of its session goes on in
a new process, once. The same job run again goes on where it stopped.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import uuid
from collections import Counter
from pathlib import Path

from sweeps import calibration, environment
from sweeps.clock import Clock, SystemClock
from sweeps.contrasts import contrast_rows
from sweeps.ledger import CRASH, Ledger
from sweeps.lock import DeviceBusy, device_lock
from sweeps.plan import stopped_early
from sweeps.points import Job, sample_row
from sweeps.schedule import Cell
from sweeps.store import RETRY, Store, Tables, write_job, write_whole
from sweeps.worker import STOPPED, in_flight_path

ROOT = Path(__file__).resolve().parent.parent
"""Folder that workers start in, so that they find this project; paths in a job are absolute."""

RESPAWNS = 2
"""New processes a session may have after one died."""

GRACE_SECONDS = 120.0
"""How long past its budget and cap a worker may take before it is taken for stuck."""

LEAST_SHARE = 0.125
"""Share of a part below which no further session is begun in it."""

FAILURES = ("oom", "timeout", "error")


class BadJob(ValueError):
    """The worker refused the job; it has said why."""


def run(job: Job) -> int:
    """Measure `job`, answer its contrasts, build its report and print the report's path.

    Returns:
        0, 1 if a window failed or the report could not be built, or 2 if the job cannot run here as it is asked.

    Raises:
        KeyboardInterrupt: stopped by hand; rows are kept and the same job goes on later.
    """
    settings = job.settings
    device = environment.accelerator_key()
    try:
        environment.refuse_weak_power(str(settings.get("sweep")), settings.get("allow"), environment.conditions())
        wait = bool(settings.get("wait"))
        with environment.awake(), device_lock(environment.runtime_dir(), device, job.run_id, wait=wait):
            path = write_job(job)
            sessions(job, path, SystemClock())
            sound = check_baseline(job, path)
    except KeyboardInterrupt:
        # What was measured so far is worth a report; only then is the stop passed on.
        if answer(job).samples:
            report(job)
        raise
    except BadJob:
        return 2
    except (DeviceBusy, environment.PowerRefused) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    tables = answer(job)
    failed = [row for row in tables.samples if row.status in FAILURES]
    for row in failed[:20]:
        print(f"{row.phase} {row.frontier} {row.arm}: {row.status}: {row.reason}", file=sys.stderr)
    if job.settings.get("part_seconds") and stopped_early(job):
        print("this part is over and the run is not: give the same command again", file=sys.stderr)
    built = report(job)
    measured = any(row.status == "ok" and row.block >= 0 for row in tables.samples)
    if not measured and not failed:
        # That of most rows: an arm that can never run says nothing of the others.
        reasons = Counter(row.reason for row in tables.samples if row.reason).most_common(1)
        print(f"nothing was measured: {reasons[0][0] if reasons else 'no window ran'}", file=sys.stderr)
    return 0 if sound and built and not failed and measured else 1


def answer(job: Job) -> Tables:
    """Answer every contrast from the rows there are, keep the answers, and return the tables read."""
    store = Store(job.run_dir)
    tables = store.read()
    for row in contrast_rows(job, tables.samples, calibration.beside(job)):
        if row not in tables.contrasts:
            store.append(row)
    return tables


def sessions(job: Job, path: Path, clock: Clock) -> None:
    """Run every session in a process of its own, each with its share of what is left of the budget.

    A run in parts takes them one after another as far as the part goes, and leaves the rest to the next invocation.
    """
    attempt = uuid.uuid4().hex[:8]
    start = clock.now_ns()
    part = job.settings.get("part_seconds")
    for session in range(job.sessions):
        spent = (clock.now_ns() - start) / 1e9
        budget = (job.budget_seconds - spent) / (job.sessions - session) if job.budget_seconds > 0 else float("inf")
        if part:
            budget = part - spent
            if budget < LEAST_SHARE * part:
                return
        run_session(job, path, session, max(budget, 0.0), attempt)


def run_session(job: Job, path: Path, session: int, budget: float, attempt: str) -> None:
    """Spawn workers until the session is done, or until one dies without getting anywhere."""
    clock = SystemClock()
    end = clock.now_ns() + budget * 1e9
    reason = None
    for _ in range(1 + RESPAWNS):
        if not unfinished(job, session, attempt):
            return
        rows = len(Store(job.run_dir).read().samples)
        left = max((end - clock.now_ns()) / 1e9, 0.0)
        reason = _spawn(job, path, session, left, attempt)
        if reason is None:
            return
        print(f"session {session + 1}: {reason}", file=sys.stderr)
        known = len(Store(job.run_dir).read().samples)
        in_flight = _record_in_flight(job, session, reason, attempt)
        if not in_flight and known == rows:
            break
    _record_missing(job, session, reason or "", attempt)


def unfinished(job: Job, session: int, attempt: str = "") -> bool:
    """Whether a session has windows left to run, or reasons left to write."""
    ledger = Ledger(job, session, Store(job.run_dir), attempt)
    return not all(ledger.is_covered(point, arm) for point in job.points for arm in job.arms)


def check_baseline(job: Job, path: Path) -> bool:
    """With ``check=baseline``: whether our rates of MLX-LM agree with its own `stream_generate`; kept in the folder."""
    if job.settings.get("check") != "baseline" or all(arm.subject != "mlx_lm" for arm in job.arms):
        return True
    from sweeps.baseline import check

    result = check(path)
    write_whole(Path(job.run_dir) / "baseline.json", json.dumps(result, indent=1))
    passed = result.get("passed") is True
    said = result.get("reason") or "rates agree"
    print(f"check=baseline {'passed' if passed else 'failed'}: {said}", file=sys.stderr)
    return passed


def report(job: Job) -> bool:
    """Build the report in a process of its own and print its path as the last line; False if that failed."""
    command = [sys.executable, "-m", "reports", "build", job.run_dir]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        print(f"the report failed: {said[-1] if said else 'no message'}", file=sys.stderr)
        print(f"the rows are kept; try again with:  python -m reports build {job.run_dir}", file=sys.stderr)
        return False
    page = Path(job.run_dir) / "report.html"
    print(page if page.exists() else done.stdout.strip().splitlines()[-1])
    return True


def _spawn(job: Job, path: Path, session: int, budget: float, attempt: str) -> str | None:
    """One worker process to its end; None if it ended by itself, else what became of it.

    Raises:
        BadJob, KeyboardInterrupt: it refused the job, or was stopped by hand.
    """
    command = [sys.executable, "-m", "sweeps.worker", str(path), "--session", str(session)]
    command += ["--budget", str(budget), "--attempt", attempt]
    limit = budget + job.cap_seconds + GRACE_SECONDS if job.cap_seconds > 0 and budget != float("inf") else None
    worker = subprocess.Popen(command, cwd=ROOT)
    try:
        code = worker.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        worker.kill()
        worker.wait()
        return f"the worker was stuck {GRACE_SECONDS:.0f} s beyond its budget and cap and was killed"
    except KeyboardInterrupt:
        _stop(worker)
        raise
    if code == STOPPED:
        raise KeyboardInterrupt
    if code == 2:
        raise BadJob
    if code in (0, 1):
        return None
    if code < 0:
        return f"the worker was killed by {signal.Signals(-code).name}"
    return f"the worker ended with code {code}"


def _stop(worker: subprocess.Popen[bytes]) -> None:
    """Let a worker finish its row; a terminal has sent it the interrupt too."""
    worker.terminate()
    try:
        worker.wait(timeout=10)
    except subprocess.TimeoutExpired:
        worker.kill()
        worker.wait()


def _record_in_flight(job: Job, session: int, reason: str, attempt: str) -> bool:
    """An error row for the window during which the worker died; False if none was running."""
    path = in_flight_path(job, session)
    try:
        cell = Cell(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return False
    path.unlink(missing_ok=True)
    point = next(point for point in job.points if point.key == cell.point)
    arm = next(arm for arm in job.arms if arm.name == cell.arm)
    row = sample_row(job, session, point, arm, "error", reason=reason, block=cell.block, slot=cell.slot)
    row.flags, row.extra = [CRASH, RETRY], {"attempt": attempt}
    Store(job.run_dir).append(row)
    return True


def _record_missing(job: Job, session: int, reason: str, attempt: str) -> None:
    """An error row for every point and arm that still has windows to run."""
    store = Store(job.run_dir)
    ledger = Ledger(job, session, store, attempt)
    for point in job.points:
        for arm in job.arms:
            if ledger.pending(point, [arm.name]):
                row = sample_row(job, session, point, arm, "error", reason=f"not measured: {reason}")
                row.flags = [RETRY]
                store.append(row)
