"""Tokenizer: stop ids from every source, templates, and streams whose deltas add up to the one-shot text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from engine.synthetic import tiny_config, write_checkpoint
from engine.tokenizer import Tokenizer, TokenizerError

EMOJI = "👩‍🚀"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "héllo 日本"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), tiny_config(4), seed=0)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_path(folder)


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """The folder's small files, to be changed."""
    for file in folder.glob("*.json"):
        (tmp_path / file.name).write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    return tmp_path


def change(path: Path, **fields) -> None:
    value = json.loads(path.read_text(encoding="utf-8")) | fields
    path.write_text(json.dumps({k: v for k, v in value.items() if v is not None}), encoding="utf-8")


def test_ids_and_text(tokenizer):
    text = f"def f(x):\n    return x  # naïve 日本語 {EMOJI}\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("") == [] and tokenizer.decode([]) == ""
    assert tokenizer.encode("<|im_end|>") == [450]
    assert tokenizer.decode([450, 451, 452]) == "<think></think>"
    assert tokenizer.decode([450, 451], skip_special=False) == "<|im_end|><think>"
    assert tokenizer.token_id("</think>") == 452 and tokenizer.token_id("<nothing>") is None


def test_padding_has_no_text(tokenizer):
    assert tokenizer.real_vocab == 453
    assert tokenizer.decode([511, 65, 453]) == tokenizer.decode([65])


def test_agrees_with_transformers(folder, tokenizer):
    theirs = AutoTokenizer.from_pretrained(folder)
    text = "The quick brown fox, 12 times: naïve <|im_start|>日本"
    assert tokenizer.encode(text) == theirs.encode(text, add_special_tokens=False)
    for thinking in (True, False):
        rendered = theirs.apply_chat_template(
            CHAT, tokenize=False, add_generation_prompt=True, enable_thinking=thinking
        )
        assert tokenizer.render_chat(CHAT, thinking=thinking) == rendered


# -- stop ids ------------------------------------------------------------------------------------


def test_stop_ids_are_the_union_of_all_sources(copy):
    change(copy / "tokenizer_config.json", eos_token={"content": "<|im_end|>"})
    change(copy / "config.json", eos_token_id=7, text_config={"eos_token_id": 448})
    change(copy / "generation_config.json", eos_token_id=[448, 12])
    assert Tokenizer.from_path(copy).stop_ids == {450, 7, 448, 12}


def test_generation_config_with_one_id_does_not_hide_the_tokenizers(copy):
    # A generation config that lists only end-of-text let answers run past <|im_end|>.
    change(copy / "generation_config.json", eos_token_id=448)
    assert Tokenizer.from_path(copy).stop_ids == {448, 450}


def test_stop_ids_without_any_config(copy):
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        (copy / name).unlink()
    assert Tokenizer.from_path(copy).stop_ids == frozenset()


# -- chat ----------------------------------------------------------------------------------------


def test_chat_ends_in_the_assistants_turn(tokenizer):
    text = tokenizer.render_chat(CHAT)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n")
    assert text.endswith("<|im_start|>assistant\n<think>\n")
    assert tokenizer.apply_chat(CHAT) == tokenizer.encode(text)
    assert tokenizer.render_chat(CHAT, thinking=False).endswith("<think>\n\n</think>\n\n")
    assert not tokenizer.render_chat(CHAT, add_generation_prompt=False).endswith("<think>\n")


def test_template_file_goes_before_the_config(copy):
    (copy / "chat_template.jinja").write_text("{{ messages | tojson }}{{ extra }}{{ eos_token }}", encoding="utf-8")
    got = Tokenizer.from_path(copy).render_chat([{"role": "user", "content": "é<"}], extra=3)
    assert got == '[{"role": "user", "content": "é<"}]3<|im_end|>'


def test_named_templates(copy):
    stored = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    change(copy / "tokenizer_config.json", chat_template=stored)
    assert Tokenizer.from_path(copy).render_chat([]) == "d"


@pytest.mark.parametrize(
    "template, part",
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ messages[0].content.x.y }}", "has no attribute 'x'"),
        ("{% if %}", "Expected an expression"),
        ("{{ ().__class__.__base__.__subclasses__() }}", "unsafe"),
    ],
)
def test_template_that_fails_is_one_line(copy, template, part):
    (copy / "chat_template.jinja").write_text(template, encoding="utf-8")
    with pytest.raises(TokenizerError, match="the chat template cannot render") as error:
        Tokenizer.from_path(copy).render_chat([{"role": "user", "content": "x"}])
    assert part in str(error.value) and "\n" not in str(error.value)


def test_no_template(copy):
    change(copy / "tokenizer_config.json", chat_template=None)
    bare = Tokenizer.from_path(copy)
    assert not bare.has_chat_template
    with pytest.raises(TokenizerError, match="no chat template"):
        bare.apply_chat(CHAT)


def test_files_that_cannot_be_read(copy, tmp_path):
    (copy / "generation_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(TokenizerError, match="generation_config.json: is no readable JSON"):
        Tokenizer.from_path(copy)
    (copy / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(TokenizerError, match="tokenizer.json: cannot be read"):
        Tokenizer.from_path(copy)
    (copy / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json"):
        Tokenizer.from_path(copy)


# -- streaming -----------------------------------------------------------------------------------


def streamed(tokenizer: Tokenizer, ids: list[int], skip_special: bool = True) -> list[str]:
    stream = tokenizer.stream(skip_special)
    return [*(stream.add(i) for i in ids), stream.finish()]


def _bytes(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token a byte, the hardest case for a stream."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = {b: 256 + n for n, b in enumerate(b for b in range(256) if b not in shown)}
    made = [tokenizer.token_id(chr(hidden.get(b, b))) for b in data]
    assert None not in made
    return made  # type: ignore[return-value]


@pytest.mark.parametrize("text", ["plain", "🎉", EMOJI, "e\u0301a\u0308", "日本語テスト", "🇨🇭🇯🇵", "a\ufffdb", "\ufffd"])
def test_characters_over_several_tokens(tokenizer, text):
    ids = _bytes(tokenizer, text.encode())
    deltas = streamed(tokenizer, ids)
    assert "".join(deltas) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in delta for delta in deltas)
        assert deltas[-1] == ""


def test_a_character_comes_when_it_is_whole(tokenizer):
    ids = _bytes(tokenizer, "a🎉b".encode())
    assert streamed(tokenizer, ids) == ["a", "", "", "", "🎉", "b", ""]


def test_stop_inside_a_character(tokenizer):
    ids = _bytes(tokenizer, "ok 🎉".encode())[:-1]
    assert streamed(tokenizer, ids) == ["o", "k", " ", "", "", "", "\ufffd"]


def test_a_stream_can_be_used_again(tokenizer):
    stream = tokenizer.stream()
    first = [stream.add(i) for i in _bytes(tokenizer, b"x\xf0\x9f")]
    assert "".join(first) + stream.finish() == "x\ufffd"
    assert stream.add(_bytes(tokenizer, b"y")[0]) == "y"


@settings(deadline=None, max_examples=200)
@given(text=st.text(max_size=40))
def test_any_text_streams_to_itself(tokenizer, text):
    ids = tokenizer.encode(text)
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


@settings(deadline=None, max_examples=300)
@given(ids=st.lists(st.integers(0, 511), max_size=40), skip=st.booleans())
def test_any_ids_stream_to_the_one_shot_text(tokenizer, ids, skip):
    deltas = streamed(tokenizer, ids, skip)
    assert "".join(deltas) == tokenizer.decode(ids, skip)


@settings(deadline=None, max_examples=300)
@given(data=st.binary(max_size=30))
def test_any_bytes_stream_to_their_text(tokenizer, data):
    ids = _bytes(tokenizer, data)
    assert "".join(streamed(tokenizer, ids)) == data.decode("utf-8", "replace") == tokenizer.decode(ids)
