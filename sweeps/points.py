"""The plan's plain data: arms, points and the job a worker process is handed (as JSON).

A job is everything a worker needs: it never reads Hydra. Paths in it are absolute.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from sweeps.rows import SampleRow, Status

FRONTIERS = (256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
"""The ten context lengths of a full sweep, in tokens."""

APART = frozenset({"llama_bench", "openai"})
"""Subjects that are measured apart: they order and time their own windows, and stand in no contrast."""


@dataclass
class Arm:
    """One configuration of one subject. `config` is EngineConfig as nested plain values (empty for other subjects)."""

    name: str
    subject: Literal["engine", "mlx_lm", "llama_bench", "openai", "stub"]
    config: dict[str, Any] = field(default_factory=dict)
    toggles: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    hash: str = ""
    aa: bool = False


def drafts(arm: Arm) -> bool:
    """Whether an arm drafts tokens."""
    return arm.config.get("speculative", {}).get("drafter", "off") != "off"


@dataclass
class Contrast:
    """A question: is `arm` faster than `reference`? Names of arms in the same job.

    about: what it tests, lists by word: ``toggles``, ``directions``, ``claims`` (of the catalogue), ``ladder`` (step).
    """

    name: str
    arm: str
    reference: str
    about: dict[str, list[str]] = field(default_factory=dict)


@dataclass
class Point:
    """One cell to measure: phase and frontier for all arms of the job, with its blocks.

    key: hash of the settings that make the result what it is (model, prompt, arms, phase, frontier, tokens).
    blocks: paired blocks a session. windows: repeated windows of `decode_tokens` inside a slot (CPU: many short ones).
    straight: fresh prompt for each trial (True) or the walk (False). skip: arm name to reason, known beforehand.
    """

    key: str
    phase: Literal["prefill", "decode"]
    frontier: int
    blocks: int
    decode_tokens: int = 64
    straight: bool = True
    skip: dict[str, str] = field(default_factory=dict)
    forecast_seconds: float = 0.0
    forecast_bytes: int = 0


@dataclass
class Job:
    """All that one run measures, in the order it will be measured; written as ``job.json`` in the run folder."""

    run_dir: str
    run_id: str
    model: dict[str, Any]
    prompt: dict[str, Any]
    arms: list[Arm]
    contrasts: list[Contrast]
    points: list[Point]
    sessions: int
    seed: int
    budget_seconds: float
    cap_seconds: float
    settings: dict[str, Any] = field(default_factory=dict)
    argv: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    config_hash: str = ""


def sample_row(
    job: Job, session: int, point: Point, arm: Arm, status: Status, *, block: int = -1, slot: int = -1, **fields: Any
) -> SampleRow:
    """A row of `arm` at `point`, by default one that stands for the whole point; `fields` are those of `SampleRow`."""
    return SampleRow(
        run_id=job.run_id,
        session=session,
        point=point.key,
        arm=arm.name,
        arm_hash=arm.hash,
        subject=arm.subject,
        phase=point.phase,
        frontier=point.frontier,
        block=block,
        slot=slot,
        status=status,
        **fields,
    )
