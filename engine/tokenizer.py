"""Text to token ids and back: encoding, chat templates, stop ids, and text that arrives a token at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

_REPLACEMENT = "\ufffd"


class TokenizerError(ValueError):
    """A tokenizer or chat template that is missing or cannot be used; one line that names the file."""


class Tokenizer:
    """A checkpoint's tokenizer with what its folder says around it.

    Made by `from_path`. Ids from `real_vocab` up exist only as padding of the embedding: they have no text, so
    sampling must leave them out and prompts must not contain them.
    """

    def __init__(self, core: tokenizers.Tokenizer, settings: Mapping[str, Any], template: str | None, eos: set[int]):
        self.core = core
        self.real_vocab: int = max(core.get_vocab(with_added_tokens=True).values()) + 1
        self._settings, self._template = settings, template
        token = self._special("eos_token")
        own = core.token_to_id(token) if token else None
        self.stop_ids: frozenset[int] = frozenset(eos if own is None else eos | {own})
        """Ids that end a turn: those of the tokenizer, of config.json and of generation_config.json together."""

    @classmethod
    def from_path(cls, path: str | Path) -> Tokenizer:
        """Read tokenizer.json and, where present, tokenizer_config.json, chat_template.jinja and the two configs.

        Raises:
            TokenizerError: no tokenizer.json, or a file that cannot be read.
        """
        path = Path(path).expanduser()
        file = path / "tokenizer.json"
        if not file.is_file():
            raise TokenizerError(
                f"{path}: has no tokenizer.json; copy it from the model's repository beside the weights"
            )
        try:
            core = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise TokenizerError(f"{file}: cannot be read ({error}); download it again") from error
        settings = _object(path / "tokenizer_config.json")
        return cls(core, settings, _template(path, settings), _eos_ids(path))

    # -- text and ids ----------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; control tokens written in it become their ids, none is added."""
        return self.core.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD, ids without text nothing.

        Args:
            ids: token ids.
            skip_special: leave out special tokens such as ``<|im_end|>`` (``<think>`` is none).
        """
        return self.core.decode(list(ids), skip_special_tokens=skip_special)

    def token_id(self, token: str) -> int | None:
        """Id of a token by its exact name, such as ``</think>``; None if there is none."""
        return self.core.token_to_id(token)

    def stream(self, skip_special: bool = True) -> TextStream:
        """A new incremental decoder."""
        return TextStream(self, skip_special)

    # -- chat ------------------------------------------------------------------------------------

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat` can work."""
        return self._template is not None

    def apply_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        thinking: bool | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation; arguments as in `render_chat`."""
        return self.encode(self.render_chat(messages, add_generation_prompt, thinking, **kwargs))

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        thinking: bool | None = None,
        **kwargs: Any,
    ) -> str:
        """A conversation in the model's own format.

        Args:
            messages: each with ``role`` and ``content``, and whatever else the template reads.
            add_generation_prompt: end with the opening of the assistant's turn.
            thinking: the template's ``enable_thinking``; None leaves its default.
            kwargs: further template variables, such as ``tools``.

        Raises:
            TokenizerError: no template, or the template refuses these messages.
        """
        if self._template is None:
            raise TokenizerError("this tokenizer has no chat template; encode the prompt as plain text")
        if thinking is not None:
            kwargs["enable_thinking"] = thinking
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        special = {name: token for name in names if (token := self._special(name)) is not None}
        try:
            return self._compiled.render(
                **special, messages=messages, add_generation_prompt=add_generation_prompt, **kwargs
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise TokenizerError(f"the chat template cannot render these messages: {error}") from error

    @cached_property
    def _compiled(self) -> jinja2.Template:
        # The settings that chat templates are written for; sandboxed, since a template comes with a download.
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals["raise_exception"] = _refuse
        assert self._template is not None
        return environment.from_string(self._template)

    def _special(self, name: str) -> str | None:
        token = self._settings.get(name)
        return token.get("content") if isinstance(token, dict) else token


class TextStream:
    """Text of tokens as they come: all deltas together equal `Tokenizer.decode` of all ids.

    A character whose bytes are spread over tokens is held back until it is whole, so no delta ends in half of
    one, and no delta is ever taken back. Combining marks and joiners are characters of their own.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool):
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._pending: list[int] = []
        self._shown = 0

    def add(self, token: int) -> str:
        """The text that `token` completes, often empty."""
        self._pending.append(token)
        text = self._tokenizer.decode(self._pending, self._skip_special)
        if text.endswith(_REPLACEMENT):
            # Only the last character can still change: the bytes of a cut-off character decode to one U+FFFD.
            return self._take(text[:-1])
        delta = self._take(text)
        self._pending, self._shown = [], 0
        return delta

    def finish(self) -> str:
        """The text still held back (U+FFFD where generation stopped inside a character); the stream starts anew."""
        delta = self._take(self._tokenizer.decode(self._pending, self._skip_special))
        self._pending, self._shown = [], 0
        return delta

    def _take(self, text: str) -> str:
        delta = text[self._shown :]
        self._shown = max(self._shown, len(text))
        return delta


# -- files of the folder -------------------------------------------------------------------------


def _object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path}: is no readable JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: holds a {type(value).__name__}, expected an object; download it again")
    return value


def _template(path: Path, settings: Mapping[str, Any]) -> str | None:
    """The chat template: a file of its own before the one inside tokenizer_config.json."""
    own = path / "chat_template.jinja"
    if own.is_file():
        return own.read_text(encoding="utf-8")
    stored = settings.get("chat_template")
    if isinstance(stored, list):  # several named templates
        return next((t["template"] for t in stored if t.get("name") == "default"), None)
    return stored


def _eos_ids(path: Path) -> set[int]:
    config, generation = _object(path / "config.json"), _object(path / "generation_config.json")
    text = config.get("text_config") or {}
    return {i for source in (config, text, generation) for i in _ids(source.get("eos_token_id"))}


def _ids(value: Any) -> Iterable[int]:
    return () if value is None else value if isinstance(value, list) else (value,)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
