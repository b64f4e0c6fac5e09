"""What a Mac should reach, from bytes, stages and operations: predictions that the first run there confirms or refutes.

Nothing on the page was measured by this project. The model is as simple as can be and its numbers are on the page:

    decode   time of a token = least bytes / (share · bandwidth) + stages · cost of a stage
    prefill  time of a prompt = operations / (share · arithmetic) + bytes of the weights a chunk / (share · bandwidth)

The shares and the cost of a stage are fitted to rates that others published for one machine; rates of other programs
and machines, to which nothing was fitted, stand beside what the model says of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from ablations.catalogue import Table as Published
from ablations.catalogue import TableRow, claim, table
from engine.config import ModelConfig
from reports import text
from reports.load import ReportError
from reports.tables import Column, Table
from sweeps.least import least_by_op, least_work
from sweeps.points import FRONTIERS

FOLDER = Path(__file__).parent / "published"
LAUNCHES = FOLDER / "launches.json"
"""Launches and stages of a step on Metal by configuration and context; ``python -m sweeps.launches`` writes it."""

PAGE = FOLDER / "predictions.md"

CHUNK = 2048
"""Tokens of a prefill pass, as MLX-LM's and the engine's default."""

FITTED = "0.32.2"
"""The version of MLX against whose table the model is fitted."""

MODEL = ModelConfig()


@dataclass(frozen=True)
class Chip:
    """A chip by its public figures.

    Attributes:
        cores: of the GPU. bandwidth: peak, bytes a second. flops: peak of 16-bit matrix products, operations a second.
        accelerated: matrix products run in units of their own. source: where the figures come from.
    """

    name: str
    cores: int
    bandwidth: float
    flops: float
    accelerated: bool
    source: str


_SPECS = "cores and bandwidth: Apple's technical specifications"
CHIPS = (
    Chip("M1 Max", 32, 400e9, 10.4e12, False, f"{_SPECS}; arithmetic: float32 peak as commonly listed"),
    Chip("M3 Max", 40, 400e9, 14.1e12, False, f"{_SPECS}; arithmetic: float32 peak as commonly listed"),
    Chip("M4 Max", 40, 546e9, 18.4e12, False, f"{_SPECS}; arithmetic: float32 peak as commonly listed"),
    Chip(
        "M5 Max",
        40,
        614e9,
        70e12,
        True,
        f"{_SPECS}; arithmetic: about, from 1,024 16-bit multiply-adds a core and clock",
    ),
)
"""The Macs that are predicted. Before the M5, a matrix product runs at the rate of float32, whatever its type."""

M5_MAX = CHIPS[-1]
_M4_PRO = Chip("M4 Pro", 20, 273e9, 9.2e12, False, f"{_SPECS}; arithmetic: half an M4 Max")
_M3_ULTRA = Chip("M3 Ultra", 80, 819e9, 28.2e12, False, f"{_SPECS}; arithmetic: two M3 Max")

PLAIN_SHARE = 0.5
"""Assumed share of peak arithmetic that a prefill reaches without matrix accelerators."""

REPORTED = (
    ("DSPARK project, its MLX-LM baseline", _M4_PRO, "decode", 256, 86.9),
    ("DSPARK project", _M4_PRO, "prefill", 2048, 960.0),
    ("omlx project, before its change", _M3_ULTRA, "decode", 4096, 117.5),
    ("Mac-MLX project, mlx-swift", M5_MAX, "decode", 1536, 133.5),
    ("Mac-MLX project, mlx-swift", M5_MAX, "prefill", 1536, 2757.0),
)
"""Single rates reported for this geometry by programs on MLX: who, chip, phase, context (assumed where not said),
tokens a second."""


class Predictor:
    """The model with its numbers fitted. `steps`: by configuration and context (launches, stages) on Metal."""

    def __init__(self, steps: Mapping[str, Mapping[int, tuple[int, int]]], published: Published | None = None) -> None:
        self.steps = steps
        self.published = published or table(FITTED)

    @cached_property
    def decode_fit(self) -> tuple[float, float]:
        """Share of the bandwidth, and seconds of a stage: of Lily's decode rates, whose stages are known."""
        rows = self.published.rows
        moved = np.array([_token_bytes(row.context) for row in rows]) / M5_MAX.bandwidth
        stages = np.array([_lily_stages(row.context) for row in rows])
        times = np.array([1 / row.lily_decode for row in rows])
        one_over_share, stage = _fit(np.column_stack([moved, stages]), times)
        return 1 / one_over_share, stage

    @cached_property
    def prefill_fit(self) -> tuple[float, float]:
        """Shares of the arithmetic in products and in attention: of MLX-LM's prefill rates on the M5 Max."""
        rows = self.published.rows
        work = np.array([_prompt_flops(row.context) for row in rows]) / M5_MAX.flops
        times = np.array([row.context / row.mlx_prefill - self._weights(M5_MAX, row.context) for row in rows])
        products, attention = _fit(work, times)
        return 1 / products, 1 / attention

    def decode(self, chip: Chip, context: int, stages: float) -> float:
        """Tokens a second."""
        share, stage = self.decode_fit
        return 1 / (_token_bytes(context) / (share * chip.bandwidth) + stages * stage)

    def prefill(self, chip: Chip, context: int) -> float:
        """Tokens a second."""
        shares = self.prefill_fit if chip.accelerated else (PLAIN_SHARE, PLAIN_SHARE)
        work = sum(flops / (share * chip.flops) for flops, share in zip(_prompt_flops(context), shares, strict=True))
        return context / (work + self._weights(chip, context))

    def stages(self, configuration: str, context: int) -> int:
        """Stages of a step of ours on Metal."""
        return self.steps[configuration][context][1]

    def _weights(self, chip: Chip, context: int) -> float:
        """Seconds in which the chunks of a prompt read the weights."""
        passes, rest = divmod(context, CHUNK)
        lengths = [CHUNK] * passes + ([rest] if rest else [])
        moved = sum(least_work(MODEL, "prefill", length)[0] for length in lengths)
        return moved / (self.decode_fit[0] * chip.bandwidth)


def _fit(columns: np.ndarray, times: np.ndarray) -> tuple[float, float]:
    """Factors of two columns whose sum meets the times with the smallest relative error."""
    found = np.linalg.lstsq(columns / times[:, None], np.ones(len(times)), rcond=None)[0]
    return float(found[0]), float(found[1])


def _token_bytes(context: int) -> int:
    return least_work(MODEL, "decode", context, 1)[0]


def _prompt_flops(context: int) -> tuple[float, float]:
    """Operations of a prompt: all products, and attention over the context."""
    by_op = {op: flops for op, (_, flops) in least_by_op(MODEL, "prefill", context).items()}
    attention = by_op.pop("attention")
    return sum(by_op.values()), attention


def _lily_stages(context: int) -> float:
    """Sequential stages of Lily's released step: one combination fewer a layer up to 256 tokens."""
    stages = claim("decode_stages_released").value or 0
    return stages - (len(MODEL.attention_layers) if context <= 256 else 0)


# -- the page ----------------------------------------------------------------------------------------


def read_steps(path: Path = LAUNCHES) -> dict[str, dict[int, tuple[int, int]]]:
    """The counts that `python -m sweeps.launches` wrote.

    Raises:
        ReportError: the file is not there or holds something else.
    """
    try:
        told = json.loads(path.read_text(encoding="utf-8"))["steps"]
        return {name: {int(at): (int(n), int(s)) for at, (n, s) in by.items()} for name, by in told.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ReportError(
            f"{path}: no counts of launches ({error}); python -m sweeps.launches {path} writes them"
        ) from None


def predict(output: Path = PAGE, launches: Path = LAUNCHES) -> Path:
    """Write the page of predictions and return its path.

    Raises:
        ReportError: the counts are not there, or the page cannot be written.
    """
    page = render(Predictor(read_steps(launches)))
    try:
        output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ReportError(f"{output}: cannot be written ({error.strerror})") from None
    return output


def render(model: Predictor) -> str:
    """The page as Markdown."""
    parts = [_HEAD, _numbers(model)]
    for phase in ("decode", "prefill"):
        parts += [f"## {phase.capitalize()}, *predicted*", _rates(model, phase).markdown()]
    parts += [_CHECK, _errors(model), _beside(model, "decode").markdown(), _beside(model, "prefill").markdown()]
    return "\n\n".join([*parts, _reported(model).markdown()]) + "\n"


_HEAD = """# Predictions for Apple silicon

**Every rate of ours on this page is *predicted*: computed, never measured.** Nothing of this project has been timed on
a Mac yet. The page is here so that the first run on one of these machines confirms or refutes it; that run writes a
report of its own, and this page stays as it is. `python -m reports predict` makes it again."""

_CHECK = """## The model beside what others published

Published rates are those of their makers or users, on their machines; they are not results of this project. *Fitted*
columns gave the model its numbers and so prove nothing; the others are a check of it."""


def _numbers(model: Predictor) -> str:
    share, stage = model.decode_fit
    products, attention = model.prefill_fit
    source = model.published
    lines = [
        "decode: time of a token = least bytes / (share · bandwidth) + stages · cost of a stage",
        "prefill: time of a prompt = operations / (share · arithmetic) + bytes of the weights that each chunk reads / "
        f"(share · bandwidth), in chunks of {CHUNK:,} tokens",
        f"share of the bandwidth {share:.2f} and cost of a stage {stage * 1e6:.1f} µs: fitted to Lily's decode rates "
        f"on an {source.device} ({source.source}), whose stages are counted in its source; taken to hold on every chip",
        f"share of the arithmetic {products:.2f} in products and {attention:.2f} in attention: fitted to the prefill "
        f"rates of MLX-LM {source.baseline.version} on MLX {source.baseline.mlx} on that machine; on chips without "
        f"matrix accelerators {PLAIN_SHARE} of both is an assumption",
        "*fused* is a step of this engine's own kernels (`engine.decode.fusion=full`), *full* is what `engine=full` "
        "chooses before anything is tuned on the machine: MLX's ops",
        "16-bit activations, 4-bit weights, batch 1, greedy; a machine that slows down when warm is slower than this",
    ]
    columns = [
        Column("name", "chip"),
        Column("cores", "GPU cores", text.plain, True),
        Column("bandwidth", "GB/s", lambda x: text.number(x / 1e9), True),
        Column("flops", "TFLOP/s", lambda x: text.number(x / 1e12), True),
        Column("source", "source"),
    ]
    chips = Table("chips", "Public figures of the chips", columns, [vars(chip) for chip in CHIPS])
    how = "\n".join(f"- {line}" for line in lines)
    return "\n\n".join(["## How", how, chips.markdown(), _steps(model).markdown()])


def _steps(model: Predictor) -> Table:
    columns = [Column("name", "step of"), Column("context", "context"), _number("launches"), _number("stages")]
    rows = []
    for name, by_context in model.steps.items():
        for counts in dict.fromkeys(by_context.values()):
            at = [context for context, found in by_context.items() if found == counts]
            where = text.frontier_list(at, list(by_context))
            rows.append({"name": name, "context": where, "launches": counts[0], "stages": counts[1]})
    for name, suffix in (("Lily, as published", ""), ("Lily, released code", "_released")):
        values = {what: int(claim(f"decode_{what}{suffix}").value or 0) for what in ("launches", "stages")}
        rows.append({"name": name, "context": ""} | values)
    return Table("steps", "Launches and sequential stages of a decode step on Metal, ours predicted", columns, rows)


def _number(key: str, heading: str = "") -> Column:
    return Column(key, heading or key, text.number, True)


def _rates(model: Predictor, phase: str) -> Table:
    columns = [Column("context", "context", text.tokens, True)]
    rows = [{"context": context} for context in FRONTIERS]
    for chip in CHIPS:
        for name in ("fused", "full") if phase == "decode" else ("",):
            heading = f"{chip.name}{', ' if name else ''}{name}"
            columns.append(_number(heading))
            for row in rows:
                at = int(row["context"])
                rate = model.decode(chip, at, model.stages(name, at)) if phase == "decode" else model.prefill(chip, at)
                row[heading] = round(rate, 1)  # type: ignore[assignment]
    return Table(f"predicted-{phase}", f"{phase.capitalize()}, tokens a second, predicted", columns, rows)


def _beside(model: Predictor, phase: str) -> Table:
    """M5 Max: the model beside both programs of the published table."""
    own = "fused, predicted" if phase == "decode" else "predicted"
    columns = [Column("context", "context", text.tokens, True), _number("own", own)]
    columns += [_number(key, heading) for key, heading in _BESIDE[phase]]
    rows = [_beside_row(model, phase, row) for row in model.published.rows]
    caption = f"{phase.capitalize()} on an {model.published.device}, tokens a second"
    return Table(f"beside-{phase}", caption, columns, rows)


_BESIDE = {
    "decode": (
        ("lily", "Lily, published (fitted)"),
        ("lily_model", "the model on Lily's step"),
        ("mlx", "MLX-LM, published"),
        ("mlx_model", "the model on the step of engine=mlx"),
    ),
    "prefill": (("mlx", "MLX-LM, published (fitted)"), ("lily", "Lily, published")),
}


def _beside_row(model: Predictor, phase: str, row: TableRow) -> dict[str, float]:
    at = row.context
    if phase == "prefill":
        return {"context": at, "own": model.prefill(M5_MAX, at), "mlx": row.mlx_prefill, "lily": row.lily_prefill}
    return {
        "context": at,
        "own": model.decode(M5_MAX, at, model.stages("fused", at)),
        "lily": row.lily_decode,
        "lily_model": model.decode(M5_MAX, at, _lily_stages(at)),
        "mlx": row.mlx_decode,
        "mlx_model": model.decode(M5_MAX, at, model.stages("mlx", at)),
    }


def _reported(model: Predictor) -> Table:
    columns = [
        Column("who", "reported for"),
        Column("chip", "chip"),
        Column("phase", "phase"),
        Column("context", "context taken", text.tokens, True),
        _number("reported"),
        _number("model", "the model"),
    ]
    rows = []
    for who, chip, phase, context, rate in REPORTED:
        stages = model.stages("mlx", min(FRONTIERS, key=lambda at: abs(at - context)))
        said = model.decode(chip, context, stages) if phase == "decode" else model.prefill(chip, context)
        row = {"who": who, "chip": chip.name, "phase": phase, "context": context}
        rows.append(row | {"reported": rate, "model": round(said, 1)})
    caption = (
        "Single rates that others reported for this geometry, tokens a second: versions are not known, nothing was "
        "fitted to them"
    )
    return Table("reported", caption, columns, rows)


def _errors(model: Predictor) -> str:
    rows = [_beside_row(model, "decode", row) for row in model.published.rows]
    decode = max(abs(row["mlx_model"] / row["mlx"] - 1) for row in rows)
    fitted = max(abs(row["lily_model"] / row["lily"] - 1) for row in rows)
    prefill = max(abs(model.prefill(M5_MAX, row.context) / row.mlx_prefill - 1) for row in model.published.rows)
    return (
        f"Largest error: {text.percent(fitted)} in the decode rates it is fitted to, {text.percent(decode)} in "
        f"MLX-LM's, which it is not, {text.percent(prefill)} in the prefill rates it is fitted to. A run that misses "
        "a prediction by more than that refutes it. Of the single rates below the model misses two by far: an Ultra, "
        "two chips joined, which is why none is predicted, and a prefill by another program than MLX-LM."
    )
