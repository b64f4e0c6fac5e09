"""From ids to what a client reads: reasoning and answer apart, cut at stop strings, never half a character.

Streaming and whole answers are made of the same pieces by this one module, so they cannot differ.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import cached_property
from typing import Literal

from engine.tokenizer import Tokenizer

Part = Literal["reasoning", "content"]
OPEN, CLOSE = "<think>", "</think>"


class StopStrings:
    """Cuts text that arrives in pieces at the first stop string to be complete.

    Text that may still turn out to be the beginning of a stop string is held back.
    """

    def __init__(self, stops: Sequence[str]):
        self.stops = tuple(stops)
        self.found = False
        self._held = ""

    def add(self, text: str) -> str:
        """What of the text so far is certain to stay."""
        if self.found:
            return ""
        text = self._held + text
        ends = [(at + len(stop), at) for stop in self.stops if (at := text.find(stop)) >= 0]
        if ends:
            self.found, self._held = True, ""
            return text[: min(ends)[1]]
        keep = max((_overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The text held back, which became no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)


class Answer:
    """Turns ids into pieces of reasoning and content.

    Args:
        tokenizer: the model's. stops: stop strings; they are looked for in the content only.
        split: whether think tokens separate reasoning from content; else all text is content.
        thinking: whether the prompt ended inside a reasoning part.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), split: bool = False, thinking: bool = False):
        self._stream = tokenizer.stream()
        self._stops = StopStrings(stops)
        self._open = tokenizer.token_id(OPEN) if split else None
        self._close = tokenizer.token_id(CLOSE) if split else None
        self._part: Part = "reasoning" if split and thinking else "content"
        # Blank space at the borders of a reasoning part belongs to the template, not to the text.
        self._strip = self._part == "reasoning"
        self._blank = ""
        self._begun = False
        self.reasoning_tokens = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string was met."""
        return self._stops.found

    def add(self, token: int) -> list[tuple[Part, str]]:
        """Pieces that `token` completes, often none."""
        if self._part == "reasoning":
            self.reasoning_tokens += 1
        if token == self._close and self._part == "reasoning":
            made = self._piece(self._stream.finish())
            self._part, self._strip, self._blank = "content", True, ""
            return made
        if token == self._open and not self._begun and self._part == "content":
            made = self._piece(self._stream.finish())
            self._part, self._strip = "reasoning", True
            self.reasoning_tokens += 1
            return made
        return self._piece(self._stream.add(token))

    def finish(self) -> list[tuple[Part, str]]:
        """What was still held back, once the last token is in."""
        made = self._piece(self._stream.finish())
        if self._part == "reasoning" and self._blank:
            made.append(("reasoning", self._blank))
        if rest := self._stops.finish():
            made.append(("content", rest))
        return made

    def _piece(self, text: str) -> list[tuple[Part, str]]:
        if self._strip:
            text = text.lstrip()
            self._strip = not text
        if self._part == "reasoning":
            text = self._blank + text
            kept = text.rstrip()
            self._blank = text[len(kept) :]
            text = kept
        else:
            # An answer that speaks of think tags is not thinking: reasoning comes first or not at all.
            self._begun = self._begun or bool(text.strip())
            text = self._stops.add(text)
        return [(self._part, text)] if text else []


class TokenBytes:
    """The bytes of single ids, of which text decoding shows only whole characters.

    Attributes:
        hidden: ids of which texts show nothing, though they have a name.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._core = tokenizer.core
        added = tokenizer.core.get_added_tokens_decoder()
        self._added = {i: t.content for i, t in added.items()}
        self.hidden = frozenset(i for i, t in added.items() if t.special)

    def __call__(self, token: int) -> bytes:
        """Bytes of `token`; none for an id without text."""
        if token in self._added:
            return self._added[token].encode()
        written = self._core.id_to_token(token) or ""
        return b"".join(bytes([self._alphabet[c]]) if c in self._alphabet else c.encode() for c in written)

    @cached_property
    def _alphabet(self) -> dict[str, int]:
        """Bytes by the characters that byte-level vocabularies write for them: printable ones stand for themselves."""
        plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        table = {chr(b): b for b in plain}
        others = [b for b in range(256) if b not in set(plain)]
        return table | {chr(0x100 + i): b for i, b in enumerate(others)}


class Offsets:
    """Where tokens begin in the text they decode to, in characters.

    Tokens that hold pieces of one character begin where it does. Bytes that are no character count as decoding shows
    them: one U+FFFD for each stretch that could have begun one.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def add(self, data: bytes) -> int:
        """Where the token begins whose bytes, as the text shows them, are next."""
        first = self._decoder.decode(data[:1])
        # Of what the first byte completes it is part of the last character, unless it begins one itself: then all of
        # that was a character cut off before it.
        begins = bool(self._decoder.getstate()[0])
        start = self._length + max(0, len(first) - (0 if begins else 1))
        self._length += len(first) + len(self._decoder.decode(data[1:]))
        return start
