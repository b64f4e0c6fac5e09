"""Paired statistics: from the rates of ABBA blocks to a ratio with an interval.

The chain, in the order of this file:

1. `block_log_ratios`: within one block, the median rate of each arm, and the log of their ratio. Both arms saw
   the same minutes, so drift of the machine cancels to first order (exactly, if linear, in ABBA and BAAB).
2. `paired_ratio`: a session's value is the mean of its blocks; the effect is ``exp`` of the mean over sessions.
   Sessions are fresh processes and the unit of the interval, because memory layout, clocks and heat differ between
   processes by more than blocks within one can show. With one session the blocks are the unit and the interval
   speaks of this process only.
3. `aa_margin`: how far two identical arms come apart on this machine, hence what counts as no difference.
4. `detectable_ratio`, `slowdown_p`, `gate_stage`, `confirm_stage`: what a run could have seen, and the gate's test.

All logs are natural. A ratio above 1 means that the arm is faster than its reference. A margin of 0.01 means the
band from 1/1.01 to 1.01, which is symmetric in logs: swapping the arms swaps the verdict and nothing else.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy import special, stats

Unit = Literal["session", "block"]

LEAST_MARGIN = 0.01
"""No margin is narrower than 1 %: below that, code layout alone moves a rate."""

MOST_MARGIN = 0.10
"""Above this margin no two arms are called the same: the run cannot tell."""

POWER = 0.80
"""Probability of a decided verdict for which the detectable effect is stated."""

_AUTOCORRELATION_BLOCKS = 20
_MAX_AUTOCORRELATION = 0.9
_BOOTSTRAP_UNITS = 20
_AA_OWN_ONLY = 5
_AA_EMPIRICAL = 20


class StatisticsError(ValueError):
    """Values that no ratio can be made of; the message names which and why."""


# -- blocks ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Window:
    """The rate of one timed window, in tokens a second, and where it stood."""

    session: int
    block: int
    arm: str
    rate: float


def block_log_ratio(arm: Sequence[float], reference: Sequence[float]) -> float:
    """Log of the ratio of median rates within one block.

    Args:
        arm, reference: rates of the block's windows (any positive unit, the same for both).

    Raises:
        StatisticsError: an empty side, or a rate that is zero, negative or not finite.
    """
    _require_rates(arm, "arm")
    _require_rates(reference, "reference")
    return math.log(float(np.median(arm)) / float(np.median(reference)))


def block_log_ratios(windows: Iterable[Window], arm: str, reference: str) -> tuple[list[list[float]], list[str]]:
    """Log ratios of all whole blocks, by session in order, and a reason for each block left out.

    A block that lost a window of one arm is left out: unequal counts no longer cancel drift. Sessions that keep
    no block are absent from the result.

    Raises:
        StatisticsError: a rate that is zero, negative or not finite, named with its session and block.
    """
    rates: dict[tuple[int, int], dict[str, list[float]]] = defaultdict(lambda: {arm: [], reference: []})
    for window in windows:
        if window.arm in (arm, reference):
            rates[window.session, window.block][window.arm].append(window.rate)
    sessions: dict[int, list[float]] = defaultdict(list)
    dropped: list[str] = []
    for (session, block), sides in sorted(rates.items()):
        counts = len(sides[arm]), len(sides[reference])
        if counts[0] != counts[1]:
            dropped.append(f"session {session} block {block}: {counts[0]} windows of {arm}, {counts[1]} of {reference}")
            continue
        try:
            sessions[session].append(block_log_ratio(sides[arm], sides[reference]))
        except StatisticsError as error:
            raise StatisticsError(f"session {session} block {block}: {error}") from None
    return list(sessions.values()), dropped


def _require_rates(rates: Sequence[float], side: str) -> None:
    if len(rates) == 0:
        raise StatisticsError(f"{side} has no rates")
    for index, rate in enumerate(rates):
        if not (math.isfinite(rate) and rate > 0):
            raise StatisticsError(f"{side} rate {index} is {rate!r}; a rate must be finite and above zero")


# -- the estimate ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """A paired ratio of rates and what is known about its uncertainty.

    Attributes:
        ratio: arm over reference; above 1 is faster. None without any block.
        low, high: 95 % interval. low90, high90: 90 % interval. None with fewer than two units.
        units, unit: number and kind of independent units behind the interval.
        detectable: smallest true ratio above 1 that would be called faster with 80 % probability, given the
            scatter seen and the margin.
        sd_block: SD of block log ratios within a session (pooled). sd_session: SD between sessions with the
            blocks' share taken out (0 if none is left). None where they cannot be told.
        blocks: blocks of each session.
        standard_error, df: of the mean log ratio, for tests built on it.
        method: what was computed and assumed, for the reader. reason: why there is no interval.
    """

    ratio: float | None
    low: float | None
    high: float | None
    low90: float | None
    high90: float | None
    units: int
    unit: Unit
    detectable: float | None
    sd_block: float | None
    sd_session: float | None
    blocks: tuple[int, ...]
    standard_error: float | None
    df: float | None
    method: str
    reason: str | None = None


def paired_ratio(blocks: Sequence[Sequence[float]], unit: Unit | None = None, margin: float = LEAST_MARGIN) -> Estimate:
    """The effect of an arm from its block log ratios.

    Args:
        blocks: one sequence of block log ratios per session, in the order of time.
        unit: what the interval is over; default: sessions if there are two or more, else blocks.
        margin: the equivalence margin that `detectable` is stated for.

    Over sessions: a t interval on the session means, each session with equal weight; it assumes sessions to be
    independent. Over blocks: a t interval on the blocks of one session. Neighbouring blocks share heat and load,
    so from 20 blocks up the standard error and the degrees of freedom use the effective number of blocks
    ``n (1 - r) / (1 + r)``, where r is the lag-1 autocorrelation (corrected for its bias in short series, never
    below 0); that assumes a first-order process. Below 20 blocks r cannot be told and independence is assumed.

    Both lean on the mean being near normal. Rare stalls that strike either arm alike leave the coverage of 60 blocks
    and of 5 sessions where it should be (simulated from recorded noise); a handful of blocks of one process with such
    stalls covers less than it says, which is one more reason for many short blocks.

    Raises:
        StatisticsError: a log ratio that is not finite; a margin below 0; `unit="block"` with several sessions.
    """
    if not (math.isfinite(margin) and margin >= 0):
        raise StatisticsError(f"margin is {margin!r}; it must be finite and at least 0")
    sessions = [np.asarray(session, dtype=np.float64) for session in blocks if len(session)]
    for s, session in enumerate(sessions):
        if not np.isfinite(session).all():
            bad = int(np.flatnonzero(~np.isfinite(session))[0])
            raise StatisticsError(f"session {s} block {bad}: log ratio is {session[bad]!r}, which is not finite")
    unit = unit or ("session" if len(sessions) > 1 else "block")
    if unit == "block" and len(sessions) > 1:
        raise StatisticsError(
            f"unit 'block' speaks of one process, but there are {len(sessions)} sessions; use unit 'session'"
        )
    if unit == "session":
        values = np.array([session.mean() for session in sessions])
        correlation, method = 0.0, "t interval over sessions of the mean block log ratio"
    else:
        values = sessions[0] if sessions else np.empty(0)
        correlation, method = _block_method(values)
    return _estimate(values, unit, margin, correlation, method, sessions)


def _block_method(values: np.ndarray) -> tuple[float, str]:
    """Autocorrelation to allow for, and the method in words."""
    words = "t interval over blocks of one session (this process only), "
    if len(values) < _AUTOCORRELATION_BLOCKS:
        return 0.0, words + "blocks taken as independent"
    correlation = autocorrelation(values)
    return correlation, words + f"first-order autocorrelation {correlation:.2f} allowed for"


def _estimate(
    values: np.ndarray, unit: Unit, margin: float, correlation: float, method: str, sessions: list[np.ndarray]
) -> Estimate:
    units = len(values)
    sd_block, sd_session = _components(sessions)
    counts = tuple(len(session) for session in sessions)
    if units < 2:
        reason = f"no {unit} to estimate from" if units == 0 else f"one {unit} gives no interval; at least two needed"
        ratio = float(np.exp(values[0])) if units else None
        return Estimate(
            ratio, None, None, None, None, units, unit, None, sd_block, sd_session, counts, None, None, method, reason
        )
    effective = units * (1 - correlation) / (1 + correlation)
    df = max(effective - 1, 1.0)
    mean, error = float(values.mean()), float(values.std(ddof=1)) / math.sqrt(effective)
    half95, half90 = (float(special.stdtrit(df, q)) * error for q in (0.975, 0.95))
    low, high, low90, high90 = (math.exp(mean + h) for h in (-half95, half95, -half90, half90))
    detectable = detectable_ratio(error, df, margin)
    return Estimate(
        math.exp(mean),
        low,
        high,
        low90,
        high90,
        units,
        unit,
        detectable,
        sd_block,
        sd_session,
        counts,
        error,
        df,
        method,
    )


def _components(sessions: list[np.ndarray]) -> tuple[float | None, float | None]:
    """SD of blocks within sessions (pooled), and of sessions beyond what their blocks explain."""
    freedom = sum(len(session) - 1 for session in sessions)
    if freedom < 1:
        return None, None
    within = sum(float(((session - session.mean()) ** 2).sum()) for session in sessions) / freedom
    if len(sessions) < 2:
        return math.sqrt(within), None
    between = float(np.var([session.mean() for session in sessions], ddof=1))
    share = within * float(np.mean([1 / len(session) for session in sessions]))
    return math.sqrt(within), math.sqrt(max(between - share, 0.0))


def autocorrelation(values: Sequence[float] | np.ndarray) -> float:
    """Lag-1 autocorrelation of a series, between 0 and 0.9; 0 for a constant or very short one.

    An estimated mean pulls the usual estimate down by about ``(1 + 4 r) / n``; that is undone here. Negative
    values are cut at 0: they would narrow the interval on weak evidence.
    """
    series = np.asarray(values, dtype=np.float64)
    n = len(series)
    deviations = series - series.mean() if n else series
    total = float((deviations**2).sum())
    if n < 6 or total == 0:
        return 0.0
    raw = float((deviations[:-1] * deviations[1:]).sum()) / total
    corrected = (raw + 1 / n) / (1 - 4 / n)
    return min(max(corrected, 0.0), _MAX_AUTOCORRELATION)


def detectable_ratio(standard_error: float, df: float, margin: float = LEAST_MARGIN) -> float | None:
    """Smallest true ratio above 1 called faster with 80 % probability.

    The verdict asks for the lower end of the 95 % interval beyond the margin, so this is the noncentrality at which
    a t statistic with `df` degrees of freedom passes its 97.5 % point with that probability, in standard errors of
    the log ratio. None if it is beyond what a number can hold.
    """
    critical = special.stdtrit(df, 0.975)
    noncentrality = float(special.nctdtrinc(df, 1 - POWER, critical))
    log_ratio = math.log1p(margin) + noncentrality * standard_error
    return math.exp(log_ratio) if log_ratio < 700 else None


def bootstrap_interval(
    values: Sequence[float],
    statistic: Callable[..., Any] = np.median,
    confidence: float = 0.95,
    seed: int = 0,
) -> tuple[float | None, float | None, str | None]:
    """BCa bootstrap interval, for what has no t interval: tails, memory, acceptance.

    Args:
        values: one value per unit; at least 20 for an interval.
        statistic: called as ``statistic(sample, axis=axis)``.

    Returns:
        low, high, and None, or None, None and the reason.

    Raises:
        StatisticsError: a value that is not finite.
    """
    sample = np.asarray(values, dtype=np.float64)
    if not np.isfinite(sample).all():
        bad = int(np.flatnonzero(~np.isfinite(sample))[0])
        raise StatisticsError(f"value {bad} is {sample[bad]!r}, which is not finite")
    if len(sample) < _BOOTSTRAP_UNITS:
        return None, None, f"{len(sample)} units; a bootstrap interval needs {_BOOTSTRAP_UNITS}"
    if np.ptp(sample) == 0:
        value = float(statistic(sample, axis=-1))
        return value, value, None
    result = stats.bootstrap(
        (sample,), statistic, confidence_level=confidence, method="BCa", rng=np.random.default_rng(seed)
    )
    low, high = float(result.confidence_interval.low), float(result.confidence_interval.high)
    if not (math.isfinite(low) and math.isfinite(high)):
        return None, None, "the values are too much alike for a bootstrap interval"
    return low, high, None


# -- margin ---------------------------------------------------------------------------------------


def aa_margin(own: Estimate | None, earlier: Sequence[float] = ()) -> float:
    """The equivalence margin: the larger of 1 % and half the 95 % range of A/A estimates.

    Args:
        own: this run's A/A estimate of the same design (phase, frontier, sessions, blocks).
        earlier: ratios of earlier A/A estimates of that design on this machine.

    With fewer than 5 estimates in all the range is that of this run's own: its 95 % half-width, or its distance
    from 1 if larger, since identical arms that came apart by 3 % cannot decide a difference of 2 %. From 5 to 19
    it is the t range about 0, the true value being known. From 20 up it is half the distance between the 2.5 and
    97.5 percentiles.

    Raises:
        StatisticsError: an earlier ratio that is zero, negative or not finite.
    """
    if len(earlier):
        _require_rates(earlier, "A/A")
    logs = [math.log(ratio) for ratio in earlier]
    if own is not None and own.ratio is not None:
        logs.append(math.log(own.ratio))
    if len(logs) >= _AA_EMPIRICAL:
        low, high = np.percentile(logs, [2.5, 97.5])
        half = float(high - low) / 2
    elif len(logs) >= _AA_OWN_ONLY:
        half = float(special.stdtrit(len(logs), 0.975)) * float(np.sqrt(np.mean(np.square(logs))))
    elif own is not None and own.ratio is not None:
        width = math.log(own.high / own.low) / 2 if own.high is not None and own.low is not None else 0.0
        half = max(width, abs(math.log(own.ratio)))
    else:
        half = max((abs(value) for value in logs), default=0.0)
    return max(LEAST_MARGIN, math.expm1(half))


# -- gate -----------------------------------------------------------------------------------------


def false_discovery(p_values: Sequence[float]) -> list[float]:
    """Benjamini-Hochberg adjusted p values, in the order given (empty for none).

    Raises:
        StatisticsError: a p value outside 0 to 1 or not a number.
    """
    for index, p in enumerate(p_values):
        if not 0 <= p <= 1:
            raise StatisticsError(f"p value {index} is {p!r}; it must lie between 0 and 1")
    return [float(p) for p in stats.false_discovery_control(p_values)] if len(p_values) else []


def slowdown_p(estimate: Estimate, margin: float) -> float | None:
    """One-sided p value against "no slower than the margin"; None if the estimate has no interval."""
    if estimate.ratio is None or estimate.standard_error is None or estimate.df is None:
        return None
    distance = math.log(estimate.ratio) + math.log1p(margin)
    if estimate.standard_error == 0:
        return 0.0 if distance < 0 else 1.0
    return float(special.stdtr(estimate.df, distance / estimate.standard_error))


@dataclass(frozen=True)
class GateStage:
    """One round of gate tests.

    adjusted: false-discovery adjusted p value by contrast. slower: contrasts found slower than their margin.
    untestable: contrasts without an interval, or not measured.
    """

    adjusted: dict[str, float]
    slower: tuple[str, ...]
    untestable: tuple[str, ...]


def gate_stage(estimates: Mapping[str, Estimate], margins: Mapping[str, float], rate: float = 0.05) -> GateStage:
    """Test every contrast for a slowdown beyond its margin, adjusted for how many were tested.

    Raises:
        StatisticsError: a contrast without a margin.
    """
    missing = sorted(set(estimates) - set(margins))
    if missing:
        raise StatisticsError(f"no margin for {', '.join(missing)}")
    tested = {name: slowdown_p(estimate, margins[name]) for name, estimate in estimates.items()}
    names = [name for name, p in tested.items() if p is not None]
    adjusted = dict(zip(names, false_discovery([p for p in tested.values() if p is not None])))
    slower = tuple(name for name in names if adjusted[name] <= rate)
    return GateStage(adjusted, slower, tuple(name for name, p in tested.items() if p is None))


def confirm_stage(
    first: GateStage, fresh: Mapping[str, Estimate], margins: Mapping[str, float], rate: float = 0.05
) -> GateStage:
    """Test what `first` found slower once more, on sessions that `first` has not seen.

    The fresh sessions are tested alone: pooling them with those that raised the suspicion would count its luck
    twice. A suspect that was not measured again is untestable.
    """
    again = {name: fresh[name] for name in first.slower if name in fresh}
    stage = gate_stage(again, margins, rate)
    unmeasured = tuple(name for name in first.slower if name not in fresh)
    return GateStage(stage.adjusted, stage.slower, stage.untestable + unmeasured)


# -- noise ----------------------------------------------------------------------------------------


def noise_from_samples(rows: Iterable[Mapping[str, Any]], arm: str, reference: str) -> dict[str, dict[str, Any]]:
    """What the noise of a machine looks like, from sample rows of two arms (best: an A/A pair).

    Args:
        rows: mappings with the fields of a sample row; rows that are not ok or in no block are passed over.

    Returns:
        By phase: ``sd_block``, ``sd_session`` (as in `Estimate`; pooled over frontiers), ``autocorrelation`` (mean
        over series) and ``blocks``, one list of block log ratios per frontier and session, in order of time.

    Raises:
        StatisticsError: no whole block of both arms, or a window without positive time and work.
    """
    windows: dict[tuple[str, int], list[Window]] = defaultdict(list)
    for row in rows:
        if row["status"] == "ok" and row["block"] >= 0 and row["arm"] in (arm, reference):
            windows[row["phase"], row["frontier"]].append(Window(row["session"], row["block"], row["arm"], _rate(row)))
    by_phase: dict[str, list[list[list[float]]]] = defaultdict(list)
    for (phase, _), group in sorted(windows.items()):
        sessions, _ = block_log_ratios(group, arm, reference)
        if sessions:
            by_phase[phase].append(sessions)
    if not by_phase:
        raise StatisticsError(f"no whole block holds both {arm} and {reference}")
    return {phase: _noise(groups) for phase, groups in by_phase.items()}


def _rate(row: Mapping[str, Any]) -> float:
    elapsed, work = row["elapsed_ns"], row["work_tokens"]
    if not elapsed or elapsed <= 0 or work <= 0:
        raise StatisticsError(
            f"session {row['session']} block {row['block']} {row['arm']}: elapsed_ns {elapsed!r} and "
            f"work_tokens {work!r} give no rate"
        )
    return work / (elapsed / 1e9)


def _noise(groups: list[list[list[float]]]) -> dict[str, Any]:
    components = [_components([np.asarray(session) for session in sessions]) for sessions in groups]
    series = [session for sessions in groups for session in sessions]
    return {
        "sd_block": _root_mean_square([block for block, _ in components if block is not None]),
        "sd_session": _root_mean_square([session for _, session in components if session is not None]),
        "autocorrelation": float(np.mean([autocorrelation(session) for session in series])),
        "blocks": series,
    }


def _root_mean_square(values: list[float]) -> float | None:
    return float(np.sqrt(np.mean(np.square(values)))) if values else None
