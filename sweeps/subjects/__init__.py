"""The subjects of a sweep, built from a job's arms on one shared model.

`make` imports MLX only for arms that need it, so a job of stubs runs on any machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from sweeps.points import APART, Arm, Job
from sweeps.subjects.base import Subject, SubjectError

if TYPE_CHECKING:
    from sweeps.subjects.shared import Shared
    from sweeps.subjects.stub import Sleep

__all__ = ["make", "reachable", "share"]


def share(job: Job) -> Shared | None:
    """The model that the arms of `job` will share, not loaded yet; None if no arm needs one.

    Raises:
        SubjectError: the job names neither a folder nor a synthetic model.
    """
    kinds = {arm.subject for arm in job.arms}
    if not kinds & {"engine", "mlx_lm"}:
        return None
    from sweeps.subjects.shared import Shared, SharedElsewhere

    if any("checkout" in arm.options for arm in job.arms):
        return SharedElsewhere(job.model, baseline="mlx_lm" in kinds)
    # Random weights have a draft head where an arm asks for one; what else is drawn does not change with it.
    drafts = any(arm.config.get("speculative", {}).get("drafter") == "mtp" for arm in job.arms)
    return Shared({**job.model, **({"mtp": True} if drafts else {})}, baseline="mlx_lm" in kinds)


def make(arm: Arm, job: Job, shared: Shared | None = None, sleep: Sleep | None = None) -> Subject:
    """Build the subject of `arm`.

    Args:
        arm: what to build; `config` holds EngineConfig for the engine, `options` the rest.
        job: the job it belongs to.
        shared: the loaded model (`share`); needed by the engine and MLX-LM.
        sleep: how a stub spends time; None is the machine's clock.

    Raises:
        SubjectUnsupported: the arm cannot run on this device; its rows become `skipped` with this reason.
        SubjectOutOfMemory: the weights do not fit.
        SubjectError: an unknown subject or option.
    """
    if arm.subject == "stub":
        from sweeps.subjects.stub import Stub, StubOptions

        return Stub(StubOptions.from_dict(arm.options), sleep)
    if arm.subject in APART:
        raise SubjectError(f"arm {arm.name}: {arm.subject} is measured apart; use `measure` in its module")
    if shared is None:
        raise SubjectError(f"arm {arm.name}: {arm.subject} needs the shared model of the job")
    if arm.subject == "mlx_lm":
        return _mlx_lm(arm, shared)
    if arm.subject == "engine":
        return _engine(arm, job, shared)
    known = ", ".join(["engine", "mlx_lm", "stub", *sorted(APART)])
    raise SubjectError(f"arm {arm.name}: unknown subject {arm.subject!r}; known: {known}")


def reachable(job: Job) -> None:
    """Ask every endpoint of `job` a first question, so that one that is not there costs no run.

    Raises:
        SubjectError: one of them does not answer as it must.
    """
    from sweeps.subjects import openai

    for arm in job.arms:
        if arm.subject == "openai":
            openai.check(arm)


def _engine(arm: Arm, job: Job, shared: Shared) -> Subject:
    from sweeps.clock import SystemClock
    from sweeps.subjects.engine import EngineSubject
    from sweeps.subjects.remote import Remote
    from sweeps.subjects.slowed import Slowed

    subject: Subject = Remote(arm, job) if "checkout" in arm.options else EngineSubject.from_arm(arm, shared)
    slowdown = arm.options.get("slowdown")
    if slowdown is None:
        return subject
    # It passes on what it does not change, which a type checker cannot see.
    return cast(Subject, Slowed(subject, float(slowdown), SystemClock()))


def _mlx_lm(arm: Arm, shared: Shared) -> Subject:
    from sweeps.subjects.mlx_lm import MlxLm

    allowed = {"chunk", "speculative"}
    options: dict[str, Any] = dict(arm.options)
    if unknown := sorted(set(options) - allowed):
        known = ", ".join(sorted(allowed))
        raise SubjectError(f"arm {arm.name}: MLX-LM has no option {', '.join(unknown)}; known: {known}")
    return MlxLm(shared.lm_model, shared.config, **options)
