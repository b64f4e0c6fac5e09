"""Quality of every arm: perplexity, top-1 agreement and divergence against its reference arms, beside Lily's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ablations.catalogue import claim
from reports import text
from reports.cells import Study
from reports.facts import finite
from reports.tables import Column, Table

LEAST_POSITIONS = 192
"""Positions of the published check."""


def quality(study: Study) -> Table:
    """A row for each arm, phase and reference that its logits were held against, the published figures first."""
    columns = [
        Column("arm", "arm"),
        Column("reference", "against"),
        Column("phase", "path"),
        Column("positions", "positions", text.number, True),
        Column("perplexity", "perplexity", _increase, True),
        Column("perplexity_upper", "at most (95 %)", _increase, True),
        Column("top1", "same top-1", _share, True),
        Column("top1_outside_ties", "outside near-ties", _share, True),
        Column("kl_mean", "KL, mean (nats)", _small, True),
        Column("kl_p999", "KL, 99.9th pct", _small, True),
        Column("passed", "output right"),
    ]
    rows = list(_rows(study))
    empty = "No logits were compared in these rows: on random weights layers are compared instead (see the guard)."
    published = {
        "arm": "Lily, as published",
        "reference": "not named",
        "phase": text.ABSENT,
        "positions": LEAST_POSITIONS,
        "perplexity": 1 + (claim("perplexity_increase").value or 0),
        "top1": claim("top1_agreement").value,
        "passed": claim("top1_agreement").device,
    }
    caption = "Quality of each arm against what it was held against; change of perplexity, agreement, divergence"
    return Table("quality", caption, columns, [published, *rows] if rows else [], empty)


def _rows(study: Study) -> Iterator[dict[str, Any]]:
    seen: set[tuple[Any, ...]] = set()
    for sample in study.rows.samples:
        if "aa" in sample.flags:
            continue
        arm = study.label(sample.run_id, sample.arm)
        for check in (sample.check, *(sample.check.get("also") or [])):
            figures = check.get("figures") or {}
            ratio = finite(figures.get("perplexity_ratio"))
            reference = str(figures.get("reference") or "its reference")
            key = (arm, sample.phase, reference, figures.get("positions"), ratio)
            if ratio is None or key in seen:
                continue
            seen.add(key)
            yield _row(arm, sample.phase, reference, figures, check.get("passed"))
            first = figures.get("first_192")
            if isinstance(first, dict) and figures.get("positions") != LEAST_POSITIONS:
                yield _row(arm, sample.phase, reference, {**first, "positions": LEAST_POSITIONS}, None)


def _row(arm: str, phase: str, reference: str, figures: dict[str, Any], passed: Any) -> dict[str, Any]:
    return {
        "arm": arm,
        "reference": reference,
        "phase": phase,
        "positions": figures.get("positions"),
        "perplexity": figures.get("perplexity_ratio"),
        "perplexity_upper": figures.get("perplexity_ratio_upper"),
        "top1": figures.get("top1"),
        "top1_outside_ties": figures.get("top1_outside_ties"),
        "kl_mean": figures.get("kl_mean"),
        "kl_p999": figures.get("kl_p999"),
        "passed": {True: "yes", False: "NO"}.get(passed, "first of the above"),
    }


def _increase(value: Any) -> str:
    x = finite(value)
    return text.ABSENT if x is None else f"{100 * (x - 1):+.3f}{text.NBSP}%"


def _share(value: Any) -> str:
    x = finite(value)
    return text.ABSENT if x is None else f"{100 * x:.2f}{text.NBSP}%"


def _small(value: Any) -> str:
    x = finite(value)
    return text.ABSENT if x is None else f"{x:.2g}"
