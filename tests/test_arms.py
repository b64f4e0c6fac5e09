"""Toggles, presets and contrasts: every name expands, contradictions are named, contrasts ask one thing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ablations.arms import (
    IMPOSSIBLE,
    PRESETS,
    TOGGLES,
    AnyBut,
    ArmError,
    add_one_in,
    arm_config,
    check_contrast,
    differing_fields,
    expand,
    flatten,
    impossible,
    leave_one_out,
    nest,
    preset,
    toggle,
)
from engine.config import ConfigError, EngineConfig
from engine.ops import bind

EVERY_VALUE = [(name, key) for name, switch in TOGGLES.items() for key in switch.settings]


def test_every_toggle_of_the_design_is_there():
    assert set(TOGGLES) == {
        "packed_dequant",
        "gpu_routing",
        "single_submission",
        "tile_rows",
        "gdn_scan",
        "gqa_packing",
        "fixed_block_layout",
        "kv_split",
        "cache_layout",
        "coalesced_cache",
        "device_token",
        "speculative",
        "prefill_chunk",
        "step_trace",
        "fusion",
        "phase_overlap",
    }


@pytest.mark.parametrize("name, value", EVERY_VALUE)
def test_every_value_makes_a_configuration_the_engine_reads(name, value):
    fields = expand({name: value})
    config = EngineConfig.from_dict(fields)
    assert flatten(fields).items() <= flatten(config.to_dict()).items()
    assert set(flatten(fields)) <= set(TOGGLES[name].fields)


@pytest.mark.parametrize("name", TOGGLES)
def test_on_and_off_are_two_settings_that_set_the_same_fields_apart(name):
    switch = TOGGLES[name]
    on, off = expand({name: "on"}), expand({name: "off"})
    assert on != off
    assert (expand({name: True}), expand({name: False})) == (on, off)
    assert switch.key("on") == switch.on and switch.key("off") == switch.off
    assert set(switch.requires) == set(switch.settings)
    assert set(switch.phases) <= {"prefill", "decode"}


def test_packed_names_what_runs_packed_weights_on_the_device():
    """Our kernels where a GPU runs them, MLX's product on a CPU; the other side expands; nothing else differs."""
    for device, variant in (("cuda", "packed"), ("metal", "packed"), ("cpu", "mlx")):
        pair = leave_one_out("packed_dequant", device=device)
        assert differing_fields(pair.arm, pair.reference) == {
            "linear": (variant, "expanded"),
            "experts.variant": (variant, "expanded"),
        }
        bind(pair.arm, device), bind(pair.reference, device)


def test_numbers_may_be_written_as_numbers():
    assert expand({"gqa_packing": 4, "prefill_chunk": 512}) == {
        "decode_attention": {"heads": "4"},
        "prefill": {"chunk": 512},
    }


def test_unknown_names_are_answered_with_the_nearest():
    with pytest.raises(ArmError, match="toggle.gqa_paking is no toggle; did you mean gqa_packing"):
        expand({"gqa_paking": "on"})
    with pytest.raises(ArmError, match="toggle.gdn_scan=chunkd: did you mean chunked"):
        expand({"gdn_scan": "chunkd"})
    with pytest.raises(ArmError, match="toggle.gqa_packing=3: known: off, on, 1, 2, 4, 8"):
        expand({"gqa_packing": 3})
    with pytest.raises(ArmError, match="decode.fedback is no field of the engine; did you mean decode.feedback"):
        expand({}, {"decode": {"fedback": "host"}})
    with pytest.raises(ArmError, match="engine=ful is no preset; did you mean full"):
        preset("ful")
    with pytest.raises(ArmError, match="known: packed_dequant"):
        toggle("zzz")


# -- contradictions -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "toggles, explicit, names",
    [
        ({"packed_dequant": "off"}, {"linear": "mlx"}, ("linear=mlx", "toggle.packed_dequant=off")),
        ({"packed_dequant": True}, {"linear": "expanded"}, ("linear=expanded", "toggle.packed_dequant=on")),
        ({"gqa_packing": 4}, {"decode_attention": {"heads": 2}}, ("decode_attention.heads=2", "toggle.gqa_packing=4")),
        ({"phase_overlap": "off"}, {"overlap": True}, ("overlap=True", "toggle.phase_overlap=off")),
        ({"device_token": False}, {"decode.in_flight": 2}, ("decode.in_flight=2", "toggle.device_token=off")),
        (
            {"kv_split": "off", "fixed_block_layout": "on"},
            {},
            ("toggle.kv_split=off", "toggle.fixed_block_layout=on", "decode_attention.split"),
        ),
        ({"fixed_block_layout": "on", "kv_split": "off"}, {}, ("toggle.kv_split=off", "toggle.fixed_block_layout=on")),
    ],
)
def test_contradictions_name_both_sides(toggles, explicit, names):
    with pytest.raises(ArmError, match="contradict each other") as error:
        expand(toggles, explicit)
    assert all(name in str(error.value) for name in names)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "toggles, explicit, field, value",
    [
        ({"packed_dequant": "on"}, {"linear": "best"}, "linear", "best"),
        ({"gqa_packing": 4}, {"decode_attention.heads": 4}, "decode_attention.heads", "4"),
        ({"kv_split": "on", "fixed_block_layout": "on"}, {}, "decode_attention.split", "blocks"),
        ({"fixed_block_layout": "on", "kv_split": "on"}, {}, "decode_attention.split", "blocks"),
        ({"kv_split": "on"}, {"decode_attention.split": "blocks"}, "decode_attention.split", "blocks"),
        ({"device_token": "on"}, {"decode.in_flight": 3}, "decode.in_flight", 3),
    ],
)
def test_a_finer_setting_of_the_same_kind_is_no_contradiction(toggles, explicit, field, value):
    assert flatten(arm_config("full", toggles, explicit).to_dict())[field] == value


@given(st.dictionaries(st.sampled_from(sorted(TOGGLES)), st.sampled_from(["on", "off"])))
def test_any_choice_of_toggles_makes_a_configuration_or_names_two_of_them(toggles):
    try:
        config = arm_config("plain", toggles)
    except ArmError as error:
        assert str(error).count("toggle.") == 2
    else:
        for name, value in toggles.items():
            setting = TOGGLES[name].settings[TOGGLES[name].key(value)]
            values = flatten(config.to_dict())
            for field, wanted in setting.fields.items():
                assert values[field] == wanted or values[field] in setting.also.get(field, ())


def test_nesting_and_flattening_are_inverse():
    values = EngineConfig().to_dict()
    assert nest(flatten(values)) == values


# -- presets --------------------------------------------------------------------------------------


def test_presets_can_run_and_are_fresh_each_time():
    for name in PRESETS:
        assert impossible(preset(name)) == []
    changed = preset("full")
    changed.prefill.chunk = 1
    assert preset("full") == EngineConfig()


def test_plain_is_every_toggle_off_but_kernel_options():
    plain = flatten(preset("plain").to_dict())
    kernel_options = {"tile_rows", "gqa_packing", "coalesced_cache", "fixed_block_layout"}
    for name in set(TOGGLES) - kernel_options:
        assert flatten(expand({name: "off"})).items() <= plain.items(), name


def test_mlx_names_no_variant_but_mlx():
    variants = {k: v for k, v in flatten(preset("mlx").to_dict()).items() if v == "mlx"}
    assert len(variants) == 7


def test_lily_is_what_was_published():
    lily = preset("lily")
    assert (lily.prefill.chunk, lily.experts.tile, lily.decode_attention.heads) == (4096, "32", "4")


def test_fields_by_name_are_checked_for_their_kind():
    with pytest.raises(ConfigError, match="engine.prefill.chunk='many'"):
        arm_config("full", {}, {"prefill": {"chunk": "many"}})


# -- what cannot run ------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", IMPOSSIBLE, ids=lambda rule: "+".join(rule.fields))
def test_every_impossible_combination_is_found_and_each_part_of_it_alone_is_not(rule):
    def one_of(values):
        return (
            next(v for v in ("32", "4", "none", "coalesced", 64) if v in values)
            if isinstance(values, AnyBut)
            else values[0]
        )

    chosen = {}
    for name, values in rule.fields.items():
        chosen[name] = "none" if name.endswith("split") else one_of(values)
        if name.endswith("draft_vocab"):
            chosen[name] = 64
    found = impossible(EngineConfig.from_dict(nest(chosen)))
    assert any(
        reason.endswith(rule.reason) and all(f"{k}={v}" in reason for k, v in chosen.items()) for reason in found
    )
    assert impossible(EngineConfig()) == []


def test_a_toggle_brings_what_it_needs():
    config = arm_config("full", {"gpu_routing": "off"})
    assert (config.prefill.submission, config.decode.trace) == ("layer", "eager")
    assert impossible(config) == []


def test_what_was_set_by_name_is_kept_and_the_clash_told():
    config = arm_config("full", {"gpu_routing": "off", "single_submission": "on"})
    assert (config.route, config.prefill.submission) == ("host", "chunk")
    assert "route=host with prefill.submission=chunk" in impossible(config)[0]
    config = arm_config("full", {"gpu_routing": "off"}, {"decode": {"trace": "step"}})
    assert config.decode.trace == "step"
    assert "which a compiled function cannot" in impossible(config)[0]


# -- contrasts ------------------------------------------------------------------------------------


def test_a_contrast_of_more_than_was_asked_is_refused():
    arm, reference = arm_config("full", {"fusion": "off", "step_trace": "eager"}), preset("full")
    with pytest.raises(ArmError, match="asks about decode.trace, but the arms also differ in decode.fusion .off ag"):
        check_contrast(arm, reference, ["decode.trace"])
    check_contrast(arm, reference, ["decode.trace", "decode.fusion"])
    check_contrast(arm, reference, ["decode"])
    with pytest.raises(ArmError, match="also differ"):
        check_contrast(arm, reference, ["dec"])


def test_a_contrast_of_nothing_is_refused():
    with pytest.raises(ArmError, match="the arms are the same"):
        check_contrast(preset("full"), preset("full"), ["linear"])


@pytest.mark.parametrize("build", [add_one_in, leave_one_out])
@pytest.mark.parametrize("name", TOGGLES)
def test_both_directions_of_every_toggle_differ_in_its_fields_alone(name, build):
    pair = build(name)
    assert set(differing_fields(pair.arm, pair.reference)) <= set(TOGGLES[name].fields)
    assert pair.impossible == ()
    base = preset("plain" if build is add_one_in else "full")
    elsewhere = set(differing_fields(pair.reference, base)) - set(pair.asked)
    assert elsewhere == set(pair.shared) - set(pair.asked), "what was changed in both arms is not told"


def test_host_routing_and_its_partner_get_the_same_trace():
    pair = leave_one_out("gpu_routing")
    assert pair.name == "full-gpu_routing"
    assert (pair.arm.decode.trace, pair.reference.decode.trace) == ("eager", "eager")
    assert pair.shared == {"prefill.submission": "layer", "decode.trace": "eager", "decode.fusion": "off"}


def test_a_claim_is_measured_on_top_of_what_was_on():
    pair = add_one_in("tile_rows", 64, 32, on_top_of=["packed_dequant", "gpu_routing"])
    assert pair.name == "plain+packed_dequant+gpu_routing+tile_rows=64:32"
    assert (pair.arm.experts.tile, pair.reference.experts.tile) == ("64", "32")
    assert (pair.arm.linear, pair.arm.route) == ("mlx", "mlx")


def test_a_pair_never_undoes_what_it_stands_on():
    pair = add_one_in("gpu_routing", on_top_of=["single_submission"])
    assert pair.arm.prefill.submission == pair.reference.prefill.submission == "chunk"
    assert "no single submission" in pair.impossible[0]
