"""Binding: from a config's names to the callables of one engine, chosen once, counted always."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.config import DecodeAttentionConfig, EngineConfig
from engine.kernels.attention import HEADS, LANES, SPLITS
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
        settings = {name: self.settings[name] for name in variant.settings}
        self.recorder.record(self.op.name, variant.name, _tile(settings))
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
    fusion: str = "off"

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
    fusion = _fusion(config, device)

    def one(name: str, wanted: str, **settings: Any) -> BoundOp:
        op = OPS[name]
        decode, prefill = op.choose(wanted, device, "decode"), op.choose(wanted, device, "prefill")
        return BoundOp(op, decode, prefill, recorder, settings, op.decode_rows.get(device, DECODE_ROWS))

    if config.experts.tile != "best":
        raise VariantUnsupported("experts", f"tile {config.experts.tile}", "no variant of this build has tiles")
    attention = config.decode_attention
    bound = BoundOps(
        linear=one("linear", config.linear),
        # Norms follow the products: a reference engine is a reference throughout.
        norm=one("norm", "reference" if config.linear == "reference" else "mlx"),
        route=one("route", config.route),
        experts=one("experts", config.experts.variant),
        decode_attention=one("decode_attention", attention.variant, **_attention_settings(attention, device)),
        prefill_attention=one("prefill_attention", config.prefill_attention),
        gated_delta=one("gated_delta", config.gated_delta),
        head=one("head", config.head),
        recorder=recorder,
        fusion=fusion,
    )
    if attention.min_context != DecodeAttentionConfig.min_context:
        reason = "no variant of this build changes its split with the context; blocks apply at every length"
        raise VariantUnsupported("decode_attention", f"min_context {attention.min_context}", reason)
    if config.cache.layout != "contiguous":
        raise VariantUnsupported("cache", config.cache.layout, "no variant of this build reads a paged cache")
    _check_speculative(config)
    if config.overlap:
        raise VariantUnsupported("overlap", "on", "this build runs the phases of a layer in order")
    return bound


def _check_speculative(config: EngineConfig) -> None:
    """Raise `VariantUnsupported` for settings of drafting that cannot go together on any device."""
    s = config.speculative

    def refuse(setting: str, reason: str) -> VariantUnsupported:
        return VariantUnsupported("speculative", setting, reason)

    try:
        forced = 0.0 if s.force == "none" else float(s.force)
    except ValueError:
        forced = -1.0
    if not 0 <= forced <= 1:
        raise refuse(f"force {s.force}", "it takes none, or a probability from 0 to 1")
    if s.depth >= DECODE_ROWS:
        reason = f"a token and its drafts are verified in one pass of at most {DECODE_ROWS} rows; take 1 to 7"
        raise refuse(f"depth {s.depth}", reason)
    if s.drafter == "off":
        return
    if s.draft_vocab and s.drafter != "mtp":
        raise refuse(f"draft_vocab {s.draft_vocab}", f"{s.drafter} has no output matrix of its own to trim; take mtp")
    if config.decode.logprobs:
        reason = "decode.logprobs is a step's extra work, and a verification is no such step; turn one of them off"
        raise refuse(s.drafter, reason)


FOLDED = {
    "partial": {"linear": ("best", "metal")},
    "full": {
        "linear": ("best", "metal"),
        "route": ("best",),
        "experts": ("best", "metal"),
        "gated_delta": ("best", "registers"),
        "head": ("best", "metal"),
    },
}
"""What each degree of fusion takes over from an op's own variant, with the values of the config that allow it."""


def _fusion(config: EngineConfig, device: str) -> str:
    """The degree of fusion to run.

    Raises:
        VariantUnsupported: fusion was asked for where its kernels do not run, or beside an op's other variant.
    """
    wanted = config.decode.fusion
    if wanted in ("best", "off"):
        # No fused step has measured faster on any chip yet.
        return "off"
    if device == "cpu":
        raise VariantUnsupported("decode.fusion", wanted, "the fused kernels run on Metal and CUDA, not on a CPU")
    for op, allowed in FOLDED[wanted].items():
        named = config.experts.variant if op == "experts" else getattr(config, op)
        if named not in allowed:
            raise VariantUnsupported("decode.fusion", wanted, f"it takes the place of {op}={named}; leave {op} at best")
    return wanted


ATTENTION_VALUES = {"heads": HEADS, "split": SPLITS, "lanes": LANES}


def _attention_settings(attention: DecodeAttentionConfig, device: str) -> dict[str, Any]:
    """What the chosen variant is told, ``"best"`` replaced by its default.

    Raises:
        VariantUnsupported: a setting that the variant does not take.
    """
    variant = OPS["decode_attention"].choose(attention.variant, device, "decode")
    settings: dict[str, Any] = {"blocks": attention.blocks}
    for name in ("heads", "split", "lanes"):
        value = getattr(attention, name)
        if value not in ("best", *ATTENTION_VALUES[name]):
            known = ", ".join(ATTENTION_VALUES[name])
            raise VariantUnsupported("decode_attention", f"{name} {value}", f"{name} is best or one of {known}")
        if value == "best":
            settings[name] = variant.defaults(device).get(name, value)
        elif name in variant.settings:
            settings[name] = value
        else:
            reason = f"variant {variant.name} does not let it be chosen"
            raise VariantUnsupported("decode_attention", f"{name} {value}", reason)
    return settings


def _tile(settings: Mapping[str, Any]) -> str:
    """What the record of executed ops says of the settings: the split alone, or every one that was chosen."""
    chosen = [f"{name} {settings[name]}" for name in ("heads", "lanes") if name in settings]
    return " ".join([str(settings.get("split", "")), *chosen])
