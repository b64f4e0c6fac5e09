"""The command line: words to a checked request, quoting, lists, paths, and the presets and ablations there are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st

from ablations import arms
from ablations.catalogue import CLAIMS, claim
from engine.config import ConfigError, EngineConfig
from sweeps import compose
from sweeps.compose import UsageError
from sweeps.questions import side


def test_defaults_are_the_toy_model_full_engine_and_mlx_lm():
    request = compose.request([])
    assert (request.engine_name, request.subject["name"], request.sweep) == ("full", "mlx_lm", "smoke")
    assert request.engine == EngineConfig().to_dict()
    assert request.frontiers == (256, 512, 1024, 2048)
    assert (request.sessions, request.budget_seconds) == (1, 150)


@pytest.mark.parametrize("name", compose.options("engine"))
def test_preset_files_are_the_presets_of_the_arms(name):
    assert compose.request([f"engine={name}"]).engine == arms.preset(name).to_dict()


def test_every_preset_has_a_file():
    assert set(compose.options("engine")) == set(arms.PRESETS)


@pytest.mark.parametrize("name", compose.options("ablation"))
def test_ablation_files_compose_and_name_themselves(name):
    request = compose.request([f"ablation={name}", "sweep=ten"])
    assert request.ablation["name"] == name
    if request.ablation["varies"] in arms.TOGGLES:
        assert request.phases == arms.toggle(request.ablation["varies"]).phases
    for found in map(claim, request.ablation["claims"]):
        assert side(found)[0] == request.ablation["varies"], found.name


def test_every_toggle_has_an_ablation():
    assert set(arms.TOGGLES) <= set(compose.options("ablation"))


def test_sweeps_are_those_of_the_plan():
    assert compose.request(["sweep=ten"]).frontiers[-1] == 131_072
    publish = compose.request(["sweep=publish"])
    assert (publish.sessions, publish.blocks) == (5, 5)


def test_values_reach_the_request():
    words = (
        "frontiers=[4K,256] budget=10m cap=90s arms=serial dry_run=json prompt=lily decode.logprobs=true sessions=2 "
        "blocks=3 engine.prefill.chunk=4096 toggle.gqa_packing=4"
    )
    request = compose.request(words.split())
    assert request.frontiers == (256, 4096)
    assert (request.budget_seconds, request.cap_seconds) == (600, 90)
    assert (request.arms, request.dry_run, request.prompt, request.logprobs) == ("serial", "json", "lily", True)
    assert (request.sessions, request.blocks) == (2, 3)
    assert request.engine_fields == {"prefill.chunk": 4096}
    assert request.toggles == {"gqa_packing": "4"}


@pytest.mark.parametrize("name", ["org/name@rev", "./a,b=c", "my model", "a#b", "a%20b", "a=b", "it's", "t\\", "a|b"])
def test_model_names_need_no_quoting_of_their_own(name, tmp_path):
    (tmp_path / name).mkdir(parents=True)
    (jobs,) = compose.jobs(compose.parse([f"model={name}"]), tmp_path)
    assert compose.request(jobs, tmp_path).model["reference"] == name


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(min_codepoint=32, max_codepoint=0x17F), min_size=1))
def test_quote_is_read_back_by_hydra(value):
    (override,) = OverridesParser.create().parse_overrides([f"model.reference={compose.quote(value)}"])
    assert override.value() == value


def test_quotes_inside_the_value_are_taken_off():
    (job,) = compose.jobs(compose.parse(["model='a,b'"]))
    assert compose.request(job).model["reference"] == "a,b"


def test_multirun_is_the_product_of_its_lists():
    line = compose.parse(["-m", "ablation=step_trace,gdn_scan", "engine=plain,full", "frontiers=[256,512]"])
    jobs = compose.jobs(line)
    assert len(jobs) == 4
    assert jobs[0] == ("ablation=step_trace", "engine=plain", "frontiers=[256,512]")


def test_suite_published_asks_every_claim_at_its_phase_and_contexts_and_every_toggle():
    jobs = [compose.request(job) for job in compose.jobs(compose.parse(["suite=published"]))]
    asked = {name: job for job in jobs for one in job.ablations for name in one["claims"]}
    for one in CLAIMS:
        if one.toggle or one.fields:
            job = asked[one.name]
            assert one.phase in job.phases and set(one.contexts) <= set(job.frontiers), one.name
            assert job.directions == ("in", "claim", "out")
    assert set(arms.TOGGLES) <= {one["varies"] for job in jobs for one in job.ablations}
    assert {"mlx_lm"} == {job.subject["name"] for job in jobs} - {"none"}
    assert sum(bool(one["ladder"]) for job in jobs for one in job.ablations) == 2
    assert sum(bool(one["interaction"]) for job in jobs for one in job.ablations) == 3


def test_words_of_the_user_go_before_those_of_a_suite():
    jobs = compose.jobs(compose.parse(["suite=quick", "budget=9s", "subject=mlx_lm"]))
    assert {compose.request(job).budget_seconds for job in jobs} == {9}
    assert {compose.request(job).subject["name"] for job in jobs} == {"mlx_lm"}
    fewer = compose.request(compose.jobs(compose.parse(["suite=quick", "blocks=3"]))[0])
    assert (fewer.blocks, fewer.decode_blocks) == (3, 3)
    assert compose.request(compose.jobs(compose.parse(["suite=quick"]))[0]).decode_blocks == 60


def test_questions_can_be_joined():
    request = compose.request(["ablation=gqa_packing+fixed_block_layout", "sweep=ten", "directions=[out,in]"])
    assert [one["varies"] for one in request.ablations] == ["gqa_packing", "fixed_block_layout"]
    assert (request.phases, request.directions) == (("decode",), ("in", "out"))
    assert request.frontiers == (8192, 32_768, 65_536, 131_072)


@pytest.mark.parametrize("multirun", [[], ["-m"]])
def test_relative_paths_start_at_the_launch_folder(multirun, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (job,) = compose.jobs(compose.parse([*multirun, "run_dir=runs/one"]))
    request = compose.request(job)
    assert request.run_dir == tmp_path.resolve() / "runs" / "one"
    assert Path.cwd() == tmp_path.resolve()


def test_composing_leaves_another_hydra_job_alone():
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    compose.register()
    with initialize_config_dir(str(compose.config_dir()), version_base=None):
        compose.request([])
        assert hydra_compose("config").sweep.name == "smoke"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["toggle.packed_dequnt=off"], "packed_dequant"),
        (["toggle.gqa_packing=3"], "known"),
        (["engine=ful"], "'full'"),
        (["engine.prefil.chunk=1"], "engine.prefill.chunk"),
        (["engine.prefill.chunk=many"], "engine.prefill.chunk"),
        (["engine.decode.trace=stepp"], "must be one of"),
        (["sweep=smok"], "'smoke'"),
        (["frontier=[256]"], "frontiers"),
        (["frontiers=256,512"], "frontiers=[256,512]"),
        (["frontiers=[abc]"], "[4K,128K]"),
        (["frontiers=[]"], "empty"),
        (["planted=5 per cent"], "planted=5 per cent is no share"),
        (["planted=0"], "planted=0 is no share"),
        (["planted=150%"], "planted=150% is no share"),
        (["frontiers=[256"], "context length"),
        (["ablation=gdn_scan,step_trace"], "-m"),
        (["budget=fast"], "10m"),
        (["budget=0"], "10m"),
        (["cap=-1"], "90s"),
        (["sessions=0"], "whole number"),
        (["blocks=1.5"], "whole number"),
        (["dry_run=maybe"], "json"),
        (["arms=both"], "parallel"),
        (["prompt=prose2"], "prose"),
        (["phases=[prefil]"], "'prefill'"),
        (["model="], "empty"),
        (["seed=${oc.env:HOME}"], "references"),
        (["engine=full", "engine=plain"], "twice"),
        (["allow=batery"], "'battery'"),
        (["suite=publishd"], "'published'"),
        (["suite=quick", "ablation=gdn_scan"], "two lists"),
        (["jobs=[1]"], "add suite=NAME"),
        (["suite=quick", "jobs=1,2"], "jobs=[1,2]"),
        (["-m", "suite=quick", "jobs=1,2"], "jobs=[1,2]"),
        (["suite=quick", "jobs=[0]"], "whole number"),
        (["suite=quick", "jobs=[]"], "empty"),
        (["ablation=gdn_scan+step_trac"], "'step_trace'"),
        (["margin=0.5%"], "1% to 10%"),
        (["margin=20%"], "1% to 10%"),
        (["directions=[into]"], "directions: 'into'"),
        (["sweep"], "key=value"),
        (["suite"], "key=value"),
        (["--multi"], "-m"),
        (["swep"], "unknown command"),
        (["hydra/launcher=basic"], "-m"),
        (["hydra.job.chdir=true"], "unknown setting"),
        (["-m", "engine=full,"], "comma"),
    ],
)
def test_bad_words_are_one_line_with_the_fix(words, said):
    with pytest.raises((UsageError, arms.ArmError, ConfigError)) as caught:
        for job in compose.jobs(compose.parse(words)):
            compose.request(job)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_config_of_a_request_is_plain():
    json.dumps(compose.request(["sweep=ten"]).config)
