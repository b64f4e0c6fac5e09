"""Binding: from a config's names to the callables of one engine, chosen once, counted always."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.config import DecodeAttentionConfig, EngineConfig
from engine.kernels.attention import HEADS, LANES, NO_PAGED_TILES, SPLITS
from engine.ops.choice import Choice, Tuned, nearest
from engine.ops.registry import DECODE_ROWS, OPS, Op, Phase, Recorder, Refuses, Variant, VariantUnsupported


@dataclass(frozen=True)
class BoundOp:
    """An op as one engine runs it: a variant for few rows and one for many (the same, if named).

    Attributes:
        free: ``best`` was asked for, so `tuned` decides where it speaks. tuned: what was measured on this chip; of a
            named variant it gives the settings alone.
        far: past so many positions that variant runs many rows, where nothing is tuned (see `Op.far`).
    """

    op: Op
    decode: Variant
    prefill: Variant
    recorder: Recorder
    settings: dict[str, Any]
    decode_rows: int = DECODE_ROWS
    free: bool = False
    tuned: tuple[Choice, ...] = ()
    far: tuple[int, Variant] | None = None

    def __call__(self, *arguments: Any, rows: int, residual: Any = None) -> Any:
        """Run the variant for `rows` new rows and count the call; a residual is added to what it returns."""
        variant, settings, chosen = self.pick(rows, arguments)
        self.recorder.record(self.op.name, variant.name, tile_of(settings), chosen)
        if residual is None:
            return variant.run(*arguments, **settings)
        if variant.adds:
            return variant.run(*arguments, residual=residual, **settings)
        return residual + variant.run(*arguments, **settings)

    def pick(self, rows: int, arguments: tuple[Any, ...] = ()) -> tuple[Variant, dict[str, Any], str]:
        """Variant and settings of a call with `rows` new rows, and ``"tuned"``, ``"untuned"`` or, of a named one, "".

        Without arguments it is at no certain context, and no settings but tuned ones are given.
        """
        phase: Phase = "decode" if rows <= self.decode_rows else "prefill"
        variant = self.decode if phase == "decode" else self.prefill
        context = self.op.context(*arguments) if self.op.context is not None and arguments else None
        near = nearest(self.tuned, phase, rows, context)
        if near is not None and self.free:
            variant, settings = self.op.variants[near.variant], dict(near.settings)
            if arguments and "tile" in variant.settings:
                # Its own rule was timed where no tile is named; the record is to say which that is.
                settings = variant.settled(arguments, settings)
            return variant, settings, "tuned"
        if phase == "prefill" and self.far is not None and context is not None and context > self.far[0]:
            variant = self.far[1]
        settings: dict[str, Any] = {}
        if arguments:
            settings = variant.settled(arguments, {name: self.settings[name] for name in variant.settings})
        if near is not None and (known := near.settings_of(variant.name)) is not None:
            settings = dict(known)
        return variant, settings, "untuned" if self.free else ""

    def by_context(self, rows: int) -> list[tuple[Choice, str]]:
        """Every tuned choice that a call with `rows` new rows may run, and what the record calls its settings.

        Empty where the number of cached positions decides nothing.
        """
        if not self.free or self.op.context is None:
            return []
        phase: Phase = "decode" if rows <= self.decode_rows else "prefill"
        mine = [c for c in self.tuned if c.phase == phase and c == nearest(self.tuned, phase, rows, c.context)]
        return [(choice, tile_of(choice.settings)) for choice in mine]

    def always(self, variant: str) -> bool:
        """Whether every call with few rows runs that variant, whatever the context."""
        tuned = {choice.variant for choice in self.tuned if choice.phase == "decode"} if self.free else set()
        return {self.decode.name, *tuned} == {variant} or tuned == {variant}

    @property
    def reads_host(self) -> bool:
        """Whether a decode step through this op reads back to the host."""
        return self.pick(1)[0].reads_host


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
    fusion_chosen: str = ""
    folded: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)

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
        return {b.op.name: _both(b.pick(1)[0].name, b.pick(_MANY)[0].name) for b in self.all()}

    def tuning(self) -> dict[str, str]:
        """``{op: "tuned", "untuned" or "named"}``, or two of them by phase, and the same of ``decode.fusion``."""
        made = {"decode.fusion": self.fusion_chosen or "named"}
        for b in self.all():
            phases = {choice.phase for choice in b.tuned}
            told = ("tuned" if phase in phases else "untuned" for phase in ("decode", "prefill"))
            made[b.op.name] = _both(*told) if b.free else "named"
        return made


_MANY = 2048
"""Rows that stand for a prefill where one variant is to be named."""


def _both(decode: str, prefill: str) -> str:
    return decode if decode == prefill else f"{decode} | {prefill}"


def bind(
    config: EngineConfig,
    device: str,
    tuned: Tuned | None = None,
    refuses: Refuses | None = None,
    folds: bool = False,
) -> BoundOps:
    """Choose a variant for every op.

    Args:
        tuned: what ``best`` is on this chip; None: the declared order.
        folds: the model is one that a folded step can run (`engine.folded.unfit`).
        refuses: why a variant, or ``("unit", name)`` of `engine.proof`, is not to be used on this machine.

    Raises:
        VariantUnsupported: a named variant, tile or attention setting that cannot run on `device`.
    """
    recorder = Recorder()
    told = tuned.fusion if tuned else None
    fusion = _fusion(config, device, told or (FUSION.get(device) if folds else None), refuses)
    measured = {} if tuned is None else _applicable(config, device, tuned, refuses)
    paged = config.cache.layout == "paged"

    def one(name: str, wanted: str, told: str | None = None, **settings: Any) -> BoundOp:
        op = OPS[name]
        decode = op.choose(wanted, device, "decode", paged, refuses)
        prefill = op.choose(told or wanted, device, "prefill", paged, refuses)
        far = None
        if wanted == "best" and not paged and (device, "prefill") in op.far:
            positions, variant = op.far[device, "prefill"]
            far = positions, op.choose(variant, device, "prefill")
        return BoundOp(
            op,
            decode,
            prefill,
            recorder,
            settings,
            op.decode_rows.get(device, DECODE_ROWS),
            wanted == "best",
            measured.get(name, ()),
            far,
        )

    attention = config.decode_attention
    recording = told is None or (tuned is not None and tuned.trace == "replay")
    if fusion == "full" and recording and attention.variant == "best" and not paged:
        # A step that is one recording holds launches of our own kernels only, and was timed so.
        if refuses is None or refuses("decode_attention", "metal") is None:
            attention = replace(attention, variant="metal")
    bound = BoundOps(
        linear=one("linear", config.linear),
        # Norms follow the products: a reference engine is a reference throughout.
        norm=one("norm", "reference" if config.linear == "reference" else "mlx"),
        route=one("route", config.route),
        experts=one(
            "experts",
            config.experts.variant,
            _overlapping_experts(config, device) or _tiled_experts(config, device),
            tile=config.experts.tile,
            shared="beside" if config.overlap else "after",
        ),
        decode_attention=one(
            "decode_attention", attention.variant, **_attention_settings(attention, device, paged, refuses)
        ),
        prefill_attention=one("prefill_attention", config.prefill_attention),
        gated_delta=one("gated_delta", config.gated_delta),
        head=one("head", config.head),
        recorder=recorder,
        fusion=fusion,
        folded=tuned.folded if tuned else {},
        fusion_chosen="" if config.decode.fusion != "best" else "tuned" if tuned and tuned.fusion else "untuned",
    )
    _check_speculative(config)
    return bound


def _tiled_experts(config: EngineConfig, device: str) -> str | None:
    """The variant that honours a named tile of the expert products, or None if none was named.

    Raises:
        VariantUnsupported: the variant has no such tile, or cannot run on the device.
    """
    tile, wanted, op = config.experts.tile, config.experts.variant, OPS["experts"]
    if tile == "best":
        return None
    takers = [variant.name for variant in op.variants.values() if "tile" in variant.settings]
    variant = op.choose(takers[0] if wanted == "best" else wanted, device, "prefill")
    if "tile" not in variant.settings:
        reason = f"variant {variant.name} does not let it be chosen; take {' or '.join(takers)}"
        raise VariantUnsupported("experts", f"tile {tile}", reason)
    if tile not in variant.tiles:
        known = ", ".join(variant.tiles)
        raise VariantUnsupported("experts", f"tile {tile}", f"variant {variant.name} has tiles {known}")
    return variant.name


def _overlapping_experts(config: EngineConfig, device: str) -> str | None:
    """The variant for many rows that runs the shared expert beside the routed ones, or None if that was not asked for.

    Raises:
        VariantUnsupported: the variant that was named runs them together or one after the other.
    """
    if not config.overlap:
        return None
    op, wanted = OPS["experts"], config.experts.variant
    takers = [variant.name for variant in op.variants.values() if "shared" in variant.settings]
    if config.experts.tile != "best":
        reason = "kernels with tiles do the shared expert in the launches of the others; leave experts.tile at best"
        raise VariantUnsupported("overlap", "on", reason)
    if wanted == "best":
        return next(name for name in (*op.order[device, "prefill"], *takers) if name in takers)
    if wanted not in takers:
        reason = f"experts={wanted} has no shared expert of its own to put beside; take {', '.join(takers)}"
        raise VariantUnsupported("overlap", "on", reason)
    return wanted


def _applicable(
    config: EngineConfig, device: str, tuned: Tuned, refuses: Refuses | None
) -> dict[str, tuple[Choice, ...]]:
    """Tuned choices by op, but for ops of which a setting was named, and for variants that do not run here."""
    named = set()
    attention = dataclasses.replace(config.decode_attention, variant="best")
    if attention != DecodeAttentionConfig() or config.cache.layout != "contiguous":
        named |= {"decode_attention", "prefill_attention"}
    if config.experts.tile != "best" or config.overlap:
        named.add("experts")
    made = {}
    for name, choices in tuned.choices.items():
        runs = OPS[name].variants
        if name not in named:
            made[name] = tuple(
                c
                for c in choices
                if runs[c.variant].supports(None, device) is None
                and (refuses is None or refuses(name, c.variant) is None)
            )
    return made


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


FUSION = {"cuda": "full"}
"""Degree of fusion that ``best`` is where nothing was tuned, by device: on an H200 a folded, replayed step decoded 586
to 421 tokens a second at 256 to 128K, separate ops 69 to 78 (reports/published/nvidia-h200)."""


def _fusion(config: EngineConfig, device: str, tuned: str | None, refuses: Refuses | None) -> str:
    """The degree of fusion to run; ``best`` is what was tuned, where nothing that it takes over was named.

    Raises:
        VariantUnsupported: fusion was asked for where its kernels do not run, or beside an op's other variant.
    """
    wanted = config.decode.fusion
    if wanted == "off":
        return "off"
    if wanted == "best":
        free = tuned in FOLDED and device != "cpu" and _named(config, FOLDED[tuned]) is None
        return tuned if free and tuned and _against(tuned, refuses) is None else "off"
    if device == "cpu":
        raise VariantUnsupported("decode.fusion", wanted, "the fused kernels run on Metal and CUDA, not on a CPU")
    if (found := _named(config, FOLDED[wanted])) is not None:
        op, named = found
        raise VariantUnsupported("decode.fusion", wanted, f"it takes the place of {op}={named}; leave {op} at best")
    if (reason := _against(wanted, refuses)) is not None:
        raise VariantUnsupported("decode.fusion", wanted, reason)
    return wanted


UNITS = ("rotary", "recent", "folded_step")
"""What a folded step needs on this machine beside its ops' variants (`engine.proof`)."""


def _against(fusion: str, refuses: Refuses | None) -> str | None:
    """Why this machine does not run a fused step, with the kernel that fails it."""
    if refuses is None:
        return None
    parts = [(op, kinds[1]) for op, kinds in FOLDED[fusion].items() if len(kinds) > 1]
    for part, name in [*parts, *(("unit", name) for name in UNITS)]:
        if (reason := refuses(part, name)) is not None:
            return f"{name if part == 'unit' else f'{part}={name}'}: {reason}"
    return None


def _named(config: EngineConfig, folded: Mapping[str, tuple[str, ...]]) -> tuple[str, str] | None:
    """The first op that is named as a variant which fusion would replace."""
    for op, allowed in folded.items():
        named = config.experts.variant if op == "experts" else getattr(config, op)
        if named not in allowed:
            return op, named
    return None


ATTENTION_VALUES = {"heads": HEADS, "split": SPLITS, "lanes": LANES}


def _attention_settings(
    attention: DecodeAttentionConfig, device: str, paged: bool, refuses: Refuses | None
) -> dict[str, Any]:
    """What the chosen variant is told, ``"best"`` replaced by its default.

    Raises:
        VariantUnsupported: a setting that the variant does not take.
    """
    variant = OPS["decode_attention"].choose(attention.variant, device, "decode", paged, refuses)
    # A split that nobody named is the variant's own at every length.
    named = attention.split != "best"
    settings: dict[str, Any] = {"blocks": attention.blocks, "min_context": attention.min_context if named else 0}
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
    if attention.min_context != DecodeAttentionConfig.min_context and not (named and "min_context" in variant.settings):
        reason = "it says from where split=blocks applies; name a split, and a variant that can be told it"
        raise VariantUnsupported("decode_attention", f"min_context {attention.min_context}", reason)
    if paged and variant.name == "metal" and str(settings["lanes"]).startswith("tiles"):
        raise VariantUnsupported("decode_attention", f"lanes {settings['lanes']}", NO_PAGED_TILES)
    return settings


def tile_of(settings: Mapping[str, Any]) -> str:
    """What the record of executed ops says of the settings: the split alone, or every one that was chosen."""
    first = settings.get("split", settings.get("tile", ""))
    silent = ("split", "tile", "blocks", "min_context")
    chosen = [f"{name} {settings[name]}" for name in ("heads", "lanes") if name in settings]
    chosen += [f"{name} {value}" for name, value in settings.items() if name not in (*silent, "heads", "lanes")]
    return " ".join(filter(None, [str(first), *chosen]))
