"""How one generation looks in /v1/responses: the resource, and the named events that build it up.

An answer is a list of items, messages and function calls. Whole or streamed it is built by the same moves; only whether
their events are sent differs.
"""

import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from server.routers.asked import tier
from server.routers.openai_views import ChatView, call_id, loop_report
from server.routers.shared import Problem
from server.routers.telling import Teller
from server.schemas import responses as shapes
from server.schemas import responses_answers as answers
from server.schemas.openai_answers import ChosenLogprob
from server.sse import json_event
from server.store import ResponseStore, Stored
from server.types import GenerationChunk, GenerationResult
from tinyloop.tools import Piece

if TYPE_CHECKING:
    from server.request import ScheduledRequest


class ResponseTeller(Teller):
    """`kept`: what will be stored, with the conversation up to the answer; `store` None keeps nothing.

    A streamed answer is in the store from its first event on, so that it can be looked up and cancelled.
    """

    def __init__(
        self, body: shapes.CreateRequest, view: ChatView, kept: Stored, store: ResponseStore | None, owner: str
    ) -> None:
        self.view, self.kept, self.store, self.owner = view, kept, store, owner
        self.resource = _resource(body, view, kept.id, stored=store is not None)
        self.tokens = 0
        self._item: answers.OutputMessage | answers.FunctionCall | None = None  # the one that is being made
        self._announced = self._ended = False
        self._sequence = 0

    def whole(self, result: GenerationResult) -> dict[str, Any]:
        logprobs = self.view.logprobs_of(result) if self.view.logprobs else []
        for _ in self._add([*self.view.pieces(0, result.text), *self.view.rest(0)], logprobs):
            pass
        for _ in self._close_last(result):
            pass
        return self._finished(result)

    # The events

    def opening(self) -> Iterator[str]:
        yield from self._announce()

    def token(self, chunk: GenerationChunk) -> Iterator[str]:
        self.tokens += 1
        shown = self.view.logprobs and chunk.logprobs is not None
        logprobs = [self.view.logprob(chunk.token_id, chunk.logprobs)] if shown and chunk.logprobs else []
        yield from self._add(self.view.pieces(0, chunk.text), logprobs)

    def closing(self, result: GenerationResult) -> Iterator[str]:
        yield from self._add(self.view.rest(0), [])
        yield from self._close_last(result)
        resource = self._finished(result)
        yield self._event(f"response.{resource['status']}", response=resource)

    def failing(self, problem: Problem) -> Iterator[str]:
        self._ended = True
        cancelled = problem.code == "cancelled"
        if not cancelled:
            yield self._event("error", code=problem.code, message=problem.message, param=problem.field)
            self.resource.error = answers.Failure(code="server_error", message=problem.message)
        if self._item is not None:
            self._item.status = "incomplete"
        self.resource.status = "cancelled" if cancelled else "failed"
        self.resource.usage = self._usage(self.tokens, 0)
        resource = self.resource.model_dump()
        self._keep(resource, streamed=True)
        yield self._event("response.incomplete" if cancelled else "response.failed", response=resource)

    def waiting(self, request: "ScheduledRequest") -> str:
        """Clients of this API take comments for silence."""
        if self._announced:
            return self._event("response.in_progress", response=self.resource)
        return "".join(self._announce())

    def closed(self) -> None:
        if self.store is not None and self._announced and not self._ended:  # the reader has left
            self.store.delete(self.owner, self.kept.id)

    def _announce(self) -> Iterator[str]:
        if self._announced:
            return
        self._announced = True
        resource = self.resource.model_dump()
        if self.store is not None:
            self.store.put(self.owner, replace(self.kept, body=resource))
        yield self._event("response.created", response=resource)
        yield self._event("response.in_progress", response=resource)

    # The items

    def _add(self, pieces: Iterable[Piece], logprobs: list[ChosenLogprob]) -> Iterator[str]:
        """More of the answer. Log-probabilities are shown with text only."""
        for piece in pieces:
            if piece.call is None:
                yield from self._say(piece.text, logprobs)
                logprobs = []
            elif piece.name:
                yield from self._close("completed")
                yield from self._call(piece.name)
            elif isinstance(self._item, answers.FunctionCall):
                self._item.arguments += piece.arguments
                yield self._item_event("response.function_call_arguments.delta", delta=piece.arguments)
        if logprobs and not isinstance(self._item, answers.FunctionCall):
            yield from self._say("", logprobs)

    def _say(self, text: str, logprobs: list[ChosenLogprob]) -> Iterator[str]:
        if not isinstance(self._item, answers.OutputMessage):
            yield from self._close("completed")
            message = answers.OutputMessage(id=f"msg_{uuid.uuid4().hex}", status="in_progress", content=[])
            yield from self._open(message)
            yield self._part_event("response.content_part.added", part=answers.OutputText(text=""))
            message.content = [answers.OutputText(text="")]
        assert isinstance(self._item, answers.OutputMessage)
        [part] = self._item.content
        part.text += text
        part.logprobs += logprobs
        yield self._part_event("response.output_text.delta", delta=text, logprobs=logprobs)

    def _call(self, name: str) -> Iterator[str]:
        key = f"fc_{uuid.uuid4().hex}"
        item = answers.FunctionCall(id=key, call_id=call_id(), name=name, arguments="", status="in_progress")
        yield from self._open(item)

    def _open(self, item: answers.OutputMessage | answers.FunctionCall) -> Iterator[str]:
        self._item = item
        self.resource.output = [*self.resource.output, item]
        yield self._event("response.output_item.added", output_index=self._index, item=item)

    def _close(self, status: answers.ItemStatus) -> Iterator[str]:
        item, self._item = self._item, None
        if item is None:
            return
        item.status = status
        if isinstance(item, answers.OutputMessage):
            [part] = item.content
            where = {"item_id": item.id, "output_index": self._index, "content_index": 0}
            text = {"text": part.text, "logprobs": part.logprobs}
            yield self._event("response.output_text.done", **where, **text)
            yield self._event("response.content_part.done", **where, part=part)
        else:
            call = {"name": item.name, "arguments": item.arguments}
            yield self._event(
                "response.function_call_arguments.done", item_id=item.id, output_index=self._index, **call
            )
        yield self._event("response.output_item.done", output_index=self._index, item=item)

    def _close_last(self, result: GenerationResult) -> Iterator[str]:
        """The end of the items. An answer without any has one message, an empty one."""
        if not self.resource.output:
            yield from self._say("", [])
        yield from self._close("incomplete" if result.finish_reason == "length" else "completed")

    @property
    def _index(self) -> int:
        return len(self.resource.output) - 1

    def _part_event(self, name: str, /, **fields: Any) -> str:
        return self._item_event(name, content_index=0, **fields)

    def _item_event(self, name: str, /, **fields: Any) -> str:
        assert self._item is not None
        return self._event(name, item_id=self._item.id, output_index=self._index, **fields)

    def _event(self, name: str, /, **fields: Any) -> str:
        data = {"type": name, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return json_event(data, name)

    # The resource

    def _finished(self, result: GenerationResult) -> dict[str, Any]:
        """The resource with its answer, kept if it is to be."""
        self._ended, cut = True, result.finish_reason == "length"
        self.resource.status = "incomplete" if cut else "completed"
        self.resource.incomplete_details = answers.Incomplete(reason="max_output_tokens") if cut else None
        self.resource.completed_at = None if cut else int(time.time())
        self.resource.usage = self._usage(len(result.token_ids), result.cached_tokens)
        self.resource.tinyloop = loop_report([result], self.view.slo)
        resource = self.resource.model_dump()
        self._keep(resource, streamed=self._announced)
        return resource

    def _keep(self, resource: dict[str, Any], *, streamed: bool) -> None:
        """Not again what was deleted while it was being made."""
        if self.store is None or (streamed and self.store.get(self.owner, self.kept.id) is None):
            return
        messages = [*self.kept.messages, self._message()]
        self.store.put(self.owner, replace(self.kept, messages=messages, body=resource))

    def _message(self) -> dict[str, Any]:
        """The answer as a turn of the conversation."""
        said = [item for item in self.resource.output if isinstance(item, answers.OutputMessage)]
        called = [item for item in self.resource.output if isinstance(item, answers.FunctionCall)]
        message: dict[str, Any] = {"role": "assistant", "content": "".join(item.content[0].text for item in said)}
        calls = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in called
        ]
        return message | ({"tool_calls": calls} if calls else {})

    def _usage(self, made: int, cached: int) -> answers.Usage:
        given = len(self.view.prompts[0])
        details = answers.InputDetails(cached_tokens=cached)
        return answers.Usage(
            input_tokens=given, output_tokens=made, total_tokens=given + made, input_tokens_details=details
        )


def _resource(body: shapes.CreateRequest, view: ChatView, key: str, *, stored: bool) -> answers.Resource:
    """What is known before there is an answer: the request, with its defaults filled in."""
    same = ("instructions", "previous_response_id", "parallel_tool_calls", "max_output_tokens", "safety_identifier",
            "prompt_cache_key", "user", "top_p", "temperature", "presence_penalty", "frequency_penalty",
            "top_logprobs", "metadata")  # fmt: skip
    given = {name: getattr(body, name) for name in same}
    effort = body.reasoning.effort if body.reasoning and body.reasoning.effort else body.reasoning_effort
    choice = body.tool_choice if isinstance(body.tool_choice, str) else body.tool_choice.model_dump()
    return answers.Resource(
        id=key,
        created_at=view.created,
        status="in_progress",
        model=view.model,
        text=_text(body.text),
        tools=[tool.model_dump(include=set(shapes.FunctionTool.model_fields)) for tool in body.tools],
        tool_choice=choice,
        reasoning=answers.ReasoningShape(effort=effort, summary=body.reasoning.summary if body.reasoning else None),
        store=stored,
        service_tier=tier(body),
        **{name: value for name, value in given.items() if value is not None},
    )


def _text(text: shapes.TextConfig | None) -> answers.TextShape:
    if text is None:
        return answers.TextShape()
    shape = answers.TextShape(verbosity=text.verbosity or "medium")
    if text.format is not None:
        shape.format = text.format.model_dump(by_alias=True)
    return shape
