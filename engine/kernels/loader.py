"""From a `<topic>.metal` text to launches: `mx.fast.metal_kernel` on Metal, `mx.fast.cuda_kernel` on CUDA.

A text opens with a comment on what it computes and who calls it, and holds one or more kernels. Each begins with a
block of comment lines that the loader reads, and goes on as a plain body in Metal Shading Language, the way MLX takes
it (MLX writes the signature)::

    // kernel: merge
    // inputs: partial sums
    // dense: partial sums
    // outputs: out
    // template: typename T, int SIMDGROUPS

No kernel exists without its Metal text; `portable.h` makes CUDA read the same one. The dialect's rules:

- float32 arithmetic, explicit conversions, suffixed literals (``1.0f``); vectors only carry 16 bytes (``.x .y .z .w``);
- pointers name their address space; threadgroup arrays through ``THREADGROUP_ARRAY`` at the outermost scope;
- every simdgroup operation and barrier in uniform control flow; threadgroups a multiple of 32 threads; grids in threads
  and a multiple of the threadgroup;
- no word between threadgroups of one launch (two launches instead), no 0-d inputs;
- an input of fewer than 8 elements is `constant` on Metal: index it in place, never hand it to a helper.

MLX makes no copies on the way in (`ensure_row_contiguous=False`), so an input that is not row-contiguous must be
refused or read by its strides. A body that mentions ``NAME_strides`` reads input NAME by them and refuses on the device
what it cannot read (``REFUSE_UNLESS``), since the host cannot see the strides of an array in a traced step. Every other
input must be listed as ``dense``: something that its wrapper knows to be row-contiguous, such as another kernel's
output or a weight.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

from engine.device import device_kind

FOLDER = Path(__file__).parent
SIMD = 32
"""Threads of a simdgroup, on Apple and NVIDIA GPUs alike."""

_BLOCK = re.compile(r"^// kernel: (\w+)\n((?:// \w+: .*\n)*)", re.MULTILINE)


class KernelError(ValueError):
    """A kernel text that breaks the loader's rules, or a call that does not fit the kernel."""


@dataclass(frozen=True)
class Kernel:
    """One kernel of a topic.

    Attributes:
        name: ``<topic>_<kernel>``.
        inputs, outputs: names in order, as in the body.
        template: each template argument's name and kind: ``"typename"``, ``"int"`` or ``"bool"``.
        body: Metal Shading Language, with a line marker so that compilers name the file and line.
        header: what stands before it on every target.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    template: tuple[tuple[str, str], ...]
    body: str
    header: str

    @property
    def identity(self) -> str:
        """16 hex digits that change with the body, the header or the signature."""
        parts = (self.name, *self.inputs, *self.outputs, *map(str, self.template), self.body, self.header)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

    @property
    def launch_name(self) -> str:
        """Name under which MLX caches the compiled kernel: MLX looks it up by name alone, so it holds the identity."""
        return f"{self.name}_{self.identity}"

    def without(self, **stand_ins: str) -> Kernel:
        """The kernel for calls that do not use some inputs, each named with another one that its text then means.

        An input costs the host time at every launch, used or not.
        """
        return _without(self, tuple(sorted(stand_ins.items())))

    def arguments(self, **values: Any) -> list[tuple[str, Any]]:
        """Template arguments in the kernel's order.

        Raises:
            KernelError: one is missing, unknown or of the wrong kind.
        """
        if values.keys() != dict(self.template).keys():
            raise KernelError(f"{self.name} takes template arguments {list(dict(self.template))}, not {list(values)}")
        kinds = {"typename": mx.Dtype, "int": int, "bool": bool}
        for name, kind in self.template:
            if type(values[name]) is not kinds[kind]:
                raise KernelError(f"{self.name}: template argument {name} is a {kind}, not {values[name]!r}")
        return [(name, values[name]) for name, _ in self.template]


def float_bits(value: float) -> int:
    """A float32 as the int32 of the same bits, for a template argument; the kernel says ``as_type<float>(NAME)``."""
    return struct.unpack("<i", struct.pack("<f", value))[0]


def in_device_memory(few: mx.array) -> mx.array:
    """`few` as the beginning of an array of more than 8 bytes; still to be evaluated.

    MLX's CUDA build keeps arrays of up to 8 bytes in the host's memory, where each threadgroup that reads one waits for
    the bus: on an H200 that was four fifths of a small product's time.
    """
    return mx.concatenate([few] * (16 // few.dtype.size))[: few.shape[0]]


@dataclass(frozen=True)
class Launch:
    """One call of a kernel.

    Attributes:
        template: from `Kernel.arguments`.
        grid: threads in all, in x, y and z; threadgroup: threads of one threadgroup, each a divisor of the grid's.
        shapes, dtypes: of the outputs, which are fresh arrays.
        into: arrays that are written instead, as far as the kernel writes; only where launches are recorded.
    """

    kernel: Kernel
    inputs: Sequence[mx.array]
    template: list[tuple[str, Any]]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    shapes: Sequence[tuple[int, ...]]
    dtypes: Sequence[mx.Dtype]
    into: Sequence[mx.array] | None = None

    def __post_init__(self) -> None:
        name = self.kernel.name
        if len(self.inputs) != len(self.kernel.inputs) or len(self.shapes) != len(self.kernel.outputs):
            raise KernelError(f"{name} takes inputs {self.kernel.inputs} and gives {self.kernel.outputs}")
        if any(all_ % one for all_, one in zip(self.grid, self.threadgroup)) or self.threadgroup[0] % SIMD:
            raise KernelError(f"{name}: grid {self.grid} does not divide into threadgroups of {self.threadgroup}")
        for label, array in zip(self.kernel.inputs, self.inputs):
            if array.ndim == 0:
                raise KernelError(f"{name}: input {label} is 0-d; give it as an array of one element")


def parse(topic: str, text: str, header: str) -> dict[str, Kernel]:
    """The kernels of a text by their short names.

    Raises:
        KernelError: no kernel, a missing line of the comment block, or an input that is neither read by its strides
            nor listed as dense.
    """
    starts = list(_BLOCK.finditer(text))
    if not starts:
        raise KernelError(f'{topic}.metal has no line "// kernel: NAME"')
    kernels = {}
    for start, following in zip(starts, [*starts[1:], None]):
        name = start[1]
        fields = dict(re.findall(r"// (\w+): (.*)\n", start[2]))
        if missing := {"inputs", "outputs", "dense", "template"} - fields.keys():
            raise KernelError(f"{topic}.metal: kernel {name} lacks the lines {sorted(missing)}")
        body = text[start.end() : following.start() if following else len(text)]
        inputs = tuple(fields["inputs"].split())
        for label in inputs:
            if f"{label}_strides" not in body and label not in fields["dense"].split():
                raise KernelError(f"{topic}.metal: kernel {name} neither reads {label}_strides nor lists it as dense")
        line = text.count("\n", 0, start.end()) + 1
        kernels[name] = Kernel(
            name=f"{topic}_{name}",
            inputs=inputs,
            outputs=tuple(fields["outputs"].split()),
            template=tuple((label, kind) for kind, label in (p.split() for p in fields["template"].split(","))),
            body=f'\n#line {line} "{topic}.metal"\n{body}',
            header=header,
        )
    return kernels


@cache
def _without(kernel: Kernel, stand_ins: tuple[tuple[str, str], ...]) -> Kernel:
    words = [(old + what, new + what) for old, new in stand_ins for what in ("", "_shape", "_strides")]
    absent = dict(stand_ins)
    defined = "".join(f"#define {old} {new}\n" for old, new in words)
    undefined = "".join(f"#undef {old}\n" for old, _ in words)
    return replace(
        kernel,
        inputs=tuple(name for name in kernel.inputs if name not in absent),
        body=f"\n{defined}{kernel.body}\n{undefined}",
    )


@cache
def load(topic: str) -> dict[str, Kernel]:
    """The kernels of ``<topic>.metal`` beside this file, by their short names.

    Raises:
        KernelError: there is no such text, or it breaks a rule of this module.
    """
    path = FOLDER / f"{topic}.metal"
    if not path.is_file():
        raise KernelError(f"no kernel text {path.name}; there are {', '.join(topics())}")
    header = '#line 1 "portable.h"\n' + (FOLDER / "portable.h").read_text(encoding="utf-8")
    return parse(topic, path.read_text(encoding="utf-8"), header)


def topics() -> list[str]:
    """Names of the texts there are."""
    return sorted(path.stem for path in FOLDER.glob("*.metal"))


def identity(topic: str, wrapper: str) -> str:
    """16 hex digits of a variant: its kernels with their header, and the module that launches them.

    Args:
        wrapper: path of that module (its ``__file__``).
    """
    parts = [kernel.identity for kernel in load(topic).values()]
    parts.append(Path(wrapper).read_text(encoding="utf-8"))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


@cache
def function(kernel: Kernel, device: str) -> Any:
    """MLX's callable for a kernel.

    Args:
        device: ``"metal"`` or ``"cuda"``.
    """
    make = mx.fast.cuda_kernel if device == "cuda" else mx.fast.metal_kernel
    header, body = by_reference(kernel, cache_folder()) if device == "cuda" else (kernel.header, kernel.body)
    return make(
        name=kernel.launch_name,
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        source=body,
        header=header,
        ensure_row_contiguous=False,
    )


def cache_folder() -> Path:
    """Where kernel texts lie for compilers that read files."""
    return Path.home() / ".cache" / "lilybench" / "kernels"


def by_reference(kernel: Kernel, folder: Path) -> tuple[str, str]:
    """Header and body of a kernel as lines that include files of `folder`, which are written if need be.

    MLX's CUDA backend hashes the whole source at every launch: tens of kilobytes cost the host more than the launch
    itself. Where `folder` cannot be written the texts themselves come back.
    """
    try:
        header, body = (_kept(folder, text) for text in (kernel.header, kernel.body))
    except OSError:
        return kernel.header, kernel.body
    # MLX looks for these words to see which shapes and strides a kernel wants.
    words = [f"{name}_{what}" for name in kernel.inputs for what in ("shape", "strides", "ndim")]
    used = " ".join(word for word in words if word in kernel.body)
    return f'#include "{header}"\n', f'// {used}\n#include "{body}"\n'


def _kept(folder: Path, text: str) -> Path:
    """A file of `folder` that holds `text`, named by it, written whole or not at all."""
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.h"
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    return path


_recorder: ContextVar[Callable[[Launch], list[mx.array]] | None] = ContextVar("recorder", default=None)


@contextmanager
def recorded(by: Callable[[Launch], list[mx.array]]) -> Iterator[None]:
    """Launches go to `by` instead of MLX, in this thread."""
    token = _recorder.set(by)
    try:
        yield
    finally:
        _recorder.reset(token)


def launch(call: Launch) -> list[mx.array]:
    """Add a kernel's launch to the graph and return its outputs.

    Raises:
        KernelError: the default device is a CPU, or the kernel writes into arrays and nothing records it.
    """
    if (by := _recorder.get()) is not None:
        return by(call)
    if call.into is not None:
        raise KernelError(f"{call.kernel.name} writes into arrays that are there already, which MLX cannot launch")
    device = device_kind()
    if device == "cpu":
        raise KernelError(f"{call.kernel.name} runs on a GPU; MLX's default device is a CPU")
    return function(call.kernel, device)(
        inputs=list(call.inputs),
        template=call.template,
        grid=call.grid,
        threadgroup=call.threadgroup,
        output_shapes=list(call.shapes),
        output_dtypes=list(call.dtypes),
    )
