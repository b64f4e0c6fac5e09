"""Recorded launches on CUDA without MLX: kernels compiled by NVRTC, and a step's launches as one CUDA graph.

MLX builds its graph anew for every step and hands it to CUDA node by node, which costs the host more than the kernels
of a decode step cost the device (on an H200 some 14 us a launch with this engine's inputs). A graph that is built once
and replayed costs one call. Here is what that takes of CUDA's driver, through `ctypes`: `Device` knows nothing of
models. What is replayed, and when MLX may look at the arrays again, is `engine.replay`'s business.

The driver is the one that MLX has loaded, the compiler the one that MLX's own kernels go through, and the source around
a body has MLX's form, so that one text serves both ways.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx

from engine.kernels.loader import Kernel, KernelError, Launch, cache_folder

MAX_NDIM = 10
"""Axes of the shapes and strides that a kernel is handed, as in MLX."""
_TYPES = {
    mx.bfloat16: "__nv_bfloat16",
    mx.float16: "__half",
    mx.float32: "float",
    mx.int32: "int",
    mx.uint32: "unsigned int",
}
_PROLOGUE = f"""
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
template <typename N>
struct Axes {{ N of[{MAX_NDIM}]; __device__ N operator[](int axis) const {{ return of[axis]; }} }};
using Shape = Axes<int>;
using Strides = Axes<long long>;
"""


class CudaError(RuntimeError):
    """A call of CUDA's driver or compiler that failed, with its own message."""


def _named(dtype: mx.Dtype) -> str:
    """CUDA's name of a type.

    Raises:
        KernelError: no kernel takes that type.
    """
    if dtype not in _TYPES:
        raise KernelError(f"no kernel takes arrays of {dtype}; there are {', '.join(map(str, _TYPES))}")
    return _TYPES[dtype]


# -- source and compilation --------------------------------------------------------------------------


def source(call: Launch) -> str:
    """A kernel's whole text for one launch, with the signature that MLX would write."""
    kernel, parameters = call.kernel, []
    for name, array in zip(kernel.inputs, call.inputs):
        parameters.append(f"const {_named(array.dtype)}* {name}")
        parameters += [
            f"const __grid_constant__ {kind} {name}_{what}"
            for what, kind in (("shape", "Shape"), ("strides", "Strides"), ("ndim", "int"))
            if f"{name}_{what}" in kernel.body
        ]
    parameters += [f"{_named(dtype)}* {name}" for name, dtype in zip(kernel.outputs, call.dtypes)]
    settings = []
    for name, value in call.template:
        if isinstance(value, bool):
            settings.append(f"constexpr bool {name} = {str(value).lower()};")
        elif isinstance(value, int):
            settings.append(f"constexpr int {name} = {value};")
        else:
            settings.append(f"using {name} = {_named(value)};")
    signature = ",\n    ".join(parameters)
    return "\n".join(
        (
            _PROLOGUE,
            kernel.header,
            f'extern "C" __global__ void {kernel.name}(\n    {signature}) {{',
            *settings,
            kernel.body,
            "}",
            "",
        )
    )


@cache
def _nvrtc() -> ctypes.CDLL:
    """NVRTC as MLX has loaded it.

    Raises:
        CudaError: there is none.
    """
    for name in ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise CudaError("no libnvrtc found; install mlx[cuda13], which brings it")


@cache
def _include_folders() -> tuple[Path, ...]:
    """Where CUDA's headers are looked for, as MLX does."""
    (package,) = (Path(place) for place in list(__import__("mlx").__path__)[:1])
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    folders = [
        *(package.parent / "nvidia" / part / "include" for part in ("cu13", "cuda_runtime")),
        *(Path(home) / "include" for home in homes),
        Path("/usr/local/cuda/include"),
    ]
    return tuple(folder for folder in folders if (folder / "cuda_bf16.h").is_file())


def compiled(text: str, name: str, architecture: str) -> bytes:
    """A kernel's machine code, from the user's cache or from NVRTC.

    Args:
        text: as `source` gives it. name: of the kernel. architecture: such as ``sm_90a``.

    Raises:
        CudaError: it does not compile, or there is no compiler or no header.
    """
    digest = hashlib.sha256(f"{architecture}\0{text}".encode()).hexdigest()[:24]
    kept = cache_folder().parent / "cubins" / f"{name}_{digest}.cubin"
    if kept.is_file() and (code := kept.read_bytes()):
        return code
    code = _compile(text, name, architecture)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        part = kept.with_suffix(f".{os.getpid()}")
        part.write_bytes(code)
        os.replace(part, kept)
    except OSError:
        pass  # It is compiled again next time.
    return code


def _compile(text: str, name: str, architecture: str) -> bytes:
    nvrtc = _nvrtc()
    if not _include_folders():
        raise CudaError("no cuda_bf16.h found; set CUDA_HOME to a CUDA toolkit")
    options = [
        "--device-as-default-execution-space",
        f"--gpu-architecture={architecture}",
        *(f"--include-path={folder}" for folder in _include_folders()),
    ]
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), f"{name}.cu".encode(), 0, None, None)
    try:
        array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        failed = nvrtc.nvrtcCompileProgram(program, len(options), array)
        size = ctypes.c_size_t()
        if failed:
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise CudaError(f"{name} does not compile: {log.value.decode(errors='replace')}")
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, code)
        return code.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


# -- the driver --------------------------------------------------------------------------------------


class _NodeParameters(ctypes.Structure):
    """``CUDA_KERNEL_NODE_PARAMS_v2``."""

    _fields_ = [
        ("function", ctypes.c_void_p),
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("parameters", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    ]


_TOLD = 16
"""Arrays that one launch tells the addresses of."""


@lru_cache(maxsize=256)
def _address_kernel(kinds: tuple[tuple[mx.Dtype, int], ...]):
    """A kernel that tells where its inputs lie, and their strides: MLX itself would move an array to tell.

    Args:
        kinds: type and axes of each input.
    """
    name = "_".join(f"{_named(dtype).replace(' ', '').strip('_')}{ndim}" for dtype, ndim in kinds)
    lines, at = [], 0
    for number, (_, ndim) in enumerate(kinds):
        lines.append(f"  out[{at}] = (unsigned long long)x{number};")
        steps = (f"  out[{at + 1 + axis}] = (unsigned long long)x{number}_strides[{axis}];" for axis in range(ndim))
        lines += steps
        at += 1 + ndim
    return mx.fast.cuda_kernel(
        name=f"addresses_{hashlib.sha256(name.encode()).hexdigest()[:16]}",
        input_names=[f"x{number}" for number in range(len(kinds))],
        output_names=["out"],
        source="if (threadIdx.x == 0) {\n" + "\n".join(lines) + "\n}",
        ensure_row_contiguous=False,
    )


def _kind(array: mx.array) -> tuple[mx.Dtype, int]:
    return array.dtype, array.ndim


class Device:
    """The GPU that MLX runs on: where arrays lie, graphs of recorded launches, and a stream of its own to run them.

    Nothing here waits for MLX or makes MLX wait: the caller drains the one before it uses the other.

    Raises (all methods):
        CudaError: a call of the driver failed.
    """

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        mx.synchronize()
        self._call("cuInit", 0)
        number = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(number), 0)
        self._context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), number)
        self.enter()
        parts = []
        for attribute in (75, 76):  # compute capability, major and minor
            value = ctypes.c_int()
            self._call("cuDeviceGetAttribute", ctypes.byref(value), attribute, number)
            parts.append(value.value)
        self.architecture = f"sm_{parts[0]}{parts[1]}{'a' if parts[0] >= 9 else ''}"
        self._stream = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(self._stream), 1)  # not held up by the default stream
        self._functions: dict[str, ctypes.c_void_p] = {}

    def _call(self, name: str, *arguments) -> None:
        if status := getattr(self._cuda, name)(*arguments):
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(status, ctypes.byref(text))
            raise CudaError(f"{name}: {(text.value or b'unknown error').decode()}")

    def enter(self) -> None:
        """Make the calls of this thread go to the GPU; once before any other, and again in another thread."""
        self._call("cuCtxSetCurrent", self._context)

    def addresses(self, arrays: Sequence[mx.array]) -> list[tuple[int, tuple[int, ...]]]:
        """Address and strides (in elements) of each array, which must stay alive for them to mean anything."""
        # Arrays of one kind stand together, so that few kernels have to be compiled.
        order = sorted(range(len(arrays)), key=lambda i: (_named(arrays[i].dtype), arrays[i].ndim))
        groups: list[list[int]] = []
        for i in order:
            same = groups and len(groups[-1]) < _TOLD and _kind(arrays[groups[-1][0]]) == _kind(arrays[i])
            groups[-1].append(i) if same else groups.append([i])
        made = []
        for group in groups:
            # The last array again where a group is not full, for the same reason.
            told = [arrays[i] for i in group] + [arrays[group[-1]]] * (_TOLD - len(group))
            kernel: Any = _address_kernel(tuple(map(_kind, told)))
            (out,) = kernel(
                inputs=told,
                grid=(32, 1, 1),
                threadgroup=(32, 1, 1),
                output_shapes=[(sum(array.ndim + 1 for array in told),)],
                output_dtypes=[mx.uint64],
            )
            made.append(out)
        numbers = mx.concatenate(made).tolist() if made else []
        places: dict[int, tuple[int, tuple[int, ...]]] = {}
        at = 0
        for group in groups:
            width = arrays[group[0]].ndim + 1
            for slot, i in enumerate(group):
                first = at + slot * width
                places[i] = numbers[first], tuple(numbers[first + 1 : first + width])  # type: ignore[index]
            at += _TOLD * width
        return [places[i] for i in range(len(arrays))]

    def graph(self, calls: Sequence[tuple[Launch, Sequence[int], Sequence[tuple[int, ...]]]]) -> ctypes.c_void_p:
        """Launches, one after another, as an executable graph.

        Args:
            calls: each launch, the addresses of its inputs and outputs, and the strides of its inputs.
        """
        functions = self._load([call for call, _, _ in calls])
        graph, before = ctypes.c_void_p(), None
        self._call("cuGraphCreate", ctypes.byref(graph), 0)
        for (call, addresses, strides), function in zip(calls, functions):
            values = _parameters(call, addresses, strides)
            pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
            blocks = [-(-whole // one) for whole, one in zip(call.grid, call.threadgroup)]
            node = ctypes.c_void_p()
            given = _NodeParameters(
                function,
                *blocks,
                *call.threadgroup,
                0,
                ctypes.cast(pointers, ctypes.POINTER(ctypes.c_void_p)),
                None,
                None,
                None,
            )
            needs = None if before is None else ctypes.byref(before)
            self._call(
                "cuGraphAddKernelNode_v2",
                ctypes.byref(node),
                graph,
                needs,
                ctypes.c_size_t(0 if before is None else 1),
                ctypes.byref(given),
            )
            before = node
        made = ctypes.c_void_p()
        self._call("cuGraphInstantiateWithFlags", ctypes.byref(made), graph, ctypes.c_ulonglong(0))
        self._call("cuGraphDestroy", graph)
        return made

    def drop(self, graph: ctypes.c_void_p) -> None:
        """Free a graph that is not running."""
        self._call("cuGraphExecDestroy", graph)

    def _load(self, calls: Sequence[Launch]) -> list[ctypes.c_void_p]:
        """The function of each launch; what is new is compiled several at a time."""
        texts = [source(call) for call in calls]
        new = {text: call.kernel for text, call in zip(texts, calls) if text not in self._functions}
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            made = pool.map(lambda item: compiled(item[0], item[1].name, self.architecture), new.items())
            for (text, kernel), code in zip(new.items(), made):
                self._functions[text] = self._function(code, kernel)
        return [self._functions[text] for text in texts]

    def _function(self, code: bytes, kernel: Kernel) -> ctypes.c_void_p:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), code)
        self._call("cuModuleGetFunction", ctypes.byref(function), module, kernel.name.encode())
        return function

    def start(self, graph: ctypes.c_void_p) -> None:
        """Start a graph behind what runs already."""
        self._call("cuGraphLaunch", graph, self._stream)

    def run(self, graph: ctypes.c_void_p) -> ctypes.c_void_p:
        """The same; returns an event that `wait` takes, once."""
        event = ctypes.c_void_p()
        self._call("cuEventCreate", ctypes.byref(event), 2)  # without a time
        self.start(graph)
        self._call("cuEventRecord", event, self._stream)
        return event

    def wait(self, event: ctypes.c_void_p) -> None:
        """Until what `run` started has ended."""
        self._call("cuEventSynchronize", event)
        self._call("cuEventDestroy_v2", event)

    def synchronize(self) -> None:
        """Until everything has ended."""
        self._call("cuStreamSynchronize", self._stream)

    def copy(self, to: int, from_: int, size: int) -> None:
        """`size` bytes between addresses, behind what runs already."""
        self._call(
            "cuMemcpyDtoDAsync_v2",
            ctypes.c_ulonglong(to),
            ctypes.c_ulonglong(from_),
            ctypes.c_size_t(size),
            self._stream,
        )

    def fill(self, to: int, word: int, count: int) -> None:
        """`count` 32-bit words at an address, behind what runs already."""
        self._call(
            "cuMemsetD32Async",
            ctypes.c_ulonglong(to),
            ctypes.c_uint(word & 0xFFFFFFFF),
            ctypes.c_size_t(count),
            self._stream,
        )

    def host_words(self, count: int) -> tuple[int, Any]:
        """32-bit words in the host's memory, which kernels read and write: their address, and they."""
        place = ctypes.c_void_p()
        self._call("cuMemHostAlloc", ctypes.byref(place), ctypes.c_size_t(4 * count), ctypes.c_uint(3))
        assert place.value is not None
        return place.value, (ctypes.c_uint32 * count).from_address(place.value)


@cache
def device() -> Device:
    """The one of this process: engines share its stream and the kernels that it has loaded."""
    return Device()


def _parameters(call: Launch, addresses: Sequence[int], strides: Sequence[tuple[int, ...]]) -> list:
    """Arguments of a launch in the order of `source`; kept alive by the caller until the node is made.

    Raises:
        KernelError: an array with more axes than a kernel can be told of.
    """
    made: list = []
    for i, name in enumerate(call.kernel.inputs):
        array = call.inputs[i]
        if array.ndim > MAX_NDIM:
            raise KernelError(f"{call.kernel.name}: input {name} has {array.ndim} axes; at most {MAX_NDIM}")
        made.append(ctypes.c_ulonglong(addresses[i]))
        if f"{name}_shape" in call.kernel.body:
            made.append((ctypes.c_int * MAX_NDIM)(*array.shape))
        if f"{name}_strides" in call.kernel.body:
            made.append((ctypes.c_longlong * MAX_NDIM)(*strides[i]))
        if f"{name}_ndim" in call.kernel.body:
            made.append(ctypes.c_int(array.ndim))
    made += [ctypes.c_ulonglong(address) for address in addresses[len(call.inputs) :]]
    return made
