"""Tokens of one answer to text that is safe to send: whole characters, and nothing that may belong to a stop string.

Knows one sequence and its tokenizer. Whether the sequence goes on is the caller's decision; `stopped` tells it.
"""

import codecs
from typing import Protocol

from tinyloop.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_MAX_BYTES_OF_CHARACTER = 4


class TextStream:
    """Feed tokens with `push`, end with `finish`; the strings they return make up `text`.

    Without stop strings `text` ends as `tokenizer.decode(all tokens)`. With them it ends where the first one to be
    complete begins (after it, with `include_stop`), however tokens cut it. Of several that are complete at the same
    character the longest counts.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        skip_special: bool = True,
    ) -> None:
        self._characters = _characters(tokenizer, skip_special)
        self._stops = [_StopString(text) for text in sorted(set(stop), key=len, reverse=True)]
        self._include_stop = include_stop
        self._held = ""  # whole characters that may be the start of a stop string
        self._released: list[str] = []
        self.stopped: str | None = None

    @property
    def text(self) -> str:
        """All text released so far."""
        return "".join(self._released)

    def push(self, token_id: int) -> str:
        """The text that `token_id` makes safe to send, often ""."""
        return "" if self.stopped is not None else self._advance(self._characters.push(token_id))

    def finish(self) -> str:
        """The rest: what was held back for a character or a stop string that did not come."""
        if self.stopped is not None:
            return ""
        now = self._advance(self._characters.finish())
        rest, self._held = self._held, ""
        return now + self._release(rest)

    def _advance(self, new: str) -> str:
        if not self._stops:
            return self._release(new)
        for count, char in enumerate(new, start=1):
            matched = self._matched(char)
            if matched is not None:
                return self._stop_at(self._held + new[:count], matched)
        self._held += new
        return self._release_up_to(len(self._held) - max(stop.progress for stop in self._stops))

    def _matched(self, char: str) -> str | None:
        """The stop string that `char` completes. All of them must see it, hence no early return."""
        complete = [stop.text for stop in self._stops if stop.feed(char)]
        return complete[0] if complete else None

    def _stop_at(self, text: str, matched: str) -> str:
        self.stopped, self._held = matched, ""
        return self._release(text if self._include_stop else text[: -len(matched)])

    def _release_up_to(self, end: int) -> str:
        safe, self._held = self._held[:end], self._held[end:]
        return self._release(safe)

    def _release(self, text: str) -> str:
        if text:
            self._released.append(text)
        return text


class _StopString:
    """Follows one stop string through the text, a character at a time, never looking back (Knuth, Morris, Pratt).

    `progress`: how many characters of it the text ends with.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.progress = 0
        self._fallback = _fallbacks(text)

    def feed(self, char: str) -> bool:
        while self.progress and self.text[self.progress] != char:
            self.progress = self._fallback[self.progress - 1]
        self.progress += self.text[self.progress] == char
        return self.progress == len(self.text)


def _fallbacks(text: str) -> list[int]:
    """Per prefix of `text`: length of its longest proper prefix that is also its suffix."""
    table, length = [0] * len(text), 0
    for i in range(1, len(text)):
        while length and text[i] != text[length]:
            length = table[length - 1]
        length += text[i] == text[length]
        table[i] = length
    return table


class _Characters(Protocol):
    """Whole characters out of tokens. An id the tokenizer does not know adds nothing: models pad their vocabulary."""

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


def _characters(tokenizer: Tokenizer, skip_special: bool) -> _Characters:
    kind = _ByteCharacters if tokenizer.is_byte_level else _WindowCharacters
    return kind(tokenizer, skip_special)


def _is_silent(tokenizer: Tokenizer, skip_special: bool, token_id: int) -> bool:
    unknown = not 0 <= token_id < tokenizer.vocab_size
    return unknown or (skip_special and tokenizer.is_special(token_id))


class _ByteCharacters:
    """For byte-level vocabularies: the text is the tokens' bytes as UTF-8, so a decoder that waits is exact."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        silent = _is_silent(self._tokenizer, self._skip_special, token_id)
        return "" if silent else self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowCharacters:
    """For other vocabularies, where a token's text depends on its neighbours (spaces, byte fallback).

    Decodes a short window: the tokens of the last piece of text, for context, and those since. Equals a full decode
    as long as byte tokens spell valid UTF-8.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._context: list[int] = []
        self._new: list[int] = []

    def push(self, token_id: int) -> str:
        if _is_silent(self._tokenizer, self._skip_special, token_id):
            return ""
        self._new.append(token_id)
        text = self._new_text()
        return "" if not text or self._may_be_unfinished(text) else self._accept(text)

    def _may_be_unfinished(self, text: str) -> bool:
        """An unfinished character makes its whole run of byte tokens invalid, one replacement for each: up to three of
        its own and those of the context. More are bytes that are no text."""
        replacements = len(text) - len(text.rstrip(_REPLACEMENT))
        return 0 < replacements < _MAX_BYTES_OF_CHARACTER + len(self._context)

    def finish(self) -> str:
        return self._accept(self._new_text())

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._context, skip_special=False)
        return self._tokenizer.decode(self._context + self._new, skip_special=False)[len(before) :]

    def _accept(self, text: str) -> str:
        self._context, self._new = self._new, []
        return text
