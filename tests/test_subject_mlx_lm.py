"""MLX-LM as a subject: what it runs is what it says, and its state comes back bit for bit."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from engine.synthetic import make_weights, tiny_config
from sweeps.subjects.base import SubjectOutOfMemory, SubjectUnsupported
from sweeps.subjects.mlx_lm import MlxLm, set_wired_limit
from sweeps.subjects.shared import build_lm_model

CONFIG = tiny_config(4, hidden_size=128, experts=8, num_experts_per_tok=2)
CHUNK = 8
PROMPT = [(i * 2654435761) % 2**32 % CONFIG.vocab_size for i in range(40)]


@pytest.fixture(scope="module")
def model():
    return build_lm_model(CONFIG, make_weights(CONFIG, seed=3, dtype=mx.float32).tensors)


@pytest.fixture
def subject(model):
    return MlxLm(model, CONFIG, chunk=CHUNK)


def states(subject):
    made = subject.export_state()
    return [made.keys, made.values, made.state, made.conv]


def same(a, b):
    return all(mx.array_equal(x, y).item() for x, y in zip(a, b, strict=True))


def by_hand(model, prompt, count):
    return [int(t) for t, _ in generate_step(mx.array(prompt), model, max_tokens=count, prefill_step_size=CHUNK)]


@pytest.mark.parametrize("length, chunks", [(1, [1]), (2, [1, 1]), (8, [7, 1]), (9, [8, 1]), (20, [8, 8, 3, 1])])
def test_prompt_chunks_are_those_of_its_loop(subject, length, chunks):
    done = subject.prefill(PROMPT[:length])
    assert done.chunks == chunks
    assert subject.position() == length
    assert {"op": "prefill_pass", "variant": "mlx_lm", "tile": "chunk=8", "calls": len(chunks)} in subject.executed()


def test_progress_comes_after_each_complete_chunk(subject):
    seen = []
    subject.prefill(PROMPT[:20], progress=lambda now, total: seen.append((now, total)))
    assert seen == [(8, 20), (16, 20), (19, 20), (20, 20)]


def test_walk_equals_straight_prompt(subject, model):
    assert subject.prefill(PROMPT[:16], last=False).chunks == [8, 8]
    assert subject.prefill(PROMPT[16:24], last=False).next_token == -1
    walked = subject.prefill(PROMPT[24:40])
    straight = MlxLm(model, CONFIG, chunk=CHUNK)
    alone = straight.prefill(PROMPT[:40])
    assert [8, 8, 8] + walked.chunks == alone.chunks
    assert walked.next_token == alone.next_token
    assert same(states(subject), states(straight))


@pytest.mark.parametrize("count", [1, 2, 7])
def test_decode_gives_the_tokens_of_generate_step_in_as_many_steps(subject, model, count):
    first = subject.prefill(PROMPT[:20]).next_token
    subject.reset_executed()
    made = subject.decode(first, count)
    expected = by_hand(model, PROMPT[:20], count + 4)
    assert [first, *made.tokens] == expected[: count + 1]
    assert subject.position() == 20 + count
    assert {"op": "decode_step", "variant": "mlx_lm", "tile": None, "calls": count} in subject.executed()
    # The cache holds exactly these tokens: a fresh prompt of them continues alike.
    onward = subject.decode(made.tokens[-1], 3).tokens
    assert onward == expected[count + 1 :]


def test_stamps_one_for_each_token(subject):
    first = subject.prefill(PROMPT[:9]).next_token
    ticks = iter(range(100))
    assert subject.decode(first, 4, clock=lambda: next(ticks)).stamps == [0, 1, 2, 3]


def test_restore_is_bit_exact(subject, model):
    subject.prefill(PROMPT[:12])
    mark, before = subject.snapshot(), states(subject)
    subject.prefill(PROMPT[30:37])
    subject.decode(5, 3)
    subject.restore(mark)
    assert subject.position() == 12
    assert same(states(subject), before)
    after = subject.prefill(PROMPT[12:20]).next_token
    fresh = MlxLm(model, CONFIG, chunk=CHUNK)
    fresh.prefill(PROMPT[:12])
    assert fresh.prefill(PROMPT[12:20]).next_token == after
    assert same(states(subject), states(fresh))


def test_snapshot_holds_no_keys_or_values(subject):
    subject.prefill(PROMPT[:12])
    held = [a for state in subject.snapshot().states for a in state]
    assert sum(a.nbytes for a in held) == CONFIG.state_bytes(itemsize=4)


def test_restore_to_an_empty_sequence(subject):
    mark = subject.snapshot()
    a = subject.prefill(PROMPT[:12]).next_token
    subject.restore(mark)
    assert subject.position() == 0
    assert subject.prefill(PROMPT[:12]).next_token == a


def test_restore_refuses_a_longer_sequence(subject):
    subject.prefill(PROMPT[:12])
    mark = subject.snapshot()
    subject.reset()
    with pytest.raises(ValueError, match="no prefix"):
        subject.restore(mark)


@pytest.mark.parametrize("length", [13, 256])
def test_state_travels_in_canonical_form(subject, model, length):
    prompt = (PROMPT * 7)[:length]
    first = subject.prefill(prompt).next_token
    other = MlxLm(model, CONFIG, chunk=CHUNK)
    other.import_state(subject.export_state())
    assert same(states(other), states(subject))
    assert other.position() == length
    assert other.decode(first, 4).tokens == subject.decode(first, 4).tokens
    assert same(states(other), states(subject))


def test_logits_rows_and_chunks_agree(subject, model):
    subject.prefill(PROMPT[:10], last=False)
    mark = subject.snapshot()
    rows = subject.logits(PROMPT[10:30], phase="decode")
    subject.restore(mark)
    chunks = subject.logits(PROMPT[10:30], phase="prefill")
    assert rows.shape == chunks.shape == (20, CONFIG.vocab_size) and rows.dtype == mx.float32
    error = mx.sqrt(mx.mean((rows - chunks) ** 2) / mx.mean(chunks**2)).item()
    assert error < 1e-4
    subject.restore(mark)
    assert int(mx.argmax(rows[0]).item()) == subject.decode(PROMPT[10], 1).tokens[0]


def test_speculation_is_unsupported_not_slow(model):
    with pytest.raises(SubjectUnsupported, match="unsupported"):
        MlxLm(model, CONFIG, speculative="mtp")


def test_training_mode_is_refused(model):
    model.train()
    try:
        with pytest.raises(ValueError, match=r"model\.eval"):
            MlxLm(model, CONFIG)
    finally:
        model.eval()


def test_out_of_memory_is_told_from_other_errors(subject, monkeypatch):
    def failing(message):
        def call(*_, **__):
            raise RuntimeError(message)

        return call

    monkeypatch.setattr(type(subject.model), "__call__", failing("[metal::malloc] Unable to allocate 99 bytes.\nmore"))
    with pytest.raises(SubjectOutOfMemory, match="prefill of 4 tokens after 0: .*99 bytes"):
        subject.prefill(PROMPT[:4])
    monkeypatch.setattr(type(subject.model), "__call__", failing("[matmul] shapes differ"))
    with pytest.raises(RuntimeError, match="shapes differ"):
        subject.prefill(PROMPT[:4])


def test_wired_limit_is_recorded():
    made = set_wired_limit()
    assert set(made) == {"limit", "before"}
    assert (made["limit"] is None) == (not mx.metal.is_available())


def test_describe_says_what_baseline_does(subject):
    facts = subject.describe()
    assert facts["logprobs"] is True and facts["vocabulary_rows"] == CONFIG.vocab_size
    assert facts["dtype"] == "float32" and facts["chunk"] == CHUNK


def test_model_is_built_around_the_arrays_without_a_second_copy():
    weights = make_weights(CONFIG, seed=4)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    made = build_lm_model(CONFIG, weights.tensors)
    mx.eval(made.parameters())
    assert mx.get_peak_memory() - before < weights.nbytes // 20
    assert made.language_model.model.layers[0].mlp.gate.bits == 8
    assert made.language_model.lm_head.weight is weights.tensors["lm_head.weight"]
    assert not made.training


def test_missing_tensor_is_named():
    tensors = dict(make_weights(CONFIG, seed=4).tensors)
    del tensors["model.norm.weight"]
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        build_lm_model(CONFIG, tensors)
