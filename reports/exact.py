"""Counts that must not rise: what `python -m sweeps.exact` wrote, against the committed counts of the same device.

The committed files are ``.github/exact/<device kind>.json``; `renew` writes them, on purpose only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from reports import text
from reports.announce import ci
from reports.facts import finite, flatten
from reports.load import ReportError

FORMAT = 1
COMMITTED = Path(".github") / "exact"
"""Where committed counts are kept, from the folder the command is started in."""

TOLERANCE = {"peak_bytes": 0.05}
"""Share by which a count may rise: allocators round, so a peak is the one that is not exact."""


@dataclass(frozen=True)
class Exact:
    """What the comparison says. code: 0 nothing rose, 1 something rose or changed, 2 the files cannot be compared.

    rose, fell: a line for each count. changed: a line for each chosen variant that is another one.
    """

    code: Literal[0, 1, 2]
    reason: str
    rose: tuple[str, ...] = ()
    fell: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()


def compare(counted: Path, against: Path | None = None) -> Exact:
    """Hold the counts of a file against the committed ones.

    Args:
        against: the committed file; by default that of the device the counts come from.

    Raises:
        ReportError: `counted` cannot be read.
    """
    now = _read(counted)
    against = against or _committed(now)
    if not against.is_file():
        return Exact(2, f"cannot tell: {against} does not exist; python -m reports exact {counted} --renew makes it")
    then = _read(against)
    if then["device_kind"] != now["device_kind"]:
        return Exact(2, f"cannot tell: counts of {now['device_kind']} against counts of {then['device_kind']}")
    if then.get("mlx") != now.get("mlx"):
        return Exact(
            2, f"cannot tell: MLX {now.get('mlx')} here, {then.get('mlx')} in {against}; renew it with that version"
        )
    old, new = dict(_counts(then)), dict(_counts(now))
    rose = [_said(name, old.get(name, 0), value) for name, value in new.items() if _rises(name, old.get(name), value)]
    fell = [_said(name, value, new[name]) for name, value in old.items() if name in new and new[name] < value]
    before, after = dict(_variants(then)), dict(_variants(now))
    changed = [
        f"{name}: {before[name]}, now {after.get(name, 'gone')}" for name in before if before[name] != after.get(name)
    ]
    gone = [f"{name} is not counted any more" for name in old if name not in new and not _by_operation(name)]
    if rose or changed:
        return Exact(
            1,
            f"rose: {'; '.join(rose) or 'nothing'}; chosen: {'; '.join(changed) or 'as before'}",
            *map(tuple, (rose, fell, changed)),
        )
    if gone:
        return Exact(2, f"cannot tell: {'; '.join(gone)}", (), tuple(fell))
    said = f"no count rose in {len(new)}" + (f"; {len(fell)} fell, renew the committed counts" if fell else "")
    return Exact(0, said, (), tuple(fell))


def renew(counted: Path, against: Path | None = None) -> Path:
    """Write the counts as the committed ones and return the file.

    Raises:
        ReportError: they cannot be read.
    """
    now = _read(counted)
    path = against or _committed(now)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(now, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return path


def announce(answer: Exact, environment: Mapping[str, str] | None = None) -> list[str]:
    """Lines for stdout: what rose and changed, as annotations under GitHub Actions, and the verdict last."""
    environment = ci() if environment is None else environment
    mark = environment.get("GITHUB_ACTIONS") == "true"
    bad = [f"rose: {line}" for line in answer.rose] + [f"another variant: {line}" for line in answer.changed]
    lines = [f"::error title=exact::{text.one_line(line)}" if mark else line for line in bad]
    lines += [f"fell: {line}" for line in answer.fell]
    if answer.code == 2 and mark:
        lines.append(f"::warning title=exact::{text.one_line(answer.reason)}")
    if step := environment.get("GITHUB_STEP_SUMMARY"):
        with Path(step).open("a", encoding="utf-8") as file:
            file.write("## Exact counts\n\n" + "".join(f"- {text.markdown(line)}\n" for line in (*bad, answer.reason)))
    return [*lines, answer.reason]


def _read(path: Path) -> dict[str, Any]:
    try:
        made = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ReportError(f"{path}: no counts ({error}); python -m sweeps.exact {path} makes them") from None
    if not isinstance(made, dict) or made.get("format") != FORMAT or not isinstance(made.get("presets"), dict):
        raise ReportError(f"{path}: counts of another format than {FORMAT}; make them again")
    return made


def _committed(now: Mapping[str, Any]) -> Path:
    return COMMITTED / f"{now['device_kind']}.json"


def _counts(made: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in flatten(made["presets"]).items():
        number = finite(value)
        if number is not None:
            yield name, number


def _variants(made: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for preset, values in made["presets"].items():
        for op, variant in (values.get("chosen") or {}).items():
            yield f"{preset} {op}", str(variant)


def _by_operation(name: str) -> bool:
    return ".by_operation." in name


def _rises(name: str, before: float | None, now: float) -> bool:
    # One kind of operation may take another's place; what counts is their sum.
    if _by_operation(name):
        return False
    if before is None:
        return True
    return now > before * (1 + TOLERANCE.get(name.rsplit(".", 1)[-1], 0.0))


def _said(name: str, before: float, now: float) -> str:
    return f"{' '.join(name.split('.'))} {text.number(int(before) if before == int(before) else before)} to " + (
        text.number(int(now) if now == int(now) else now)
    )
