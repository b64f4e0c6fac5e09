"""The engine arms and pairs of an ablation: a toggle's values, both directions, a ladder, an interaction, presets.

Every kind comes to the same: configurations that differ in nothing but what is asked about, each once however many
questions it serves, and pairs of them. What a pair is about goes along with it, so that a report can set it beside
what was published.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ablations import arms as toggle_arms
from ablations.arms import PRESETS, preset
from ablations.catalogue import Claim, claim
from engine.config import EngineConfig
from engine.ops import VariantUnsupported, bind
from sweeps import toggles

Nested = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """One pair of arms by name, and what it is about."""

    arm: str
    reference: str
    about: dict[str, Any] = field(default_factory=dict)


@dataclass
class Questions:
    """Arms of a job in the order in which they were first needed, and what is asked of them.

    configs: by arm name. chosen: the toggles behind each. ladders: rungs by arm name, with what was left out and why.
    interactions: four arms by name (neither, first, second, both) and the toggles they are about.
    """

    configs: dict[str, EngineConfig] = field(default_factory=dict)
    chosen: dict[str, dict[str, Any]] = field(default_factory=dict)
    pairs: list[Asked] = field(default_factory=list)
    ladders: list[dict[str, Any]] = field(default_factory=list)
    interactions: list[dict[str, Any]] = field(default_factory=list)

    def add(self, name: str, config: EngineConfig, chosen: Mapping[str, Any]) -> str:
        """Take an arm in, unless its configuration is there already; returns the name it goes by."""
        for known, other in self.configs.items():
            if other.hash() == config.hash():
                return known
        for base in PRESETS:
            if base not in self.configs and preset(base).hash() == config.hash():
                name = base
                break
        self.configs[name], self.chosen[name] = config, dict(chosen)
        return name

    def ask(self, arm: str, reference: str, **about: Any) -> None:
        """Add a pair; one that is asked for again keeps what both are about."""
        for known in self.pairs:
            if (known.arm, known.reference) == (arm, reference):
                for key, value in about.items():
                    known.about[key] = [*dict.fromkeys([*known.about.get(key, []), *value])]
                return
        self.pairs.append(Asked(arm, reference, {key: list(value) for key, value in about.items()}))


class Builder:
    """Builds the arms of ablations under the overrides of one request.

    Args:
        engine: nested values of the preset in use. engine_name: its name. chosen, fields: toggles and dotted fields set
            by hand. device: kind of device, to leave rungs of a ladder out that cannot run there.
    """

    def __init__(
        self, engine: Nested, engine_name: str, chosen: Mapping[str, Any], fields: Mapping[str, Any], device: str
    ) -> None:
        self.engine, self.engine_name, self.given, self.fields = engine, engine_name, dict(chosen), dict(fields)
        self.device = device
        self.made = Questions()

    def build(self, ablation: Mapping[str, Any], directions: Sequence[str]) -> None:
        """Add the arms and pairs of one ablation, as its file describes it."""
        together = {str(key): str(value) for key, value in ablation["together"].items()}
        given = {**together, **self.given}
        if ablation["presets"]:
            self._presets(ablation["presets"], given)
        if ablation["ladder"]:
            self._ladder(ablation["ladder"], given)
        if ablation["interaction"]:
            self._interaction(ablation["interaction"], given)
        if directions and (ablation["claims"] or ablation["varies"]):
            self._directions(ablation, directions, given)
        elif ablation["varies"]:
            values = [str(value) for value in ablation["values"]]
            self._values(ablation["varies"], values, given, ablation["claims"], ablation["settings"])

    def _presets(self, names: Sequence[str], given: Mapping[str, Any]) -> None:
        configs = [toggles.apply(preset(n).to_dict(), given, self.fields, self.device) for n in names]
        made = [self.made.add(name, config, given) for name, config in zip(names, configs)]
        for name in made[1:]:
            self.made.ask(name, made[0])

    def _values(
        self,
        name: str,
        values: Sequence[str],
        given: Mapping[str, Any],
        claims: Sequence[str],
        settings: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """The values of one toggle (or, with a dot in it, one field) on the engine in use, against the first.

        settings: dotted fields that a value is given besides, an arm for each of them.
        """
        words = self._words(name, values)
        configs = self._family(name, words, self.engine, given)
        if settings:
            reference = self.made.add(f"{name}={words[0]}", configs[0], {**given, name: words[0]})
            for word in words[1:]:
                for fields in settings:
                    config = toggles.apply(self.engine, {**given, name: word}, {**self.fields, **fields}, self.device)
                    toggle_arms.check_contrast(config, configs[0], [*toggle_arms.toggle(name).fields, *fields])
                    label = ",".join(f"{field.rpartition('.')[2]}={value}" for field, value in fields.items())
                    arm = self.made.add(f"{name}={word},{label}", config, {**given, name: word})
                    self.made.ask(arm, reference, toggles=[name])
            return
        made = [
            self.made.add(f"{name}={word}", config, {**given, **({} if "." in name else {name: word})})
            for word, config in zip(words, configs)
        ]
        for word, arm in zip(words[1:], made[1:]):
            found = [c for c in map(claim, claims) if _is_pair(c, name, word, words[0])]
            self.made.ask(arm, made[0], toggles=[name], claims=[c.name for c in found])

    def _words(self, name: str, values: Sequence[str]) -> list[str]:
        return [str(value) if "." in name else toggles.check(name, str(value)) for value in values]

    def _family(self, name: str, values: Sequence[str], base: Nested, given: Mapping[str, Any]) -> list[EngineConfig]:
        if "." not in name:
            return toggles.family(name, values, base, given, self.fields, self.device)
        made = [toggles.apply(base, given, {**self.fields, name: int(value)}, self.device) for value in values]
        for other in made[1:]:
            toggle_arms.check_contrast(other, made[0], [name])
        return made

    # -- both directions -------------------------------------------------------------------------

    def _directions(self, ablation: Mapping[str, Any], directions: Sequence[str], given: Mapping[str, Any]) -> None:
        for name, arm, reference, below, claims in _sides(ablation):
            for direction in directions:
                base = "full" if direction == "out" else "plain"
                on_top = [b for b in below if b != name] if direction == "claim" else []
                chosen = {**dict.fromkeys(on_top, "on"), **given}
                words = self._words(name, [reference, arm])
                configs = self._family(name, words, preset(base).to_dict(), chosen)
                label = "+".join([base, *on_top])
                ref, other = (
                    self.made.add(f"{label},{name}={w}", c, {**chosen, **({} if "." in name else {name: w})})
                    for w, c in zip(words, configs)
                )
                self.made.ask(other, ref, directions=[direction], toggles=[name], claims=claims)

    # -- ladder and interaction ------------------------------------------------------------------

    def _ladder(self, steps: Sequence[str], given: Mapping[str, Any]) -> None:
        """Cumulative arms from everything off to everything on; a step that cannot run here is left out and said."""
        base = preset("plain").to_dict()
        chosen: dict[str, Any] = dict(given)
        rungs = [self.made.add("plain", toggles.apply(base, chosen, self.fields, self.device), chosen)]
        names, left_out = ["plain"], {}
        for step in steps:
            config = toggles.apply(base, {**chosen, step: "on"}, self.fields, self.device)
            reason = self.refusal(config.to_dict())
            if reason:
                left_out[step] = reason
                continue
            chosen = {**chosen, step: "on"}
            arm = self.made.add(f"up to {step}", config, chosen)
            if arm != rungs[-1]:
                self.made.ask(arm, rungs[-1], ladder=[step])
                rungs.append(arm)
                names.append(step)
        full = self.made.add("full", toggles.apply(preset("full").to_dict(), given, self.fields, self.device), given)
        if full not in rungs:
            self.made.ask(full, rungs[-1], ladder=["all the rest"])
            rungs.append(full)
            names.append("all the rest")
        self.made.ask(full, rungs[0], ladder=["together"])
        self.made.ladders.append({"arms": rungs, "steps": names, "left_out": left_out})

    def refusal(self, config: Nested) -> str | None:
        """Why this configuration cannot run on the device, or None."""
        return refusal(config, self.device)

    def _interaction(self, names: Sequence[str], given: Mapping[str, Any]) -> None:
        """Four arms on everything off: neither of two toggles, either, both."""
        first, second = names
        off = {name: toggle_arms.toggle(name).off for name in names}
        on = {name: toggle_arms.toggle(name).on for name in names}
        settings = [off, {**off, first: on[first]}, {**off, second: on[second]}, on]
        configs = toggles.combinations(settings, preset("plain").to_dict(), given, self.fields, self.device)
        four = [
            self.made.add("plain," + ",".join(f"{k}={v}" for k, v in one.items()), config, {**given, **one})
            for one, config in zip(settings, configs)
        ]
        neither, a, b, both = four
        for arm, reference, name in ((a, neither, first), (b, neither, second), (both, b, first), (both, a, second)):
            self.made.ask(arm, reference, toggles=[name])
        self.made.interactions.append({"toggles": list(names), "arms": four})


def refusal(config: Nested, device: str) -> str | None:
    """Why a configuration can run nowhere, or not on this kind of device; None if it may run."""
    reason = toggles.impossible(config)
    if reason:
        return reason
    if config["speculative"]["drafter"] == "model":
        return "speculative=model takes a second engine, which a sweep does not have; take mtp or ngram"
    try:
        bind(EngineConfig.from_dict(config), device)
    except VariantUnsupported as error:
        return str(error)
    return None


def _is_pair(c: Claim, name: str, arm: str, reference: str) -> bool:
    known, value, against = side(c)
    key: Callable[[str], str] = str if "." in name else toggle_arms.toggle(name).key
    return known == name and (key(value), key(against)) == (arm, reference)


def side(c: Claim) -> tuple[str, str, str]:
    """What a claim varies: a toggle or, where it names none, its one engine field; the arm's value, the reference's."""
    if c.toggle is not None or not c.fields:
        return c.toggle or "", c.arm, c.reference
    ((name, value),) = c.fields.items()
    return name, str(value), "0"


def _sides(ablation: Mapping[str, Any]) -> list[tuple[str, str, str, tuple[str, ...], list[str]]]:
    """(varied, arm, reference, on top of, claims) of each pair an ablation tests; without a claim, on against off."""
    found: dict[tuple[str, str, str, tuple[str, ...]], list[str]] = {}
    for c in map(claim, ablation["claims"]):
        found.setdefault((*side(c), tuple(c.on_top_of or ())), []).append(c.name)
    if not found:
        name = ablation["varies"]
        found[name, toggle_arms.toggle(name).on, toggle_arms.toggle(name).off, ()] = []
    return [(*key, names) for key, names in found.items()]
