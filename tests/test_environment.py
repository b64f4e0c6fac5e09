"""Machine and conditions: from recorded command output to words."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from sweeps import environment
from sweeps.clock import ManualClock
from sweeps.sentinel import REPEATS, SPIN_UP, Sentinel, cpu_kernel, device_kernel

ROOT = Path(__file__).parent.parent

ON_BATTERY = """Now drawing from 'Battery Power'
 -InternalBattery-0 (id=23134307)\t77%; discharging; 5:12 remaining present: true
"""
ON_MAINS = """Now drawing from 'AC Power'
 -InternalBattery-0 (id=23134307)\t100%; charged; 0:00 remaining present: true
"""
GENERAL = """System-wide power settings:
Currently in use:
 standby              1
 Sleep On Power Button 1
 hibernatefile        /var/vm/sleepimage
 powernap             1
 disksleep            10
 sleep                1 (sleep prevented by caffeinate)
 lowpowermode         {mode}
 displaysleep         10
"""
COOL = """Note: No thermal warning level has been recorded
Note: No performance warning level has been recorded
Note: No CPU power status has been recorded
"""
HOT = """2026-11-02 10:11:12 +0100 CPU Power notify
\tCPU_Scheduler_Limit \t= 100
\tCPU_Available_CPUs \t= 8
\tCPU_Speed_Limit \t= 62
"""


@pytest.mark.parametrize(("text", "source"), [(ON_BATTERY, "battery"), (ON_MAINS, "ac"), ("", None)])
def test_power_source(text, source):
    assert environment.power_source(text) == source


@pytest.mark.parametrize(
    ("text", "mode"),
    [(GENERAL.format(mode=1), True), (GENERAL.format(mode=0), False), (" powermode 1\n", True), ("", None)],
)
def test_low_power_mode(text, mode):
    assert environment.low_power_mode(text) is mode


def test_thermal_limits():
    assert environment.thermal_limits(HOT)["cpu_speed_limit"] == 62
    assert environment.thermal_limits(COOL) == {}


def test_gpu_state():
    state = environment.gpu_state("41, 1980, 118.05, 0, 0x0000000000000001\n")
    assert (state["temperature"], state["clock_mhz"], state["power_w"], state["use_percent"]) == (41, 1980, 118.05, 0)
    assert state["throttle"] == "0x0000000000000001"
    assert environment.gpu_state("[N/A], 1980, [N/A], 0, 0x0")["power_w"] is None
    assert environment.gpu_state("no devices were found") == {}


IDLE = {"power": "ac", "low_power": False, "thermal": {}, "swap": 0, "load": 0.2, "foreign_cores": 0.0, "gpu": {}}


@pytest.mark.parametrize(
    ("change", "flags"),
    [
        ({}, []),
        ({"thermal": {"cpu_speed_limit": 62}}, ["hot"]),
        ({"thermal": {"celsius": 99.0}}, ["hot"]),
        ({"gpu": {"throttle": "0x0000000000000020"}}, ["hot"]),
        ({"gpu": {"throttle": "0x0000000000000001"}}, []),
        ({"foreign_cores": 1000.0}, ["loaded"]),
        ({"swap": 1 << 30}, ["swapping"]),
        ({"power": "battery"}, ["battery"]),
        ({"low_power": True}, ["low_power"]),
    ],
)
def test_flags(change, flags):
    assert environment.condition_flags(IDLE | change, IDLE) == flags


def test_swap_that_was_there_before_is_no_flag():
    assert environment.condition_flags(IDLE | {"swap": 1 << 30}) == []
    assert environment.condition_flags(IDLE | {"swap": 1 << 30}, IDLE | {"swap": 1 << 30}) == []


@pytest.mark.parametrize("state", [{"power": "battery"}, {"low_power": True}])
def test_long_sweeps_are_refused_on_weak_power(state):
    for sweep in ("ten", "publish"):
        with pytest.raises(environment.PowerRefused, match="allow=battery"):
            environment.refuse_weak_power(sweep, None, IDLE | state)
        environment.refuse_weak_power(sweep, "battery", IDLE | state)
        environment.refuse_weak_power(sweep, None, IDLE)
    environment.refuse_weak_power("smoke", None, IDLE | state)


def test_wheel_tag_says_for_which_system_the_backend_was_built():
    text = "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: false\nTag: py3-none-macosx_26_0_arm64\n"
    assert environment.wheel_tag(text) == "py3-none-macosx_26_0_arm64"


@pytest.mark.skipif("sys.platform == 'darwin'")
def test_blas_is_named_from_what_is_mapped():
    assert environment.blas(["/usr/lib/libopenblas.so.0", "/x/libm.so"]) == "libopenblas.so.0"
    assert environment.blas(["/x/numpy.libs/libscipy_openblas64_.so"]) is None
    assert environment.blas([]) is None


def test_knobs_leave_secrets_out():
    found = environment.knobs({"MLX_MAX_OPS_PER_BUFFER": "50", "HF_TOKEN": "hf_x", "OMP_NUM_THREADS": "2", "HOME": "/"})
    assert found == {"MLX_MAX_OPS_PER_BUFFER": "50", "OMP_NUM_THREADS": "2"}


def test_records_are_plain_values_and_name_this_machine():
    machine, now = environment.machine(), environment.conditions()
    json.dumps([machine, now])
    assert machine["versions"]["mlx"] and machine["memory"] > 0 and machine["cores"] >= 1
    assert machine["device_kind"] in ("cpu", "cuda", "metal")
    assert now["foreign_cores"] >= 0


def test_git_state_tells_changes_and_absence(tmp_path):
    import subprocess

    assert environment.git_state(tmp_path) == {"commit": None, "dirty": None}
    who = ["-c", "user.name=n", "-c", "user.email=e@x"]
    for words in (["init", "-q"], [*who, "commit", "-q", "--allow-empty", "-m", "m"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    clean = environment.git_state(tmp_path)
    assert len(clean["commit"]) == 40 and clean["dirty"] is False
    (tmp_path / "new").write_text("x", encoding="utf-8")
    assert environment.git_state(tmp_path)["dirty"] is True


def test_only_one_module_of_the_sweep_reads_environment_variables():
    readers = set()
    for path in (ROOT / "sweeps").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"):
                readers.add(path.name)
    assert readers == {"environment.py"}


# -- sentinel ----------------------------------------------------------------------------------------


def beat(clock: ManualClock, pace: list[int], may_wait: bool = True) -> Sentinel:
    made = Sentinel(lambda: clock.advance(pace[0]), clock, may_wait)
    made.warm_up()
    return made


def test_a_cool_machine_is_not_waited_for():
    clock, pace = ManualClock(), [1_000_000]
    reading = beat(clock, pace).before_block(256)
    assert (reading.waited, reading.hot, reading.ns) == (0.0, False, 1_000_000)


@pytest.mark.parametrize(("frontier", "limit"), [(256, 120.0), (65_536, 600.0)])
def test_a_hot_machine_is_waited_for_so_long_and_then_flagged(frontier, limit):
    clock, pace = ManualClock(), [1_000_000]
    sentinel = beat(clock, pace)
    pace[0] = 1_100_000
    reading = sentinel.before_block(frontier)
    assert (reading.waited, reading.hot) == (limit, True)


def test_a_short_run_waits_no_longer_than_it_can_afford():
    """On a borrowed GPU a quarter of a run's time once went into waiting for a kernel that idling had slowed."""
    clock, pace = ManualClock(), [1_000_000]
    sentinel = beat(clock, pace)
    sentinel.most_wait = 7.0
    pace[0] = 1_100_000
    assert sentinel.before_block(65_536).waited == 7.0


def test_a_kernel_that_only_idled_is_not_waited_for():
    clock, pace, idle = ManualClock(), [1_000_000], [0]
    sentinel = beat(clock, pace)

    def waking() -> None:
        idle[0] += 1
        clock.advance(1_300_000 if idle[0] <= SPIN_UP else 1_000_000)

    sentinel.kernel = waking
    assert sentinel.before_block(256).waited == 0.0


def test_waiting_ends_when_the_kernel_is_back():
    clock, pace = ManualClock(), [1_000_000]
    sentinel = beat(clock, pace)
    start = clock.now_ns()
    sentinel.kernel = lambda: clock.advance(1_000_000 if clock.now_ns() - start > 10 * 10**9 else 2_000_000)
    reading = sentinel.before_block(256)
    assert not reading.hot
    assert 9 < reading.waited < 15


def test_the_margin_is_three_percent_or_three_times_the_spread():
    clock, pace = ManualClock(), [1_000_000]
    assert beat(clock, pace).margin == 0.03
    count = [0]

    def uneven() -> None:
        count[0] += 1
        clock.advance(1_000_000 + 50_000 * (count[0] // (SPIN_UP + REPEATS) % 2))

    wide = Sentinel(uneven, clock, True)
    wide.warm_up()
    assert wide.margin > 0.05


def test_on_a_cpu_it_is_recorded_and_never_waited_for():
    clock, pace = ManualClock(), [1_000_000]
    sentinel = beat(clock, pace, may_wait=False)
    pace[0] = 3_000_000
    reading = sentinel.before_block(65_536)
    assert (reading.waited, reading.hot) == (0.0, True)


@pytest.mark.gpu
def test_the_device_kernel_takes_a_time_that_can_be_read():
    from sweeps.clock import SystemClock

    sentinel = Sentinel(device_kernel(environment.machine()["device_kind"]), SystemClock(), True)
    sentinel.warm_up()
    assert 200_000 < sentinel.best_ns < 100_000_000


def test_the_cpu_kernel_takes_a_time_that_can_be_read():
    from sweeps.clock import SystemClock

    sentinel = Sentinel(cpu_kernel(), SystemClock(), False)
    sentinel.warm_up()
    assert 20_000 < sentinel.best_ns < 50_000_000


def test_a_published_row_does_not_tell_one_card_from_another(monkeypatch):
    """The rows of a borrowed GPU once carried its serial id."""
    import mlx.core as mx

    from engine.device import device_info

    told = {"device_name": "NVIDIA H200", "uuid": "GPU-0", "pci_bus_id": "0000:00:06.0", "total_memory": 1}
    monkeypatch.setattr(mx, "device_info", lambda device: told)
    made = device_info()
    assert made["device_name"] == "NVIDIA H200" and made["total_memory"] == 1
    assert not {"uuid", "pci_bus_id"} & made.keys()
