"""Published claims about Lily, as data: what was said, where, against what.

Nothing here was measured by this project. A published figure stands beside a measured one with the device of each,
never in its place. A ratio is a statement about two programs, so the schema refuses one whose baseline has no version:
one MLX release took back most of the published prefill lead.

Two kinds of entry. A `Claim` is one sentence: an effect, a rate, or a finding without a figure. A `Table` holds rates
of both programs by context, from which ratios follow.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ablations.arms import ArmError, toggle

Phase = Literal["prefill", "decode"]
Quantity = Literal["ratio", "tokens_per_second", "gigabytes_per_second", "share", "count"]


class CatalogueError(ValueError):
    """A claim that lacks what makes it checkable; the message names claim and field."""


@dataclass(frozen=True)
class Baseline:
    """What a figure was taken against.

    program: ``"mlx_lm"`` or ``"lily"`` (Lily without the change). version: of the program; for Lily, in words, which
    of its builds. mlx: version of MLX under it; None only for Lily, which does not use MLX.
    """

    program: Literal["mlx_lm", "lily"]
    version: str
    mlx: str | None = None


@dataclass(frozen=True)
class Claim:
    """One published sentence.

    Attributes:
        value: the figure in units of `quantity` (a ratio above 1 is faster, a share lies between 0 and 1), or None
            for a finding in words. `finding` says it in words either way.
        phase, contexts: where it was measured; None and empty if not said. Contexts in tokens.
        baseline: what a ratio is against. device, source: whose machine, whose words.
        rounds: repetitions, None if not said. prompt: kind of prompt, ``"not said"`` if so.
        on_top_of: toggles already on when it was measured; None if not said.
        toggle, arm, reference: the question that tests it here: `toggle` at value `arm` against value `reference`.
        fields: engine fields of the arm beside the toggle.
    """

    name: str
    finding: str
    quantity: Quantity
    value: float | None
    phase: Phase | None
    contexts: tuple[int, ...]
    source: str
    device: str
    baseline: Baseline | None = None
    rounds: int | None = None
    prompt: str = "not said"
    on_top_of: tuple[str, ...] | None = None
    toggle: str | None = None
    arm: str = "on"
    reference: str = "off"
    fields: Mapping[str, Any] = field(default_factory=dict)
    worked: bool = True

    def __post_init__(self) -> None:
        """Raises `CatalogueError` for a claim that cannot be checked."""
        for name in ("name", "finding", "source", "device", "prompt"):
            if not getattr(self, name):
                raise CatalogueError(f"claim {self.name!r}: {name} is empty")
        if self.value is not None and not (math.isfinite(self.value) and self.value > 0):
            raise CatalogueError(f"claim {self.name}: value is {self.value!r}; it must be finite and above 0")
        if self.quantity == "share" and self.value is not None and self.value > 1:
            raise CatalogueError(f"claim {self.name}: a share of {self.value} is above 1")
        if any(context <= 0 for context in self.contexts):
            raise CatalogueError(f"claim {self.name}: a context of {min(self.contexts)} tokens is not above 0")
        if self.quantity == "ratio" and self.value is not None:
            _require_baseline(self.name, self.baseline)
        self._require_toggles()

    def _require_toggles(self) -> None:
        try:
            for name in self.on_top_of or ():
                toggle(name)
            if self.toggle is not None:
                toggle(self.toggle).key(self.arm)
                toggle(self.toggle).key(self.reference)
        except ArmError as error:
            raise CatalogueError(f"claim {self.name}: {error}") from None


def _require_baseline(name: str, baseline: Baseline | None) -> None:
    """A ratio needs to say what it is against, down to the version."""
    if baseline is None:
        raise CatalogueError(f"claim {name}: a ratio without a baseline; name the program and its version")
    if not baseline.version:
        raise CatalogueError(f"claim {name}: a ratio without its baseline's version")
    if baseline.program == "mlx_lm" and not re.fullmatch(r"\d+\.\d+\.\d+", baseline.mlx or ""):
        raise CatalogueError(f"claim {name}: a ratio to MLX-LM without the version of MLX (got {baseline.mlx!r})")


@dataclass(frozen=True)
class TableRow:
    """Rates in tokens a second at one context (tokens)."""

    context: int
    lily_decode: float
    lily_prefill: float
    mlx_decode: float
    mlx_prefill: float

    def ratio(self, phase: Phase) -> float:
        """Lily over MLX-LM at this context."""
        return self.lily_decode / self.mlx_decode if phase == "decode" else self.lily_prefill / self.mlx_prefill


@dataclass(frozen=True)
class Table:
    """Rates of both programs by context, of one report. `statistic` is what one figure is of its rounds."""

    name: str
    source: str
    device: str
    system: str
    baseline: Baseline
    rounds: int
    statistic: str
    decode_tokens: int
    prompt: str
    prefill_includes: str
    rows: tuple[TableRow, ...]

    def __post_init__(self) -> None:
        """Raises `CatalogueError` without the baseline's versions, or for rates that are not above 0."""
        _require_baseline(self.name, self.baseline)
        contexts = [row.context for row in self.rows]
        if contexts != sorted(set(contexts)):
            raise CatalogueError(f"table {self.name}: contexts must rise without repeats, got {contexts}")
        for row in self.rows:
            if min(row.lily_decode, row.lily_prefill, row.mlx_decode, row.mlx_prefill) <= 0:
                raise CatalogueError(f"table {self.name}: a rate at {row.context} is not above 0")


# -- sources --------------------------------------------------------------------------------------

_PRESS = "press articles of 1 and 2 September 2026"
_REPOSITORY = "perplexityai/pplx-garden, folder lily, commit f263d07"
_M5_MAX = "Apple M5 Max, 40 GPU cores, 128 GB"
_ITSELF = Baseline("lily", "its build of September 2026 without the change")
_NO_GAIN = "no measurable gain"
_PRESS_CONTEXTS = (256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 128_000)
"""As the articles round them; the repository's tables end at 131,072."""

CLAIMS: tuple[Claim, ...] = (
    # The press names no MLX version behind its averages, so they stand as rates, not as ratios.
    Claim(
        "headline_prefill_lily",
        "mean prefill rate over ten contexts",
        "tokens_per_second",
        4156,
        "prefill",
        _PRESS_CONTEXTS,
        _PRESS,
        _M5_MAX,
    ),
    Claim(
        "headline_prefill_mlx_lm",
        "mean prefill rate of MLX-LM over ten contexts, version not named",
        "tokens_per_second",
        3388,
        "prefill",
        _PRESS_CONTEXTS,
        _PRESS,
        _M5_MAX,
    ),
    Claim(
        "headline_decode_lily",
        "mean decode rate over ten contexts",
        "tokens_per_second",
        170.0,
        "decode",
        _PRESS_CONTEXTS,
        _PRESS,
        _M5_MAX,
    ),
    Claim(
        "headline_decode_mlx_lm",
        "mean decode rate of MLX-LM over ten contexts, version not named",
        "tokens_per_second",
        126.4,
        "decode",
        _PRESS_CONTEXTS,
        _PRESS,
        _M5_MAX,
    ),
    # What worked.
    Claim(
        "packed_dequant",
        "77.4 % faster (the second article gives the figure to several changes together)",
        "ratio",
        1.774,
        "prefill",
        (512,),
        _PRESS,
        _M5_MAX,
        _ITSELF,
        toggle="packed_dequant",
    ),
    Claim(
        "gpu_routing",
        "a further 89 % (the second article's words read as a share of time)",
        "ratio",
        1.89,
        "prefill",
        (512,),
        _PRESS,
        _M5_MAX,
        _ITSELF,
        on_top_of=("packed_dequant",),
        toggle="gpu_routing",
    ),
    Claim(
        "single_submission",
        "the prefill is one command buffer; its part of the 89 % is not told apart",
        "ratio",
        None,
        "prefill",
        (512,),
        _PRESS,
        _M5_MAX,
        on_top_of=("packed_dequant", "gpu_routing"),
        toggle="single_submission",
    ),
    Claim(
        "tile_rows",
        "13.2 % faster with 32 rows and four simdgroups than with 16 rows",
        "ratio",
        1.132,
        "prefill",
        (2048,),
        _PRESS,
        _M5_MAX,
        _ITSELF,
        on_top_of=("packed_dequant", "gpu_routing"),
        toggle="tile_rows",
        arm="32",
        reference="16",
    ),
    Claim(
        "gdn_scan",
        "another 5.6 % with the state in registers",
        "ratio",
        1.056,
        "prefill",
        (2048,),
        _PRESS,
        _M5_MAX,
        _ITSELF,
        on_top_of=("packed_dequant", "gpu_routing", "tile_rows"),
        toggle="gdn_scan",
        arm="registers",
        reference="recurrence",
    ),
    Claim(
        "gqa_packing",
        "23.8 % faster with four query heads a fetch",
        "ratio",
        1.238,
        "decode",
        (32_768,),
        _PRESS,
        _M5_MAX,
        _ITSELF,
        toggle="gqa_packing",
        arm="4",
        reference="1",
    ),
    *(
        Claim(
            f"fixed_block_layout_{context // 1024}k",
            f"{value - 1:.1%} faster with a fixed number of key blocks",
            "ratio",
            value,
            "decode",
            (context,),
            _PRESS,
            _M5_MAX,
            _ITSELF,
            on_top_of=("gqa_packing",),
            toggle="fixed_block_layout",
        )
        for context, value in ((32_768, 1.077), (65_536, 1.274), (131_072, 1.402))
    ),
    *(
        Claim(
            f"coalesced_{part}_{side}",
            f"{part} reads of the cache, {words}",
            "gigabytes_per_second",
            value,
            "decode",
            (),
            _PRESS,
            _M5_MAX,
            toggle="coalesced_cache",
        )
        for part, before, after in (("key", 33.8, 47.9), ("value", 42.0, 61.8))
        for side, words, value in (("before", "lanes apart", before), ("after", "lanes together", after))
    ),
    Claim(
        "device_token",
        "the chosen token stays on the device; no figure given",
        "ratio",
        None,
        "decode",
        (),
        _PRESS,
        _M5_MAX,
        toggle="device_token",
    ),
    # What did not work.
    Claim(
        "speculative",
        "single-request decode 18 % slower",
        "ratio",
        0.82,
        "decode",
        (),
        _PRESS,
        _M5_MAX,
        _ITSELF,
        toggle="speculative",
        arm="mtp",
        worked=False,
    ),
    # Both arms draft; they differ in the vocabulary of the drafter alone.
    Claim(
        "draft_vocab",
        "the drafter is faster, end to end nothing changes",
        "ratio",
        None,
        "decode",
        (),
        _PRESS,
        _M5_MAX,
        on_top_of=("speculative",),
        fields={"speculative.draft_vocab": 32_768},
        worked=False,
    ),
    Claim(
        "fewer_launches",
        _NO_GAIN,
        "ratio",
        None,
        "decode",
        (),
        _PRESS,
        _M5_MAX,
        toggle="fusion",
        arm="partial",
        worked=False,
    ),
    Claim(
        "broader_fusion",
        _NO_GAIN,
        "ratio",
        None,
        "decode",
        (),
        _PRESS,
        _M5_MAX,
        toggle="fusion",
        arm="full",
        reference="partial",
        worked=False,
    ),
    Claim(
        "phase_overlap",
        _NO_GAIN,
        "ratio",
        None,
        # Its phase was not said; the toggle overlaps in prefill.
        "prefill",
        (),
        _PRESS,
        _M5_MAX,
        toggle="phase_overlap",
        worked=False,
    ),
    *(
        Claim(
            f"larger_prefill_tiles_{rows}",
            _NO_GAIN,
            "ratio",
            None,
            "prefill",
            (),
            _PRESS,
            _M5_MAX,
            on_top_of=("packed_dequant", "gpu_routing"),
            toggle="tile_rows",
            arm=rows,
            reference="32",
            worked=False,
        )
        for rows in ("64", "128")
    ),
    # Facts of one machine that have no arm.
    Claim(
        "expert_share",
        "expert products take about 90 % of prefill time",
        "share",
        0.90,
        "prefill",
        (),
        _PRESS,
        _M5_MAX,
    ),
    Claim("decode_launches", "kernel launches of one decode step", "count", 795, "decode", (), _PRESS, _M5_MAX),
    Claim("decode_stages", "sequential stages of one decode step", "count", 555, "decode", (), _PRESS, _M5_MAX),
    # The released code is another step than the one in the press.
    *(
        Claim(f"decode_{what}_released", words, "count", value, "decode", (), _REPOSITORY, "read, not run")
        for what, words, value in (
            ("launches", "kernel launches of one decode step beyond 256 tokens, counted in the released source", 605),
            ("stages", "barriers of one decode step beyond 256 tokens, counted in the released source", 425),
        )
    ),
    *(
        Claim(
            f"read_rate_{place}",
            "core matrix operations against the fastest sustained read",
            "share",
            value,
            None,
            (),
            _PRESS,
            _M5_MAX,
        )
        for place, value in (("first", 0.979), ("second", 0.903))
    ),
    # Quality, teacher-forced over 192 positions, reference not named.
    Claim(
        "top1_agreement",
        "same top-ranked token at 185 of 192 positions, reference not named",
        "share",
        0.9635,
        None,
        (192,),
        _PRESS,
        _M5_MAX,
    ),
    Claim(
        "perplexity_increase",
        "perplexity 0.04 % higher over 192 positions, reference not named",
        "share",
        0.0004,
        None,
        (192,),
        _PRESS,
        _M5_MAX,
    ),
)


def _table(mlx: str, rows: tuple[tuple[float, ...], ...]) -> Table:
    return Table(
        name=f"lily_against_mlx_{mlx}",
        source=_REPOSITORY,
        device=_M5_MAX,
        system="macOS 27.0",
        baseline=Baseline("mlx_lm", "0.31.3", mlx),
        rounds=2,
        statistic="median",
        decode_tokens=64,
        prompt="lily",
        prefill_includes="time to the first token, the first decode step submitted; MLX-LM also computes "
        "full-vocabulary log-probabilities, Lily does not",
        rows=tuple(TableRow(int(context), *rates) for context, *rates in rows),
    )


# context, Lily decode, Lily prefill, MLX-LM decode, MLX-LM prefill
TABLES: tuple[Table, ...] = (
    _table(
        "0.31.2",
        (
            (256, 194.2, 2875.7, 146.9, 1923.7),
            (512, 193.7, 3872.0, 146.5, 2693.7),
            (1024, 193.8, 4738.9, 144.9, 3903.1),
            (2048, 190.2, 5275.8, 143.6, 4688.0),
            (4096, 182.6, 5728.8, 141.2, 4690.1),
            (8192, 179.9, 5456.0, 133.9, 4518.7),
            (16_384, 166.3, 4903.2, 124.5, 4104.9),
            (32_768, 150.5, 3884.0, 116.8, 3355.0),
            (65_536, 126.0, 2830.4, 96.6, 2428.7),
            (131_072, 93.7, 1781.7, 74.5, 1525.9),
        ),
    ),
    _table(
        "0.32.2",
        (
            (256, 194.7, 2866.6, 148.5, 2536.4),
            (512, 193.8, 3859.9, 149.5, 3309.5),
            (1024, 193.3, 4734.6, 148.1, 4471.7),
            (2048, 190.4, 5274.3, 147.6, 5121.9),
            (4096, 182.8, 5724.4, 145.6, 5165.7),
            (8192, 180.5, 5457.6, 136.8, 5031.8),
            (16_384, 167.0, 4968.5, 129.6, 4722.5),
            (32_768, 151.1, 3927.5, 118.2, 3963.7),
            (65_536, 125.4, 2752.5, 98.5, 3051.1),
            (131_072, 92.7, 1792.7, 75.0, 2237.5),
        ),
    ),
)


def claim(name: str) -> Claim:
    """The claim of that name.

    Raises:
        CatalogueError: no such claim.
    """
    for entry in CLAIMS:
        if entry.name == name:
            return entry
    raise CatalogueError(f"no published claim is called {name!r}; known: {', '.join(c.name for c in CLAIMS)}")


def claims_about(name: str) -> tuple[Claim, ...]:
    """All claims that a toggle's contrast tests, in order; empty for a toggle nothing was published about.

    Raises:
        ArmError: no such toggle.
    """
    return tuple(entry for entry in CLAIMS if entry.toggle == toggle(name).name)


def table(mlx: str) -> Table:
    """The ten-point table taken against that version of MLX.

    Raises:
        CatalogueError: no such table.
    """
    for entry in TABLES:
        if entry.baseline.mlx == mlx:
            return entry
    known = ", ".join(str(entry.baseline.mlx) for entry in TABLES)
    raise CatalogueError(f"no published table against MLX {mlx}; known: {known}")
