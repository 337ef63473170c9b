"""Streaming text: the pieces are the whole, characters come whole, and stop strings stop wherever tokens cut them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models

from tests.tiny import byte_tokenizer
from tinyloop.text import TextStream
from tinyloop.tokenizer import Tokenizer

BYTES = Tokenizer(byte_tokenizer())


def words() -> Tokenizer:
    """A vocabulary of the SentencePiece kind: ▁ for spaces, byte fallback, a first space that is stripped."""
    pieces = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "b", "▁the", "你", "."]
    core = Core(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    strip = decoders.Strip(" ", 1, 0)
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    core.add_special_tokens(["<s>"])
    return Tokenizer(core)


WORDS = words()
PIECES = [WORDS._core.token_to_id(piece) for piece in ["<s>", "▁", "▁a", "b", "▁the", "你", "."]]
CHARACTERS = [[WORDS._core.token_to_id(f"<0x{byte:02X}>") for byte in char.encode()] for char in "é你👍"]


def run(tokens: list[int], tokenizer: Tokenizer = BYTES, **options: object) -> tuple[TextStream, list[str]]:
    stream = TextStream(tokenizer, **options)  # type: ignore[arg-type]
    return stream, [*map(stream.push, tokens), stream.finish()]


def first_complete(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """Reference: grow the text by one character until it ends in a stop string. Where that begins, and which it is."""
    for end in range(1, len(text) + 1):
        if ends := [stop for stop in stops if text[:end].endswith(stop)]:
            longest = max(ends, key=len)
            return end - len(longest), longest
    return None


@given(st.lists(st.integers(0, 258)), st.booleans())
def test_pieces_of_any_tokens_make_up_the_decoded_whole(tokens: list[int], skip: bool) -> None:
    stream, pieces = run(tokens, skip_special=skip)
    assert "".join(pieces) == stream.text == BYTES.decode(tokens, skip_special=skip)


@given(st.text())
def test_characters_come_whole(text: str) -> None:
    _, pieces = run(BYTES.encode(text, special=False))
    assert "".join(pieces) == text
    assert all(piece == "" or piece in text for piece in pieces)
    assert pieces[-1] == ""


@given(st.lists(st.one_of(st.sampled_from(PIECES).map(lambda i: [i]), st.sampled_from(CHARACTERS)), max_size=12))
def test_word_pieces_with_byte_fallback_make_up_the_decoded_whole(groups: list[list[int]]) -> None:
    tokens = [token for group in groups for token in group]
    stream, pieces = run(tokens, WORDS)
    assert "".join(pieces) == stream.text == WORDS.decode(tokens)
    assert not any("\ufffd" in piece for piece in pieces)


@given(
    st.text("ab<", max_size=30),
    st.lists(st.text("ab<", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple),
    st.booleans(),
)
def test_text_is_cut_at_the_first_stop(text: str, stops: tuple[str, ...], include: bool) -> None:
    stream, pieces = run(BYTES.encode(text), stop=stops, include_stop=include)
    found = first_complete(text, stops)
    expected = text if found is None else text[: found[0] + (len(found[1]) if include else 0)]
    assert "".join(pieces) == stream.text == expected
    assert stream.stopped == (None if found is None else found[1])
    assert include or not any(stop in stream.text for stop in stops)


@given(st.lists(st.sampled_from(["x", "the ", "</s", "top>", ">", "é"]), max_size=12), st.data())
def test_stops_do_not_depend_on_where_tokens_cut(parts: list[str], data: st.DataObject) -> None:
    text, stops = "".join(parts), ("</stop>", "top>x")
    vocab = {part: i for i, part in enumerate(dict.fromkeys([*parts, *text]))}
    core = Core(models.WordLevel(vocab, "x"))
    core.decoder = decoders.Fuse()
    tokens = [vocab[piece] for part in parts for piece in ([part] if data.draw(st.booleans()) else part)]
    stream, _ = run(tokens, Tokenizer(core), stop=stops)
    found = first_complete(text, stops)
    assert stream.text == (text if found is None else text[: found[0]])


@given(st.text("ab", max_size=20), st.text("ab", min_size=1, max_size=5))
def test_nothing_is_held_that_cannot_become_a_stop(text: str, stop: str) -> None:
    stream = TextStream(BYTES, stop=(stop,))
    for token in BYTES.encode(text):
        stream.push(token)
    if stream.stopped is None:
        held = text[len(stream.text) :]
        assert stop.startswith(held)
        assert held != stop


def test_half_a_character_at_the_end_is_replaced_once() -> None:
    tokens = BYTES.encode("a👍")[:-1]
    stream, pieces = run(tokens)
    assert pieces == ["a", "", "", "", "\ufffd"]
    assert stream.text == BYTES.decode(tokens)


def test_held_stop_prefix_is_released_at_the_end() -> None:
    stream, pieces = run(BYTES.encode("a</s"), stop=("</s>",))
    assert pieces == ["a", "", "", "", "</s"]
    assert stream.stopped is None


def test_nothing_follows_a_stop() -> None:
    stream, pieces = run(BYTES.encode("aXbXc"), stop=("X",))
    assert (pieces, stream.text, stream.stopped) == (["a", "", "", "", "", ""], "a", "X")


def test_longest_of_the_stops_that_end_together_counts() -> None:
    stream, _ = run(BYTES.encode("<end>"), stop=("end>", "<end>", "d>"))
    assert (stream.text, stream.stopped) == ("", "<end>")


def test_padding_ids_of_the_model_add_nothing() -> None:
    stream, _ = run([*BYTES.encode("a"), 300, -1, *BYTES.encode("b")])
    assert stream.text == "ab"


def test_special_tokens_show_only_when_asked() -> None:
    assert run(BYTES.encode("a<|im_end|>"))[0].text == "a"
    assert run(BYTES.encode("a<|im_end|>"), skip_special=False)[0].text == "a<|im_end|>"


@pytest.mark.parametrize("stop", ["a" * 20_000 + "b", "ab" * 10_000])
def test_long_stops_that_almost_match_cost_little(stop: str) -> None:
    stream, _ = run(BYTES.encode("a" * 20_000), stop=(stop,))
    assert stream.text == "a" * 20_000


def test_bytes_that_are_no_text_are_not_held_for_ever() -> None:
    stray = WORDS._core.token_to_id("<0xFF>")
    stream, pieces = run([stray] * 40, WORDS)
    assert stream.text == "\ufffd" * 40
    assert sum(map(bool, pieces[:-1])) >= 3
