"""The embedded checkpoint and the scripts that made it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import lzma
import math
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from tokenizers import Tokenizer as TextTokenizer

from engine.checkpoint import load
from engine.config import ModelConfig
from engine.generate import Engine
from engine.serve.source import find
from engine.tiny import CHECKPOINT
from engine.tiny.ngram import KneserNey
from engine.tokenizer import Tokenizer
from sweeps import compose, models

torch = pytest.importorskip("torch", reason="training scripts need PyTorch")

from engine.tiny import evaluate, network, rounding, train  # noqa: E402
from engine.tiny.convert import pack_draft_head  # noqa: E402
from engine.tiny.corpus import KINDS, Document, capped, chat_documents, split_of, strip_markup  # noqa: E402
from engine.tiny.muon import Muon, orthogonalise  # noqa: E402
from engine.tiny.tokenizer import CHAT_TEMPLATE, VOCABULARY, train_tokenizer  # noqa: E402

SMALL = dataclasses.replace(
    network.TINY,
    vocab_size=512,
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=2,
    head_dim=64,
    partial_rotary_factor=0.5,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    num_experts=8,
    num_experts_per_tok=2,
    bos_token_id=1,
    eos_token_ids=(2, 1),
)


def relative(a, b) -> float:
    return float(((a - b).norm() / b.norm()).item())


# -- rounding ----------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_is_mlx_quantisation(bits: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 256) * 0.05
    # Rows that take the other branches: all zero, one sign only, constant.
    weight[0], weight[1], weight[2], weight[3] = 0, weight[1].abs(), -weight[2].abs(), 0.3
    packed, scales, biases = mx.quantize(mx.array(weight.numpy()).astype(mx.bfloat16), 64, bits)
    codes, mine, offsets = rounding.quantise(weight, bits)
    stored = np.array(packed).view(np.uint8)
    if bits == 4:
        stored = np.stack([stored & 15, stored >> 4], -1)
    assert (stored.reshape(64, 4, 64) == codes.numpy()).all()
    assert (np.array(scales.astype(mx.float32)) == mine.float().numpy()).all()
    assert (np.array(biases.astype(mx.float32)) == offsets.float().numpy()).all()
    back = mx.dequantize(packed, scales.astype(mx.float32), biases.astype(mx.float32), 64, bits)
    assert np.allclose(np.array(back), rounding.round_to_grid(weight, bits).numpy(), atol=1e-7)


def test_which_tensors_are_rounded() -> None:
    assert rounding.bits_of("model.layers.0.mlp.gate.weight", (32, 256)) == 8
    assert rounding.bits_of("mtp.layers.0.mlp.shared_expert_gate.weight", (1, 256)) == 8
    assert rounding.bits_of("model.layers.0.mlp.experts.gate_up_proj", (32, 128, 256)) == 4
    assert rounding.bits_of("model.layers.0.linear_attn.conv1d.weight", (1024, 1, 4)) is None
    assert rounding.bits_of("model.norm.weight", (256,)) is None


def test_rounding_in_the_forward_leaves_the_originals() -> None:
    model, head = network.build(SMALL)
    parameters = train.named(model, head)
    name = "model.layers.0.mlp.experts.down_proj"
    before = parameters[name].detach().clone()
    with train.on_grid(parameters, True):
        assert not torch.equal(parameters[name], before)
        assert torch.equal(parameters[name].detach(), rounding.round_to_grid(before, 4))
    assert torch.equal(parameters[name].detach(), before)


# -- the training forward ----------------------------------------------------------------------


def test_training_forward_equals_transformers() -> None:
    model, head = network.build(SMALL, seed=1)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p.add_(torch.randn_like(p) * 0.1)
        ids = torch.randint(0, SMALL.vocab_size, (2, 192))
        hidden, _, share = network.Forward(SMALL, model, head).trunk(ids)
        logits = network.rms(hidden, model.model.norm) @ model.lm_head.weight.T
        reference = model(input_ids=ids, use_cache=False).logits
    assert relative(logits, reference) < 1e-5
    assert torch.allclose(share.sum(-1), torch.ones(SMALL.num_hidden_layers))


def test_chunked_rule_and_its_gradients_equal_transformers() -> None:
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as hf

    torch.manual_seed(1)
    shape = (2, 192, 3)
    made = [
        torch.randn(*shape, 32),
        torch.randn(*shape, 32),
        torch.randn(*shape, 16),
        -torch.rand(shape),
        torch.rand(shape),
    ]
    mine, theirs = ([x.clone().requires_grad_() for x in made] for _ in range(2))
    q, k = network._l2(mine[0]) * 32**-0.5, network._l2(mine[1])
    out = network.gated_delta(q, k, *mine[2:])
    q, k, v, g, beta = theirs
    expected, _ = hf.torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
    assert relative(out, expected) < 1e-5
    weight = torch.randn_like(out)
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    for a, b in zip(mine, theirs):
        assert relative(a.grad, b.grad) < 1e-4


def test_inverse_of_like_keys_stays_finite() -> None:
    # 64 equal keys are the worst case: powers of the matrix reach 1e17 where the inverse is below 1.
    a = torch.full((1, 64, 64), 0.98).tril(-1)
    x = network.unit_lower_inverse(a)
    assert torch.allclose(x @ (a + torch.eye(64)), torch.eye(64).expand(1, 64, 64), atol=1e-4)


def test_draft_head_names_and_shapes() -> None:
    head = network.DraftHead(network.transformers_config(SMALL))
    shapes = {n: tuple(p.shape) for n, p in head.named_parameters()}
    width = SMALL.hidden_size
    assert shapes["fc.weight"] == (width, 2 * width)
    assert shapes["layers.0.mlp.experts.gate_up_proj"] == (8, 2 * SMALL.moe_intermediate_size, width)
    assert shapes["layers.0.self_attn.q_proj.weight"] == (2 * 2 * SMALL.head_dim, width)
    assert {"pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "norm.weight"} <= set(shapes)
    assert len(shapes) == 19


def test_one_step_of_training_lowers_the_loss() -> None:
    model, head = network.build(SMALL)
    parameters = train.named(model, head)
    muon, adam = train.optimisers(parameters, SMALL, fused=False)
    updated = {id(p) for members in muon.groups.values() for p, _ in members}
    updated |= {id(p) for group in adam.param_groups for p in group["params"]}
    assert updated == {id(p) for p in parameters.values()}
    forward = network.Forward(SMALL, model, head)
    window = torch.randint(0, 64, (2, 66))
    losses = []
    for _ in range(6):
        found = forward.losses(window)
        loss = found["next"].mean() + found["draft"].mean()
        loss.backward()
        losses.append(loss.item())
        adam.step()
        muon.step(4e-3)
        adam.zero_grad()
        for p in parameters.values():
            p.grad = None
    assert losses[-1] < losses[0] - 0.1


def test_muon_update_is_orthogonal_and_scaled() -> None:
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.zeros(2, 128, 64))
    p.grad = torch.randn_like(p)
    Muon([(p, 2)]).step(1e-2)
    assert math.isclose(p.detach().square().mean().sqrt().item(), 0.2e-2, rel_tol=0.2)
    values = torch.linalg.svdvals(orthogonalise(torch.randn(3, 32, 64)))
    assert values.min() > 0.3 and values.max() < 1.6


def test_schedule_ends_at_nothing_and_rounds_the_last_tenth() -> None:
    assert train.plan(0.3).length == 1024 and train.plan(0.7).length == 4096
    assert not train.plan(0.89).rounded and train.plan(0.91).rounded
    assert train.plan(0.3).rate == 1.0 and train.plan(1.0).rate == 0.0


def test_saved_parts_are_what_transformers_reads(tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeForCausalLM

    model, head = network.build(SMALL)
    train.save(train.named(model, head), SMALL, tmp_path / "mine")
    model.bfloat16().save_pretrained(tmp_path / "theirs", save_original_format=False)
    theirs = {n for part in (tmp_path / "theirs").glob("*.safetensors") for n in load_file(part)}
    mine = {n for part in (tmp_path / "mine").glob("*.safetensors") for n in load_file(part)}
    assert {n for n in mine if not n.startswith("mtp.")} == theirs
    config = json.loads((tmp_path / "mine" / "config.json").read_text(encoding="utf-8"))
    assert config["model_type"] == "qwen3_5_moe" and "text_config" in config
    again = Qwen3_5MoeForCausalLM.from_pretrained(
        tmp_path / "mine", config=network.transformers_config(SMALL), dtype=torch.bfloat16
    )
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)


def test_a_run_ends_in_time_saves_and_resumes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for split, kind in itertools.product(("train", "valid"), KINDS):
        ids = rng.integers(0, 40, 2000).astype("<u2")
        (tmp_path / f"{split}.{kind}.xz").write_bytes(lzma.compress(ids.tobytes()))
    out, state = tmp_path / "out", tmp_path / "state.pt"
    common = ["--data", str(tmp_path), "--out", str(out), "--tokens-per-step", "256", "--short", "64", "--long", "128"]
    common += ["--compile-seconds", "0", "--valid-tokens", "256", "--log-every", "1"]
    out.mkdir()
    first = train.parser().parse_args([*common, "--steps", "2", "--until", "0.5", "--state", str(state)])
    train.Trainer(first, SMALL).run(time.monotonic())
    second = train.parser().parse_args([*common, "--minutes", "0.05", "--reserve", "0", "--resume", str(state)])
    resumed = train.Trainer(second, SMALL)
    assert (resumed.steps, resumed.start) == (2, 0.5) and resumed.muon.state()
    resumed.run(time.monotonic())
    lines = [json.loads(line) for line in (out / "training.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "progress" in line]
    assert [line["length"] for line in steps[:2]] == [64, 64] and steps[-1]["length"] == 128
    assert all(a["progress"] <= b["progress"] for a, b in itertools.pairwise(steps))
    assert lines[-1]["steps"] == resumed.steps > 2 and (out / "model.safetensors.index.json").is_file()


def test_packed_draft_head_has_split_experts_and_shifted_gains() -> None:
    packed = pack_draft_head(
        {
            "mtp.norm.weight": mx.full((64,), 0.5, dtype=mx.bfloat16),
            "mtp.layers.0.mlp.experts.gate_up_proj": mx.random.normal((4, 128, 64)).astype(mx.bfloat16),
            "mtp.layers.0.mlp.gate.weight": mx.random.normal((4, 64)).astype(mx.bfloat16),
        }
    )
    assert packed["mtp.norm.weight"].tolist() == [1.5] * 64
    assert packed["mtp.layers.0.mlp.switch_mlp.up_proj.weight"].shape == (4, 64, 8)
    assert packed["mtp.layers.0.mlp.gate.weight"].shape == (4, 16)
    assert packed["mtp.layers.0.mlp.gate.weight"].dtype == mx.uint32


# -- text ----------------------------------------------------------------------------------------


def test_no_file_is_on_two_sides() -> None:
    documents = [
        Document(
            "p", f"a/{i}.py", "code", f'def f{i}(x):\n    """Return the sum of x and {i}, as a plain whole number."""\n'
        )
        for i in range(2000)
    ]
    sides = {s: [d for d in documents if d.split == s] for s in ("train", "valid", "test")}
    assert all(sides.values()) and sum(map(len, sides.values())) == len(documents)
    chats = {s: chat_documents(d) for s, d in sides.items()}
    for a, b in itertools.combinations(sides, 2):
        assert not {d.text for d in chats[a]} & {d.text for d in chats[b]}
        assert not {d.name.split("@")[0] for d in chats[a]} & {d.name for d in sides[b]}
    assert split_of("p", "a/1.py") == split_of("p", "a/1.py")


def test_a_package_is_capped() -> None:
    documents = [Document("big", f"{i}", "code", "x" * 1_000_000) for i in range(9)]
    assert sum(len(d.text) for d in capped(documents)) == 3_000_000


def test_markup_is_stripped_and_code_kept() -> None:
    page = "<head><title>no</title></head><body><nav>menu</nav><p>A &lt; b\n and</p><pre>x = 1\n  y</pre></body>"
    text = strip_markup(page)
    assert "A < b and" in text and "x = 1\n  y" in text and "menu" not in text and "no" not in text.split()


def test_tokenizer_round_trip_and_control_ids() -> None:
    tokenizer = train_tokenizer(["def f(x):\n    return x + 1\n", "The naïve café costs 12 €."], vocabulary=300)
    for text in ("    if x:\n\n\treturn 'é€'\n", "<think>\nso\n</think>\n\nYes.<|im_end|>\n"):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert tokenizer.token_to_id("</think>") == tokenizer.get_vocab_size() - 1


def test_chat_template_ends_where_the_answer_begins() -> None:
    import jinja2

    template = jinja2.Environment().from_string(CHAT_TEMPLATE)
    messages = [{"role": "user", "content": "Hello"}]
    said = template.render(messages=messages, add_generation_prompt=True, enable_thinking=False)
    assert said == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    said = template.render(messages=messages, add_generation_prompt=True)
    assert said.endswith("<|im_start|>assistant\n<think>\n")


def test_kneser_ney_is_a_distribution() -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 6, 400).astype(np.uint16)
    model = KneserNey(ids, vocabulary=6)
    for context in ([0, 1, 2, 3], [5, 5, 5, 5], [3, 0, 4, 1]):
        total = sum(
            math.exp(model.log_probabilities(np.array([*context, w], np.uint16))[0]) for w in range(model.vocabulary)
        )
        assert math.isclose(total, 1.0, rel_tol=1e-6)


# -- the shipped checkpoint --------------------------------------------------------------------

EVALUATION = json.loads((CHECKPOINT / "evaluation.json").read_text(encoding="utf-8"))
CARD = (CHECKPOINT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def forward() -> network.Forward:
    """The shipped files in transformers' modules, float32."""
    return evaluate.make_forward(CHECKPOINT, evaluate.read_packed(CHECKPOINT), "cpu")


@pytest.fixture(scope="module")
def exact() -> Engine:
    """The engine on the shipped files, float32."""
    checkpoint = load(CHECKPOINT, dtype=mx.float32)
    return Engine(checkpoint.config, checkpoint.weights, dtype=mx.float32)


@pytest.fixture(scope="module")
def heldout() -> dict[str, np.ndarray]:
    """Token ids of the held-out texts."""
    tokenizer = TextTokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    return {kind: evaluate.heldout_ids(tokenizer, kind)[0] for kind in ("code", "prose")}


@pytest.fixture(scope="module")
def scored(forward: network.Forward, heldout: dict[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """The first window of each held-out text."""
    return {kind: evaluate.score(forward, ids, "cpu", 1) for kind, ids in heldout.items()}


def test_shipped_files_are_small_and_the_architecture_is_real() -> None:
    assert sum(p.stat().st_size for p in CHECKPOINT.iterdir()) <= 16 * 2**20
    config = ModelConfig.from_dict(json.loads((CHECKPOINT / "config.json").read_text(encoding="utf-8")))
    assert (config.head_dim, config.rotary_dims, config.linear_key_head_dim) == (256, 64, 128)
    assert (config.linear_value_head_dim, config.linear_conv_kernel_dim) == (128, 4)
    assert config.num_attention_heads == 8 * config.num_key_value_heads
    assert config.num_hidden_layers >= 8 and config.num_experts >= 32 and config.num_experts_per_tok == 8
    assert config.attention_layers == tuple(range(3, config.num_hidden_layers, 4))
    assert config.vocab_size == VOCABULARY and config.mtp_num_hidden_layers == 1
    checkpoint = load(CHECKPOINT)
    assert checkpoint.weights.mtp is not None
    assert set(checkpoint.info["bits_by_module"]["mlp.gate"]) == {"8"}
    assert set(checkpoint.info["bits_by_module"]["mtp.mlp.gate"]) == {"8"}


def test_transformers_mlx_lm_and_engine_agree_on_the_shipped_files(
    forward: network.Forward, exact: Engine, heldout: dict[str, np.ndarray]
) -> None:
    from mlx_lm import load as mlx_lm_load

    ids = heldout["code"][:300].astype(int).tolist()
    with torch.no_grad():
        reference = forward.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    model, _ = mlx_lm_load(str(CHECKPOINT))
    model.set_dtype(mx.float32)
    assert relative(torch.from_numpy(np.array(model(mx.array([ids]))[0])), reference) < 1e-5
    for chunk in (300, 61):
        exact.reset()
        mine = np.concatenate([np.array(exact.logits(ids[i : i + chunk])) for i in range(0, len(ids), chunk)])
        assert relative(torch.from_numpy(mine), reference) < 1e-5
    exact.reset()
    by_token = torch.from_numpy(np.array(exact.logits(ids[:32], phase="decode")))
    assert relative(by_token, reference[:32]) < 1e-5


def test_sixteen_bit_error_on_the_shipped_files_is_no_larger_than_mlx_lms(
    exact: Engine, heldout: dict[str, np.ndarray]
) -> None:
    from mlx_lm import load as mlx_lm_load

    ids = heldout["prose"][:24].tolist()
    exact.reset()
    wanted = torch.from_numpy(np.array(exact.logits(ids)))
    checkpoint = load(CHECKPOINT)
    engine = Engine(checkpoint.config, checkpoint.weights, dtype=mx.bfloat16)
    model, _ = mlx_lm_load(str(CHECKPOINT))
    ours = relative(torch.from_numpy(np.array(engine.logits(ids))), wanted)
    theirs = relative(torch.from_numpy(np.array(model(mx.array(ids)[None])[0].astype(mx.float32))), wanted)
    print(f"bfloat16 error against float32: engine {ours:.4f}, MLX-LM {theirs:.4f}")
    assert ours <= 1.25 * theirs


@pytest.mark.parametrize("kind", ["code", "prose"])
def test_shipped_files_score_what_the_card_says(scored: dict[str, dict[str, np.ndarray]], kind: str) -> None:
    perplexity = math.exp(float(scored[kind]["loss"].mean()))
    assert math.isclose(perplexity, EVALUATION[kind]["four_bit"]["by_window"][0], rel_tol=1e-3)
    assert perplexity < EVALUATION[kind]["five_gram"]["perplexity"] / 2
    assert scored[kind]["hit"].mean() > 0.5


def test_the_draft_head_agrees_by_both_hidden_states(scored: dict[str, dict[str, np.ndarray]]) -> None:
    assert scored["code"]["agree_after"].mean() >= 0.5 and scored["code"]["agree_before"].mean() >= 0.5


def test_every_expert_is_used(scored: dict[str, dict[str, np.ndarray]]) -> None:
    share = np.mean([scored[kind]["share"][0] for kind in scored], 0)
    load = share * share.shape[-1]
    assert load.min() >= 0.25 and load.max() <= 4


def test_the_engine_ends_a_turn_by_itself(exact: Engine) -> None:
    tokenizer = Tokenizer.from_path(CHECKPOINT)
    question = "What does the class Thread in threading do?"
    for thinking in (False, True):
        prompt = tokenizer.apply_chat([{"role": "user", "content": question}], thinking=thinking)
        exact.reset()
        ids = list(exact.generate(prompt, 120))
        end = next(i for i, token in enumerate(ids) if token in tokenizer.stop_ids)
        said = tokenizer.decode(ids[:end])
        assert tokenizer.decode(ids[end : end + 1]) == "" and ids[end] == tokenizer.token_id("<|im_end|>")
        assert said.count("</think>") == thinking and len(said.split("</think>")[-1].split()) >= 4, said


def test_the_acceptance_figures_hold() -> None:
    for kind in KINDS:
        found = EVALUATION[kind]
        assert found["four_bit"]["perplexity"] <= 1.03 * found["bf16"]["perplexity"]
        assert found["four_bit"]["perplexity"] < 0.5 * found["five_gram"]["perplexity"]
    assert min(EVALUATION["code"]["four_bit"][f"draft_{where}_norm"] for where in ("after", "before")) >= 0.5
    for kind, layers in EVALUATION["experts"]["load"].items():
        assert min(least for least, _ in layers) >= 0.25 and max(most for _, most in layers) <= 4, kind
    for kind in ("code", "prose"):
        by_depth = [EVALUATION[kind]["by_depth"][str(depth)] for depth in evaluate.DEPTHS]
        trained = [v for depth, v in zip(evaluate.DEPTHS, by_depth) if depth + evaluate.BLOCK <= evaluate.WINDOW]
        assert all(later <= 1.01 * earlier for earlier, later in itertools.pairwise(trained)), trained


def test_the_card_says_what_was_measured() -> None:
    body = evaluate.what_it_scores(EVALUATION) + evaluate.what_it_is(CHECKPOINT) + evaluate.text_of(EVALUATION)
    assert not [line for line in body if line not in CARD.splitlines() and line not in CARD]
    text = " ".join(CARD.split())
    assert "python -m engine.tiny.evaluate --trained OUT --data .tiny" in text and "| python-stdlib | code |" in text


def test_mlx_lm_reads_the_index_and_drops_the_draft_head() -> None:
    from mlx_lm import load as mlx_lm_load

    index = json.loads((CHECKPOINT / "model.safetensors.index.json").read_text(encoding="utf-8"))
    stored = mx.load(str(CHECKPOINT / "model.safetensors"))
    assert set(index["weight_map"]) == set(stored)
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in stored.values())  # type: ignore[union-attr]
    model, tokenizer = mlx_lm_load(str(CHECKPOINT))
    kept = dict(tree_flatten(model.parameters()))
    assert set(stored) - set(kept) == {name for name in stored if name.startswith("mtp.")} != set()
    assert tokenizer.decode(tokenizer.encode("x = 1\n")) == "x = 1\n"


def test_it_is_the_default_of_sweeps_server_and_chat() -> None:
    model = models.find(compose.request([]))
    assert (model.name, model.kind, model.path, model.synthetic) == ("tiny", "checkpoint", str(CHECKPOINT), False)
    assert model.toy and model.missing is None and model.weights_hash == load(CHECKPOINT).info["weights_hash"]
    assert find().path == CHECKPOINT
    argv = [sys.executable, "-m", "engine", "chat", "--max-tokens", "60", "--thinking", "off"]
    root = Path(__file__).parents[1]
    question = "What does the class Thread in threading do?\n"
    done = subprocess.run(argv, cwd=root, input=question, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr.startswith("tiny. "), done.stderr
    assert len(done.stdout.split()) >= 4 and "cut off" not in done.stdout
