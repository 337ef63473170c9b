"""Tool calls as text: how tools are shown to a model, which grammar its calls follow, and how they are read back.

A call is written as Qwen, Hermes and most fine-tunes of small models write it:

    <tool_call>
    {"name": "weather", "arguments": {"city": "Oslo"}}
    </tool_call>

A chat template that knows this form shows the tools itself; for any other they are put into the system message. While
tools are offered the grammar always holds: free text, until a call is opened, which then must be one of theirs. Knows
no HTTP and no API's shapes.
"""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tinyloop.arguments import nodes
from tinyloop.constraint import inline_json

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_HEAD, _MIDDLE, _TAIL = '\n{"name": ', ', "arguments": ', "}\n" + CLOSE
Message = Mapping[str, Any]
MAX_DEPTH = 64  # of arguments that are shown as a value
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. `parameters`: the JSON schema of its arguments, an object; `field`: what the
    caller calls that schema."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=lambda: NO_PARAMETERS)
    field: str = "tools"

    @property
    def signature(self) -> dict[str, Any]:
        described = {"description": self.description} if self.description else {}
        return {"name": self.name, **described, "parameters": self.parameters}


@dataclass(frozen=True)
class Tools:
    """The tools of one request. `need`: "auto" leaves the choice between text and calls to the model, "call" demands
    calls. `many`: more than one call in an answer."""

    offered: tuple[Tool, ...]
    need: Literal["auto", "call"] = "auto"
    many: bool = True

    def grammar(self, content: str | None = None) -> str:
        """Lark. `content` is a term for answers without a call, None for any text."""
        starts, rules = ["called again*" if self.many else "called"], list[str]()
        if self.need == "call" or content is not None:
            rules.append(f"called: {_quoted(OPEN)} call")
            starts += [content] if self.need == "auto" and content is not None else []
        else:
            # A lazy lexeme ends with the first `<tool_call>`, wherever tokens cut it.
            rules += ["called: opened call", f"opened[lazy]: TEXT {_quoted(OPEN)}", r"TEXT: /(.|\n)*/"]
            starts.append("TEXT")
        named = " | ".join(f"{_quoted(_opening(tool))} args_{i}" for i, tool in enumerate(self.offered))
        rules += [
            f"again: {_quoted(chr(10) + OPEN)} call",
            f"call: {_quoted(_HEAD)} ({named}) {_quoted(_TAIL)}",
            *(f"args_{i}: {inline_json(tool.parameters)}" for i, tool in enumerate(self.offered)),
        ]
        return "\n".join([f"start: {' | '.join(starts)}", *rules, ""])


def _quoted(text: str) -> str:
    """A string of Lark, which reads JSON's escapes."""
    return json.dumps(text)


def _opening(tool: Tool) -> str:
    return json.dumps(tool.name) + _MIDDLE


# What the model gets to see


def knows_tools(template: str | None) -> bool:
    """Whether a chat template shows tools, and in the form that is read here."""
    xml = "<function="  # as Qwen3-Coder writes calls, between the same tags
    return template is not None and xml not in template and all(word in template for word in ("tools", OPEN))


def conversation(
    template: str | None, messages: Sequence[Message], tools: Sequence[Tool] = ()
) -> tuple[list[Message], list[Message] | None]:
    """Messages and tools for `chat.render`. A template that knows no tools gets them in the system message, calls in
    the assistant's text and results as a turn of the user."""
    if knows_tools(template):
        wire: list[Message] = [{"type": "function", "function": tool.signature} for tool in tools]
        return [_read(message) for message in messages], wire or None
    told: list[Message] = list(_told(messages))
    if not tools:
        return told, None
    explained = _explained(tools)
    if told and told[0]["role"] == "system":
        return [{**told[0], "content": f"{told[0]['content']}\n\n{explained}"}, *told[1:]], None
    return [{"role": "system", "content": explained}, *told], None


def _explained(tools: Iterable[Tool]) -> str:
    signatures = "\n".join(json.dumps(tool.signature, ensure_ascii=False) for tool in tools)
    return (
        "You can call these functions, given as JSON, one a line:\n"
        f"<tools>\n{signatures}\n</tools>\n"
        "To call one, write nothing but its name and its arguments as JSON between tags:\n"
        f'{OPEN}\n{{"name": "function", "arguments": {{"key": "value"}}}}\n{CLOSE}'
    )


def _told(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Turns with their calls as text. Results of calls are something that the assistant is told, all in one turn."""
    told: list[dict[str, Any]] = []
    for before, message in zip([None, *messages], messages, strict=False):
        content = message.get("content") or ""
        if message["role"] != "tool":
            text = "\n".join([*([content] if content else []), *map(_written, message.get("tool_calls") or ())])
            told.append({**{key: value for key, value in message.items() if key != "tool_calls"}, "content": text})
            continue
        result = f"<tool_response>\n{content}\n</tool_response>"
        if before is not None and before["role"] == "tool":
            told[-1]["content"] += "\n" + result
        else:
            told.append({"role": "user", "content": result})
    return told


def _written(call: Mapping[str, Any]) -> str:
    function = call["function"]
    return f"{OPEN}{_HEAD}{json.dumps(function['name'])}{_MIDDLE}{function['arguments'] or '{}'}{_TAIL}"


def _read(message: Message) -> Message:
    """A turn whose calls hold their arguments as values, which is what templates expect."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [{**call, "function": _with_value(call["function"])} for call in calls]}


def _with_value(function: Mapping[str, Any]) -> dict[str, Any]:
    """Text that spells no value, or one of absurd depth, stays text."""
    try:
        value = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return dict(function)
    shallow = nodes(value, MAX_DEPTH, most=len(function["arguments"]) + 1) is not None
    return {**function, "arguments": value} if shallow else dict(function)


# What the model says


@dataclass(frozen=True)
class Piece:
    """Part of an answer: text, or part of its call number `call`, which opens with a name."""

    text: str = ""
    call: int | None = None
    name: str = ""
    arguments: str = ""


class ToolReader:
    """Tells text from tool calls as they come. What only looks like the beginning of a call is given out as text."""

    def __init__(self, names: Iterable[str]) -> None:
        self._openings = {_HEAD + json.dumps(name) + _MIDDLE: name for name in names}
        self._held = ""  # not yet told
        self._read = self._text
        self._depth, self._in_string, self._escaped = 0, False, False  # inside the arguments
        self.calls = 0

    def push(self, text: str) -> list[Piece]:
        """What `text` settles."""
        self._held += text
        return list(self._settled())

    def finish(self) -> list[Piece]:
        """The rest of an answer that has ended; a call that was cut stays cut."""
        rest, self._held = self._held, ""
        if self._read == self._head:
            rest = OPEN + rest
        return [Piece(rest)] if rest and self._read in (self._text, self._head) else []

    def _settled(self) -> Iterator[Piece]:
        going = True
        while going and self._held:
            before = len(self._held), self._read
            yield from self._read()
            going = (len(self._held), self._read) != before

    def _text(self) -> Iterator[Piece]:
        text, found, rest = self._held.partition(OPEN)
        if found:
            self._held, self._read = rest, self._head
        else:
            safe = len(text) - _overlap(text, OPEN)
            text, self._held = text[:safe], text[safe:]
        if text:
            yield Piece(text)

    def _head(self) -> Iterator[Piece]:
        for opening, name in self._openings.items():
            if self._held.startswith(opening):
                self._held, self._read = self._held.removeprefix(opening), self._arguments
                yield Piece(call=self.calls, name=name)
                return
        if not any(opening.startswith(self._held) for opening in self._openings):
            self._read = self._text
            yield Piece(OPEN)

    def _arguments(self) -> Iterator[Piece]:
        """As far as the JSON object goes."""
        for at, char in enumerate(self._held, start=1):
            if self._ends(char):
                part, self._held, self._read = self._held[:at], self._held[at:], self._tail
                self.calls += 1
                yield Piece(call=self.calls - 1, arguments=part)
                return
        part, self._held = self._held, ""
        yield Piece(call=self.calls, arguments=part)

    def _ends(self, char: str) -> bool:
        if self._in_string:
            self._in_string = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
            return False
        self._in_string = char == '"'
        self._depth += (char in "{[") - (char in "}]")
        return self._depth == 0 and char in "}]"

    def _tail(self) -> Iterator[Piece]:
        """What closes a call, and the line break between two, are nobody's text."""
        if self._held.startswith(_TAIL):
            self._held, self._read = self._held.removeprefix(_TAIL), self._between
        elif not _TAIL.startswith(self._held):
            self._read = self._text
        yield from ()

    def _between(self) -> Iterator[Piece]:
        self._held, self._read = self._held.removeprefix("\n"), self._text
        yield from ()


def _overlap(text: str, word: str) -> int:
    """Length of the longest end of `text` that begins `word`."""
    return next((size for size in range(min(len(text), len(word) - 1), 0, -1) if word.startswith(text[-size:])), 0)
