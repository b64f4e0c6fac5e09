"""Binding: from a config's names to the callables of one engine, chosen once, counted always."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.config import EngineConfig
from engine.ops.registry import DECODE_ROWS, OPS, Op, Recorder, Variant, VariantUnsupported


@dataclass(frozen=True)
class BoundOp:
    """An op as one engine runs it: a variant for few rows and one for many (the same, if named)."""

    op: Op
    decode: Variant
    prefill: Variant
    recorder: Recorder
    settings: dict[str, Any]
    decode_rows: int = DECODE_ROWS

    def __call__(self, *arguments: Any, rows: int) -> Any:
        """Run the variant for `rows` new rows and count the call."""
        variant = self.decode if rows <= self.decode_rows else self.prefill
        settings = self.settings if variant.tiles else {}
        self.recorder.record(self.op.name, variant.name, str(settings.get("split", "")))
        return variant.run(*arguments, **settings)

    @property
    def reads_host(self) -> bool:
        """Whether a decode step through this op reads back to the host."""
        return self.decode.reads_host


@dataclass(frozen=True)
class BoundOps:
    """Every op of one engine."""

    linear: BoundOp
    norm: BoundOp
    route: BoundOp
    experts: BoundOp
    decode_attention: BoundOp
    prefill_attention: BoundOp
    gated_delta: BoundOp
    head: BoundOp
    recorder: Recorder

    def all(self) -> tuple[BoundOp, ...]:
        """The bound ops in forward order."""
        return (
            self.norm,
            self.linear,
            self.gated_delta,
            self.decode_attention,
            self.prefill_attention,
            self.route,
            self.experts,
            self.head,
        )

    def chosen(self) -> dict[str, str]:
        """``{op: variant}``, or ``decode | prefill`` variants where they differ."""
        return {
            b.op.name: b.decode.name if b.decode is b.prefill else f"{b.decode.name} | {b.prefill.name}"
            for b in self.all()
        }


def bind(config: EngineConfig, device: str) -> BoundOps:
    """Choose a variant for every op.

    Raises:
        VariantUnsupported: a named variant, tile or attention setting that cannot run on `device`.
    """
    recorder = Recorder()

    def one(name: str, wanted: str, **settings: Any) -> BoundOp:
        op = OPS[name]
        decode, prefill = op.choose(wanted, device, "decode"), op.choose(wanted, device, "prefill")
        return BoundOp(op, decode, prefill, recorder, settings, op.decode_rows.get(device, DECODE_ROWS))

    if config.experts.tile != "best":
        raise VariantUnsupported("experts", f"tile {config.experts.tile}", "no variant of this build has tiles")
    attention = config.decode_attention
    for setting in ("heads", "lanes"):
        value = getattr(attention, setting)
        if value != "best":
            raise VariantUnsupported(
                "decode_attention", f"{setting} {value}", "no variant of this build lets it be chosen"
            )
    bound = BoundOps(
        linear=one("linear", config.linear),
        # Norms follow the products: a reference engine is a reference throughout.
        norm=one("norm", "reference" if config.linear == "reference" else "mlx"),
        route=one("route", config.route),
        experts=one("experts", config.experts.variant),
        decode_attention=one("decode_attention", attention.variant, **_split(attention, device)),
        prefill_attention=one("prefill_attention", config.prefill_attention),
        gated_delta=one("gated_delta", config.gated_delta),
        head=one("head", config.head),
        recorder=recorder,
    )
    chosen = bound.decode_attention.decode
    if attention.split != "best" and not chosen.tiles:
        raise VariantUnsupported(
            "decode_attention", f"split {attention.split}", f"variant {chosen.name} decides that itself"
        )
    if config.cache.layout != "contiguous":
        raise VariantUnsupported("cache", config.cache.layout, "no variant of this build reads a paged cache")
    if config.speculative.drafter != "off":
        raise VariantUnsupported("speculative", config.speculative.drafter, "this build has no drafter")
    if config.decode.fusion not in ("best", "off"):
        raise VariantUnsupported("decode.fusion", config.decode.fusion, "this build has no fused kernels to choose")
    if config.overlap:
        raise VariantUnsupported("overlap", "on", "this build runs the phases of a layer in order")
    return bound


def _split(attention: Any, device: str) -> dict[str, Any]:
    split = attention.split
    if split == "best":
        split = "chunks" if device == "cuda" else "none"
    return {"split": split, "blocks": attention.blocks}
