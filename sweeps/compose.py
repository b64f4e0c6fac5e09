"""From the words of a command line to a checked request, or one clear line that says what is wrong.

Hydra composes the groups of `configs/`, but only after this module has checked every word itself, because plain
Hydra quotes by rules of its own, answers over several lines and lets wrong values pass. What that gives:

- values need no quoting beyond the shell's: ``model=org/name@rev``, ``model=./a,b``, ``run_dir=/tmp/my=run`` are taken
  as they stand. One pair of quotes inside the value is taken off: ``model="'a,b'"`` is the folder ``a,b``.
- a comma separates jobs, and only with ``-m``; an existing path that contains one stays a path.
- relative paths start at the folder the command was started from; the working directory never changes.

``-m`` is expanded here, not by Hydra's own sweeper: every job is checked before the first one starts, each has a run
folder of its own, and one that fails does not hide the others. Where a launcher is named (``hydra/launcher=…``, to
spread jobs over machines) the checked command is handed to Hydra's main instead, quoted for its grammar.
"""

from __future__ import annotations

import difflib
import itertools
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

import sweeps
from ablations.arms import PRESETS, TOGGLES, preset
from ablations.statistics import LEAST_MARGIN, MOST_MARGIN
from engine.config import EngineConfig
from engine.ops import OPS
from sweeps import toggles
from sweeps.points import FRONTIERS

GROUPS = ("engine", "subject", "model", "sweep", "ablation")
"""Configuration groups: ``GROUP=NAME`` picks a file of ``configs/GROUP``."""

COMMANDS = ("run", "tune", "calibrate", "pack", "unpack")
"""Words that may stand before the overrides; no word means ``run``."""

LEAST_PART_SECONDS = 60
"""Shortest part of a run, in seconds: below it, most of each part would go to loading weights and warming up."""

_ENDPOINT = ("subject.url", "subject.model", "subject.key_env")
_FREE_TEXT = frozenset({"model.reference", "run_dir", "base", "head", "subject.binary", "subject.gguf", *_ENDPOINT})
_SHORT = {"url": "subject.url"}
"""Keys that may be written without their group."""

_OWNERS = {
    "model.reference": "write model=FOLDER or model=ORG/NAME@REVISION",
    "model.seed": "it takes model=synthetic-35b",
    "model.skew": "it takes model=synthetic-35b",
    "model.layers": "it takes model=synthetic-35b",
    "subject.binary": "it takes subject=llama_bench",
    "subject.gguf": "it takes subject=llama_bench",
    **dict.fromkeys(_ENDPOINT, "it takes subject=openai"),
}
_PHASES = ("prefill", "decode")
DIRECTIONS = ("in", "claim", "out")
"""Added to everything off; added on top of what was on when it was published; taken from everything on."""

_CHOICES = {
    "arms": ("parallel", "serial"),
    "check": ("none", "baseline"),
    "allow": ("none", "battery"),
    "dry_run": ("true", "false", "json"),
    "fetch": ("true", "false"),
    "wait": ("true", "false"),
    "probe": ("auto", "true", "false"),
    "decode.logprobs": ("true", "false"),
    "decode.cache": ("own", "shared"),
    "decode.prompts": ("one", "own"),
}


class UsageError(ValueError):
    """Something on the command line is wrong; the message is one line that names the thing and the fix."""


@dataclass(frozen=True)
class CommandLine:
    """Words of a command.

    command: a word of `COMMANDS`. overrides: ``key=value``. multirun: whether ``-m`` was given. arguments: of ``pack``
    and ``unpack``. launcher: what goes to Hydra's launcher untouched.
    """

    command: str
    overrides: tuple[str, ...]
    multirun: bool = False
    arguments: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ()


@dataclass(frozen=True)
class Request:
    """A composed and checked configuration: plain values, ready to be planned.

    Attributes:
        engine_name, engine: preset and its nested values with every ``engine.*`` override, toggles not yet applied.
        engine_fields: dotted engine fields set by hand. toggles: toggles set by hand.
        model: the model group as composed; ``reference`` of kind ``custom`` is what followed ``model=``.
        ablations: the questions of `ablation`, several where it joins them (``a+b``). directions: in which each toggle
            is asked about; empty for the values of its file. suite: what the job is part of, or ``none``.
        frontiers: tokens, rising; `asked_frontiers` tells whether they were set by hand.
        budget_seconds, cap_seconds: limits of the whole run and of one prefill.
        part_seconds: limit of one invocation, or None.
        own_prompts: whether each block of decode windows has a prompt of its own. decode_tokens: of a window, or None.
        decode_blocks: blocks of decode windows that were asked for by hand, or None for what the device needs.
        jobs: numbers of the jobs of the suite to run, rising; empty for all.
        base: another checkout whose engine is the reference, or None. head: the checkout that is held against it; None
            is this one.
        margin: smallest difference of interest, as a share.
        planted: share of its time by which a copy of the engine's arm is slowed, or None.
        config: everything composed, for the record.
    """

    engine_name: str
    engine: dict[str, Any]
    engine_fields: dict[str, Any]
    toggles: dict[str, Any]
    subject: dict[str, Any]
    model: dict[str, Any]
    sweep: str
    ablation: dict[str, Any]
    ablations: tuple[dict[str, Any], ...]
    directions: tuple[str, ...]
    suite: str
    frontiers: tuple[int, ...]
    asked_frontiers: bool
    phases: tuple[str, ...]
    budget_seconds: float
    cap_seconds: float
    part_seconds: float | None
    sessions: int
    blocks: int
    arms: str
    prompt: str
    base: Path | None
    head: Path | None
    planted: float | None
    margin: float
    logprobs: bool
    shared_cache: bool
    own_prompts: bool
    decode_tokens: int | None
    decode_blocks: int | None
    jobs: tuple[int, ...]
    seed: int
    dry_run: str
    fetch: bool
    wait: bool
    probe: str
    check: str
    allow: str
    run_dir: Path | None
    launch: Path
    overrides: tuple[str, ...]
    config: dict[str, Any]


def config_dir() -> Path:
    """The folder of configuration groups, beside the package both in a checkout and in an installed wheel."""
    found = Path(sweeps.__file__).resolve().parent.parent / "configs"
    if not (found / "config.yaml").is_file():
        raise UsageError(f"the folder {found} with config.yaml is missing: install lilybench again")
    return found


def options(group: str) -> list[str]:
    """Names that ``group=`` takes, sorted."""
    return sorted(p.stem for p in (config_dir() / group).glob("*.yaml") if p.stem != "custom")


# -- words -------------------------------------------------------------------------------------------


def parse(argv: Sequence[str]) -> CommandLine:
    """Sort the words of a command line.

    Raises:
        UsageError: an unknown command, option, or a word that is no ``key=value``.
    """
    words = list(argv)
    command = "run"
    if words and re.fullmatch(r"[a-z]+", words[0]) and words[0] not in (*GROUPS, *_CHOICES, "suite"):
        command = words.pop(0)
        if command not in COMMANDS:
            raise UsageError(f"unknown command {command!r}{_near(command, COMMANDS)}; commands: {', '.join(COMMANDS)}")
    if command in ("pack", "unpack"):
        return CommandLine(command, (), arguments=tuple(words))
    multirun = False
    overrides, launcher = [], []
    for word in words:
        if word in ("-m", "--multirun"):
            multirun = True
        elif word.startswith("-"):
            raise UsageError(f"unknown option {word!r}: settings are written key=value; options are -m and --help")
        elif "=" not in word or word.startswith("="):
            known = _near(word, [*COMMANDS, *_CHOICES, *GROUPS, "suite"])
            raise UsageError(f"{word!r} has no value{known}: settings are written key=value, as in sweep=ten")
        elif word.startswith(("hydra/launcher=", "hydra.launcher.")):
            launcher.append(word)
        else:
            overrides.append(word)
    if launcher and not multirun:
        raise UsageError(f"{launcher[0]} spreads several jobs: add -m")
    return CommandLine(command, tuple(overrides), multirun, launcher=tuple(launcher))


def jobs(line: CommandLine, launch: Path | None = None) -> list[tuple[str, ...]]:
    """The overrides of every job a command asks for: one, or with ``-m`` or ``suite=`` the product of its lists.

    Raises:
        UsageError: a comma outside brackets without ``-m``.
    """
    launch = launch or Path.cwd()
    suite: str | None = None
    choices: list[list[str]] = []
    for word in line.overrides:
        key, value = word.split("=", 1)
        if key == "suite":
            suite = _suite(unquote(value))
            continue
        parts = [value] if _is_path(value, launch) else _split(value)
        if len(parts) > 1 and (not line.multirun or key == "jobs"):
            raise UsageError(_comma(key, value, parts))
        if any(not part for part in parts) and len(parts) > 1:
            raise UsageError(f"{word!r} has an empty entry between commas: remove the extra comma")
        choices.append([f"{key}={part}" for part in parts])
    made = [tuple(combination) for combination in itertools.product(*choices)]
    return [words for job in made for words in _suite_jobs(suite, job)] if suite else made


def suites() -> list[str]:
    """Names that ``suite=`` takes beside ``none``, sorted."""
    return sorted(p.stem for p in (config_dir() / "suites").glob("*.yaml"))


def suite_of(line: CommandLine) -> str | None:
    """The suite that a command asks for, or None."""
    named = [word.split("=", 1)[1] for word in line.overrides if word.startswith("suite=")]
    return _suite(unquote(named[-1])) if named else None


def _suite(name: str) -> str | None:
    if name != "none" and name not in suites():
        known = ["none", *suites()]
        raise UsageError(f"suite={name} is unknown{_near(name, known)}; it takes {', '.join(known)}")
    return None if name == "none" else name


def _suite_jobs(name: str, words: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The jobs of a suite, each with the user's own words in place of its own where they name the same key."""
    suite: Any = OmegaConf.to_container(OmegaConf.load(config_dir() / "suites" / f"{name}.yaml"))
    own = {word.split("=", 1)[0] for word in words}
    # Blocks that the user names are those of both phases, whatever the suite has for decoding.
    own |= {"decode.blocks"} if "blocks" in own else set()
    if "ablation" in own:
        raise UsageError(f"suite={name} and ablation= are two lists of questions: leave one out")
    made = []
    for job in suite["jobs"]:
        values = {**suite["settings"], **job, "ablation": "+".join(job["ablation"])}
        told = [f"{key}={_word(value)}" for key, value in values.items() if key not in own]
        made.append((f"suite={name}", *told, *words))
    return made


def _word(value: Any) -> str:
    return f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)


def _split(value: str) -> list[str]:
    """Parts between the commas that stand outside brackets and quotes."""
    parts, depth, quote, start = [], 0, "", 0
    for i, char in enumerate(value):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"" and (i == start or depth):
            quote = char
        elif char in "[{(":
            depth += 1
        elif char in "]})":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(value[start:i])
            start = i + 1
    return [*parts, value[start:]]


def _comma(key: str, value: str, parts: list[str]) -> str:
    if key in ("frontiers", "phases", "jobs"):
        return f"{key}={value} holds a comma: write a list in brackets, {key}=[{value}]"
    quoted = f"""{key}="'{value}'\""""
    return f"{key}={value} holds a comma: add -m to run {len(parts)} jobs one after another, or quote it as {quoted}"


def _is_path(value: str, launch: Path) -> bool:
    try:
        return "," in value and (launch / Path(unquote(value)).expanduser()).exists()
    except OSError:
        return False


def unquote(value: str) -> str:
    """`value` without one pair of quotes around it."""
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
        return value[1:-1]
    return value


def quote(value: str) -> str:
    """`value` as a quoted string of Hydra's override grammar, whatever characters it holds."""
    escaped = re.sub(r"(\\*)'", lambda m: m[1] * 2 + r"\'", value)
    trailing = re.search(r"\\*$", escaped)
    return "'" + escaped + (trailing[0] if trailing else "") + "'"


def _near(word: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f", did you mean {found[0]!r}?" if found else ""


# -- composing ---------------------------------------------------------------------------------------


def request(overrides: Sequence[str], launch: Path | None = None) -> Request:
    """Compose and check one job.

    Args:
        overrides: ``key=value`` words of one job, as typed.
        launch: folder that relative paths start from; None is the current one.

    Raises:
        UsageError: names the first thing that is wrong and how to write it.
    """
    launch = (launch or Path.cwd()).resolve()
    quoted = checked(overrides)
    values = _compose(quoted)
    names = next((unquote(w.split("=", 1)[1]) for w in overrides if w.startswith("ablation=")), "none").split("+")
    if len(names) > 1:
        values["ablation"] |= {"name": "+".join(names), "joined": [_ablation(name) for name in names]}
    return _request(values, overrides, launch)


def _ablation(name: str) -> dict[str, Any]:
    """One ablation's file over what `none.yaml` sets."""
    folder = config_dir() / "ablation"
    made: Any = OmegaConf.to_container(OmegaConf.merge(*(OmegaConf.load(folder / f"{n}.yaml") for n in ("none", name))))
    made.pop("defaults", None)
    return made


def checked(overrides: Sequence[str]) -> list[str]:
    """Overrides in Hydra's grammar, every key and choice checked and every value quoted as needed."""
    known = known_keys()
    seen: dict[str, str] = {}
    made = []
    for word in overrides:
        key, value = word.split("=", 1)
        key, value = _SHORT.get(key, key), value.strip()
        if key in seen and seen[key] != value:
            raise UsageError(f"{key} is set twice, to {seen[key]} and to {value}: keep one")
        seen[key] = value
        if "${" in value:
            raise UsageError(f"{key}={value}: references such as ${{…}} are not taken on the command line")
        made.extend(_checked(key, value, known))
    return made


def _checked(key: str, value: str, known: Sequence[str]) -> list[str]:
    if key == "model":
        return _model(unquote(value))
    if key == "suite":
        return [f"suite={_suite(unquote(value)) or 'none'}"]
    if key == "ablation":
        names = unquote(value).split("+")
        for name in names:
            if name not in options(key):
                known = ", ".join(options(key))
                raise UsageError(f"{key}={name} is unknown{_near(name, options(key))}; known: {known}")
        return [f"{key}={names[0]}"]
    if key in GROUPS:
        name = unquote(value)
        if name not in options(key):
            raise UsageError(f"{key}={name} is unknown{_near(name, options(key))}; known: {', '.join(options(key))}")
        return [f"{key}={name}"]
    if key.startswith("toggle."):
        name = key.removeprefix("toggle.")
        return [f"++toggle.{name}={quote(toggles.check(name, unquote(value)))}"]
    if key not in known:
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        fix = f"did you mean {near[0]}?" if near else "see configs/config.yaml for the keys there are"
        raise UsageError(f"unknown setting {key}: {fix}")
    if key in _CHOICES:
        return [f"{key}={_choice(key, unquote(value).lower())}"]
    if key == "run_dir" and not unquote(value):
        raise UsageError("run_dir= is empty: give a folder, or leave it out for one under reports/runs")
    if key in _FREE_TEXT:
        return [f"{key}={quote(unquote(value))}"]
    if key == "model.seed" and not unquote(value).isdecimal():
        raise UsageError(f"model.seed={value} is no count: write a whole number from 0 up")
    if key.startswith("engine."):
        _variant(key, unquote(value))
    plain = re.fullmatch(r"[A-Za-z0-9_./:+-]+|\[[^'\"]*\]", value)
    return [f"{key}={value if plain else quote(unquote(value))}"]


def _choice(key: str, value: str) -> str:
    allowed = _CHOICES[key]
    if value not in allowed:
        raise UsageError(f"{key}={value} is unknown{_near(value, allowed)}; it takes {', '.join(allowed)}")
    return value


def _variant(key: str, value: str) -> None:
    """Refuse a variant that neither the op nor a toggle knows; else a run of skipped points would say it late."""
    field = key.removeprefix("engine.")
    op = OPS.get(field.removesuffix(".variant"))
    if op is not None:
        # Toggles name kernels that this build may not have: those are skipped with their reason.
        named = (setting.fields.get(field) for toggle in TOGGLES.values() for setting in toggle.settings.values())
        known = list(dict.fromkeys(["best", *op.variants, *(str(name) for name in named if name is not None)]))
        if value not in known:
            raise UsageError(f"{key}={value} is unknown{_near(value, known)}; it takes {', '.join(known)}")


def _model(value: str) -> list[str]:
    if not value:
        raise UsageError(f"model= is empty: give a name ({', '.join(options('model'))}), a folder or ORG/NAME@REVISION")
    if value in options("model"):
        return [f"model={value}"]
    return ["model=custom", f"model.reference={quote(value)}"]


@lru_cache(maxsize=1)
def known_keys() -> tuple[str, ...]:
    """Every key that may be set by hand, dotted: groups, fields of the engine, toggles, and the plain settings."""
    values = _compose([])
    values.pop("toggle")
    own = {*_OWNERS, *GROUPS}
    plain = {k: v for k, v in values.items() if k not in GROUPS}
    engine = {"engine": EngineConfig().to_dict()}
    return tuple(sorted({*own, *_flat(plain), *_flat(engine), *(f"toggle.{name}" for name in toggles.names())}))


def _flat(values: dict[str, Any], prefix: str = "") -> list[str]:
    keys = []
    for key, value in values.items():
        keys += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [f"{prefix}{key}"]
    return keys


def _compose(overrides: Sequence[str]) -> dict[str, Any]:
    register()
    # A caller that is itself a Hydra job (a launcher's worker) has initialised Hydra already.
    held = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(config_dir()), version_base=None):
            composed = compose("config", overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        first = str(error).strip().splitlines()[0]
        if found := re.search(r"Could not override '((model|subject)\.\w+)'", first):
            raise UsageError(f"{found[1]} does not go with this {found[2]}: {_OWNERS[found[1]]}") from error
        raise UsageError(f"the settings do not compose: {first}") from error
    finally:
        GlobalHydra.instance().hydra = held
    values = OmegaConf.to_container(composed, resolve=False)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def register() -> None:
    """Offer the presets of `ablations.arms` to Hydra, so that no YAML file repeats them."""
    for name in PRESETS:
        ConfigStore.instance().store(group="engine", name=f"preset_{name}", node=preset(name).to_dict())


# -- checking values ---------------------------------------------------------------------------------


def _request(values: dict[str, Any], overrides: Sequence[str], launch: Path) -> Request:
    words = dict(word.split("=", 1) for word in overrides)
    sweep, ablation = values["sweep"], values["ablation"]
    joined = ablation.get("joined") or [ablation]
    engine = EngineConfig.from_dict(values["engine"]).to_dict()
    fields = [key.removeprefix("engine.") for key in words if key.startswith("engine.")]
    # Long frontiers of a claim do not fit the two minutes of a smoke run, which only shows that the arms work.
    own = sorted({f for one in joined for f in one["frontiers"] or ()}) if sweep["name"] != "smoke" else None
    frontiers = _first(values["frontiers"], own or sweep["frontiers"])
    phases = values["phases"]
    if "phases" not in words:
        phases = _asked_phases(joined) or phases
    run_dir = values["run_dir"]
    return Request(
        engine_name=unquote(words.get("engine", "full")),
        engine=engine,
        engine_fields={name: _lookup(engine, name) for name in fields},
        toggles={str(k): v for k, v in values["toggle"].items()},
        subject=values["subject"],
        model=values["model"],
        sweep=sweep["name"],
        ablation=ablation,
        ablations=tuple(joined),
        directions=_directions(values["directions"]),
        suite=values["suite"],
        frontiers=_frontiers(frontiers),
        # A suite goes as far as the machine can, and says where it ends.
        asked_frontiers=values["frontiers"] is not None and values["suite"] == "none",
        phases=_phases(phases),
        budget_seconds=seconds("budget", _first(values["budget"], sweep["budget"])),
        cap_seconds=seconds("cap", _first(values["cap"], sweep["cap"])),
        part_seconds=_part(_first(values["part"], sweep.get("part"))),
        sessions=_count("sessions", _first(values["sessions"], sweep["sessions"])),
        blocks=_count("blocks", _first(values["blocks"], sweep["blocks"])),
        arms=values["arms"],
        prompt=_prompt(values["prompt"]),
        base=None if values["base"] is None else resolve(str(values["base"]), launch),
        head=None if values["head"] is None else resolve(str(values["head"]), launch),
        planted=_share("planted", _first(values["planted"], sweep.get("planted"))),
        margin=_margin(values["margin"]),
        logprobs=bool(values["decode"]["logprobs"]),
        shared_cache=values["decode"]["cache"] == "shared",
        own_prompts="own" in (_first(values["decode"]["prompts"], None) or [one["prompts"] for one in joined]),
        decode_tokens=_tokens(values["decode"]["tokens"], joined),
        decode_blocks=_decode_blocks(values["decode"]["blocks"], values["blocks"]),
        jobs=_numbers(values["jobs"], values["suite"]),
        seed=_count("seed", values["seed"], least=0),
        dry_run=str(values["dry_run"]).lower(),
        fetch=bool(values["fetch"]),
        wait=bool(values["wait"]),
        probe=str(values["probe"]).lower(),
        check=values["check"],
        allow=values["allow"],
        run_dir=None if run_dir is None else resolve(str(run_dir), launch),
        launch=launch,
        overrides=tuple(overrides),
        config=values,
    )


def _asked_phases(ablations: Sequence[dict[str, Any]]) -> list[str]:
    """Phases that the questions are about: those a file names, else those that its toggle can change."""
    made: list[str] = []
    for one in ablations:
        toggle = one["varies"] if one["varies"] in TOGGLES else None
        made += one["phases"] or (toggles.phases(toggle) if toggle else _PHASES if one["name"] != "none" else ())
    return list(dict.fromkeys(made))


def _tokens(asked: Any, ablations: Sequence[dict[str, Any]]) -> int | None:
    """Tokens of a decode window: those asked for, else the most that a question needs; None for what the device has."""
    own = [one["tokens"] for one in ablations if one["tokens"] is not None]
    value = _first(asked, max(own, default=None))
    return None if value is None else _count("decode.tokens", value)


def _decode_blocks(asked: Any, blocks: Any) -> int | None:
    value = _first(asked, blocks)
    return None if value is None else _count("decode.blocks", value)


def _numbers(value: Any, suite: str) -> tuple[int, ...]:
    """Numbers of jobs of a suite, rising; that the suite has them is seen where all its jobs are known."""
    if value is None:
        return ()
    if suite == "none":
        raise UsageError(f"jobs={_word(value)} picks jobs of a suite: add suite=NAME, or leave it out")
    entries = value if isinstance(value, list) else [value]
    if not entries:
        raise UsageError("jobs=[] is empty: name at least one job, as in jobs=[1], or leave it out for all")
    return tuple(sorted({_count("jobs", entry) for entry in entries}))


def _directions(value: Any) -> tuple[str, ...]:
    entries = [str(v) for v in (value if isinstance(value, list) else [value])]
    for entry in entries:
        if entry not in DIRECTIONS:
            raise UsageError(f"directions: {entry!r} is unknown{_near(entry, DIRECTIONS)}; it takes {DIRECTIONS}")
    return tuple(d for d in DIRECTIONS if d in entries)


def resolve(path: str, launch: Path) -> Path:
    """An absolute path; relative ones start at the launch folder, ``~`` is the home folder."""
    try:
        return Path(os.path.normpath(launch / Path(path).expanduser()))
    except RuntimeError as error:
        raise UsageError(f"{path}: there is no such user: write the full path") from error


def _first(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value


def _lookup(values: dict[str, Any], dotted: str) -> Any:
    for part in dotted.split("."):
        values = values[part]
    return values


def seconds(key: str, value: Any) -> float:
    """A time such as ``90s``, ``10m``, ``2h`` or a plain number of seconds.

    Raises:
        UsageError: anything else, or nothing to spend.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h)?", str(value).strip())
    made = float(found[1]) * {"s": 1, "m": 60, "min": 60, "h": 3600}[found[2] or "s"] if found else 0.0
    if made <= 0:
        raise UsageError(f"{key}={value} is no time: write 90s, 10m or 2h")
    return made


def _part(value: Any) -> float | None:
    if value is None:
        return None
    made = seconds("part", value)
    if made < LEAST_PART_SECONDS:
        raise UsageError(f"part={value} is too short to get anywhere: give at least {LEAST_PART_SECONDS} s")
    return made


def _share(key: str, value: Any) -> float | None:
    if value is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%?)", str(value).strip())
    made = float(found[1]) / (100 if found[2] else 1) if found else 0.0
    if not 0 < made <= 1:
        raise UsageError(f"{key}={value} is no share: write 5% or 0.05")
    return made


def _margin(value: Any) -> float:
    made = LEAST_MARGIN if value is None else _share("margin", value)
    assert made is not None
    if not LEAST_MARGIN <= made <= MOST_MARGIN:
        raise UsageError(f"margin={value} is out of range: it goes from {LEAST_MARGIN:.0%} to {MOST_MARGIN:.0%}")
    return made


def _count(key: str, value: Any, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{key}={value} is no count: write a whole number from {least} up")
    return value


def _frontiers(value: Any) -> tuple[int, ...]:
    entries = value if isinstance(value, list) else [value]
    made = set()
    for entry in entries:
        found = re.fullmatch(r"(\d+)([kK]?)", str(entry).strip())
        tokens = int(found[1]) * (1024 if found[2] else 1) if found else 0
        if tokens < 2:
            example = ",".join(map(str, FRONTIERS[:2]))
            raise UsageError(f"frontiers: {entry!r} is no context length: write tokens, as in [{example}] or [4K,128K]")
        made.add(tokens)
    if not made:
        raise UsageError("frontiers=[] is empty: name at least one context length, as in frontiers=[256]")
    return tuple(sorted(made))


def _phases(value: Any) -> tuple[str, ...]:
    entries = [str(v) for v in (value if isinstance(value, list) else [value])]
    for entry in entries:
        if entry not in _PHASES:
            raise UsageError(f"phases: {entry!r} is unknown{_near(entry, _PHASES)}; it takes [prefill,decode]")
    if not entries:
        raise UsageError("phases=[] is empty: it takes prefill, decode or both")
    return tuple(p for p in _PHASES if p in entries)


def _prompt(value: Any) -> str:
    from sweeps.prompts import KINDS

    name = str(value)
    if name not in KINDS:
        raise UsageError(f"prompt={name} is unknown{_near(name, KINDS)}; it takes {', '.join(KINDS)}")
    return name
