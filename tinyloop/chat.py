"""Chat messages to token ids through the model's own template. Knows control tokens, not Jinja, HTTP or models.

What a user wrote never becomes a control token: wherever it spells one, a random number stands in while the template
runs, and that stretch of the result is encoded as plain text.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from tinyloop import template
from tinyloop.arguments import shown
from tinyloop.errors import RequestError
from tinyloop.tokenizer import Tokenizer

Message = Mapping[str, Any]


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Message] | None = None,
    continue_final_message: bool = False,
) -> list[int]:
    """Token ids of the conversation. Raises RequestError("messages") if the template is absent or refuses them.

    `add_generation_prompt` opens the assistant's turn; `continue_final_message` leaves the last message open instead.
    """
    source = _template_source(tokenizer)
    _check_kind(messages)
    if continue_final_message and add_generation_prompt:
        raise RequestError("messages", "continue_final_message and add_generation_prompt exclude each other")
    guard = _Guard(tokenizer.control_strings)
    said = [guard.protect(_with_known_role(message, source)) for message in messages]
    if continue_final_message:
        said = _mark_end(said, guard.end_mark)
    text = template.render(
        source,
        messages=said,
        tools=guard.protect(list(tools)) if tools else None,
        documents=None,
        add_generation_prompt=add_generation_prompt,
        **tokenizer.special_tokens,
    )
    if continue_final_message:
        text = _cut_at_mark(text, guard.end_mark)
    return guard.encode(tokenizer, text)


def _check_kind(messages: Sequence[Message]) -> None:
    listed = isinstance(messages, Sequence) and not isinstance(messages, str)
    if not listed or not all(isinstance(message, Mapping) for message in messages):
        raise RequestError("messages", f"messages must be a list of mappings, got {shown(messages)}")


def _template_source(tokenizer: Tokenizer) -> str:
    if tokenizer.chat_template is None:
        raise RequestError("messages", "this model has no chat template; send a plain prompt instead")
    return tokenizer.chat_template


def _with_known_role(message: Message, source: str) -> Message:
    """`developer` is a newer word for `system`; most templates know only that one."""
    renamed = message.get("role") == "developer" and "developer" not in source
    return {**message, "role": "system"} if renamed else message


class _Guard:
    """Keeps control tokens that users spell apart from those of the template. One per conversation."""

    def __init__(self, control_strings: Sequence[str]) -> None:
        # Digits survive what templates do to text: upper, lower, title, trim, tojson.
        self._nonce = nonce = f"{secrets.randbits(128):039d}"
        self.end_mark = f"{nonce}99999 "
        self._control = list(control_strings)
        self._spelled = re.compile("|".join(map(re.escape, self._control)) or r"(?!)")
        self._numbers = {text: f"{nonce}{i:05d}" for i, text in enumerate(self._control)}

    def protect(self, value: Any) -> Any:
        """`value` with a stand-in for each control string, in all its strings and keys."""
        if isinstance(value, str):
            return self._spelled.sub(lambda match: self._numbers[match[0]], value)
        if isinstance(value, Mapping):
            return {self.protect(key): self.protect(item) for key, item in value.items()}
        return [self.protect(item) for item in value] if isinstance(value, list | tuple) else value

    def encode(self, tokenizer: Tokenizer, text: str) -> list[int]:
        """Ids of rendered text: control tokens where the template wrote them, plain text where a user did."""
        if self._nonce not in text:
            return _encode(tokenizer, text, special=True)
        ids, at = [], 0
        for match in self._spelled.finditer(text):
            ids += self._encode_between(tokenizer, text[at : match.start()])
            ids += _encode(tokenizer, match[0], special=True)
            at = match.end()
        return ids + self._encode_between(tokenizer, text[at:])

    def _encode_between(self, tokenizer: Tokenizer, text: str) -> list[int]:
        stand_in = self._nonce + r"(\d{5})"
        restored, found = re.subn(stand_in, lambda match: self._control[int(match[1])], text)
        return _encode(tokenizer, restored, special=not found)


def _encode(tokenizer: Tokenizer, text: str, *, special: bool) -> list[int]:
    try:
        return tokenizer.encode(text, special=special)
    except RequestError as error:
        raise RequestError("messages", str(error)) from error


def _mark_end(messages: list[Message], mark: str) -> list[Message]:
    """A mark after the last message's text, to find where it ends once it is rendered."""
    if not messages or not isinstance(messages[-1].get("content"), str):
        raise RequestError("messages", "continue_final_message needs a last message with text")
    return [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + mark}]


def _cut_at_mark(text: str, mark: str) -> str:
    at = text.rfind(mark.rstrip())
    if at < 0:
        raise RequestError("messages", "the chat template does not show the last message, so it cannot be continued")
    # The mark ends in a space. If that is gone the template trims messages, and would have trimmed this one.
    return text[:at] if text.startswith(mark, at) else text[:at].rstrip()
