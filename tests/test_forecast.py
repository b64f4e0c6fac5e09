"""Forecasts: memory against published peaks and machine sizes, times against the geometry and a probe."""

from __future__ import annotations

import pytest

from ablations.arms import arm_config, preset
from engine.config import ModelConfig
from engine.memory import packed_bytes
from sweeps import ceilings
from sweeps import probe as probing
from sweeps.clock import SystemClock
from sweeps.forecast import (
    Forecast,
    Probe,
    apple,
    cpu,
    cuda,
    largest_frontier,
    memory,
    this_machine,
)
from sweeps.least import least_by_op, least_work, token_bytes
from sweeps.points import FRONTIERS, Arm, Job, Point

REAL = ModelConfig()


def test_decode_reads_what_the_byte_count_of_the_architecture_says():
    assert token_bytes(REAL) == pytest.approx(1_669_563_648, rel=1e-4)


def test_least_work_of_a_decode_window():
    moved, done = least_work(REAL, "decode", 4096, 64)
    step = 1_669_563_648 + 2 * REAL.state_bytes() + 20_480 * 4096
    assert moved == pytest.approx(64 * step, rel=1e-4)
    assert done / 64 == pytest.approx(2 * 3e9, rel=0.15)  # three billion active parameters


def test_least_work_of_a_prefill_reads_the_weights_once_at_any_length():
    short, long = (least_work(REAL, "prefill", n) for n in (256, 131_072))
    # All but the embedding; at 256 tokens even routing has met nearly every expert.
    every = 19_508_789_376 - packed_bytes(REAL.vocab_size * REAL.hidden_size, 4, 2)
    assert short[0] == pytest.approx(every, rel=0.01)
    assert long[0] == pytest.approx(every + 20_480 * 131_072, rel=0.01)
    assert least_work(REAL, "prefill", 1)[0] == pytest.approx(least_work(REAL, "decode", 1, 1)[0], rel=0.05)
    assert long[1] > 512 * short[1]


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_least_work_by_op_adds_up(phase):
    for frontier in (1, 256, 131_072):
        by_op = least_by_op(REAL, phase, frontier)
        total = least_work(REAL, phase, frontier, 1)
        assert [round(sum(x)) for x in zip(*by_op.values())] == pytest.approx(total, rel=1e-9)
    # Half of a token's bytes that are not experts' are projections; the head is an eighth and more at any length.
    assert by_op["linear"][0] == pytest.approx(721_797_120)
    assert by_op["head"] == (286_064_640, 2 * 248_320 * 2048)
    assert by_op["attention"][0] == pytest.approx(20_480 * 131_072, rel=1e-3)


def test_ceilings_of_this_cpu_are_plausible():
    made = ceilings.measure("cpu", SystemClock())
    assert 1e8 < made["bandwidth_bytes_per_second"] < 1e12
    assert 1e8 < made["read_bytes_per_second"] < 1e12
    assert 1e8 < made["flops_per_second"] < 1e14
    assert 1e-8 < made["launch_seconds"] < 1e-2
    assert ceilings.measure("stub", SystemClock()) == {}


def test_weights_of_another_packing_scale_the_bytes_of_a_token():
    assert token_bytes(REAL, 2 * 19_508_789_376) == pytest.approx(2 * token_bytes(REAL), rel=1e-6)


@pytest.mark.parametrize(("frontier", "peak_gb"), [(8192, 21.7), (32_768, 23.8), (65_536, 26.7), (131_072, 32.5)])
def test_memory_meets_published_peaks_of_one_arm(frontier, peak_gb):
    forecast = memory(REAL, apple("M5 Max", 128), frontier, arms=1)
    assert forecast.total / 1e9 == pytest.approx(peak_gb, abs=0.5)


@pytest.mark.parametrize(
    ("gigabytes", "one", "two"),
    [(24, 0, 0), (32, 16_384, 16_384), (48, 131_072, 131_072), (64, 262_144, 262_144), (128, 262_144, 262_144)],
)
def test_largest_frontier_by_machine(gigabytes, one, two):
    machine = apple("M4 Pro", gigabytes)
    assert (largest_frontier(REAL, machine, 1), largest_frontier(REAL, machine, 2)) == (one, two)


def test_every_live_arm_adds_its_cache_but_no_weights():
    machine = apple("M4 Max", 64)
    one, two = memory(REAL, machine, 65_536, 1), memory(REAL, machine, 65_536, 2)
    assert two.caches == 2 * one.caches
    assert two.total - one.total == one.caches == 20_480 * 65_536 + REAL.state_bytes()


def test_scores_are_counted_on_every_mac_and_not_on_cuda():
    m4, m5 = (memory(REAL, apple(chip, 64), 131_072, 1).scratch for chip in ("M4 Max", "M5 Max"))
    scores = 16 * 2048 * 131_072 * 2
    assert m4 == m5 > scores > memory(REAL, cuda("H200", 10**11), 131_072, 1).scratch


def test_machine_from_what_the_device_tells():
    metal = {"kind": "metal", "device_name": "Apple M4 Pro", "memory_size": 48 << 30}
    assert this_machine(metal).working_set_bytes == 36 << 30
    told = this_machine(metal | {"max_recommended_working_set_size": 40_000_000_000})
    assert told.working_set_bytes == 40_000_000_000
    assert this_machine({"kind": "cpu", "device_name": "x"}).itemsize == 4
    assert this_machine({"kind": "cuda", "device_name": "H", "memory_size": 1 << 37}).kind == "cuda"


def test_published_rates_of_a_fast_mac_are_met_within_a_factor_of_1_5():
    forecast = Forecast(REAL, apple("M5 Max", 128))
    published = {256: (2536, 148.5), 4096: (5166, 145.6), 32_768: (3964, 118.2), 131_072: (2238, 75.0)}
    for frontier, (prefill, decode) in published.items():
        assert 1 / 1.65 < frontier / forecast.prefill("x", frontier) / prefill < 1.5
        assert 1 / 1.5 < 1 / forecast.decode("x", frontier, 1) / decode < 1.5


def test_baseline_without_a_fused_scan_is_slow_off_metal():
    forecast = Forecast(REAL, cuda("H200", 150 * 10**9))
    slow, fast = (2048 / forecast.prefill("x", 2048, subject=subject) for subject in ("mlx_lm", "engine"))
    assert slow < 700 < fast


def test_rates_of_an_h200_are_met_within_a_third():
    forecast = Forecast(REAL, cuda("H200", 150 * 10**9))
    prefills = {512: 10_800, 2048: 24_600, 8192: 22_000, 32_768: 16_300, 131_072: 9150}
    decodes = {256: 585, 4096: 571, 32_768: 524, 131_072: 421}
    for frontier, rate in prefills.items():
        assert frontier / forecast.prefill("x", frontier) == pytest.approx(rate, rel=1 / 3)
    for frontier, rate in decodes.items():
        assert 1 / forecast.decode("x", frontier, 1) == pytest.approx(rate, rel=0.05)
    assert forecast.start() == pytest.approx(8, rel=0.1)


def test_arms_that_the_host_holds_back_are_told_apart_on_cuda():
    """By what decodes 421 to 585, 50 to 80, 33 to 47 and about 12 tokens a second on an H200."""
    known = {name: preset(name).to_dict() for name in ("full", "plain")}
    known["unfused"] = arm_config("full", {"fusion": "off"}, device="cuda").to_dict()
    known["paged"] = arm_config("full", {"cache_layout": "paged"}, device="cuda").to_dict()
    known["overlap"] = arm_config("full", {"phase_overlap": "on"}, device="cuda").to_dict()
    forecast = Forecast(REAL, cuda("H200", 150 * 10**9), arms=known | {"mlx_lm": {}})
    rates = {name: 1 / forecast.decode(name, 4096, 1) for name in forecast.arms}
    assert rates["full"] > 500 and 10 < rates["plain"] < 14 and 33 < rates["mlx_lm"] < 47
    assert all(50 < rates[name] < 80 for name in ("unfused", "paged", "overlap"))
    assert 256 / forecast.prefill("mlx_lm", 256, "mlx_lm") == pytest.approx(250, rel=0.1)
    assert forecast.prefill("plain", 2048) > 50 * forecast.prefill("full", 2048), "its scan goes token by token"
    mac = Forecast(REAL, apple("M4 Max", 64), arms=known)
    assert mac.decode("plain", 4096, 1) == mac.decode("full", 4096, 1)


def test_the_guard_records_mlx_lm_once_for_all_arms():
    forecast = Forecast(REAL, cuda("H200", 150 * 10**9))
    one, three = (forecast.guard_synthetic(names, 264, "mlx_lm") for names in ("a", "abc"))
    assert one == pytest.approx(50, rel=0.15) and (three - one) / 2 == pytest.approx(10, rel=0.15)


def test_a_probe_is_used_between_and_beyond_its_lengths():
    probe = Probe({"a": [(100, 1.0), (200, 2.0)]}, {"a": [(100, 0.01), (200, 0.02)]}, 3.0)
    forecast = Forecast(REAL, cpu("c", 8 << 30), probe=probe)
    assert forecast.prefill("a", 150) == pytest.approx(1.5)
    assert forecast.prefill("a", 400) == pytest.approx(4.0, rel=0.01)
    assert forecast.prefill("a", 50) == pytest.approx(0.5)
    assert forecast.decode("a", 150, 10) == pytest.approx(0.15)
    assert forecast.decode("a", 300, 1) == pytest.approx(0.03)
    assert forecast.decode("a", 10, 1) == pytest.approx(0.01)
    assert forecast.start() == 3.0


def test_a_probe_of_other_arms_leaves_the_geometry():
    probe = Probe({"a": [(100, 1.0)]}, {"a": [(100, 0.01)]})
    with_probe, without = (Forecast(REAL, cpu("c", 8 << 30), probe=p) for p in (probe, None))
    assert with_probe.prefill("b", 512) == without.prefill("b", 512)


def test_decode_falling_with_position_in_a_noisy_probe_is_not_extrapolated_to_nothing():
    probe = Probe({}, {"a": [(100, 0.02), (200, 0.01)]})
    assert Forecast(REAL, cpu("c", 8 << 30), probe=probe).decode("a", 100_000, 1) == pytest.approx(0.01)


def test_seconds_rise_with_context_for_every_frontier():
    forecast = Forecast(REAL, apple("M1", 32))
    prefills = [forecast.prefill("x", f) for f in FRONTIERS]
    decodes = [forecast.decode("x", f, 1) for f in FRONTIERS]
    assert prefills == sorted(prefills) and decodes == sorted(decodes)


def test_a_probe_of_known_subjects_forecasts_their_times_within_a_factor_of_1_5(tmp_path):
    cost = {"ns_per_row": 20_000, "ns_per_step": 2_000_000}
    slow = Arm("slow", "stub", options=cost, hash="a")
    arms = [slow, Arm("again", "stub", options=cost, hash="a", aa=True)]
    point = Point("key", "prefill", 2048, 1)
    model = {"config": {"vocab_size": 512}}
    job = Job(str(tmp_path), "id", model, {}, arms, [], [point], 1, 0, 60.0, 60.0)
    probe = Probe.from_dict(probing.measure(job))
    forecast = Forecast(ModelConfig(num_hidden_layers=4), cpu("c", 8 << 30), probe=probe)
    assert 1 / 1.5 < forecast.prefill("slow", 2048) / (2048 * 20e-6) < 1.5
    assert 1 / 1.5 < forecast.decode("slow", 256, 100) / 0.2 < 1.5
    assert probe.prefill["again"] == probe.prefill["slow"]
