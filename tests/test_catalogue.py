"""The catalogue of published claims: complete, checkable, and true to its own published averages."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ablations.arms import ArmError, add_one_in
from ablations.catalogue import (
    CLAIMS,
    TABLES,
    Baseline,
    CatalogueError,
    Claim,
    claim,
    claims_about,
    table,
)


def ratio(**changes) -> Claim:
    fields = dict(
        name="c",
        finding="f",
        quantity="ratio",
        value=1.2,
        phase="decode",
        contexts=(256,),
        source="s",
        device="d",
        baseline=Baseline("mlx_lm", "0.31.3", "0.32.2"),
    )
    return Claim(**(fields | changes))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"baseline": None}, "claim c: a ratio without a baseline"),
        ({"baseline": Baseline("mlx_lm", "")}, "without its baseline's version"),
        ({"baseline": Baseline("mlx_lm", "0.31.3")}, "without the version of MLX"),
        ({"baseline": Baseline("mlx_lm", "0.31.3", "new")}, "without the version of MLX .got 'new'"),
        ({"device": ""}, "device is empty"),
        ({"value": float("nan")}, "value is nan"),
        ({"value": 0}, "value is 0"),
        ({"quantity": "share"}, "share of 1.2 is above 1"),
        ({"contexts": (0,)}, "context of 0"),
        ({"toggle": "gqa_paking"}, "did you mean gqa_packing"),
        ({"toggle": "gqa_packing", "arm": "3"}, "toggle.gqa_packing=3"),
        ({"on_top_of": ("nothing",)}, "toggle.nothing is no toggle"),
    ],
)
def test_schema_refuses_what_cannot_be_checked(changes, message):
    ratio()
    with pytest.raises(CatalogueError, match=message):
        ratio(**changes)


def test_a_table_without_its_version_or_with_bad_rows_is_refused():
    good = TABLES[0]
    with pytest.raises(CatalogueError, match="without the version of MLX"):
        dataclasses.replace(good, baseline=Baseline("mlx_lm", "0.31.3"))
    with pytest.raises(CatalogueError, match="rise without repeats"):
        dataclasses.replace(good, rows=good.rows[:1] * 2)
    with pytest.raises(CatalogueError, match="a rate at 256 is not above 0"):
        dataclasses.replace(good, rows=(dataclasses.replace(good.rows[0], mlx_decode=0),))


@pytest.mark.parametrize(
    "mlx, means, ratios",
    [
        ("0.31.2", (167.1, 4135, 126.9, 3383), (1.32, 1.22)),
        ("0.32.2", (167.2, 4136, 129.7, 3961), (1.29, 1.04)),
    ],
)
def test_tables_reproduce_their_published_means(mlx, means, ratios):
    rows = table(mlx).rows
    assert [row.context for row in rows] == [256 << i for i in range(10)]
    values = np.array([[r.lily_decode, r.lily_prefill, r.mlx_decode, r.mlx_prefill] for r in rows])
    found = values.mean(axis=0)
    assert found == pytest.approx(means, abs=0.51, rel=3e-4)
    assert (found[0] / found[2], found[1] / found[3]) == pytest.approx(ratios, abs=0.006)


def test_the_newer_table_shows_the_lead_lost_from_32k_up():
    lost = [row.context for row in table("0.32.2").rows if row.ratio("prefill") < 1]
    assert lost == [32_768, 65_536, 131_072]
    assert table("0.32.2").rows[-1].ratio("decode") == pytest.approx(1.24, abs=0.005)


def test_every_claim_with_a_toggle_is_a_question_that_can_be_built():
    for entry in CLAIMS:
        if entry.toggle is None:
            continue
        pair = add_one_in(entry.toggle, entry.arm, entry.reference, on_top_of=entry.on_top_of or ())
        assert not pair.impossible, entry.name
        assert entry.phase in pair.phases, entry.name


def test_all_that_was_published_is_there():
    names = [entry.name for entry in CLAIMS]
    assert len(set(names)) == len(names)
    worked = {
        "packed_dequant",
        "gpu_routing",
        "tile_rows",
        "gdn_scan",
        "gqa_packing",
        "fixed_block_layout",
        "coalesced_cache",
        "device_token",
    }
    assert worked <= {entry.toggle for entry in CLAIMS if entry.worked}
    failed = {entry.name for entry in CLAIMS if not entry.worked}
    assert failed == {
        "speculative",
        "draft_vocab",
        "fewer_launches",
        "broader_fusion",
        "phase_overlap",
        "larger_prefill_tiles_64",
        "larger_prefill_tiles_128",
    }
    assert [c.value for c in claims_about("fixed_block_layout")] == [1.077, 1.274, 1.402]
    assert claim("speculative").value == 0.82


def test_unknown_names_are_answered():
    with pytest.raises(CatalogueError, match="no published claim is called 'speed'"):
        claim("speed")
    with pytest.raises(CatalogueError, match="known: 0.31.2, 0.32.2"):
        table("0.30.0")
    with pytest.raises(ArmError, match="did you mean fusion"):
        claims_about("fuson")
