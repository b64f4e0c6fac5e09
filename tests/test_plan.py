"""Plans: arms and contrasts, points and their keys, what is skipped, and how a budget is met."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from ablations.arms import TOGGLES, ArmError, differing_fields
from engine.config import EngineConfig, ModelConfig
from sweeps import compose, models, plan, preview
from sweeps.forecast import Probe, apple, cpu, cuda
from sweeps.models import Model, read
from sweeps.plan import PlanError
from sweeps.store import read_job, write_job

REAL = Model("real", "checkpoint", ModelConfig(), path="/weights", weights_bytes=19_508_789_376, weights_hash="w")
TINY = Model(
    "tiny",
    "synthetic",
    dataclasses.replace(
        ModelConfig(),
        num_hidden_layers=4,
        hidden_size=256,
        num_experts=32,
        vocab_size=512,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    ),
    synthetic=True,
    weights_bytes=6_000_000,
)
MAC = apple("M4 Max", 128)
CPU = cpu("cpu", 8 << 30)
INVENTORY = Path(__file__).parent / "data" / "qwen3.6-35b-a3b-4bit.json.gz"


def made(*words, model=REAL, machine=MAC, probe=None, launch=None):
    return plan.make(compose.request(words, launch), model, machine, probe)


def fast_probe(*arms, seconds_per_token=1e-4):
    prefill = {arm: [(128, 128 * seconds_per_token), (512, 512 * seconds_per_token)] for arm in arms}
    return Probe(prefill, {arm: [(128, 1e-3), (512, 1e-3)] for arm in arms}, 2.0)


def test_default_arms_are_engine_baseline_and_a_second_engine():
    job = made("sweep=ten").job
    assert [(arm.name, arm.subject, arm.aa) for arm in job.arms] == [
        ("full", "engine", False),
        ("mlx_lm", "mlx_lm", False),
        ("full.again", "engine", True),
    ]
    assert [(c.arm, c.reference) for c in job.contrasts] == [("full", "mlx_lm"), ("full.again", "full")]
    assert job.arms[0].hash == job.arms[2].hash


def test_ten_frontiers_with_replicates_that_fall_with_cost():
    job = made("sweep=ten", "budget=100h").job
    blocks = {p.frontier: p.blocks for p in job.points if p.phase == "prefill"}
    assert [blocks[f] for f in sorted(blocks)] == [5, 5, 5, 5, 5, 5, 2, 2, 1, 1]
    assert {p.blocks for p in job.points if p.phase == "decode"} == {5}
    assert all(p.straight == (p.frontier <= 8192) for p in job.points)
    assert job.settings["walk_check"] == 16_384


def test_longer_chunks_are_straight_for_longer():
    job = made("sweep=ten", "engine.prefill.chunk=4096").job
    assert [p.straight for p in job.points if p.frontier == 16_384] == [True, True]


def test_publish_is_five_sessions_of_five_blocks():
    job = made("sweep=publish", "budget=1000h").job
    assert (job.sessions, max(p.blocks for p in job.points)) == (5, 5)


def test_a_cpu_decodes_in_many_short_windows():
    arms = ("full", "mlx_lm", "full.again")

    def decode(*words: str) -> set[tuple[int, int]]:
        job = made("budget=1h", *words, model=TINY, machine=CPU, probe=fast_probe(*arms)).job
        return {(p.blocks, p.decode_tokens) for p in job.points if p.phase == "decode"}

    assert decode() == {(60, 8)}
    assert decode("blocks=5") == {(5, 8)}, "what the user asks for holds"
    assert decode("blocks=5", "decode.blocks=20") == {(20, 8)}


def test_an_ablation_varies_one_toggle_and_gives_both_arms_what_either_needs():
    job = made("ablation=gpu_routing", "sweep=ten").job
    off, on = (arm for arm in job.arms if arm.subject == "engine" and not arm.aa)
    assert (off.config["route"], on.config["route"]) == ("host", "mlx")
    assert off.config["decode"]["trace"] == on.config["decode"]["trace"] == "eager"
    assert off.config["prefill"]["submission"] == on.config["prefill"]["submission"] == "layer"
    assert ("gpu_routing=device", "gpu_routing=off") in [(c.arm, c.reference) for c in job.contrasts]


def test_mlx_lm_is_asked_to_draft_where_the_engine_does_and_cannot():
    job = made("ablation=speculative", "sweep=ten").job
    asked = next(arm for arm in job.arms if arm.subject == "mlx_lm" and arm.options.get("speculative"))
    assert asked.name == "mlx_lm,speculative=mtp"
    assert all("cannot be trimmed" in point.skip[asked.name] for point in job.points)
    assert ("mlx_lm,speculative=mtp", "mlx_lm") in [(c.arm, c.reference) for c in job.contrasts]
    assert not any("speculative" in arm.options for arm in made("sweep=ten").job.arms)


@pytest.mark.parametrize("name", [n for n in compose.options("ablation") if n != "none"])
@pytest.mark.parametrize("engine", ["plain", "full"])
def test_every_ablation_plans_in_both_directions(name, engine):
    job = made(f"ablation={name}", f"engine={engine}", "sweep=ten").job
    assert len({arm.hash for arm in job.arms}) >= 2


def test_presets_against_each_other():
    assert [a.name for a in made("ablation=full_vs_plain", "sweep=ten", "subject=none").job.arms] == [
        "plain",
        "full",
        "plain.again",
    ]


def test_a_shared_decode_cache_is_filled_by_the_fastest_engine_arm_and_only_without_prefill():
    words = ("ablation=full_vs_plain", "sweep=ten", "decode.cache=shared", "frontiers=[256,32K]")
    own, shared = (made(*words[: 2 + n], words[3], "phases=[decode]") for n in (0, 1))
    assert own.job.settings["cache_from"] is None and shared.job.settings["cache_from"] == "full"
    slowed = made(*words, "phases=[decode]", "planted=5%").job
    assert slowed.settings["cache_from"] == "full", "a copy that waits would fill it more slowly"
    assert shared.seconds < own.seconds
    assert not {p.key for p in own.job.points} & {p.key for p in shared.job.points}
    with pytest.raises(PlanError, match=r"phases=\[decode\]"):
        made(*words)
    with pytest.raises(PlanError, match="decode.cache=own"):
        made(*words, "phases=[decode]", "arms=serial")


def test_a_contradiction_of_toggle_and_field_is_refused():
    with pytest.raises(ArmError, match="contradict"):
        made("toggle.prefill_chunk=4096", "engine.prefill.chunk=512")


def test_a_toggle_cannot_be_both_fixed_and_varied():
    with pytest.raises(PlanError, match="gdn_scan"):
        made("ablation=gdn_scan", "toggle.gdn_scan=mlx")


def test_an_override_that_makes_the_arms_equal_is_refused():
    with pytest.raises(ArmError):
        made("ablation=prefill_chunk", "engine.prefill.chunk=4096")


def test_impossible_combinations_are_skipped_with_their_reason():
    job = made("toggle.cache_layout=paged", "engine.decode_attention.variant=mlx", "sweep=ten").job
    assert "contiguous" in job.points[0].skip["full,cache_layout=paged"]
    assert "mlx_lm" not in job.points[0].skip


def test_drafting_that_cannot_be_is_known_beforehand():
    """A second engine that no sweep has, and a trimmed vocabulary as large as the model's own."""
    job = made("toggle.speculative=model", "sweep=ten").job
    assert "take mtp or ngram" in job.points[0].skip["full,speculative=model"]
    words, name = ("ablation=draft_vocab", "sweep=ten"), "speculative.draft_vocab=32768"
    small = dataclasses.replace(REAL, config=dataclasses.replace(REAL.config, vocab_size=4096))
    assert "has 4096 tokens" in made(*words, model=small).job.points[0].skip[name]
    assert name not in made(*words).job.points[0].skip


def test_keys_follow_what_determines_the_result_and_nothing_else():
    key = {
        name: made(*words).job.points[0].key
        for name, words in {
            "base": (),
            "blocks": ("blocks=2",),
            "budget": ("budget=3m",),
            "seed": ("seed=1",),
            "prompt": ("prompt=code",),
            "engine": ("engine.prefill.chunk=512",),
            "logprobs": ("decode.logprobs=true",),
        }.items()
    }
    assert key["base"] == key["blocks"] == key["budget"]
    assert len({key[n] for n in ("base", "seed", "prompt", "engine", "logprobs")}) == 5


def test_keys_are_unique_within_a_job():
    points = made("sweep=ten").job.points
    assert len({p.key for p in points}) == len(points) == 20


def test_a_budget_drops_replicates_from_the_long_end_first_and_says_so():
    whole, cut = made("sweep=ten", "budget=100h"), made("sweep=ten", "budget=20m")
    assert not whole.dropped and cut.dropped
    assert cut.seconds <= 20 * 60
    full = {p.key: p.blocks for p in whole.job.points}
    left = {p.frontier: p.blocks / full[p.key] for p in cut.job.points if p.phase == "decode"}
    shares = [left[f] for f in sorted(left)]
    assert shares == sorted(shares, reverse=True) and shares[0] > shares[-1]
    assert len(cut.dropped) == sum(p.blocks < full[p.key] for p in cut.job.points)


def test_a_budget_that_ends_before_the_long_frontiers_skips_them_with_the_reason():
    job = made("sweep=ten", "budget=2m").job
    last = [p for p in job.points if p.frontier == 131_072]
    assert all("budget" in reason for p in last for reason in p.skip.values()) and last[0].skip
    assert job.points[0].blocks >= 1 and not job.points[0].skip


def test_a_budget_in_which_nothing_fits_is_refused():
    with pytest.raises(PlanError, match="budget=1 s"):
        made("sweep=ten", "budget=1s")


def test_memory_skips_preset_frontiers_and_refuses_those_asked_for():
    machine = apple("M1", 32)
    skipped = made("sweep=ten", "budget=100h", machine=machine).rows[-1].skip
    assert set(skipped) == {"full", "mlx_lm", "full.again"} and "working set" in skipped["full"]
    with pytest.raises(PlanError, match="working set"):
        made("frontiers=[128K]", machine=machine)


def test_arms_take_turns_where_their_caches_do_not_fit_together():
    machine = dataclasses.replace(MAC, working_set_bytes=35_000_000_000)
    planned = made("sweep=ten", "budget=100h", machine=machine)
    assert planned.job.settings["arms"] == "serial"
    assert any("do not fit together" in note for note in planned.notes)


def test_frontiers_beyond_the_context():
    with pytest.raises(PlanError, match="262144"):
        made("frontiers=[512K]")


def test_an_arm_far_beyond_its_cap_is_skipped_for_prefill_only():
    probe = fast_probe("full", "full.again")
    probe.prefill["mlx_lm"], probe.decode["mlx_lm"] = [(128, 1.28), (512, 5.12)], [(128, 1e-3), (512, 1e-3)]
    points = made("frontiers=[256,16K]", "cap=30s", "budget=1h", probe=probe).job.points
    assert {(p.phase, p.frontier): sorted(p.skip) for p in points} == {
        ("prefill", 256): [],
        ("decode", 256): [],
        ("prefill", 16_384): ["mlx_lm"],
        ("decode", 16_384): [],
    }


def test_calibration_is_the_same_engine_again_and_once_slowed():
    job = made("sweep=calibrate").job
    assert {arm.hash for arm in job.arms[:3]} == {job.arms[0].hash} != {job.arms[3].hash}
    assert [arm.aa for arm in job.arms] == [False, True, True, False] and len(job.contrasts) == 3
    assert job.arms[-1].options == {"slowdown": 1.05}


def test_a_slowdown_can_be_planted_in_any_run():
    job = made("planted=10%").job
    assert [arm.name for arm in job.arms] == ["full", "mlx_lm", "full.again", "full.slowed"]
    assert job.arms[-1].options == {"slowdown": 1.1} and job.contrasts[-1].name == "planted slowdown of 0.1"
    assert not any("slowed" in arm.name for arm in made().job.arms)


@pytest.mark.parametrize("layers", ["6", "0", "44", "four"])
def test_a_cut_of_the_model_is_whole_periods_of_layers(layers):
    with pytest.raises(compose.UsageError, match=rf"model\.layers={layers}"):
        models.find(compose.request(["model=synthetic-35b", f"model.layers={layers}"]))


def test_a_cut_model_says_so_in_its_name():
    cut = models.find(compose.request(["model=synthetic-35b", "model.layers=8"]))
    assert (cut.name, cut.config.num_hidden_layers) == ("synthetic-35b-8layers", 8)


def test_a_job_survives_its_file(tmp_path):
    job = made("ablation=gdn_scan", "sweep=ten").job
    assert read_job(write_job(job, tmp_path / "job.json")) == job


def test_the_same_command_goes_on_with_an_unfinished_run(tmp_path):
    first = made(launch=tmp_path).job
    write_job(first, tmp_path / "reports" / "runs" / first.run_id / "job.json")
    again = made("budget=5m", launch=tmp_path).job
    assert again.run_dir == first.run_dir
    assert plan.interrupted(again) == first
    (tmp_path / "reports" / "runs" / first.run_id / "report.md").write_text("done", encoding="utf-8")
    assert made(launch=tmp_path).job.run_dir != first.run_dir
    assert made("seed=5", launch=tmp_path).job.run_dir != first.run_dir


def test_a_folder_of_another_run_is_refused(tmp_path):
    write_job(made("seed=1").job, tmp_path / "job.json")
    with pytest.raises(PlanError, match="other settings"):
        plan.interrupted(made("seed=2", f"run_dir={tmp_path}").job)
    (tmp_path / "job.json").write_text("{", encoding="utf-8")
    with pytest.raises(PlanError, match="not a job of this version.*another run_dir="):
        plan.interrupted(made("seed=2", f"run_dir={tmp_path}").job)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(PlanError, match="no run"):
        plan.interrupted(made(f"run_dir={tmp_path / 'other'}").job)


def test_the_dry_run_shows_points_memory_toggles_skips_and_total():
    out = io.StringIO()
    preview.show(made("sweep=ten", "toggle.gqa_packing=4", "budget=10m"), Console(file=out, width=140))
    text = out.getvalue()
    for word in (
        "131072",
        "GB",
        "toggle.gqa_packing=4 sets decode_attention.heads=4",
        "budget of 10 min",
        "Output:",
        "Given up for the budget",
    ):
        assert word in text


def test_the_dry_run_for_programs_is_json():
    out = io.StringIO()
    preview.show(made("sweep=ten"), Console(file=out), form="json")
    values = json.loads(out.getvalue())
    assert [row["frontier"] for row in values["frontiers"]][-1] == 131_072
    assert values["seconds"] > 0 and values["frontiers"][0]["bytes"] > 19e9


def test_the_dry_run_says_what_both_arms_are_given():
    expanded = made("ablation=gpu_routing", "sweep=ten").expanded["gpu_routing=device"]
    assert expanded["toggle.gpu_routing=device"] == {"route": "mlx"}
    same = {"prefill.submission": "layer", "decode.trace": "eager", "decode.fusion": "off"}
    assert expanded["running it in every arm"] == same


def test_a_slow_arm_gives_up_long_prefills_before_a_frontier_is_lost():
    probe = fast_probe("full", "full.again")
    probe.prefill["mlx_lm"], probe.decode["mlx_lm"] = [(128, 1.28), (512, 5.12)], [(128, 1e-3), (512, 1e-3)]
    points = made("budget=70s", model=TINY, machine=CPU, probe=probe).job.points
    assert all(point.blocks for point in points)
    skipped = {p.frontier for p in points if "mlx_lm" in p.skip}
    assert 2048 in skipped and 256 not in skipped
    assert not any(p.skip for p in points if p.phase == "decode")


@pytest.mark.parametrize(
    ("chip", "memory_gb", "largest"),
    [("M4", 24, 0), ("M4", 32, 16_384), ("M4 Pro", 48, 131_072), ("M4 Max", 64, 131_072), ("M4 Max", 128, 131_072)],
)
def test_the_published_tensor_list_plans_on_every_size_of_mac(chip, memory_gb, largest):
    model = read(INVENTORY, "qwen3.6-35b")
    assert model.weights_bytes == 19_508_787_456 and not model.synthetic
    machine = apple(chip, memory_gb)
    planned = made("sweep=ten", "budget=1000h", "cap=100h", model=model, machine=machine)
    assert max((row.frontier for row in planned.rows if not row.skip), default=0) == largest
    for row in planned.rows:
        live = 1 if planned.job.settings["arms"] == "serial" else 3
        assert row.memory.weights == model.weights_bytes
        assert row.memory.caches == live * (20_480 * row.frontier + model.config.state_bytes())
        assert bool(row.skip) == (row.memory.weights + row.memory.caches // live + row.memory.scratch
                                  > machine.working_set_bytes)  # fmt: skip
    if largest == 0:
        with pytest.raises(PlanError, match="working set"):
            planned.require_work()


def test_on_a_borrowed_accelerator_the_dry_run_states_device_minutes_and_parts():
    planned = made(
        "sweep=borrowed", "ablation=gqa_packing", "subject=none", "part=90s", machine=cuda("H200", 150 * 10**9)
    )
    assert (planned.job.sessions, {p.blocks for p in planned.job.points}) == (5, {2})
    assert planned.job.settings["part_seconds"] == 90
    useful = 90 - planned.start_seconds
    assert planned.parts == -(-(planned.seconds - 5 * planned.start_seconds) // useful) > 1
    out = io.StringIO()
    preview.show(planned, Console(file=out, width=140))
    minutes = f"{planned.seconds / 60:.0f} min, in {planned.parts} parts of at most 90 s"
    assert f"Device time: {minutes}: give the same command {planned.parts} times" in out.getvalue()


def test_a_part_does_not_change_what_the_run_is():
    assert made("sweep=borrowed").job.config_hash == made("sweep=borrowed", "part=4m").job.config_hash


def test_a_run_that_was_unpacked_elsewhere_goes_on_there(tmp_path):
    first = made("sweep=borrowed", launch=tmp_path / "here").job
    there = tmp_path / "there" / "reports" / "runs" / first.run_id
    write_job(first, there / "job.json")
    (there / "report.md").write_text("so far", encoding="utf-8")
    again = made("sweep=borrowed", launch=tmp_path / "there").job
    assert again.run_dir == str(there)
    assert plan.interrupted(again) == dataclasses.replace(first, run_dir=str(there))


# -- questions ------------------------------------------------------------------------------------


def differing(job, arm, reference):
    arms = {a.name: EngineConfig.from_dict(a.config) for a in job.arms if a.config}
    return set(differing_fields(arms[arm], arms[reference]))


def test_both_directions_and_the_published_one_differ_in_the_toggle_alone():
    job = made("ablation=gpu_routing", "directions=[in,claim,out]", "subject=none", "sweep=ten").job
    asked = [(c.arm, c.reference, c.about) for c in job.contrasts if c.about]
    assert [about["directions"] for *_, about in asked] == [["in"], ["claim"], ["out"]]
    assert all(about["claims"] == ["gpu_routing"] for *_, about in asked)
    assert all(differing(job, arm, reference) == {"route"} for arm, reference, _ in asked)
    on = {a.name: a.config["linear"] for a in job.arms}
    assert on[asked[0][1]] == "expanded" != on[asked[1][1]], "the claim stands on packed weights"


def test_a_claim_on_top_of_nothing_is_the_addition_itself():
    job = made("ablation=packed_dequant", "directions=[in,claim]", "subject=none", "sweep=ten").job
    assert [c.about["directions"] for c in job.contrasts if c.about] == [["in", "claim"]]


@pytest.mark.parametrize("name", ["ladder_prefill", "ladder_decode"])
def test_a_ladder_goes_from_plain_to_full_and_says_what_cannot_be_a_rung(name):
    job = made(f"ablation={name}", "subject=none", "sweep=ten").job
    (ladder,) = job.settings["ladders"]
    assert ladder["arms"][0] == "plain" and ladder["arms"][-1] == "full"
    assert len(ladder["arms"]) == len(ladder["steps"]) and set(ladder["arms"]) <= {a.name for a in job.arms}
    pairs = {(c.arm, c.reference) for c in job.contrasts}
    assert set(zip(ladder["arms"][1:], ladder["arms"])) <= pairs and ("full", "plain") in pairs
    steps = compose.request([f"ablation={name}"]).ablation["ladder"]
    assert [s for s in steps if s not in ladder["steps"]] == [s for s in steps if s in ladder["left_out"]]
    on_a_cpu = made(f"ablation={name}", "subject=none", "sweep=ten", machine=CPU, model=TINY, probe=fast_probe())
    (short,) = on_a_cpu.job.settings["ladders"]
    assert all(short["left_out"].values()) and len(short["arms"]) <= len(ladder["arms"])


def test_an_interaction_is_four_arms_that_differ_in_two_toggles():
    job = made("ablation=packed_x_routing", "subject=none", "sweep=ten").job
    (asked,) = job.settings["interactions"]
    neither, first, second, both = asked["arms"]
    assert differing(job, first, neither) == {"linear", "experts.variant"} == differing(job, both, second)
    assert differing(job, second, neither) == {"route"} == differing(job, both, first)


def test_joined_questions_share_arms_of_one_configuration():
    job = made("ablation=packed_dequant+packed_x_routing", "directions=[in]", "subject=none", "sweep=ten").job
    hashes = [arm.hash for arm in job.arms if not arm.aa]
    assert len(set(hashes)) == len(hashes) == 4


def test_the_noise_of_a_run_is_that_of_an_arm_that_runs():
    job = made(
        "ablation=gqa_packing+kv_split", "directions=[in]", "subject=none", machine=CPU, model=TINY, probe=fast_probe()
    ).job
    again = next(arm for arm in job.arms if arm.aa)
    assert all(again.name not in point.skip for point in job.points)
    assert any(point.skip for point in job.points), "kernels of a GPU do not run on a CPU"


# -- suites of toggles ----------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_a_suite_of_toggles_takes_each_out_of_the_whole_engine_and_refuses_none_on_a_gpu(phase):
    """Every toggle has a pair that differs at every frontier, or is skipped there because both sides do the same."""
    jobs = [made(*words, machine=cuda("H200", 150 * 10**9)).job for words in suite_jobs(f"toggles_{phase}")]
    asked, idle = {}, {}
    for job in jobs:
        skips = {(point.frontier, name): reason for point in job.points for name, reason in point.skip.items()}
        assert all("its sides do the same work" in reason for reason in skips.values())
        assert {point.phase for point in job.points} == {phase} and job.sessions == 1
        donor = job.settings["cache_from"]
        assert (donor is None) == (phase == "prefill") and not {(f, donor) for f, _ in skips} & set(skips)
        for contrast in (c for c in job.contrasts if c.about):
            (name,) = contrast.about["toggles"]
            assert contrast.about["directions"] == ["out"]
            assert set(differing(job, contrast.arm, contrast.reference)) <= set(TOGGLES[name].fields)
            asked.setdefault(name, set()).update(point.frontier for point in job.points)
            idle.setdefault(name, set()).update(f for f, arm in skips if arm == contrast.arm)
    want = {name for name, toggle in TOGGLES.items() if phase in toggle.phases} - {"speculative", "step_trace"}
    if phase == "prefill":
        assert set(asked) == want - {"cache_layout"} and asked["gdn_scan"] == {512, 2048, 8192, 32_768}
        assert {name: at for name, at in idle.items() if at} == {"prefill_chunk": {512, 2048}}
        return
    assert set(asked) == want - {"gdn_scan"} | {"phase_overlap"}
    everywhere = {256, 4096, 32_768, 131_072}
    assert all(at == everywhere for at in asked.values())
    assert {name: at for name, at in idle.items() if at} == {
        "fixed_block_layout": {256, 4096},
        "phase_overlap": everywhere,
    }


def suite_jobs(name: str) -> list[tuple[str, ...]]:
    return compose.jobs(compose.parse([f"suite={name}"]))


def test_a_question_asked_alone_is_measured_as_it_was_asked():
    job = made("ablation=fixed_block_layout", "frontiers=[256]", "sweep=ten").job
    assert not any("same work" in reason for point in job.points for reason in point.skip.values())
