"""`python -m engine doctor`: what this machine can run, what it cannot and why, and whether its ops compute right.

It changes nothing: where a setting would help, it prints the command and its risk. Findings go to stdout (``--json``
for machines), progress to stderr. It also works where MLX cannot be imported, since that is when it is needed most.

Exit status: 0 nothing is in the way, 1 something is (a failed self-test, a system that MLX does not run on),
2 unknown arguments.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from engine.arguments import Arguments
from engine.config import ModelConfig
from engine.memory import SMALLEST_FRONTIER, attention_is_fused, largest_frontier, run_bytes, weight_bytes

if TYPE_CHECKING:
    from engine.ops import Op, Variant

GIB = 1 << 30
MIB = 1 << 20

Level = Literal["ok", "note", "warning", "problem"]
Command = Callable[[Sequence[str]], str | None]

_PACKAGES = ("mlx", "mlx-metal", "mlx-cpu", "mlx-cuda-12", "mlx-cuda-13", "mlx-lm", "numpy", "transformers")
_CUDA_SHARE = 0.95
_CPU_SHARE = 0.8
_SMALL_CASES = 2


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's answer. A `problem` makes the exit status 1; a `warning` does not."""

    level: Level
    topic: str
    text: str


@dataclass(frozen=True)
class Machine:
    """The computer and its system, before MLX is asked.

    Attributes:
        system: ``"Darwin"`` or ``"Linux"``. arch: of the Python process, e.g. ``"arm64"``.
        version: of the operating system. memory: bytes of main memory, 0 if unknown.
        translated: this Python runs under Rosetta.
        wired_limit_mb: macOS's ``iogpu.wired_limit_mb`` (0 = the system's default), None elsewhere.
    """

    system: str
    arch: str
    version: str
    chip: str
    memory: int
    translated: bool = False
    wired_limit_mb: int | None = None


@dataclass(frozen=True)
class VariantReport:
    """A variant on this device: why it cannot run, or how far it was off its reference.

    Attributes:
        reason: why it is not supported, or what failed.
        passed: None if it was not run. rel_rms: worst relative RMS error over `cases` cases.
    """

    op: str
    variant: str
    supported: bool
    reason: str = ""
    passed: bool | None = None
    rel_rms: float = 0.0
    cases: int = 0


@dataclass
class Diagnosis:
    """All that the doctor found."""

    machine: Machine
    device: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    budget_bytes: int = 0
    frontiers: dict[str, int] = field(default_factory=dict)
    variants: list[VariantReport] = field(default_factory=list)
    units: list[VariantReport] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        """Whether no finding is a problem."""
        return all(finding.level != "problem" for finding in self.findings)

    def say(self, level: Level, topic: str, text: str) -> None:
        """Add a finding."""
        self.findings.append(Finding(level, topic, text))


# -- the machine ---------------------------------------------------------------------------------


def run_command(argv: Sequence[str]) -> str | None:
    """What a command prints, stripped, or None if it is missing, fails or hangs for ten seconds."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def inspect_machine(system: str | None = None, arch: str | None = None, command: Command = run_command) -> Machine:
    """Look at the machine that this process runs on.

    Args:
        system, arch: as `platform.system` and `platform.machine` tell them; None asks them.
        command: runs a command line and returns its output or None (tests pass recorded outputs).
    """
    system, arch = system or platform.system(), arch or platform.machine()
    if system != "Darwin":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Machine(system, arch, platform.release(), platform.processor() or arch, memory)
    return Machine(
        system,
        arch,
        version=command(["sw_vers", "-productVersion"]) or "unknown",
        chip=command(["sysctl", "-n", "machdep.cpu.brand_string"]) or "unknown",
        memory=_number(command(["sysctl", "-n", "hw.memsize"])) or 0,
        # The key does not exist on an Intel Mac, where nothing is translated.
        translated=command(["sysctl", "-n", "sysctl.proc_translated"]) == "1",
        wired_limit_mb=_number(command(["sysctl", "-n", "iogpu.wired_limit_mb"])),
    )


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None


def system_findings(machine: Machine) -> list[Finding]:
    """What of the operating system and the Python build stands in the way of MLX."""
    if machine.system == "Linux":
        return []
    if machine.system != "Darwin":
        return [Finding("problem", "system", f"{machine.system} is not supported: use macOS 15 or newer, or Linux")]
    found = []
    if machine.translated:
        text = (
            "this Python is an x86 build that runs under Rosetta, where MLX does not exist: "
            "install an arm64 Python (`python3 -c 'import platform; print(platform.machine())'` must print arm64)"
        )
        found.append(Finding("problem", "python", text))
    elif machine.arch != "arm64":
        found.append(Finding("problem", "system", "this Mac has an Intel processor: MLX needs Apple silicon"))
    major = _number(machine.version.split(".")[0])
    if major is not None and major < 15:
        text = f"macOS {machine.version} is too old: MLX keeps weights resident from macOS 15 on; update the system"
        found.append(Finding("problem", "system", text))
    return found


def raised_limit_mb(memory: int) -> int:
    """The highest ``iogpu.wired_limit_mb`` that is named: all but an eighth of `memory` bytes, at least 4 GiB left."""
    return (memory - max(4 * GIB, memory // 8)) // MIB


def wired_limit_finding(machine: Machine, working_set: int) -> Finding | None:
    """The current wired-memory limit of a Mac and the line that would raise it, with its risk; None elsewhere."""
    if machine.system != "Darwin" or not machine.memory:
        return None
    limit = machine.wired_limit_mb
    current = "the system's default" if not limit else f"{limit} MB"
    known = "iogpu.wired_limit_mb is unknown here" if limit is None else f"iogpu.wired_limit_mb is {limit} ({current})"
    raised = raised_limit_mb(machine.memory)
    if raised * MIB <= working_set:
        return Finding("ok", "wired limit", f"{known}; the working set of {_gb(working_set)} need not be raised")
    return Finding(
        "note",
        "wired limit",
        f"{known}; `sudo sysctl iogpu.wired_limit_mb={raised}` would raise the working set from {_gb(working_set)} "
        f"to {_gb(raised * MIB)}. Risk: {_gb(machine.memory - raised * MIB)} are left for everything else, and a "
        "system short of that swaps, freezes or restarts. It lasts until the next restart; "
        "`sudo sysctl iogpu.wired_limit_mb=0` undoes it",
    )


# -- the device ------------------------------------------------------------------------------------


def budget_bytes(device: dict[str, Any], machine: Machine) -> int:
    """Bytes that a run may hold on the device: the recommended working set, or a share of its memory."""
    kind = device.get("kind")
    if kind == "metal":
        return int(device.get("max_recommended_working_set_size", 0))
    if kind == "cuda":
        return int(_CUDA_SHARE * int(device.get("total_memory", 0)))
    return int(_CPU_SHARE * machine.memory)


def fit_findings(config: ModelConfig, machine: Machine, kind: str, budget: int) -> tuple[list[Finding], dict[str, int]]:
    """Whether the real model fits `budget` bytes, and its largest frontier with one and with two live arms.

    Returns:
        The findings, and tokens by ``"one arm"`` and ``"two arms"`` (0 = does not fit).
    """
    itemsize, fused = (4 if kind == "cpu" else 2), attention_is_fused(kind)

    def largest(arms: int, within: int) -> int:
        return largest_frontier(config, within, arms=arms, itemsize=itemsize, fused_attention=fused)

    frontiers = {"one arm": largest(1, budget), "two arms": largest(2, budget)}
    need = run_bytes(config, SMALLEST_FRONTIER, itemsize=itemsize, fused_attention=fused)
    weights = weight_bytes(config, itemsize=itemsize)
    growing, constant = len(config.attention_layers), len(config.linear_layers)
    if frontiers["one arm"]:
        text = (
            f"the real model (weights {_gb(weights)}) fits: largest frontier {_tokens(frontiers['one arm'])} with one "
            f"live arm, {_tokens(frontiers['two arms'])} with two ({growing} layers grow, {constant} do not)"
        )
        found = [Finding("ok", "real model", text)]
    else:
        text = (
            f"this machine is too small: the real model needs {_gb(need)} at {SMALLEST_FRONTIER} tokens (weights "
            f"{_gb(weights)}), a run may hold {_gb(budget)} here; the embedded model runs anywhere (`python -m sweeps`)"
        )
        found = [Finding("warning", "real model", text)]
    raised = raised_limit_mb(machine.memory) * MIB if kind == "metal" else 0
    if raised > budget and largest(1, raised) > frontiers["one arm"]:
        one, two = largest(1, raised), largest(2, raised)
        text = f"with the raised limit: {_tokens(one)} with one live arm, {_tokens(two)} with two"
        found.append(Finding("note", "real model", text))
    return found, frontiers


def _tokens(count: int) -> str:
    return f"{count:,} tokens" if count else "none"


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


class _Symbol(ctypes.Structure):
    # Dl_info of <dlfcn.h>.
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def blas_library() -> str | None:
    """The file that a product in this process resolves to first, or None if only MLX's own copy can be found.

    Linux only: asks the loader which library defines ``cblas_sgemm`` in the global scope.
    """
    process = ctypes.CDLL(None)
    try:
        function = ctypes.cast(process.cblas_sgemm, ctypes.c_void_p)
    except AttributeError:
        return None
    found = _Symbol()
    if not process.dladdr(function, ctypes.byref(found)) or not found.file:
        return None
    return found.file.decode()


def cpu_findings(blas: str | None, compiler: str | None) -> list[Finding]:
    """What makes MLX slow, or fail, on a Linux CPU: the reference BLAS, and no C++ compiler for `mx.compile`.

    Args:
        blas: what `blas_library` found. compiler: path of ``g++``, or None.
    """
    if blas:
        found = [Finding("ok", "BLAS", f"products on the CPU go to {blas}")]
    else:
        text = (
            "MLX uses the reference BLAS that its wheel ships, about 30 times slower for float32 products: "
            "`apt-get install libopenblas0-pthread` (it is found when the engine is next imported)"
        )
        found = [Finding("warning", "BLAS", text)]
    if compiler is None:
        text = "no g++ was found, which mx.compile calls on a CPU: `apt-get install g++`"
        found.append(Finding("warning", "compiler", text))
    return found


# -- ops -------------------------------------------------------------------------------------------


def check_variants(kind: str, everything: bool, progress: Callable[[int, int, str], None]) -> list[VariantReport]:
    """Self-test of every variant that runs on this device against its op's reference.

    Args:
        kind: ``"metal"``, ``"cuda"`` or ``"cpu"``.
        everything: all cases of an op, not only its smallest ones.
        progress: called as ``progress(done, total, name)`` before each variant.
    """
    from engine.ops import OPS

    pairs = [(op, variant) for op in OPS.values() for variant in op.variants.values()]
    tests = []
    for done, (op, variant) in enumerate(pairs):
        progress(done, len(pairs), f"{op.name}={variant.name}")
        tests.append(_check(op, variant, kind, everything))
    return tests


def _check(op: Op, variant: Variant, kind: str, everything: bool) -> VariantReport:
    from engine import proof
    from engine.device import activation_dtype
    from engine.ops import selftest

    reason = variant.supports(None, kind)
    if reason is not None:
        return VariantReport(op.name, variant.name, supported=False, reason=reason)
    if kind != "cpu" and proof.for_a_gpu(variant):
        # Ours: the answer is what engines go by from now on.
        kept = proof.verdict(op.name, variant.name, again=True)
        if kept.reason or not everything:
            return VariantReport(op.name, variant.name, True, kept.reason, not kept.reason, kept.worst, kept.cases)
    cases = [case for case in op.cases if variant.supports(case, kind) is None]
    if not everything:
        cases = sorted(cases, key=op.least_flops)[:_SMALL_CASES]
    test = selftest(op, variant, kind, activation_dtype(), cases)
    passed = None if not cases else test.error is None
    return VariantReport(op.name, variant.name, True, test.error or "", passed, test.worst, test.cases)


def check_units(kind: str, everything: bool, progress: Callable[[int, int, str], None]) -> list[VariantReport]:
    """Self-test of what belongs to no single op, and of the compiled step of the embedded model (`engine.proof`).

    A CPU has no kernels of ours to try: there it is the step of separate ops alone, if everything is asked for.
    """
    from engine import proof

    names = list(proof.UNITS) if kind != "cpu" else ["step"] if everything else []
    names = [name for name in names if kind == "cuda" or name not in proof.CUDA_ONLY]
    tests = []
    for done, name in enumerate(names):
        progress(done, len(names), name)
        kept = proof.verdict("unit", name, again=True)
        tests.append(VariantReport("unit", name, True, kept.reason, not kept.reason, kept.worst, kept.cases))
    return tests


def tuned_findings() -> list[Finding]:
    """Tuned files of this chip, and which parts of them no longer hold."""
    from engine import tuned

    files = tuned.about()
    if not files:
        return [
            Finding("note", "tuned", "nothing was tuned for this chip, `best` goes by order: python -m sweeps tune")
        ]
    return [
        Finding("note" if "tune" in line else "ok", "tuned", f"{path}, {line}")
        for path, lines in files
        for line in lines
    ]


# -- the whole ---------------------------------------------------------------------------------------


def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages that a result depends on; the Metal wheel's with its platform tag."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        versions[name] = distribution.version
        if name == "mlx-metal":
            tags = [
                line[5:] for line in (distribution.read_text("WHEEL") or "").splitlines() if line.startswith("Tag: ")
            ]
            versions[name] += f" ({', '.join(tags)})"
    return versions


def diagnose(
    everything: bool = False,
    progress: Callable[[int, int, str], None] = lambda *_: None,
    machine: Machine | None = None,
) -> Diagnosis:
    """Examine this machine; what is wrong becomes a finding, not an exception.

    Args:
        everything, progress: as for `check_variants`.
        machine: what is known of the computer; None looks.
    """
    machine = machine or inspect_machine()
    found = Diagnosis(machine, versions=package_versions())
    found.findings += system_findings(machine)
    try:
        from engine.device import device_info

        found.device = device_info()
    except ImportError as error:
        # Where the system itself is the reason, that line is enough.
        if found.healthy:
            found.say("problem", "MLX", f"MLX cannot be imported ({error}): `pip install -c constraints.txt .`")
        return found
    kind = str(found.device["kind"])
    found.budget_bytes = budget_bytes(found.device, machine)
    fits, found.frontiers = fit_findings(ModelConfig(), machine, kind, found.budget_bytes)
    found.findings += fits
    limit = wired_limit_finding(machine, found.budget_bytes) if kind == "metal" else None
    if limit:
        found.findings.append(limit)
    if machine.system == "Linux" and kind == "cpu":
        found.findings += cpu_findings(blas_library(), shutil.which("g++"))
    found.findings += tuned_findings()
    found.variants = check_variants(kind, everything, progress)
    found.units = check_units(kind, everything, progress)
    _sum_up(found)
    return found


def _sum_up(found: Diagnosis) -> None:
    for test in (*found.variants, *found.units):
        if test.passed is False:
            text = f"{test.op}={test.variant} fails here, {test.reason}: it is refused, the others run"
            found.say("problem", "self-test", text)
    ran = [test for test in found.variants if test.passed is not None]
    here = sum(test.supported for test in found.variants)
    passed = sum(test.passed is True for test in ran)
    text = f"{passed} of {len(ran)} variants passed; {here} of {len(found.variants)} are supported here"
    found.say("ok" if passed == len(ran) else "problem", "self-test", text)


def to_json(found: Diagnosis) -> str:
    """The diagnosis as a JSON object."""
    return json.dumps(dataclasses.asdict(found) | {"healthy": found.healthy}, indent=2, default=str)


def to_text(found: Diagnosis) -> str:
    """The diagnosis for people: facts, variants, findings."""
    machine, device = found.machine, found.device
    name = device.get("device_name", "unknown")
    lines = [
        f"machine   {machine.chip}, {_gb(machine.memory)}, {machine.system} {machine.version} ({machine.arch})",
        f"device    {name} ({device.get('kind', 'no MLX')}); a run may hold {_gb(found.budget_bytes)}",
        "versions  " + ", ".join(f"{name} {version}" for name, version in found.versions.items()),
    ]
    if found.variants:
        lines.append("variants")
    for test in found.variants:
        lines.append(f"  {test.op + '=' + test.variant:34} {_outcome(test)}")
    if found.units:
        lines.append("kernels of no single op, and the whole compiled step")
    for test in found.units:
        lines.append(f"  {test.variant:34} {_outcome(test)}")
    lines += [f"{finding.level:9} {finding.topic}: {finding.text}" for finding in found.findings]
    return "\n".join(lines)


def _outcome(test: VariantReport) -> str:
    if not test.supported:
        return f"not here: {test.reason}"
    if test.passed is None:
        return "supported, no case to test"
    error = f"relative RMS {test.rel_rms:.1e} over {test.cases} case{'s' if test.cases != 1 else ''}"
    return f"passed, {error}" if test.passed else f"FAILED {test.reason}"


def _progress_line(done: int, total: int, name: str) -> None:
    print(f"self-test {done + 1}/{total} {name}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the diagnosis; see the module's text for the exit status."""
    parser = Arguments(prog="python -m engine doctor", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--all", action="store_true", help="test every variant on every case, not only the small ones")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args(argv)
    found = diagnose(options.all, _progress_line)
    print(to_json(found) if options.json else to_text(found))
    return 0 if found.healthy else 1


if __name__ == "__main__":
    sys.exit(main())
