"""Arms: from the names of optimisations to engine configurations, and the pairs that answer one question.

A toggle is a name for a setting of a few `EngineConfig` fields, with an off side that is an honest implementation.
`expand` turns toggles into fields and refuses contradictions; `arm_config` builds a whole configuration;
`add_one_in` and `leave_one_out` build the two arms of a contrast; `check_contrast` refuses a contrast whose arms
differ in more than the field asked about; `impossible` says what cannot run anywhere, with the reason.

Settings name variants, not ``best``: a contrast of ``best`` with something else would ask a different question on
each machine. Only where a name means one thing on a GPU and another on a CPU do they ask which kind of `device` it is;
unknown, it is a CPU. What a build or device lacks is refused by the engine when it binds, and becomes a skipped row.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.config import EngineConfig

Nested = dict[str, Any]


class ArmError(ValueError):
    """An unknown toggle or value, a contradiction, or a contrast of more than was asked."""


@dataclass(frozen=True)
class AnyBut:
    """Every value except those named."""

    values: tuple[Any, ...]

    def __contains__(self, value: Any) -> bool:
        return value not in self.values


@dataclass(frozen=True)
class Setting:
    """What one value of a toggle sets: dotted field to value. `also`: other values of a field that keep its meaning
    (a split into blocks is a split too), so that naming one of them is no contradiction. `gpu`: fields of `fields` that
    have another value on a GPU."""

    fields: Mapping[str, Any]
    also: Mapping[str, tuple[Any, ...] | AnyBut] = field(default_factory=dict)
    gpu: Mapping[str, Any] = field(default_factory=dict)

    def on(self, device: str) -> dict[str, Any]:
        """The fields on a kind of device (``metal``, ``cuda``, ``cpu``)."""
        return {**self.fields, **(self.gpu if device in ("metal", "cuda") else {})}


@dataclass(frozen=True)
class Need:
    """A field that must leave certain values before a setting can run: if it is in `clashes`, it becomes `value`,
    in both arms of a contrast, unless it was set by name."""

    field: str
    clashes: tuple[Any, ...]
    value: Any


@dataclass(frozen=True)
class Toggle:
    """One optimisation by name.

    Attributes:
        settings: by value. on, off: the values that those words stand for; `on` is the published one if there is one.
        phases: where it can change time. requires: by value, what the rest of the configuration must give up for it.
        min_context: tokens below which its two sides do the same work.
    """

    name: str
    summary: str
    off: str
    on: str
    settings: Mapping[str, Setting]
    phases: tuple[str, ...]
    requires: Mapping[str, tuple[Need, ...]] = field(default_factory=dict)
    min_context: int = 0

    @property
    def fields(self) -> tuple[str, ...]:
        """Dotted names of all fields that any of its values sets, in order."""
        return tuple(dict.fromkeys(name for setting in self.settings.values() for name in setting.fields))

    def key(self, value: Any) -> str:
        """The setting's name for a value as users write it: ``on``, ``off``, True, False, 4, ``"chunked"``.

        Raises:
            ArmError: no such value; names the nearest.
        """
        word = {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
        word = {"on": self.on, "off": self.off}.get(word, word)
        if word not in self.settings:
            known = ["off", "on", *(key for key in self.settings if key not in ("off", "on"))]
            raise ArmError(f"toggle.{self.name}={value}: {_nearest(word, known)}")
        return word


def _nearest(word: str, known: Iterable[str]) -> str:
    known = list(known)
    close = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known)}"


# -- the table ------------------------------------------------------------------------------------

_UNPACKED = ("expanded", "reference", "grouped", "expanded_grouped")
_DEVICE_ROUTING = (
    Need("route", ("host",), "mlx"),
    Need("experts.variant", ("grouped",), "mlx"),
)
_HOST_READS = (
    Need("prefill.submission", ("chunk",), "layer"),
    Need("decode.trace", ("best", "step", "layer"), "eager"),
)
_OWN_ATTENTION = (Need("decode_attention.variant", ("best", "reference", "mlx", "matmul", "gathered"), "metal"),)
_SPLITTING_ATTENTION = (Need("decode_attention.variant", ("best", "reference", "mlx"), "matmul"),)
_OWN_EXPERTS = (Need("experts.variant", ("reference", "mlx", "expanded", "grouped"), "best"),)
# A folded step takes the place of these ops' own variants, so none may be named but those that it holds.
_FOLDED_PRODUCTS = (Need("linear", ("expanded", "reference", "mlx", "packed"), "best"),)
_FOLDED_STEP = (
    *_FOLDED_PRODUCTS,
    Need("experts.variant", (*_UNPACKED, "mlx", "packed"), "best"),
    Need("route", ("host", "mlx", "reference"), "best"),
    Need("gated_delta", ("recurrence", "reference", "mlx", "chunked"), "best"),
    Need("head", ("mlx", "reference"), "best"),
)
# The other side names an op that a folded step takes the place of, so neither side may be folded.
_UNFUSED = (Need("decode.fusion", ("best", "partial", "full"), "off"),)
# By name: the best experts may be kernels in which the shared expert is one more of the routed ones.
_SEPARATE_SHARED_EXPERT = (
    Need("experts.variant", ("best", "reference", "metal", "packed", "expanded_grouped"), "mlx"),
    Need("experts.tile", ("16", "32", "64", "128"), "best"),
)
# By name: the best reader of pages is another one than the best reader of a contiguous cache.
_PAGE_READERS = (
    Need("decode_attention.variant", ("best", "reference", "mlx", "matmul"), "metal"),
    Need("prefill_attention", ("best", "reference", "mlx", "tiled", "metal"), "gathered"),
)


def _toggle(
    name: str,
    summary: str,
    off: str,
    on: str,
    settings: dict[str, dict[str, Any] | Setting],
    requires: Mapping[str, tuple[Need, ...]],
    phases: str = "prefill decode",
    min_context: int = 0,
) -> Toggle:
    """Declare a toggle; `requires` by value, or ``every`` for all of them."""
    made = {key: value if isinstance(value, Setting) else Setting(value) for key, value in settings.items()}
    needs = {key: (*requires.get("every", ()), *requires.get(key, ())) for key in made}
    return Toggle(name, summary, off, on, made, tuple(phases.split()), needs, min_context)


_ALL = (
    _toggle(
        "packed_dequant",
        "4-bit weights expanded inside the product, not into an array first",
        "off",
        "packed",
        {
            "off": {"linear": "expanded", "experts.variant": "expanded"},
            "packed": Setting(
                {"linear": "mlx", "experts.variant": "mlx"},
                {"linear": AnyBut(_UNPACKED), "experts.variant": AnyBut(_UNPACKED)},
                {"linear": "packed", "experts.variant": "packed"},
            ),
            # Off as well: our kernels, not MLX's product, on stacks that were expanded first.
            "expanded_grouped": {"linear": "expanded", "experts.variant": "expanded_grouped"},
        },
        {"every": _UNFUSED},
    ),
    _toggle(
        "gpu_routing",
        "routing decided on the device, never read back to the host",
        "off",
        "device",
        {"off": {"route": "host"}, "device": Setting({"route": "mlx"}, {"route": AnyBut(("host",))})},
        {"every": _UNFUSED, "off": _HOST_READS},
    ),
    _toggle(
        "single_submission",
        "no wait for the device inside a prefill chunk",
        "off",
        "chunk",
        {"off": {"prefill.submission": "layer"}, "chunk": {"prefill.submission": "chunk"}},
        {"chunk": _DEVICE_ROUTING},
        "prefill",
    ),
    _toggle(
        "tile_rows",
        "rows of one tile of the expert product",
        "16",
        "32",
        {rows: {"experts.tile": rows} for rows in ("16", "32", "64", "128")},
        {"every": _OWN_EXPERTS},
        "prefill",
    ),
    _toggle(
        "gdn_scan",
        "how the Gated DeltaNet recurrence is scanned",
        "recurrence",
        "registers",
        {name: {"gated_delta": name} for name in ("recurrence", "mlx", "registers", "chunked")},
        {"every": _UNFUSED},
    ),
    _toggle(
        "gqa_packing",
        "query heads that share one fetch of a key/value row",
        "1",
        "4",
        {heads: {"decode_attention.heads": heads} for heads in ("1", "2", "4", "8")},
        {"every": _OWN_ATTENTION},
        "decode",
    ),
    _toggle(
        "fixed_block_layout",
        "a fixed number of key blocks that grow, not a growing number of fixed chunks",
        "off",
        "blocks",
        {
            "off": {"decode_attention.split": "chunks"},
            "blocks": {
                "decode_attention.split": "blocks",
                "decode_attention.blocks": 128,
                "decode_attention.min_context": 32_768,
            },
        },
        {"every": (Need("cache.layout", ("paged",), "contiguous"), *_SPLITTING_ATTENTION)},
        "decode",
        32_768,
    ),
    _toggle(
        "kv_split",
        "keys split and partial results combined, not one pass",
        "off",
        "split",
        {
            "off": {"decode_attention.split": "none"},
            "split": Setting({"decode_attention.split": "chunks"}, {"decode_attention.split": ("blocks",)}),
        },
        {"every": _SPLITTING_ATTENTION},
        "decode",
    ),
    _toggle(
        "cache_layout",
        "keys and values in pages of a fixed size, not one growing array",
        "contiguous",
        "paged",
        {name: {"cache.layout": name} for name in ("contiguous", "paged")},
        {"paged": _PAGE_READERS},
    ),
    _toggle(
        "coalesced_cache",
        "neighbouring lanes read neighbouring words of the cache",
        "off",
        "coalesced",
        {"off": {"decode_attention.lanes": "apart"}, "coalesced": {"decode_attention.lanes": "coalesced"}},
        {"every": _OWN_ATTENTION},
        "decode",
    ),
    _toggle(
        "device_token",
        "the chosen token goes into the next step on the device",
        "off",
        "device",
        {
            "off": {"decode.feedback": "host", "decode.in_flight": 1},
            "device": Setting({"decode.feedback": "device", "decode.in_flight": 2}, {"decode.in_flight": AnyBut((0,))}),
        },
        {},
        "decode",
    ),
    _toggle(
        "speculative",
        "several tokens drafted and verified in one pass",
        "off",
        "mtp",
        {name: {"speculative.drafter": name} for name in ("off", "mtp", "ngram", "model")},
        {},
        "decode",
    ),
    _toggle(
        "prefill_chunk",
        "tokens of one prefill pass",
        "2048",
        "4096",
        {str(tokens): {"prefill.chunk": tokens} for tokens in (512, 1024, 2048, 4096, 8192)},
        {},
        "prefill",
    ),
    _toggle(
        "step_trace",
        "how much of a decode step is compiled at once, or recorded and replayed",
        "eager",
        "step",
        {name: {"decode.trace": name} for name in ("eager", "layer", "step", "replay")},
        {name: _DEVICE_ROUTING for name in ("layer", "step", "replay")},
        "decode",
    ),
    _toggle(
        "fusion",
        "prologues and epilogues folded into the products",
        "off",
        "full",
        {name: {"decode.fusion": name} for name in ("off", "partial", "full")},
        {"partial": _FOLDED_PRODUCTS, "full": _FOLDED_STEP},
        "decode",
    ),
    _toggle(
        "phase_overlap",
        "the shared expert beside the routed ones, and the like",
        "off",
        "beside",
        {"off": {"overlap": False}, "beside": {"overlap": True}},
        {"every": _SEPARATE_SHARED_EXPERT},
        "prefill",
    ),
)

TOGGLES: dict[str, Toggle] = {toggle.name: toggle for toggle in _ALL}
"""Every toggle by name, in the order of the documentation."""


def toggle(name: str) -> Toggle:
    """The toggle of that name.

    Raises:
        ArmError: no such toggle; names the nearest.
    """
    if name not in TOGGLES:
        raise ArmError(f"toggle.{name} is no toggle; {_nearest(name, TOGGLES)}")
    return TOGGLES[name]


# -- expansion ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Claim:
    """A field's value, who asked for it, and what else they would accept."""

    value: Any
    source: str
    also: tuple[Any, ...] | AnyBut = ()


def expand(toggles: Mapping[str, Any], explicit: Mapping[str, Any] | None = None, device: str = "cpu") -> Nested:
    """Toggles and fields set by name, as nested fields of `EngineConfig`.

    Args:
        toggles: ``{"packed_dequant": "off", "gqa_packing": 4}``.
        explicit: fields set by name, nested or dotted; kept in the result.
        device: kind of device that it is for.

    Raises:
        ArmError: an unknown toggle, value or field, or two settings that contradict each other (both are named).
    """
    return nest({name: claim.value for name, claim in _claims(toggles, explicit or {}, device).items()})


def _claims(toggles: Mapping[str, Any], explicit: Mapping[str, Any], device: str) -> dict[str, _Claim]:
    """What toggles and fields set by name ask for, by dotted field."""
    claims = {name: _Claim(value, f"{name}={value}") for name, value in flatten(explicit).items()}
    for name in claims:
        _require_field(name)
    for name, value in toggles.items():
        switch = toggle(name)
        setting = switch.settings[switch.key(value)]
        for field_name, field_value in setting.on(device).items():
            claim = _Claim(field_value, f"toggle.{name}={_word(value)}", setting.also.get(field_name, ()))
            claims[field_name] = _agree(field_name, claims.get(field_name), claim)
    return claims


def _word(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _agree(name: str, old: _Claim | None, new: _Claim) -> _Claim:
    """The narrower of two claims on a field."""
    if old is None or old.value in new.also:
        return old or new
    if _same(old.value, new.value) or new.value in old.also:
        return new
    raise ArmError(f"{old.source} and {new.source} contradict each other: both set {name}; drop one of them")


def _same(a: Any, b: Any) -> bool:
    """Equal as configuration values: a number and its text are one (``heads=4``), a truth value is no number."""
    return type(a) is type(b) and a == b or (not isinstance(a, bool) and not isinstance(b, bool) and str(a) == str(b))


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested fields as dotted names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        dotted = f"{prefix}{name}"
        flat |= flatten(value, f"{dotted}.") if isinstance(value, Mapping) else {dotted: value}
    return flat


def nest(values: Mapping[str, Any]) -> Nested:
    """Dotted names as nested fields; the inverse of `flatten`."""
    nested: Nested = {}
    for dotted, value in values.items():
        *parents, last = dotted.split(".")
        inner = nested
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = value
    return nested


_FIELDS = tuple(flatten(EngineConfig().to_dict()))


def _require_field(name: str) -> None:
    if name not in _FIELDS:
        raise ArmError(f"{name} is no field of the engine; {_nearest(name, _FIELDS)}")


# -- presets --------------------------------------------------------------------------------------

_PLAIN = (
    "packed_dequant",
    "gpu_routing",
    "single_submission",
    "gdn_scan",
    "kv_split",
    "cache_layout",
    "device_token",
    "speculative",
    "prefill_chunk",
    "step_trace",
    "fusion",
    "phase_overlap",
)

_PRESETS: dict[str, dict[str, Any]] = {
    # Every toggle off whose off side is no option of a kernel. What no toggle covers (prefill attention, head) is as
    # in full, so that full against plain is the sum of the toggles and nothing else.
    "plain": {
        **{name: value for key in _PLAIN for name, value in TOGGLES[key].settings[TOGGLES[key].off].fields.items()},
        "decode_attention.variant": "matmul",
    },
    "mlx": {
        name: "mlx"
        for name in (
            "linear",
            "route",
            "experts.variant",
            "decode_attention.variant",
            "prefill_attention",
            "gated_delta",
            "head",
        )
    },
    "full": {},
    # As published: what Lily's makers name, over `full` for the rest.
    "lily": {
        "route": "mlx",
        "experts.tile": "32",
        "gated_delta": "registers",
        "decode_attention.heads": "4",
        "decode_attention.split": "blocks",
        "decode_attention.lanes": "coalesced",
        "prefill.chunk": 4096,
        "prefill.submission": "chunk",
        "decode.feedback": "device",
        "decode.in_flight": 2,
    },
}

PRESETS = tuple(_PRESETS)
"""Names of the presets: plain (all off), mlx (MLX's own ops), full (all on, best), lily (as published)."""


def preset(name: str) -> EngineConfig:
    """A fresh configuration of that name.

    Raises:
        ArmError: no such preset; names the nearest.
    """
    if name not in _PRESETS:
        raise ArmError(f"engine={name} is no preset; {_nearest(name, _PRESETS)}")
    return EngineConfig.from_dict(nest(_PRESETS[name]))


def arm_config(
    base: str | EngineConfig = "full",
    toggles: Mapping[str, Any] | None = None,
    fields: Mapping[str, Any] | None = None,
    device: str = "cpu",
) -> EngineConfig:
    """A configuration from a base, toggles by name, and fields by name (nested or dotted), in that order, for a device.

    What a toggle needs of the rest is changed with it (host routing gives up the single submission), unless that
    would undo a field set by name or another toggle; `impossible` then tells.

    Raises:
        ArmError: as `expand`. ConfigError: a value of the wrong kind.
    """
    return _configured(preset(base) if isinstance(base, str) else base, toggles or {}, fields or {}, device)[0]


def _configured(
    base: EngineConfig, toggles: Mapping[str, Any], fields: Mapping[str, Any], device: str
) -> tuple[EngineConfig, dict[str, _Claim]]:
    """The configuration, and all that its toggles and fields ask for, needs included."""
    claims = _claims(toggles, fields, device)
    config = _with(base, {name: claim.value for name, claim in claims.items()})
    wanted = [(name, TOGGLES[name].requires[TOGGLES[name].key(value)]) for name, value in toggles.items()]
    # Needs that "best" can meet come first: after them a need for one certain variant must find it still free.
    for name, needs in sorted(wanted, key=lambda item: any("best" in need.clashes for need in item[1])):
        config, _ = _give_way(config, needs, claims)
        values = flatten(config.to_dict())
        for need in needs:
            claim = _Claim(values[need.field], f"toggle.{name}", AnyBut(need.clashes))
            claims.setdefault(need.field, claim)
    return config, claims


def _with(config: EngineConfig, fields: Mapping[str, Any]) -> EngineConfig:
    return EngineConfig.from_dict(nest({**flatten(config.to_dict()), **fields}))


def _give_way(
    config: EngineConfig, needs: Iterable[Need], claims: Mapping[str, _Claim]
) -> tuple[EngineConfig, dict[str, Any]]:
    """Change what clashes, unless who asked for it would not accept that; also returns what was changed."""
    values = flatten(config.to_dict())
    changed = {
        need.field: need.value
        for need in needs
        if values[need.field] in need.clashes and (need.field not in claims or need.value in claims[need.field].also)
    }
    return _with(config, changed), changed


# -- what cannot run ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Impossible:
    """Values that cannot run together on any device, and why."""

    fields: Mapping[str, tuple[Any, ...] | AnyBut]
    reason: str


_OWN = AnyBut(("best",))
IMPOSSIBLE: tuple[Impossible, ...] = (
    Impossible(
        {"route": ("host",), "prefill.submission": ("chunk",)},
        "routing on the host waits for the device in every layer, so a chunk is no single submission",
    ),
    Impossible(
        {"route": ("host",), "decode.trace": ("step", "layer")},
        "routing on the host reads an array back, which a compiled function cannot",
    ),
    Impossible(
        {"experts.variant": ("grouped",), "prefill.submission": ("chunk",)},
        "grouping on the host waits for the device in every layer, so a chunk is no single submission",
    ),
    Impossible(
        {"experts.variant": ("grouped",), "decode.trace": ("step", "layer")},
        "grouping on the host reads an array back, which a compiled function cannot",
    ),
    Impossible(
        {"cache.layout": ("paged",), "decode_attention.variant": ("reference", "mlx", "matmul")},
        "this variant reads keys and values as one contiguous array",
    ),
    Impossible(
        {"cache.layout": ("paged",), "prefill_attention": ("reference", "mlx", "tiled", "metal")},
        "this variant reads keys and values as one contiguous array",
    ),
    Impossible(
        {"cache.layout": ("paged",), "decode_attention.lanes": ("tiles", "tiles_ahead")},
        "matrix tiles read keys and values as one contiguous array",
    ),
    Impossible(
        {"decode_attention.split": _OWN, "decode_attention.variant": ("reference", "mlx")},
        "this variant decides by itself how keys are divided",
    ),
    Impossible(
        {"decode_attention.heads": _OWN, "decode_attention.variant": ("reference", "mlx", "matmul", "gathered")},
        "this variant does not let the number of heads a fetch serves be chosen",
    ),
    Impossible(
        {"decode_attention.lanes": _OWN, "decode_attention.variant": ("reference", "mlx", "matmul", "gathered")},
        "this variant does not let the order of reads be chosen",
    ),
    Impossible(
        {"experts.tile": _OWN, "experts.variant": ("reference", "mlx", "expanded", "grouped")},
        "this variant does not let the tile be chosen",
    ),
    Impossible(
        {"overlap": (True,), "experts.variant": ("reference", "metal", "packed", "expanded_grouped")},
        "this variant has no shared expert of its own to put beside the others",
    ),
    Impossible(
        {"decode.fusion": ("partial", "full"), "linear": ("reference", "expanded")},
        "there is no packed product to fold anything into",
    ),
    Impossible(
        {"speculative.drafter": ("off",), "speculative.draft_vocab": AnyBut((0,))},
        "a draft vocabulary needs a drafter",
    ),
    Impossible(
        {"speculative.drafter": ("off",), "speculative.adaptive": (True,)},
        "an adaptive depth needs a drafter",
    ),
)


def impossible(config: EngineConfig) -> list[str]:
    """Why this configuration can run nowhere, one line for each clash, naming the fields; empty if it may run."""
    values = flatten(config.to_dict())
    return [
        f"{' with '.join(f'{name}={values[name]}' for name in rule.fields)}: {rule.reason}"
        for rule in IMPOSSIBLE
        if all(values[name] in clashing for name, clashing in rule.fields.items())
    ]


# -- contrasts ------------------------------------------------------------------------------------


def differing_fields(arm: EngineConfig, reference: EngineConfig) -> dict[str, tuple[Any, Any]]:
    """Dotted fields in which two configurations differ, with both values."""
    a, b = flatten(arm.to_dict()), flatten(reference.to_dict())
    return {name: (a[name], b[name]) for name in a if a[name] != b[name]}


def check_contrast(arm: EngineConfig, reference: EngineConfig, asked: Iterable[str]) -> None:
    """Refuse a contrast that would answer another question than the one asked.

    Args:
        asked: dotted fields, or their parents, that may differ.

    Raises:
        ArmError: the arms differ in another field (named with both values), or in nothing.
    """
    asked = tuple(asked)
    differing = differing_fields(arm, reference)
    if not differing:
        raise ArmError(f"the arms are the same, so there is nothing to ask about {', '.join(asked)}")
    others = {
        name: values
        for name, values in differing.items()
        if not any(name == wanted or name.startswith(f"{wanted}.") for wanted in asked)
    }
    if others:
        listed = ", ".join(f"{name} ({a} against {b})" for name, (a, b) in others.items())
        raise ArmError(f"the contrast asks about {', '.join(asked)}, but the arms also differ in {listed}")


@dataclass(frozen=True)
class Pair:
    """The two arms of one question.

    Attributes:
        name: such as ``plain+packed_dequant`` or ``full-gqa_packing``. asked: the toggle's fields.
        shared: fields changed in both arms, away from the base, so that both can run.
        impossible: why either arm can run nowhere; empty if both may run.
    """

    name: str
    toggle: str
    arm: EngineConfig
    reference: EngineConfig
    asked: tuple[str, ...]
    shared: dict[str, Any]
    phases: tuple[str, ...]
    impossible: tuple[str, ...]


def add_one_in(
    name: str,
    value: Any = "on",
    against: Any = "off",
    base: str = "plain",
    on_top_of: Iterable[str] = (),
    device: str = "cpu",
) -> Pair:
    """Toggle `name` at `value` against the same at `against`, both on `base` with `on_top_of` switched on.

    Raises:
        ArmError: an unknown toggle, value or preset.
    """
    below = {other: "on" for other in on_top_of}
    start, claims = _configured(preset(base), below, {}, device)
    label = "+".join([base, *below, _label(name, value, against)])
    return _pair(label, name, value, against, start, claims, device)


def leave_one_out(name: str, value: Any = "on", against: Any = "off", base: str = "full", device: str = "cpu") -> Pair:
    """`base` with toggle `name` at `value` against `base` with it at `against`: what its removal costs.

    Raises:
        ArmError: an unknown toggle, value or preset.
    """
    return _pair(f"{base}-{_label(name, value, against)}", name, value, against, preset(base), {}, device)


def _label(name: str, value: Any, against: Any) -> str:
    usual = toggle(name).key(value) == toggle(name).on and toggle(name).key(against) == toggle(name).off
    return name if usual else f"{name}={_word(value)}:{_word(against)}"


def _pair(
    label: str,
    name: str,
    value: Any,
    against: Any,
    start: EngineConfig,
    claims: Mapping[str, _Claim],
    device: str,
) -> Pair:
    switch = toggle(name)
    keys = switch.key(value), switch.key(against)
    needs = [need for key in keys for need in switch.requires[key]]
    start, shared = _give_way(start, needs, claims)
    arm, reference = (_with(start, switch.settings[key].on(device)) for key in keys)
    check_contrast(arm, reference, switch.fields)
    reasons = dict.fromkeys([*impossible(arm), *impossible(reference)])
    return Pair(label, name, arm, reference, switch.fields, shared, switch.phases, tuple(reasons))
