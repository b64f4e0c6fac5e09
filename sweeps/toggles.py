"""Toggles between the command line and the engine's configuration: a thin layer over `ablations.arms`.

`ablations.arms` knows what each toggle sets; here nested plain values go in and come out, as the configuration and
the job carry them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ablations import arms
from engine.config import EngineConfig

Nested = dict[str, Any]


def names() -> list[str]:
    """All toggles, in the order of the documentation."""
    return list(arms.TOGGLES)


def check(name: str, value: str) -> str:
    """The setting that `value` stands for: ``on`` and ``off`` become the names of what they choose.

    Raises:
        ArmError: an unknown toggle or value, with the nearest.
    """
    word = {"true": "on", "false": "off"}.get(value.lower(), value)
    return arms.toggle(name).key(word)


def apply(base: Nested, chosen: Mapping[str, Any], fields: Mapping[str, Any], device: str = "cpu") -> EngineConfig:
    """`base` with toggles by name, as they are on a kind of device, and dotted fields set by hand.

    Raises:
        ArmError: two of them contradict each other.
    """
    return arms.arm_config(EngineConfig.from_dict(base), chosen, fields, device)


def family(
    name: str,
    values: Sequence[str],
    base: Nested,
    chosen: Mapping[str, Any],
    fields: Mapping[str, Any],
    device: str = "cpu",
) -> list[EngineConfig]:
    """One configuration for each of `values` of toggle `name`, differing in nothing but that toggle's fields.

    What any of the values needs of the rest (host routing cannot run inside a compiled step) is given to all alike.

    Raises:
        ArmError: contradictions, values that come to the same, or arms that differ in more than the toggle.
    """
    return combinations([{name: value} for value in values], base, chosen, fields, device)


def combinations(
    settings: Sequence[Mapping[str, str]],
    base: Nested,
    chosen: Mapping[str, Any],
    fields: Mapping[str, Any],
    device: str = "cpu",
) -> list[EngineConfig]:
    """One configuration for each of `settings` (toggle to value), differing in nothing but those toggles' fields.

    What any of them needs of the rest (host routing cannot run inside a compiled step) is given to all alike.

    Raises:
        ArmError: contradictions, settings that come to the same, or arms that differ in more than the toggles.
    """
    own = [field for name in dict.fromkeys(name for one in settings for name in one) for field in _fields_of(name)]
    start = apply(base, chosen, fields, device)
    shared: dict[str, Any] = {}
    for one in settings:
        changed = arms.differing_fields(apply(base, {**chosen, **one}, fields, device), start)
        shared |= {field: pair[0] for field, pair in changed.items() if field not in own}
    level = arms.nest({**arms.flatten(base), **shared})
    made = [apply(level, {**chosen, **one}, fields, device) for one in settings]
    for arm in made[1:]:
        arms.check_contrast(arm, made[0], own)
    return made


def _fields_of(name: str) -> tuple[str, ...]:
    return arms.toggle(name).fields


def fields_of(chosen: Mapping[str, Any], device: str = "cpu") -> dict[str, dict[str, Any]]:
    """What each chosen toggle expands to: toggle name to dotted fields and values."""
    made = {}
    for name, value in chosen.items():
        switch = arms.toggle(name)
        made[f"{name}={value}"] = dict(switch.settings[switch.key(value)].on(device))
    return made


def differing(config: Nested, base: Nested) -> dict[str, Any]:
    """Dotted fields in which `config` differs from `base`, with its own values."""
    pairs = arms.differing_fields(EngineConfig.from_dict(config), EngineConfig.from_dict(base))
    return {name: pair[0] for name, pair in pairs.items()}


def impossible(config: Nested) -> str | None:
    """Why this configuration can run nowhere, or None."""
    reasons = arms.impossible(EngineConfig.from_dict(config))
    return "; ".join(reasons) if reasons else None


def phases(name: str) -> tuple[str, ...]:
    """Phases whose time a toggle can change."""
    return arms.toggle(name).phases


def least_context(name: str) -> int:
    """Tokens below which both sides of a toggle do the same work."""
    return arms.toggle(name).min_context
