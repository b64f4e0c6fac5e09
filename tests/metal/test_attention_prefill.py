"""The kernel of `prefill_attention` on the simulator, against the op's float32 reference."""

from __future__ import annotations

from itertools import product

import mlx.core as mx
import pytest
import simulator
from simulator import LaunchReport, Simulator

from engine.config import EngineConfig
from engine.kernels import attention_prefill as prefill
from engine.kernels import loader
from engine.kernels.loader import Launch
from engine.ops import OPS, attention, bind, relative_rms
from engine.ops.registry import VariantUnsupported

pytestmark = pytest.mark.skipif(simulator.missing() is not None, reason=str(simulator.missing()))

OP = OPS["prefill_attention"]
TYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16}
SIZES = [
    # rows, keys, key/value heads, positions the cache has room for past the keys it shows
    (33, 40, 2, 3),
    (17, 70, 1, 0),
    (9, 9, 2, 5),
    (16, 64, 1, 1),
    (1, 31, 1, 0),
    (2, 33, 1, 7),
]


def arguments(size: tuple[int, int, int, int], dtype: mx.Dtype, groups: int = 8) -> tuple:
    """The op's arguments; queries as the model leaves them, keys and values as parts of a larger cache."""
    rows, n, kv, room = size
    q, keys, values, scale, _ = OP.inputs(attention._case(rows, n + room, kv), dtype, 0)
    q = mx.contiguous(q[:, : groups * kv].swapaxes(1, 2)).swapaxes(1, 2)
    if room:
        # What lies past the shown part must not be read.
        keys[:, :, n:], values[:, :, n:] = float("nan"), float("nan")
    return q, keys[:, :, :n], values[:, :, :n], scale


def worst(given: tuple, tile: str) -> float:
    """Relative RMS error as a part of the op's tolerance."""
    error = relative_rms(prefill.attention_metal(*given, tile=tile), OP.reference.run(*given))
    return error / OP.tolerance[str(given[0].dtype).rpartition(".")[2]]


@pytest.mark.parametrize("dtype", TYPES)
def test_every_instance_compiles_under_metals_rules(dtype, monkeypatch):
    texts: dict[str, None] = {}

    def note(call: Launch) -> list[mx.array]:
        texts[simulator.source(call)] = None
        return [mx.zeros(shape, kind) for shape, kind in zip(call.shapes, call.dtypes)]

    monkeypatch.setattr(loader, "launch", note)
    for tile in prefill.TILES:
        prefill.attention_metal(*arguments(SIZES[0], TYPES[dtype]), tile=tile)
    assert len(texts) == 1 + len(prefill.TILES)
    simulator.check(list(texts))
    simulator.check_pointers(list(texts)[:2])
    simulator.check_calls(list(texts)[:2])


@pytest.mark.parametrize("turn", range(len(SIZES)))
def test_tile_agrees_with_the_reference(turn, monkeypatch):
    monkeypatch.setattr(loader, "launch", Simulator(order=turn % 3).launch)
    tile = prefill.TILES[turn % len(prefill.TILES)]
    assert worst(arguments(SIZES[turn], mx.float16 if tile == "8x4" else mx.bfloat16), tile) <= 1


@pytest.mark.full
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tile", prefill.TILES)
def test_tile_agrees_with_the_reference_and_is_clean_on_every_size(tile, dtype, monkeypatch):
    for checked, size in product((False, True), SIZES):
        monkeypatch.setattr(loader, "launch", Simulator(checked=checked).launch)
        assert worst(arguments(size, TYPES[dtype]), tile) <= 1


def test_fewer_heads_share_a_key_than_a_tile_has_simdgroups(monkeypatch):
    monkeypatch.setattr(loader, "launch", Simulator().launch)
    assert worst(arguments(SIZES[2], mx.bfloat16, groups=2), "8x4") <= 1


def test_a_maximum_that_comes_late_or_falls_is_scaled_for(monkeypatch):
    """Scores so far apart that a wrong maximum overflows or loses everything."""
    monkeypatch.setattr(loader, "launch", Simulator().launch)
    q, keys, values, scale = arguments((16, 100, 1, 0), mx.bfloat16)
    for order in (slice(None), slice(None, None, -1)):
        louder = mx.linspace(0.01, 30, 100)[order].reshape(1, 1, -1, 1).astype(keys.dtype)
        assert worst((q, keys * louder, values, scale), "16x8") <= 1


def test_accesses_are_clean_and_counted(monkeypatch):
    """Keys and values are laid out once and each simdgroup reads what its tokens see."""
    simulated = Simulator(checked=True)
    monkeypatch.setattr(loader, "launch", simulated.launch)
    assert worst(arguments((17, 70, 1, 2), mx.bfloat16), "16x8") <= 1
    lay, attend = (moved for _, moved in simulated.traffic)
    row = 256 * 2
    assert lay["keys"].loaded == lay["values"].loaded == 70 * row
    assert lay["laid_keys"].stored == lay["laid_values"].stored == 96 * row
    # The first 16 tokens see 69 keys and the last sees 70: both walk over three steps of 32, eight heads each.
    assert attend["laid_keys"].loaded == attend["laid_values"].loaded == 2 * 8 * 96 * row
    assert attend["out"].stored == 17 * 8 * row
    for moved, name in ((lay, "laid_keys"), (lay, "laid_values"), (attend, "laid_keys"), (attend, "laid_values")):
        assert moved[name].lines == moved[name].ideal


# name: the kernel's text, what it is replaced by, whether the checked run reports it (else the result is off)
MISTAKES = {
    "keys past the shown ones": ("at < n ?", "at < n + 2u ?", True),
    "one key too many": ("if (key > sees)", "if (key > sees + 1u)", False),
    "output not scaled": (
        "sum_get(sum[c][d], i) * scaled[i % 2]);\n      }",
        "sum_get(sum[c][d], i));\n      }",
        False,
    ),
    "tokens past the last stored": ("if (token < rows)", "if (token < rows + 1u)", True),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_caught(name, monkeypatch):
    old, new, reported = MISTAKES[name]
    simulated = Simulator(checked=reported, replace={old: new})
    monkeypatch.setattr(loader, "launch", simulated.launch)
    q, keys, values, scale = arguments((9, 70, 1, 0), mx.bfloat16)
    given = (q, keys * mx.linspace(0.1, 4, 70).reshape(1, 1, -1, 1).astype(keys.dtype), values, scale)
    if reported:
        with pytest.raises(LaunchReport):
            worst(given, "8x4")
    else:
        assert worst(given, "8x4") > 1
    assert old in loader.load(prefill.TOPIC)["attend"].body + loader.load(prefill.TOPIC)["lay"].body


@pytest.mark.parametrize("which", range(3))
def test_an_input_that_it_cannot_read_gives_nan(which, monkeypatch):
    monkeypatch.setattr(loader, "launch", Simulator().launch)
    given = list(arguments(SIZES[1], mx.bfloat16))
    given[which] = mx.contiguous(given[which].swapaxes(2, 3)).swapaxes(2, 3)
    assert mx.isnan(prefill.attention_metal(*given, tile="8x4")).any().item()


@pytest.mark.parametrize("device", ["metal", "cuda"])
def test_the_config_reaches_the_kernel(device, monkeypatch):
    simulated, seen = Simulator(), []

    def launch(call: Launch) -> list[mx.array]:
        seen.append(call.kernel.name)
        return simulated.launch(call)

    monkeypatch.setattr(loader, "launch", launch)
    bound = bind(EngineConfig(prefill_attention="metal"), device)
    given = arguments(SIZES[2], mx.bfloat16)
    error = relative_rms(bound.prefill_attention(*given, rows=9), OP.reference.run(*given))
    assert error <= OP.tolerance["bfloat16"]
    assert seen == ["attention_prefill_lay", "attention_prefill_attend"]
    assert bound.recorder.executed()[0]["variant"] == "metal"


def test_what_it_cannot_do_is_refused():
    q, keys, values, scale = arguments(SIZES[2], mx.bfloat16)
    with pytest.raises(loader.KernelError, match="no tile 12x8; there are 16x4, 16x8"):
        prefill.attention_metal(q, keys, values, scale, tile="12x8")
    with pytest.raises(loader.KernelError, match="one type of 16 bits"):
        prefill.attention_metal(q, keys.astype(mx.float16), values, scale)
    with pytest.raises(loader.KernelError, match="head_dim 256"):
        prefill.attention_metal(*(part[..., :64] for part in (q, keys, values)), scale)
    with pytest.raises(VariantUnsupported, match="not on a CPU"):
        OP.choose("metal", "cpu", "prefill")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tile", prefill.TILES)
def test_tile_agrees_with_the_reference_on_a_gpu(tile, dtype):
    for size in (*SIZES, (300, 1000, 2, 24)):
        assert worst(arguments(size, TYPES[dtype]), tile) <= 1
