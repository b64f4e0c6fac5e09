"""The doctor's words for machines that are not at hand, from what their own commands print; and a run on this one."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import engine
from engine import doctor
from engine.config import ModelConfig
from engine.doctor import GIB, MIB, Diagnosis, Machine, VariantReport

ROOT = Path(__file__).parents[1]

# What a Mac prints; the key says which command.
MAC_32 = {
    "sw_vers -productVersion": "15.6.1\n",
    "sysctl -n machdep.cpu.brand_string": "Apple M2 Max\n",
    "sysctl -n hw.memsize": "34359738368\n",
    "sysctl -n sysctl.proc_translated": "0\n",
    "sysctl -n iogpu.wired_limit_mb": "0\n",
}
ROSETTA = MAC_32 | {
    "sysctl -n machdep.cpu.brand_string": "VirtualApple @ 2.50GHz\n",
    "sysctl -n sysctl.proc_translated": "1\n",
}
INTEL = {
    "sw_vers -productVersion": "13.6.9\n",
    "sysctl -n machdep.cpu.brand_string": "Intel(R) Core(TM) i9-9880H CPU @ 2.30GHz\n",
    "sysctl -n hw.memsize": "17179869184\n",
}


def mac(recorded: dict[str, str], arch: str = "arm64") -> Machine:
    """The machine that the recorded outputs describe; a command that was not recorded fails."""

    def command(argv: Sequence[str]) -> str | None:
        printed = recorded.get(" ".join(argv))
        return None if printed is None else printed.strip()

    return doctor.inspect_machine("Darwin", arch, command)


def test_a_supported_mac_is_read_and_has_nothing_in_its_way() -> None:
    machine = mac(MAC_32)
    assert machine == Machine("Darwin", "arm64", "15.6.1", "Apple M2 Max", 32 * GIB, False, 0)
    assert doctor.system_findings(machine) == []


@pytest.mark.parametrize(
    ("recorded", "arch", "words"),
    [
        (ROSETTA, "x86_64", ["Rosetta", "arm64 Python"]),
        (INTEL, "x86_64", ["Intel", "Apple silicon"]),
        (MAC_32 | {"sw_vers -productVersion": "14.7\n"}, "arm64", ["macOS 14.7", "macOS 15", "update"]),
    ],
)
def test_what_stops_mlx_is_one_clear_line(recorded: dict[str, str], arch: str, words: list[str]) -> None:
    first = doctor.system_findings(mac(recorded, arch))[0]
    assert first.level == "problem" and "\n" not in first.text
    assert all(word in first.text for word in words), first.text


def test_rosetta_is_not_mistaken_for_an_intel_mac() -> None:
    assert not any("Intel" in finding.text for finding in doctor.system_findings(mac(ROSETTA, "x86_64")))


def test_wired_limit_names_the_current_value_the_line_and_the_risk() -> None:
    finding = doctor.wired_limit_finding(mac(MAC_32), int(32 * GIB * 2 / 3))
    assert finding is not None and finding.level == "note"
    assert "iogpu.wired_limit_mb is 0 (the system's default)" in finding.text
    # 32 GiB less the 4 GiB that are left to the system.
    assert "sudo sysctl iogpu.wired_limit_mb=28672" in finding.text
    assert "Risk" in finding.text and "4.3 GB" in finding.text and "undoes it" in finding.text


def test_wired_limit_that_is_already_raised_is_left_alone() -> None:
    raised = mac(MAC_32 | {"sysctl -n iogpu.wired_limit_mb": "28672\n"})
    finding = doctor.wired_limit_finding(raised, 28_672 * MIB)
    assert finding is not None and finding.level == "ok" and "sudo" not in finding.text


def test_wired_limit_is_never_set_by_the_doctor() -> None:
    # The only place that starts a process is `run_command`, and nothing passes it more than a query.
    tree = ast.parse((ROOT / "engine" / "doctor.py").read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    argvs = [ast.literal_eval(call.args[0]) for call in calls if getattr(call.func, "id", "") == "command"]
    assert len(argvs) == 5
    for argv in argvs:
        assert argv[0] == "sw_vers" or argv[:2] == ["sysctl", "-n"], argv


@pytest.mark.parametrize(("gib", "left_gib"), [(16, 4), (24, 4), (32, 4), (64, 8), (128, 16)])
def test_raised_limit_leaves_memory_to_the_system(gib: int, left_gib: int) -> None:
    assert doctor.raised_limit_mb(gib * GIB) == (gib - left_gib) * 1024


def test_small_mac_is_told_so_and_what_the_raised_limit_would_give() -> None:
    machine = Machine("Darwin", "arm64", "15.6", "Apple M4", 24 * GIB, False, 0)
    findings, frontiers = doctor.fit_findings(ModelConfig(), machine, "metal", 16 * GIB)
    assert frontiers == {"one arm": 0, "two arms": 0}
    assert findings[0].level == "warning" and "too small" in findings[0].text
    assert "19.5 GB" in findings[0].text and "python -m sweeps" in findings[0].text
    assert "with the raised limit: 4,096 tokens" in findings[1].text


def test_second_live_arm_lowers_the_largest_frontier() -> None:
    machine = Machine("Darwin", "arm64", "15.6", "Apple M3 Pro", 36 * GIB, False, 0)
    findings, frontiers = doctor.fit_findings(ModelConfig(), machine, "metal", 31 * GIB)
    assert frontiers["one arm"] == 131_072 and frontiers["two arms"] == 65_536
    assert "10 layers grow, 30 do not" in findings[0].text


def test_mac_too_small_even_when_raised_gets_no_hope() -> None:
    machine = Machine("Darwin", "arm64", "15.6", "Apple M2", 16 * GIB, False, 0)
    findings, _ = doctor.fit_findings(ModelConfig(), machine, "metal", 11 * GIB)
    assert len(findings) == 1


def test_budget_by_kind_of_device() -> None:
    machine = Machine("Linux", "x86_64", "6.1", "cpu", 10 * GIB)
    assert doctor.budget_bytes({"kind": "metal", "max_recommended_working_set_size": 7}, machine) == 7
    assert doctor.budget_bytes({"kind": "cuda", "total_memory": 1000}, machine) == 950
    assert doctor.budget_bytes({"kind": "cpu"}, machine) == 8 * GIB


def test_reference_blas_is_a_warning_with_the_line_that_mends_it() -> None:
    slow = doctor.cpu_findings(None, "/usr/bin/g++")
    assert [finding.level for finding in slow] == ["warning"]
    assert "apt-get install libopenblas0-pthread" in slow[0].text
    assert "apt-get install g++" in doctor.cpu_findings("/lib/libopenblas.so.0", None)[1].text


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux loader")
def test_blas_in_use_is_what_the_loader_resolves() -> None:
    # Where the engine put OpenBLAS in front, that file is named; elsewhere nothing may be claimed.
    found = doctor.blas_library()
    assert (found is not None and "openblas" in found) if engine.BLAS else (found is None or "openblas" not in found)


def test_failed_self_test_is_a_problem() -> None:
    found = Diagnosis(Machine("Linux", "x86_64", "6.1", "cpu", GIB))
    found.variants = [
        VariantReport("linear", "mlx", True, "", True, 1e-7, 2),
        VariantReport("linear", "broken", True, "odd: relative RMS error 0.5 exceeds 0.001", False, 0.5, 1),
        VariantReport("linear", "metal", False, "needs Metal"),
    ]
    doctor._sum_up(found)
    assert not found.healthy
    text = doctor.to_text(found)
    assert "linear=broken" in text and "FAILED odd" in text and "not here: needs Metal" in text
    assert "1 of 2 variants passed; 2 of 3 are supported here" in text


def test_wrong_variant_is_caught_on_this_machine() -> None:
    # The self-test must be able to fail: a variant that is off by one part in ten is caught.
    import dataclasses

    from engine.device import device_kind
    from engine.ops import OPS

    op = OPS["linear"]
    off = dataclasses.replace(op.reference, name="off", run=lambda *given: 1.1 * op.reference.run(*given))
    report = doctor._check(op, off, device_kind(), everything=False)
    assert report.passed is False and report.rel_rms == pytest.approx(0.1, rel=0.05)


def test_kernels_of_ours_are_tried_and_the_answer_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a GPU: one that fails is listed with the compiler's message, the others beside it, and engines go by it."""
    from engine import proof
    from engine.kernels import loader
    from engine.ops import OPS

    def reject(call: object) -> None:
        raise RuntimeError("program_source:3: error: no such function")

    monkeypatch.setattr(loader, "launch", reject)
    monkeypatch.setattr(proof, "FOLDER", tmp_path)
    monkeypatch.setattr(proof, "device_kind", lambda: "metal")
    monkeypatch.setattr(proof, "UNITS", {"rotary": proof.UNITS["rotary"], "fine": lambda: 0.0})
    found = Diagnosis(mac(MAC_32))
    op = OPS["decode_attention"]
    found.variants = [doctor._check(op, op.variants[name], "metal", False) for name in ("mlx", "metal")]
    found.units = doctor.check_units("metal", False, lambda *_: None)
    doctor._sum_up(found)
    text = doctor.to_text(found)
    assert not found.healthy and "decode_attention=mlx" in text and "fine" in text
    assert text.count("program_source:3: error: no such function") == 4
    assert [test.passed for test in (*found.variants, *found.units)] == [True, False, False, True]
    assert "no such function" in str(proof.refusal("decode_attention", "metal"))


def test_doctor_on_this_machine() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "engine", "doctor", "--json"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    found = json.loads(done.stdout)
    assert (done.returncode == 0) == found["healthy"]
    assert found["device"]["kind"] in ("metal", "cuda", "cpu") and found["budget_bytes"] > 0
    assert "mlx" in found["versions"] and "mlx-lm" in found["versions"]
    # Every op's every variant is listed, with an outcome or a reason.
    from engine.ops import OPS

    listed = {(test["op"], test["variant"]): test for test in found["variants"]}
    assert set(listed) == {(op.name, name) for op in OPS.values() for name in op.variants}
    for test in listed.values():
        assert test["passed"] is True if test["supported"] else test["reason"], test
    assert done.stderr.count("self-test ") == len(listed)


def test_rosetta_is_one_line_although_mlx_is_missing_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "engine.device", None)
    found = doctor.diagnose(machine=mac(ROSETTA, "x86_64"))
    assert [finding.level for finding in found.findings] == ["problem"]
    assert "Rosetta" in found.findings[0].text


def test_missing_mlx_is_a_line_and_not_a_traceback(tmp_path: Path) -> None:
    # A folder that comes first on the path and whose `mlx` cannot be imported.
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "__init__.py").write_text("raise ImportError('no build for this system')\n", encoding="utf-8")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from engine.doctor import main; sys.exit(main([]))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "MLX cannot be imported (no build for this system)" in done.stdout
