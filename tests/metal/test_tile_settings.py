"""Matrix tiles on a GPU: what a lane holds of a block is the same there as on the simulator."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from tile_cases import TYPES, call, expected

from engine.kernels import loader


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES)
def test_every_layout_agrees_with_numpy_on_a_gpu(dtype):
    for layout in product((False, True), (False, True), (False, True)):
        made = call(TYPES[dtype], *layout)
        out, chained = (np.array(array) for array in loader.launch(made))
        want, want_chained = expected(made)
        np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(chained, want_chained, rtol=1e-2, atol=1e-2)
