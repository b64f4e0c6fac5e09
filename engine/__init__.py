"""The engine: one model family on MLX, every optimisation a switch in its config.

Read in this order: `config`, `weights`, `checkpoint`, `synthetic`, `ops`, `cache`, `model`, `generate`.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import sys

_BLAS_NAMES = ("libopenblas.so.0", "libopenblasp.so.0")


def preload_blas() -> str | None:
    """Load OpenBLAS ahead of MLX on Linux, so that MLX's CPU products resolve to it.

    MLX's Linux CPU wheel is linked against the reference BLAS, about 30 times slower for float32 products.
    The loader takes the first definition of a symbol, so this must run before MLX is first imported.

    Returns:
        The library that was loaded, or None (not Linux, none installed, or MLX is already in).
    """
    if sys.platform != "linux" or "mlx.core" in sys.modules:
        return None
    for name in _BLAS_NAMES:
        try:
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return name
    return None


BLAS = preload_blas()
"""The BLAS library that was put in front of MLX's own, or None."""
