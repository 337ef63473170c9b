"""Tool calls as text: every call that the grammar allows is read back, however tokens cut it, and text stays text."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny_models import tiny_tokenizer
from tinyloop.constraint import grammar
from tinyloop.tools import CLOSE, OPEN, Piece, Tool, ToolReader, Tools, conversation

WEATHER = Tool("weather", "Tells it.", {"type": "object", "properties": {"city": {"type": "string"}},
                                        "required": ["city"], "additionalProperties": False})  # fmt: skip
TIME = Tool("time")
HERMES = "{% if tools %}{{ tools | tojson }}{% endif %}<tool_call>{{ messages }}"
IN_XML = "{% if tools %}{{ tools | tojson }}{% endif %}<tool_call><function=name>{{ messages }}"


def written(name: str, arguments: Any) -> str:
    return f'{OPEN}\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n{CLOSE}'


def follows(tools: Tools, text: str, content: str | None = None) -> bool:
    """Whether an answer may be exactly `text`."""
    tokenizer = tiny_tokenizer()
    progress = grammar(tokenizer, tools.grammar(content), "tools").start()
    for token in tokenizer.encode(text, special=False):
        if not progress.allowed(259)[token]:
            return False
        progress.advance(token)
    return progress.complete or bool(progress.allowed(259)[258])


OSLO = written("weather", {"city": "Oslo"})
BOTH = (WEATHER, TIME)


@pytest.mark.parametrize(
    ("tools", "text", "right"),
    [
        (Tools(BOTH), "Good day.", True),
        (Tools(BOTH), OSLO, True),
        (Tools(BOTH), "I look.\n" + OSLO, True),
        (Tools(BOTH), OSLO + "\n" + written("time", {}), True),
        (Tools(BOTH), "a < b, <tool_cal", True),
        (Tools(BOTH), OPEN, False),
        (Tools(BOTH), written("weather", {"town": "Oslo"}), False),
        (Tools(BOTH), written("rain", {}), False),
        (Tools(BOTH), OSLO + " and text", False),
        (Tools(BOTH, many=False), OSLO + "\n" + OSLO, False),
        (Tools(BOTH, "call"), OSLO, True),
        (Tools(BOTH, "call"), OSLO + "\n" + OSLO, True),
        (Tools(BOTH, "call"), "I look.\n" + OSLO, False),
        (Tools(BOTH, "call"), "", False),
        (Tools((TIME,), "call", many=False), written("time", {}), True),
        (Tools((TIME,), "call", many=False), written("time", {"x": 1}), False),
        (Tools((TIME,), "call", many=False), OSLO, False),
    ],
)
def test_the_grammar_allows_text_and_the_calls_of_these_tools(tools: Tools, text: str, right: bool) -> None:
    assert follows(tools, text) is right


def test_a_form_for_the_text_leaves_the_calls_as_they_are() -> None:
    tools, content = Tools(BOTH), '%json {"const": 1}'
    assert follows(tools, "1", content)
    assert follows(tools, OSLO, content)
    assert not follows(tools, "text", content)


def told(pieces: list[Piece]) -> tuple[str, list[tuple[str, str]]]:
    text, calls = "", list[tuple[str, str]]()
    for piece in pieces:
        text += piece.text
        if piece.name:
            assert piece.call == len(calls)
            calls.append((piece.name, ""))
        elif piece.call is not None:
            calls[piece.call] = (calls[piece.call][0], calls[piece.call][1] + piece.arguments)
    return text, calls


def read(text: str, sizes: list[int]) -> tuple[str, list[tuple[str, str]]]:
    reader, pieces = ToolReader([tool.name for tool in BOTH]), list[Piece]()
    at = 0
    while at < len(text):
        size = sizes[at % len(sizes)]
        pieces += reader.push(text[at : at + size])
        at += size
    return told([*pieces, *reader.finish()])


cuts = st.lists(st.integers(1, 9), min_size=1, max_size=5)


@given(
    st.text(st.sampled_from('<tool_ca>"{x\n'), max_size=30).filter(lambda text: OPEN not in text),
    st.lists(st.dictionaries(st.text(max_size=4), st.text() | st.integers(), max_size=3), max_size=3),
    cuts,
)
def test_what_is_written_is_read_back_however_it_is_cut(
    before: str, calls: list[dict[str, Any]], sizes: list[int]
) -> None:
    text = before + "\n".join(written("weather", arguments) for arguments in calls)
    got, named = read(text, sizes)
    assert got == before
    assert [json.loads(arguments) for _, arguments in named] == calls


@given(st.lists(st.sampled_from([OPEN, CLOSE, "\n", '{"name": ', '"time"', "x"]), max_size=8), cuts)
def test_what_is_no_call_is_given_out_as_it_is(parts: list[str], sizes: list[int]) -> None:
    assert read("".join(parts), sizes) == ("".join(parts), [])


def test_text_is_not_held_back_longer_than_it_may_be_a_call() -> None:
    reader = ToolReader(["time"])
    assert told(reader.push("a <b"))[0] == "a <b"
    assert told(reader.push("c <tool"))[0] == "c "
    assert told(reader.push("s>"))[0] == "<tools>"


def test_a_call_opens_once_and_its_arguments_come_as_they_are_made() -> None:
    reader = ToolReader(["weather"])
    head, _, rest = OSLO.partition('{"city"')
    assert reader.push(head) == [Piece(call=0, name="weather")]
    assert reader.push('{"ci') == [Piece(call=0, arguments='{"ci')]
    assert told([Piece(call=0, name="weather"), *reader.push('ty"' + rest)])[1] == [("weather", 'ty": "Oslo"}')]
    assert reader.finish() == []


def test_a_call_that_was_cut_stays_a_call_and_a_head_that_was_cut_is_text() -> None:
    assert read(OSLO[:-20], [3])[1][0][0] == "weather"
    assert read("a " + OPEN + '\n{"na', [3]) == ("a " + OPEN + '\n{"na', [])


MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    ]},
    {"role": "tool", "content": "4 C", "tool_call_id": "1"},
    {"role": "tool", "content": "rain", "tool_call_id": "2"},
]  # fmt: skip


@pytest.mark.parametrize("template", ["{{ messages }}", IN_XML])
def test_a_template_that_knows_no_tools_or_another_form_is_told_of_them_in_words(template: str) -> None:
    messages, shown = conversation(template, MESSAGES, BOTH)
    assert shown is None
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert messages[0]["content"].startswith("Be brief.\n\n")
    assert json.dumps(WEATHER.signature) in messages[0]["content"].splitlines()
    assert messages[2] == {"role": "assistant", "content": OSLO}
    assert messages[3]["content"].count("<tool_response>") == 2


def test_a_conversation_without_tools_is_left_as_it_is() -> None:
    plain = [{"role": "user", "content": "Hi"}]
    assert conversation("{{ messages }}", plain) == (plain, None)


def test_tools_without_a_system_message_make_one() -> None:
    messages, _ = conversation(None, [{"role": "user", "content": "Hi"}], BOTH)
    assert [message["role"] for message in messages] == ["system", "user"]


def test_a_template_that_knows_tools_gets_them_and_arguments_as_values() -> None:
    messages, shown = conversation(HERMES, MESSAGES, BOTH)
    assert shown is not None
    assert [entry["function"]["name"] for entry in shown] == ["weather", "time"]
    assert messages[2]["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}
    assert messages[3:] == MESSAGES[3:]


@pytest.mark.parametrize("arguments", ["{", "[" * 100 + "]" * 100, "[" * 100_000, '"text"', ""])
def test_arguments_of_any_kind_reach_a_template(arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    (message,), _ = conversation(HERMES, [{"role": "assistant", "content": "", "tool_calls": [call]}])
    expected = {'"text"': "text", "": {}}.get(arguments, arguments)
    assert message["tool_calls"][0]["function"]["arguments"] == expected
