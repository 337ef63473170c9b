"""Anthropic's /v1/messages: a request in the words of chat completions, an answer as content blocks and events."""

import json
import uuid
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from server.openapi import NamedEvent, described
from server.routers.asked import alias_loops
from server.routers.openai import chat_job, rendered
from server.routers.openai_views import ChatView, loop_report
from server.routers.shared import Problem, read_body, read_json, scheduler_of
from server.routers.telling import Teller, renaming, tell
from server.schemas import anthropic as shapes
from server.schemas.common import made, parse
from server.schemas.openai import ChatRequest
from server.sse import json_event, named_event
from server.types import GenerationChunk, GenerationResult
from tinyloop.tools import Piece

if TYPE_CHECKING:
    from server.request import ScheduledRequest

router = APIRouter(prefix="/v1/messages", tags=["Anthropic"])
NAMES = {"stop": "stop_sequences", "response_format.json_schema.schema": "output_config.format.schema"}
EXAMPLE = {"model": "smollm2", "messages": [{"role": "user", "content": "Name the capital of France."}], "loops": 2}
MESSAGES = described(
    shapes.MessagesRequest,
    shapes.Answer,
    EXAMPLE | {"max_tokens": 16, "temperature": 0},
    events=NamedEvent,
    busy=True,
    error=shapes.ErrorBody,
)
COUNT = described(shapes.CountRequest, shapes.TokenCount, EXAMPLE, error=shapes.ErrorBody)
_KINDS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error",
    413: "request_too_large", 503: "overloaded_error",
}  # fmt: skip


def dress(problem: Problem) -> dict[str, Any]:
    """An error as Anthropic shows it. There is no field for the field: the message names it."""
    kind = _KINDS.get(problem.status, "invalid_request_error" if problem.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": problem.message}, "request_id": problem.request_id}


@router.post("", **MESSAGES)
async def messages(request: Request) -> Response:
    """An answer, whole or as a stream of named events."""
    with scheduler_of(request).arrival() as arrival, renaming(_named):
        with scheduler_of(request).counting_refusals():
            body = parse(shapes.MessagesRequest, await read_body(request, arrival))
            view, work = await chat_job(request, arrival, _translated(body))
        teller = MessageTeller(view, scheduler_of(request).info.max_context)
        return await tell(request, teller, work, stream=body.stream)


@router.post("/count_tokens", **COUNT)
async def count_tokens(request: Request) -> shapes.TokenCount:
    """How many tokens a request would put before the model."""
    with renaming(_named):
        body = parse(shapes.CountRequest, await read_json(request))
        alias_loops(body.model, scheduler_of(request).info)
        asked = _translated(body)
        tokens = await rendered(request, asked, asked.tools_asked())
    return shapes.TokenCount(input_tokens=len(tokens))


def _named(field: str) -> str:
    return NAMES.get(field, field.replace(".function.parameters", ".input_schema"))


def _translated(body: shapes.CountRequest) -> ChatRequest:
    """The same request in the words of chat completions. A last turn of the assistant is gone on with."""
    said = body.said()
    fields = body.dials() | {"model": body.model, "messages": said}
    if said[-1]["role"] == "assistant" and "tool_calls" not in said[-1]:
        fields["continue_final_message"] = True
    if body.tools is not None:
        fields["tools"] = [tool.asked() for tool in body.tools]
    if body.tool_choice is not None:
        fields["tool_choice"] = body.tool_choice.asked()
        fields["parallel_tool_calls"] = not body.tool_choice.disable_parallel_tool_use
    if body.output_config is not None:
        fields |= _configured(body.output_config)
    if isinstance(body, shapes.MessagesRequest):
        same = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed")
        fields |= {name: getattr(body, name) for name in same}
        fields["stop"] = body.stop_sequences
        fields["service_tier"] = "default" if body.service_tier == "standard_only" else body.service_tier
    return made(ChatRequest, fields)


def _configured(config: shapes.OutputConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {} if config.effort is None else {"reasoning_effort": config.effort}
    if config.format is not None:
        schema = {"name": "answer", "schema": config.format.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


class MessageTeller(Teller):
    """Builds the content blocks, and the events that build them, from the answer's text and calls."""

    def __init__(self, view: ChatView, max_context: int) -> None:
        self.view, self.max_context = view, max_context
        self.prompt_tokens = len(view.prompts[0])
        self.message = shapes.Answer(
            id=f"msg_{uuid.uuid4().hex}",
            model=view.model,
            content=[],
            usage=shapes.Usage(input_tokens=self.prompt_tokens, output_tokens=0),
        )
        self._arguments = ""  # of the call that is open
        self._open = False

    def whole(self, result: GenerationResult) -> dict[str, Any]:
        for _ in self._add([*self.view.pieces(0, result.text), *self.view.rest(0)]):
            pass
        for _ in self._close():
            pass
        self._finish(result)
        return self.message.model_dump()

    def opening(self) -> Iterator[str]:
        yield named_event("message_start", message=self.message.model_dump(exclude={"tinyloop"}))

    def token(self, chunk: GenerationChunk) -> Iterator[str]:
        yield from self._add(self.view.pieces(0, chunk.text))

    def closing(self, result: GenerationResult) -> Iterator[str]:
        yield from self._add(self.view.rest(0))
        yield from self._close()
        self._finish(result)
        message = self.message.model_dump()
        delta = {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]}
        yield named_event("message_delta", delta=delta, usage=message["usage"], tinyloop=message["tinyloop"])
        yield named_event("message_stop")

    def failing(self, problem: Problem) -> Iterator[str]:
        yield json_event(dress(problem), "error")

    def waiting(self, request: "ScheduledRequest") -> str:
        return named_event("ping")

    def _add(self, pieces: Iterable[Piece]) -> Iterator[str]:
        for piece in pieces:
            if piece.call is not None and piece.name:
                yield from self._close()
                call = shapes.ToolUse(id=f"toolu_{uuid.uuid4().hex}", name=piece.name, input={})
                yield from self._begin(call)
            elif piece.call is not None:
                self._arguments += piece.arguments
                yield self._delta(type="input_json_delta", partial_json=piece.arguments)
            else:
                yield from self._say(piece.text)

    def _say(self, text: str) -> Iterator[str]:
        if not self._open or not isinstance(self.message.content[-1], shapes.TextContent):
            yield from self._close()
            yield from self._begin(shapes.TextContent(text=""))
        block = self.message.content[-1]
        assert isinstance(block, shapes.TextContent)
        block.text += text
        yield self._delta(type="text_delta", text=text)

    def _begin(self, block: shapes.TextContent | shapes.ToolUse) -> Iterator[str]:
        self._open, self._arguments = True, ""
        self.message.content = [*self.message.content, block]
        yield named_event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> Iterator[str]:
        if not self._open:
            return
        self._open = False
        block = self.message.content[-1]
        if isinstance(block, shapes.ToolUse):
            block.input = _object(self._arguments)
        yield named_event("content_block_stop", index=self._index)

    def _delta(self, **delta: Any) -> str:
        return named_event("content_block_delta", index=self._index, delta=delta)

    @property
    def _index(self) -> int:
        return len(self.message.content) - 1

    def _finish(self, result: GenerationResult) -> None:
        cached = result.cached_tokens
        self.message.usage = shapes.Usage(
            input_tokens=self.prompt_tokens - cached,
            cache_read_input_tokens=cached,
            output_tokens=len(result.token_ids),
        )
        self.message.stop_reason = self._stop_reason(result)
        if self.message.stop_reason == "stop_sequence":
            self.message.stop_sequence = str(result.stop_reason)
        self.message.tinyloop = loop_report([result], self.view.slo)

    def _stop_reason(self, result: GenerationResult) -> shapes.StopReason:
        if result.finish_reason == "length":
            full = self.prompt_tokens + len(result.token_ids) >= self.max_context
            return "model_context_window_exceeded" if full else "max_tokens"
        if isinstance(result.stop_reason, str):
            return "stop_sequence"
        called = any(isinstance(block, shapes.ToolUse) for block in self.message.content)
        return "tool_use" if called else "end_turn"


def _object(arguments: str) -> dict[str, Any]:
    """A call's arguments. Those of one that was cut are no JSON yet."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
