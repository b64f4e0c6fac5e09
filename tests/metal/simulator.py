"""Kernels without a GPU: MLX's own generated source, compiled by clang as OpenCL C++ for this CPU, checked and run.

`source` asks MLX for the exact text that it would give to Metal's compiler. `check` compiles it with Metal's rules on
address spaces and conversions. `Simulator` takes the place of `engine.kernels.loader.launch` and runs it.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from engine.kernels.loader import Launch

HERE = Path(__file__).parent
CLANG, SYMBOLIZER = "clang++-19", "llvm-symbolizer-19"
CACHE = Path.home() / ".cache" / "lilybench" / "metal"
THREADGROUP_BYTES = 32768
"""Metal's limit for the threadgroup arrays of a kernel."""

# C++ for OpenCL has Metal's model of address spaces; double, and functions on pointers of no space, are left out.
_LANGUAGE = [
    *("-x", "clcpp", "-cl-std=clc++2021", "-cl-no-stdinc", "-target", "x86_64-unknown-linux-gnu"),
    "-Xclang",
    "-cl-ext=-all,+cl_khr_fp16,+__cl_clang_non_portable_kernel_param_types,+__opencl_c_generic_address_space",
    *("-I", str(HERE / "include"), "-fno-math-errno"),
    *("-Wno-unknown-attributes", "-Wno-pass-failed", "-Wno-duplicate-decl-specifier"),
]
_STRICT = [
    *("-Wall", "-Werror", "-fsyntax-only", "-fno-color-diagnostics", "-ferror-limit=8"),
    # Metal's bfloat has no implicit conversions; clang's has, so all that lose bits are errors.
    *("-Wimplicit-float-conversion", "-Wconditional-uninitialized", "-Wdouble-promotion", "-Wsign-compare"),
    *("-Wno-unused-function", "-Wno-unused-variable", "-Wno-unused-but-set-variable", "-Wno-unused-local-typedef"),
    *("-Wno-unused-const-variable", "-Wno-missing-braces", "-Wno-parentheses"),
]
_FAST = ["-O1", "-mavx2", "-mf16c", "-mfma"]
# Loads stay as the kernel has them: merged or split ones would be counted as something else.
_CHECKED = [
    *("-O1", "-mf16c", "-fsanitize=thread", "-mllvm", "-tsan-instrument-func-entry-exit=0"),
    *("-mllvm", "-tsan-instrument-read-before-write=1", "-fno-vectorize", "-fno-slp-vectorize"),
    *("-mllvm", "-disable-vector-combine"),
]

# Where each attribute stands in the runtime's Coordinates, in 32-bit words.
_ATTRIBUTES = {
    "thread_position_in_grid": 0,
    "thread_position_in_threadgroup": 3,
    "threadgroup_position_in_grid": 6,
    "threads_per_threadgroup": 9,
    "threadgroups_per_grid": 12,
    "threads_per_grid": 15,
    "thread_index_in_threadgroup": 18,
    "thread_index_in_simdgroup": 19,
    "simdgroup_index_in_threadgroup": 20,
    "simdgroups_per_threadgroup": 21,
}
# Threadgroup arrays lie side by side; what runs past one must not land in the next. The statement
# keeps the optimiser from taking an array apart, gap and all, whose every index it knows.
_GAP = 64
_ARRAY = (
    "threadgroup type name[extent]",
    f'threadgroup type name[(extent) + {_GAP} / sizeof(type)]; __asm__ volatile("" : : "r"(name))',
)
# clang knows literals that Metal does not, such as 1.0f16.
_NUMBER = re.compile(r"(?<![\w.])\.?\d(?:[eE][+-]|[\w.])*")
_METALS = re.compile(r"(0x[\da-f]+|\d+)(u?l?)|(\d+\.\d*|\.\d+|\d+)(e[+-]?\d+)?[fh]?", re.IGNORECASE)
_INPUT, _OUTPUT, _SHARED, _PAST_SHARED = range(4)
_PAGE = 4096


class CompileError(Exception):
    """What clang has against a kernel."""


class LaunchReport(Exception):
    """What the simulator has against a launch: one line each."""


def missing() -> str | None:
    """What keeps the simulator from running here, or None."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "the kernel simulator runs on Linux x86-64"
    absent = [tool for tool in (CLANG, SYMBOLIZER) if shutil.which(tool) is None]
    return f"the kernel simulator needs {', '.join(absent)} (packages clang-19, llvm-19)" if absent else None


# ---- MLX's source ----


@cache
def _source(kernel: Any, template: tuple[Any, ...], inputs: tuple[Any, ...], dtypes: tuple[Any, ...]) -> str:
    made = mx.fast.metal_kernel(
        name=kernel.launch_name,
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        source=kernel.body,
        header=kernel.header,
        ensure_row_contiguous=False,
    )

    def call(*arrays: mx.array) -> list[mx.array]:
        return made(
            inputs=list(arrays),
            template=list(template),
            grid=(32, 1, 1),
            threadgroup=(32, 1, 1),
            output_shapes=[(1,)] * len(dtypes),
            output_dtypes=list(dtypes),
            verbose=True,
        )

    arrays = [mx.zeros((8 if large else 1,) + (1,) * (ndim - 1), dtype) for ndim, large, dtype in inputs]
    # MLX prints the text from C++, past Python's own output.
    with tempfile.TemporaryFile() as text, tempfile.TemporaryDirectory() as folder:
        sys.stdout.flush()
        saved = os.dup(1)
        os.dup2(text.fileno(), 1)
        try:
            mx.export_function(os.path.join(folder, "traced"), call, *arrays)
        finally:
            os.dup2(saved, 1)
            os.close(saved)
        text.seek(0)
        printed = text.read().decode()
    return printed[printed.index("```\n") + 4 : printed.rindex("\n```")]


def source(call: Launch) -> str:
    """The text that MLX generates for a launch. It differs with the inputs' types, and their sizes below 8."""
    inputs = tuple((a.ndim, a.size >= 8, a.dtype) for a in call.inputs)
    return _source(call.kernel, tuple(call.template), inputs, tuple(call.dtypes))


@dataclass(frozen=True)
class Parameter:
    """A parameter of a generated kernel: a pointer or reference to a buffer, or an attribute's value."""

    type: str
    name: str
    attribute: str


@dataclass(frozen=True)
class Generated:
    """MLX's text taken apart: what comes before the kernel, template definitions, parameters, body."""

    header: str
    template: str
    parameters: tuple[Parameter, ...]
    body: str


@cache
def parse(text: str) -> Generated:
    """Take a generated text apart. OpenCL has no kernel templates, so the arguments become definitions."""
    start = text.rindex("[[kernel]] void ", 0, text.index("template [[host_name("))
    header, _, names = text[:start].rstrip("\n").rpartition("\n")
    kinds = [part.split() for part in re.sub(r"^template <|>$", "", names).split(", ")]
    end = text.index("\ntemplate [[host_name(")
    arguments = re.search(r"decltype\(\w+<(.*?)>\)", text[end:])
    assert arguments
    template = "".join(
        f"using {name} = {value};\n" if kind == "typename" else f"constexpr constant {kind} {name} = {value};\n"
        for (kind, name), value in zip(kinds, arguments[1].split(", "), strict=True)
    )
    opening = text.index(") {\n", start)
    parameters = []
    for line in text[text.index("(", start) + 1 : opening].split(",\n"):
        match = re.fullmatch(r"\s*(.*?) (\w+) \[\[(.*?)\]\]", line)
        assert match, f"MLX's signature has a parameter this does not know: {line}"
        parameters.append(Parameter(*match.groups()))
    body = text[opening + 4 : text.rindex("}", 0, end)]
    return Generated(header, template, tuple(parameters), body)


def _instance(generated: Generated, number: int) -> str:
    declared = ", ".join(f"{p.type} {p.name}" for p in generated.parameters)
    passed = []
    buffers = 0
    for p in generated.parameters:
        if p.attribute.startswith("buffer"):
            pointer = p.type.replace("&", "*")
            passed.append(f"{'*' if '&' in p.type else ''}({pointer})a[{buffers}]")
            buffers += 1
        else:
            at = _ATTRIBUTES[p.attribute]
            passed.append(f"(uint3)(c[{at}], c[{at + 1}], c[{at + 2}])" if p.type == "uint3" else f"c[{at}]")
    return (
        f"namespace instance_{number} {{\n{generated.template}"
        f"kernel void kernel_{number}({declared}) {{\n{generated.body}\n}}\n"
        f'#line 1 "entry"\nextern "C" __attribute__((disable_sanitizer_instrumentation)) '
        f"void entry_{number}(const thread ulong* a, const thread uint* c) {{\n"
        f"  kernel_{number}({', '.join(passed)});\n}}\n}}\n"
    )


def unit(texts: Sequence[str]) -> str:
    """One translation unit of several generated texts that share their header."""
    parts = [parse(text) for text in texts]
    assert len({part.header for part in parts}) == 1
    return parts[0].header + "\n" + "".join(_instance(part, i) for i, part in enumerate(parts))


# ---- compiling ----


def _clang(*arguments: str, text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([CLANG, *_LANGUAGE, *arguments, "-"], input=text, capture_output=True, text=True)


def check(texts: Sequence[str]) -> None:
    """Compile generated texts as strictly as Metal would.

    Raises:
        CompileError: with clang's messages, or the pointers that name no address space.
    """
    for text in texts:
        for literal in _NUMBER.findall(parse(text).body):
            if not _METALS.fullmatch(literal):
                raise CompileError(f"{literal} is no literal of Metal")
    done = _clang(*_STRICT, text=unit(texts))
    if done.returncode:
        raise CompileError(done.stderr)


def check_pointers(texts: Sequence[str]) -> None:
    """Every pointer and reference names its address space, as Metal demands; OpenCL makes the others generic.

    Raises:
        CompileError: naming those that do not.
    """
    done = _clang("-w", "-fsyntax-only", "-Xclang", "-ast-dump", "-fno-color-diagnostics", text=unit(texts))
    found = re.findall(r"(?:ParmVarDecl|VarDecl) 0x.*? (\w+) '([^']*__generic [^']*)'", done.stdout)
    named = sorted({f"{name}: {kind.replace('__generic ', '')}" for name, kind in found})
    if named:
        raise CompileError("no address space: " + ", ".join(named))


def check_calls(texts: Sequence[str]) -> None:
    """No function calls itself, directly or by others: Metal has no recursion.

    Raises:
        CompileError: naming one that does.
    """
    done = _clang("-w", "-O0", "-S", "-emit-llvm", "-o", "-", text=unit(texts))
    calls: dict[str, set[str]] = {}
    for name, body in re.findall(r"^define .*?@([\w.]+)\(.*?\{\n(.*?)^\}", done.stdout, re.MULTILINE | re.DOTALL):
        calls[name] = set(re.findall(r"call .*?@([\w.]+)\(", body))
    for name in calls:
        reached, fresh = set(), calls[name]
        while fresh:
            reached |= fresh
            fresh = set().union(*(calls.get(called, set()) for called in fresh)) - reached
        if name in reached:
            raise CompileError(f"recursion: {name} calls itself")


@dataclass
class Built:
    """A loaded object: entries by generated text, threadgroup arrays by entry number."""

    path: Path
    library: ctypes.CDLL
    base: int
    entries: dict[str, int]
    shared: dict[int, list[tuple[int, int]]]


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _once(path: Path, *argv: str, text: str | None = None) -> Path:
    """Run a compiler whose last argument is to be the output file, unless that exists."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        made = path.with_suffix(f".{os.getpid()}.tmp")
        done = subprocess.run([*argv, "-o", str(made)], input=text, capture_output=True, text=True)
        if done.returncode:
            raise CompileError(done.stderr)
        made.rename(path)
    return path


@lru_cache(maxsize=2)
def _runtime(checked: bool) -> tuple[Path, ctypes.CDLL]:
    file = HERE / "runtime.cpp"
    path = CACHE / f"runtime_{_digest(file.read_text(encoding='utf-8'), str(checked))}.so"
    flags = ["-DCHECKED"] if checked else []
    _once(path, CLANG, "-O2", "-g1", "-fPIC", "-shared", "-std=c++17", "-Wl,-Bsymbolic", *flags, str(file))
    library = ctypes.CDLL(str(path), mode=os.RTLD_LOCAL)
    library.simulator_launch.restype = ctypes.c_char_p
    return path, library


def build(texts: Iterable[str], checked: bool) -> Built:
    """Compile generated texts of one kernel into one object and load it; kept in a cache folder.

    Raises:
        CompileError: what clang says, or too much threadgroup memory.
    """
    texts = list(dict.fromkeys(texts))
    text = unit(texts)
    assert _ARRAY[0] in text, "portable.h declares threadgroup arrays in another way"
    text = text.replace(*_ARRAY)
    shim = (HERE / "include" / "metal_stdlib").read_text(encoding="utf-8")
    flags = [*_LANGUAGE, *(_CHECKED if checked else _FAST), "-g1", "-w", "-fPIC", "-ftrivial-auto-var-init=pattern"]
    runtime, _ = _runtime(checked)
    stem = CACHE / f"kernel_{_digest(text, shim, str(flags), runtime.name)}"
    compiled = _once(stem.with_suffix(".o"), CLANG, *flags, "-c", "-", text=text)
    path = _once(stem.with_suffix(".so"), CLANG, "-shared", "-rtlib=compiler-rt", str(compiled), str(runtime), "-lm")
    library = ctypes.CDLL(str(path))
    symbols = {}
    for line in subprocess.run(["nm", "-S", str(path)], capture_output=True, text=True, check=True).stdout.splitlines():
        if len(fields := line.split()) == 4:
            symbols[fields[3]] = int(fields[0], 16), int(fields[1], 16), fields[2]
    first = ctypes.cast(library.entry_0, ctypes.c_void_p).value
    assert first is not None
    base = first - symbols["entry_0"][0]
    shared: dict[int, list[tuple[int, int]]] = {i: [] for i in range(len(texts))}
    for name, (start, size, kind) in symbols.items():
        if kind in "bBdD" and (owner := re.match(r"(?:_ZZ.*?)?kernel_(\d+)\D", name)):
            shared[int(owner[1])].append((base + start, base + start + size - _GAP))
    for arrays in shared.values():
        if (taken := sum(end - start for start, end in arrays)) > THREADGROUP_BYTES:
            raise CompileError(f"threadgroup arrays take {taken} bytes; Metal has {THREADGROUP_BYTES}")
    return Built(path, library, base, {t: i for i, t in enumerate(texts)}, shared)


# ---- running ----

_libc = ctypes.CDLL(None)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class _Buffer:
    """Memory between two pages that may not be touched: at its end, or (checked) on a whole line at its start."""

    def __init__(self, size: int, checked: bool):
        room = -(-max(size, 1) // 16) * 16
        self.pages = -(-room // _PAGE) * _PAGE
        self.whole = _libc.mmap(None, self.pages + 2 * _PAGE, 3, 0x22, -1, 0)
        _libc.mprotect(self.whole, _PAGE, 0)
        _libc.mprotect(self.whole + _PAGE + self.pages, _PAGE, 0)
        self.size = size
        self.address = self.whole + _PAGE + (0 if checked else self.pages - room)

    def free(self) -> None:
        _libc.munmap(self.whole, self.pages + 2 * _PAGE)


class _LaunchStruct(ctypes.Structure):
    _fields_ = [
        ("entry", ctypes.c_uint64),
        ("arguments", ctypes.c_void_p),
        ("grid", ctypes.c_uint32 * 3),
        ("threadgroup", ctypes.c_uint32 * 3),
        ("region_count", ctypes.c_uint64),
        ("regions", ctypes.c_void_p),
        ("order", ctypes.c_uint64),
    ]


@dataclass(frozen=True)
class Traffic:
    """What a launch moved through one buffer, in bytes; lines of 128 bytes per simdgroup access, and the least."""

    loaded: int
    stored: int
    unwritten: int
    lines: int
    ideal: int


@dataclass
class Simulator:
    """Runs launches, one after another; set ``loader.launch`` to `launch`.

    Attributes:
        checked: judge and count every access (several times slower).
        order: of simdgroups: 0 ascending, 1 descending, 2 shuffled anew at every barrier.
        traffic: per launch so far, by buffer name; only if `checked`.
        replace: changes to make in a kernel's generated text before it is compiled.
        before: what the outputs hold before a launch, for kernels that write into arrays; None: NaN.
    """

    checked: bool = False
    order: int = 0
    traffic: list[tuple[Launch, dict[str, Traffic]]] = field(default_factory=list)
    replace: dict[str, str] = field(default_factory=dict)
    before: Sequence[bytes] | None = None
    _built: dict[str, Built] = field(default_factory=dict)

    def prepare(self, calls: Iterable[Launch]) -> None:
        """Compile the instances of several launches together, two objects a kernel: faster than one by one."""
        by_kernel: dict[str, list[str]] = {}
        for call in calls:
            by_kernel.setdefault(call.kernel.name, []).append(self.text(call))
        _runtime(self.checked)
        # Two halves of each kernel's instances at a time: clang works on one core.
        each = [list(dict.fromkeys(texts)) for texts in by_kernel.values()]
        halves = [half for texts in each for half in (texts[::2], texts[1::2]) if half]
        with ThreadPoolExecutor(2) as pool:
            for built in pool.map(lambda half: build(half, self.checked), halves):
                self._built.update(dict.fromkeys(built.entries, built))

    def text(self, call: Launch) -> str:
        """The generated text of a launch with `replace` applied."""
        text = source(call)
        for old, new in self.replace.items():
            text = text.replace(old, new)
        return text

    def launch(self, call: Launch) -> list[mx.array]:
        """Run a launch; outputs start as NaN.

        Raises:
            CompileError: the kernel does not compile.
            LaunchReport: what is wrong with the run.
        """
        text = self.text(call)
        if text not in self._built:
            self.prepare([call])
        built = self._built[text]
        number = built.entries[text]
        buffers, regions, kept = self._buffers(call, parse(text))
        try:
            flat = [word for region in regions for word in region]
            for i, (start, end) in enumerate(built.shared[number]):
                flat += [start, end, _SHARED, i, end, end + _GAP, _PAST_SHARED, i]
            addresses = (ctypes.c_uint64 * len(buffers))(*(b.address for b in buffers))
            words = (ctypes.c_uint64 * len(flat))(*flat)
            struct = _LaunchStruct(
                ctypes.cast(getattr(built.library, f"entry_{number}"), ctypes.c_void_p).value,
                ctypes.addressof(addresses),
                (ctypes.c_uint32 * 3)(*call.grid),
                (ctypes.c_uint32 * 3)(*call.threadgroup),
                len(flat) // 4,
                ctypes.addressof(words),
                self.order,
            )
            runtime = _runtime(self.checked)[1]
            if reports := runtime.simulator_launch(ctypes.byref(struct)).decode():
                raise LaunchReport("\n".join(_readable(built, line) for line in reports.splitlines()))
            if self.checked:
                self._count(call, runtime, kept, len(regions))
            return [_read(buffers[i], shape, dtype) for i, shape, dtype in zip(kept, call.shapes, call.dtypes)]
        finally:
            for buffer in buffers:
                buffer.free()

    def _buffers(self, call: Launch, generated: Generated) -> tuple[list[_Buffer], list[tuple[int, ...]], list[int]]:
        """Filled buffers in the kernel's order, the regions of memory they make, and which are the outputs."""
        arrays = {label: _memory(array) for label, array in zip(call.kernel.inputs, call.inputs)}
        buffers: list[_Buffer] = []
        regions: list[tuple[int, ...]] = []
        outputs = []
        for p in generated.parameters:
            if not p.attribute.startswith("buffer"):
                continue
            label, _, what = p.name.rpartition("_")
            kind = _INPUT
            if p.name in arrays:
                data = arrays[p.name][0]
            elif p.name in call.kernel.outputs:
                at = call.kernel.outputs.index(p.name)
                data, kind = b"\xff" * (math.prod(call.shapes[at]) * call.dtypes[at].size), _OUTPUT
                data = data if self.before is None else self.before[at]
                outputs.append(len(buffers))
            elif what == "strides":
                data = np.array(arrays[label][1], np.int64).tobytes()
            else:
                shape = call.inputs[call.kernel.inputs.index(label)].shape
                data = np.array(shape if what == "shape" else [len(shape)], np.int32).tobytes()
            buffer = _Buffer(len(data), self.checked)
            ctypes.memmove(buffer.address, data, len(data))
            regions.append((buffer.address, buffer.address + len(data), kind, len(buffers)))
            buffers.append(buffer)
        return buffers, regions, outputs

    def _count(self, call: Launch, runtime: ctypes.CDLL, outputs: list[int], count: int) -> None:
        names = [p.name for p in parse(self.text(call)).parameters if p.attribute.startswith("buffer")]
        counted = {}
        for i in range(count):
            out = (ctypes.c_uint64 * 5)()
            runtime.simulator_traffic(ctypes.c_uint64(i), out)
            counted[names[i]] = Traffic(*out)
        self.traffic.append((call, counted))
        never = [
            f"unwritten\t{counted[names[i]].unwritten} bytes of {names[i]}"
            for i in outputs
            if counted[names[i]].unwritten
        ]
        if never:
            raise LaunchReport("\n".join(never))


def _memory(array: mx.array) -> tuple[bytes, list[int]]:
    """An array's bytes as they lie, gaps included, and its strides in elements."""
    mx.eval(array)
    plain = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    view = np.array(plain, copy=False)
    span = sum((n - 1) * s for n, s in zip(view.shape, view.strides)) + view.itemsize
    return ctypes.string_at(view.ctypes.data, span), [s // view.itemsize for s in view.strides]


def _read(buffer: _Buffer, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    same = {mx.float16: np.float16, mx.float32: np.float32, mx.uint32: np.uint32, mx.int32: np.int32}
    plain = {mx.bfloat16: np.uint16} | same
    data = np.frombuffer(ctypes.string_at(buffer.address, buffer.size), plain[dtype]).reshape(shape)
    made = mx.array(data)
    return made.view(mx.bfloat16) if dtype == mx.bfloat16 else made


def _readable(built: Built, line: str) -> str:
    """``kind at file:line: message`` of the runtime's ``kind, address, message``."""
    kind, place, message = line.split("\t")
    argv = [SYMBOLIZER, f"--obj={built.path}", "--inlining", "--functions=none", hex(int(place, 16) - built.base - 1)]
    frames = subprocess.run(argv, capture_output=True, text=True).stdout.split("\n")
    own = next((f for f in frames if f and "metal_stdlib" not in f and not f.startswith("?")), "?:0:0")
    file, number = own.rsplit(":", 2)[:2]
    return f"{kind} at {Path(file).name}:{number}: {message}"
