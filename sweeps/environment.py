"""What a result was measured on: the machine, once a process, and its condition, before and after each point.

This is the only module that reads environment variables. Everything that asks the operating system is a small function
from recorded command output to plain values.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

PACKAGES = (
    "mlx",
    "mlx-metal",
    "mlx-cpu",
    "mlx-cuda",
    "mlx-cuda-12",
    "mlx-cuda-13",
    "mlx-lm",
    "transformers",
    "tokenizers",
    "numpy",
    "scipy",
    "lilybench",
)
"""Distributions whose versions are kept with every run."""

KNOBS = ("MLX_", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "METAL_")
"""Beginnings of environment variables that change what is measured."""

FOREIGN_CORES = 0.5
"""Cores kept busy by others, from which a machine counts as loaded (or a tenth of its cores, if that is more)."""

SWAP_GROWTH_BYTES = 64 << 20
"""Growth of used swap over a point from which it is flagged, in bytes."""

HOT_CELSIUS = 95.0


class PowerRefused(ValueError):
    """A long run on battery or in low-power mode without ``allow=battery``."""


# -- variables ---------------------------------------------------------------------------------------


def knobs(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment variables that change MLX, BLAS or the choice of device."""
    variables = os.environ if variables is None else variables
    return {name: value for name, value in sorted(variables.items()) if name.startswith(KNOBS)}


def debug() -> bool:
    """Whether ``LILYBENCH_DEBUG`` asks for tracebacks instead of one line."""
    return os.environ.get("LILYBENCH_DEBUG", "") not in ("", "0")


def secret(name: str) -> str | None:
    """A key that is kept out of settings and rows: the variable `name`, or None where there is none or an empty one."""
    return os.environ.get(name) or None


def runtime_dir() -> Path:
    """Per-user folder for lock files, the same for every launch folder."""
    folder = os.environ.get("XDG_RUNTIME_DIR")
    if folder and Path(folder).is_dir() and os.access(folder, os.W_OK):
        return Path(folder)
    return Path(tempfile.gettempdir()) / f"lilybench-{os.getuid()}"


def accelerator_key() -> str:
    """Short name of the accelerator that a timing occupies, without loading MLX: metal, cuda-…, or cpu."""
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return "metal"
    if Path("/dev/nvidia0").exists() or Path("/dev/nvidiactl").exists():
        devices = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        return "cuda-" + (re.sub(r"[^0-9A-Za-z]+", "_", devices) or "none")
    return "cpu"


# -- machine -----------------------------------------------------------------------------------------


def visible_gpu() -> str:
    """Index or identifier of the first CUDA device that this process may use."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() or "0"


def machine() -> dict[str, Any]:
    """Facts that hold for the life of the process. Sizes in bytes; what is unknown is None."""
    device = _device()
    return {
        "chip": _chip(),
        "device": device.get("device_name") or _chip(),
        "device_kind": device.get("kind"),
        "device_info": device,
        "cores": psutil.cpu_count(logical=False) or os.cpu_count(),
        "threads": os.cpu_count(),
        "memory": psutil.virtual_memory().total,
        "os": f"{platform.system()} {platform.mac_ver()[0] or platform.release()}",
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "versions": versions(),
        "blas": blas(_mapped_files()),
        "paravirtual": _paravirtual(str(device.get("device_name", ""))),
    }


def versions() -> dict[str, str]:
    """Installed versions of `PACKAGES`, and the tag of the wheel that MLX's backend came from."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    for name in ("mlx-metal", "mlx-cuda-13", "mlx-cuda-12", "mlx-cpu"):
        if name in found:
            text = importlib.metadata.distribution(name).read_text("WHEEL") or ""
            found[f"{name} wheel"] = wheel_tag(text)
    return found


def wheel_tag(text: str) -> str:
    """The tags of a ``WHEEL`` file, such as ``py3-none-macosx_26_0_arm64``."""
    return " ".join(line.removeprefix("Tag: ") for line in text.splitlines() if line.startswith("Tag: "))


def blas(mapped: list[str]) -> str | None:
    """Name of the BLAS library among the files mapped into the process; Accelerate on macOS."""
    if sys.platform == "darwin":
        return "Accelerate"
    names = {Path(path).name for path in mapped}
    for pattern in ("openblas", "mkl_rt", "blis", "libblas", "libcblas"):
        hits = sorted(name for name in names if pattern in name.lower() and "numpy" not in name and "scipy" not in name)
        if hits:
            return hits[0]
    return None


def git_state(folder: Path | None = None) -> dict[str, Any]:
    """Commit of the project's own checkout and whether it has changes; commit None where it is not a checkout."""
    folder = folder or Path(__file__).resolve().parent.parent
    commit = _output(["git", "-C", str(folder), "rev-parse", "HEAD"])
    if not commit:
        return {"commit": None, "dirty": None}
    status = _output(["git", "-C", str(folder), "status", "--porcelain"])
    return {"commit": commit.strip(), "dirty": bool(status and status.strip())}


# -- conditions --------------------------------------------------------------------------------------


def conditions() -> dict[str, Any]:
    """What may change during a run. Call while this process is idle: what is busy then is foreign load.

    Returns:
        power (ac, battery or None), low_power, thermal, swap (bytes used), load (1-minute average), foreign_cores
        (cores busy with other work), wired_limit_mb, knobs, gpu (temperature and clocks on CUDA).
    """
    power, low_power, thermal = _power()
    return {
        "power": power,
        "low_power": low_power,
        "thermal": thermal,
        "swap": psutil.swap_memory().used,
        "load": os.getloadavg()[0],
        "foreign_cores": round(psutil.cpu_percent(interval=0.1) / 100 * (os.cpu_count() or 1), 2),
        "wired_limit_mb": _number(_sysctl("iogpu.wired_limit_mb")),
        "knobs": knobs(),
        "gpu": _gpu(),
    }


def condition_flags(now: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> list[str]:
    """Short words for what spoils a measurement: hot, loaded, swapping, battery, low_power.

    Args:
        before: an earlier record, against which swap is compared.
    """
    flags = []
    if _is_hot(now.get("thermal") or {}, now.get("gpu") or {}):
        flags.append("hot")
    if now.get("foreign_cores", 0) > max(FOREIGN_CORES, 0.1 * (os.cpu_count() or 1)):
        flags.append("loaded")
    if before is not None and now.get("swap", 0) - before.get("swap", 0) > SWAP_GROWTH_BYTES:
        flags.append("swapping")
    if now.get("power") == "battery":
        flags.append("battery")
    if now.get("low_power"):
        flags.append("low_power")
    return flags


def refuse_weak_power(sweep: str, allow: str | None, now: Mapping[str, Any]) -> None:
    """Refuse a long sweep on battery or in low-power mode.

    Raises:
        PowerRefused: `sweep` is ``ten`` or ``publish``, power is weak, and `allow` is not ``battery``.
    """
    if sweep not in ("ten", "publish") or allow == "battery":
        return
    if now.get("power") == "battery":
        raise PowerRefused(f"sweep={sweep} on battery measures the battery; plug in, or pass allow=battery")
    if now.get("low_power"):
        raise PowerRefused(f"sweep={sweep} in low-power mode is throttled; turn it off, or pass allow=battery")


@contextmanager
def awake() -> Iterator[None]:
    """Keep a Mac from sleeping inside (``caffeinate``); nothing elsewhere."""
    if sys.platform != "darwin" or not shutil.which("caffeinate"):
        yield
        return
    holder = subprocess.Popen(["caffeinate", "-ims", "-w", str(os.getpid())])
    try:
        yield
    finally:
        holder.terminate()
        holder.wait()


def power_source(text: str) -> str | None:
    """``ac`` or ``battery`` from ``pmset -g batt``."""
    found = re.search(r"drawing from '([^']+)'", text)
    if not found:
        return None
    return "battery" if "battery" in found.group(1).lower() else "ac"


def low_power_mode(text: str) -> bool | None:
    """Whether low-power mode is on, from ``pmset -g`` (the key was `lowpowermode`, then `powermode`)."""
    found = re.search(r"^\s*(?:lowpowermode|powermode)\s+(\d+)", text, re.MULTILINE)
    return None if not found else found.group(1) == "1"


def thermal_limits(text: str) -> dict[str, int]:
    """Speed and scheduler limits in percent, and the warning level, from ``pmset -g therm``."""
    return {name.lower(): int(value) for name, value in re.findall(r"(\w+)\s*=\s*(\d+)", text)}


def gpu_state(text: str) -> dict[str, Any]:
    """Temperature (°C), SM clock (MHz), power (W), use (%) and throttle mask from ``nvidia-smi --query-gpu``."""
    line = text.strip().splitlines()[0] if text.strip() else ""
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != 5:
        return {}
    names = ("temperature", "clock_mhz", "power_w", "use_percent")
    return {name: _number(cell) for name, cell in zip(names, cells, strict=False)} | {"throttle": cells[4]}


def _is_hot(thermal: Mapping[str, Any], gpu: Mapping[str, Any]) -> bool:
    limited = any(thermal.get(name, 100) < 100 for name in ("cpu_speed_limit", "cpu_scheduler_limit"))
    too_warm = (thermal.get("celsius") or 0) >= HOT_CELSIUS
    # Bits 0x20, 0x40 and 0x80 of the mask are thermal slowdowns and the hardware brake.
    try:
        throttled = bool(int(str(gpu.get("throttle", "0")), 16) & 0xE0)
    except ValueError:
        throttled = False
    return limited or too_warm or throttled


def _power() -> tuple[str | None, bool | None, dict[str, Any]]:
    if sys.platform == "darwin":
        batt, general, therm = (_output(["pmset", "-g", *what]) or "" for what in (["batt"], [], ["therm"]))
        return power_source(batt), low_power_mode(general), dict(thermal_limits(therm))
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    power = None if battery is None else ("ac" if battery.power_plugged else "battery")
    sensors = psutil.sensors_temperatures() if hasattr(psutil, "sensors_temperatures") else {}
    celsius = [reading.current for readings in sensors.values() for reading in readings if reading.current]
    return power, None, {"celsius": max(celsius)} if celsius else {}


def _gpu() -> dict[str, Any]:
    if not shutil.which("nvidia-smi"):
        return {}
    fields = "temperature.gpu,clocks.sm,power.draw,utilization.gpu,clocks_throttle_reasons.active"
    return gpu_state(_output(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]) or "")


def _device() -> dict[str, Any]:
    try:
        from engine.device import device_info
    except ImportError:
        return {}
    return {key: value for key, value in device_info().items() if isinstance(value, (str, int, float, bool))}


def _chip() -> str:
    if sys.platform == "darwin":
        return (_sysctl("machdep.cpu.brand_string") or platform.processor()).strip()
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1).strip() if found else platform.machine()


def _paravirtual(device_name: str) -> bool:
    """Whether the GPU is a virtual machine's (its speed says nothing about the chip)."""
    return "paravirtual" in device_name.lower() or (_sysctl("kern.hv_vmm_present") or "0").strip() == "1"


def _mapped_files() -> list[str]:
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return sorted({line.split(maxsplit=5)[5] for line in lines if "/" in line})


def _sysctl(name: str) -> str | None:
    return _output(["sysctl", "-n", name]) if sys.platform == "darwin" else None


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text is not None else None
    except ValueError:
        return None


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
