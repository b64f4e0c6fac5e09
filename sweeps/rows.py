"""The rows a run writes: three tables of JSON Lines, schema 1.

`runs` has one row per worker process, `samples` one per timed window, `contrasts` one per question answered.
Rates are never stored; readers derive them with `tokens_per_second`. No MLX here: reports read rows anywhere.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

SCHEMA = 1
"""Version of the row format; a reader refuses rows of another version by name."""

Status = Literal["ok", "skipped", "oom", "timeout", "error"]
Phase = Literal["prefill", "decode"]


class RowError(ValueError):
    """A row of another schema version, or one that lacks a field."""


@dataclass
class RunRow:
    """One worker process: who ran what, where. Sizes in bytes, times in ISO 8601 UTC.

    `machine` holds chip, device, cores, memory, os, paravirtual, versions of python, mlx, mlx_lm, …;
    `conditions` holds what may change: power, low_power, thermal, swap, load, wired_limit, clock flags.
    """

    run_id: str
    session: int
    started: str
    argv: list[str]
    config: dict[str, Any]
    config_hash: str
    git: dict[str, Any]
    machine: dict[str, Any]
    conditions: dict[str, Any]
    model: dict[str, Any]
    prompt: dict[str, Any]
    project_version: str
    schema: int = SCHEMA


@dataclass
class SampleRow:
    """One timed window of one arm.

    Attributes:
        point: key of the point (hash of its settings), so that a rerun skips what is finished.
        block, slot: paired block number and position inside it (``ABBA`` gives slots 0 to 3); -1 = not in a block.
        phase: prefill or decode. frontier: context length in tokens.
        work_tokens: tokens the window's time is divided by: prompt tokens, or gaps between decoded tokens.
        elapsed_ns: drained wall time of the window. enqueue_ns: host time until everything was submitted.
        peak_bytes, active_bytes, footprint_bytes: MLX peak and active, process resident size.
        least_bytes, least_flops: what the work must at least move and compute.
        executed: list of {op, variant, tile, calls}. check: quality guard {name, passed, …} or {}.
        chunks: chunk lengths the prefill ran. flags: short words such as hot, loaded, clock_jump, aa, warm_capped.
        tokens_hash: hash of the greedy token ids of the window.
        extra: subject-specific facts (distinct experts, cached_tokens, first_token_ns…).
        series: name of the per-token series in the safetensors file beside the rows, or None.
    """

    run_id: str
    session: int
    point: str
    arm: str
    arm_hash: str
    subject: str
    phase: Phase
    frontier: int
    block: int
    slot: int
    status: Status
    reason: str | None = None
    work_tokens: int = 0
    elapsed_ns: int | None = None
    enqueue_ns: int | None = None
    peak_bytes: int | None = None
    active_bytes: int | None = None
    footprint_bytes: int | None = None
    least_bytes: int | None = None
    least_flops: int | None = None
    chunks: list[int] = field(default_factory=list)
    executed: list[dict[str, Any]] = field(default_factory=list)
    check: dict[str, Any] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    tokens_hash: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    series: str | None = None
    schema: int = SCHEMA


@dataclass
class ContrastRow:
    """One question answered: arm against reference arm, at one phase and frontier.

    ratio > 1 means the arm is faster (ratio of rates). low, high: 95 % interval; low90, high90: the 90 % one.
    verdict: faster, slower, same, unclear, blocked, unsupported. unit: ``session`` or ``block`` (this process only).
    detectable: smallest effect (as a ratio above 1) that this run could have seen. method: words for the reader.
    """

    run_ids: list[str]
    contrast: str
    arm: str
    reference: str
    phase: Phase
    frontier: int
    ratio: float | None
    low: float | None
    high: float | None
    low90: float | None
    high90: float | None
    units: int
    unit: Literal["session", "block"]
    margin: float
    verdict: str
    reason: str | None
    detectable: float | None
    method: str
    check: dict[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA


def tokens_per_second(row: SampleRow) -> float | None:
    """Rate of a window in tokens a second, or None where there is no time or no work to divide."""
    if row.status != "ok" or not row.elapsed_ns or row.elapsed_ns <= 0 or row.work_tokens <= 0:
        return None
    return row.work_tokens / (row.elapsed_ns / 1e9)


def to_json(row: RunRow | SampleRow | ContrastRow) -> dict[str, Any]:
    """The row as plain values."""
    return dataclasses.asdict(row)


def from_json(kind: type, values: dict[str, Any]) -> Any:
    """Rebuild a row of dataclass `kind`; unknown extra keys are refused.

    Raises:
        RowError: another schema version, a missing or an unknown field.
    """
    if not isinstance(values, dict):
        raise RowError(f"{kind.__name__}: a row is an object of names and values, not {type(values).__name__}")
    version = values.get("schema")
    if version != SCHEMA:
        raise RowError(f"{kind.__name__} has schema version {version!r}; this program reads version {SCHEMA}")
    known = {f.name for f in dataclasses.fields(kind)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise RowError(f"{kind.__name__} has unknown fields: {', '.join(unknown)}")
    try:
        return kind(**values)
    except TypeError as error:
        raise RowError(f"{kind.__name__}: {error}") from None
