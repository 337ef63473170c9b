"""LM Studio's REST v1: chats that go on by response id, models, load and unload. Talks to the scheduler.

The model is loaded for as long as the process lives, so loading it again finds it there, and unloading is refused.
"""

import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from server.openapi import NamedEvent, described
from server.routers.asked import alias_loops
from server.routers.lmstudio import quantization, rate
from server.routers.openai import chat_job
from server.routers.openai_views import ChatView, loop_report
from server.routers.shared import Job, Problem, read_body, read_json, refusal, scheduler_of, store_of, tenant_of
from server.routers.telling import Teller, renaming, tell
from server.schemas import lmstudio as shapes
from server.schemas.common import made, parse
from server.schemas.openai import ChatRequest
from server.sse import named_event
from server.store import ResponseStore, Stored
from server.types import GenerationChunk, GenerationResult
from tinyloop.errors import ContextOverflow, RequestError

if TYPE_CHECKING:
    from server.engine import ModelInfo
    from server.request import ScheduledRequest

router = APIRouter(prefix="/api/v1", tags=["LM Studio v1"])
NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "repetition_penalty": "repeat_penalty"}
CHAT = described(
    shapes.ChatV1,
    shapes.ChatAnswerV1,
    {"model": "smollm2", "input": "Name the capital of France.", "system_prompt": "Be brief.", "loops": 2},
    events=NamedEvent,
    busy=True,
    error=shapes.ErrorBody,
)
LOAD = described(shapes.Load, shapes.Loaded, {"model": "smollm2", "echo_load_config": True}, error=shapes.ErrorBody)
UNLOAD = described(shapes.Unload, None, {"instance_id": "smollm2"}, refusals=[501], error=shapes.ErrorBody)
_KINDS = {"model_not_found": "model_not_found", "job_not_found": "job_not_found", "not_supported": "not_implemented"}


def dress(problem: Problem) -> dict[str, Any]:
    """An error as LM Studio shows it."""
    kind = "invalid_request" if problem.status < 500 else "internal_error" if problem.status == 500 else "unknown"
    error = {"type": _KINDS.get(problem.code, kind), "message": problem.message, "code": problem.code}
    return {"error": error | ({} if problem.field is None else {"param": problem.field})}


@router.get("/models", **described(error=shapes.ErrorBody))
async def models(request: Request) -> shapes.ModelsV1:
    """The served model, and its one instance."""
    return shapes.ModelsV1(models=[_entry(scheduler_of(request).info)])


@router.post("/models/load", response_model_exclude_none=True, **LOAD)
async def load(request: Request) -> shapes.Loaded:
    """Find the model loaded. What it cannot be loaded with is refused."""
    body, info = parse(shapes.Load, await read_json(request)), scheduler_of(request).info
    alias_loops(body.model, info)
    if (body.context_length or 0) > info.max_context:
        most = f"context_length must be between 1 and {info.max_context}, got {body.context_length}"
        raise RequestError("context_length", most)
    return shapes.Loaded(
        instance_id=info.id,
        load_time_seconds=0.0,
        load_config=_config(info) if body.echo_load_config else None,
    )


@router.post("/models/unload", status_code=501, **UNLOAD)
async def unload(request: Request) -> None:
    """Refused: this process serves one model from its start to its end."""
    body, info = parse(shapes.Unload, await read_json(request)), scheduler_of(request).info
    alias_loops(body.instance_id, info)
    raise refusal(501, "not_supported", "the model is served for as long as the process runs; stop the process instead")


@router.post("/chat", **CHAT)
async def chat(request: Request) -> Response:
    """The next answer of a conversation, whole or as named events."""
    with scheduler_of(request).arrival() as arrival, renaming(NAMES.get):
        with scheduler_of(request).counting_refusals():
            body = parse(shapes.ChatV1, await read_body(request, arrival))
            owner = tenant_of(request)
            messages = _conversation(body, store_of(request), owner)
            view, work = await chat_job(request, arrival, _translated(body, messages))
            work = _within_context(work, body)
        teller = ChatTeller(view, messages, store_of(request) if body.store else None, owner)
        return await tell(request, teller, work, stream=body.stream)


def _conversation(body: shapes.ChatV1, store: ResponseStore, owner: str) -> list[dict[str, Any]]:
    """What was said before, under the newest system prompt, and the user's turn."""
    earlier: list[dict[str, Any]] = []
    if body.previous_response_id is not None:
        stored = store.get(owner, body.previous_response_id)
        if stored is None:
            message = "previous_response_id: no such response is kept here"
            raise refusal(404, "previous_response_not_found", message, "previous_response_id")
        earlier = [dict(message) for message in stored.messages]
    if body.system_prompt is not None:
        earlier = [message for message in earlier if message["role"] != "system"]
        earlier.insert(0, {"role": "system", "content": body.system_prompt})
    return [*earlier, {"role": "user", "content": body.text}]


def _translated(body: shapes.ChatV1, messages: list[dict[str, Any]]) -> ChatRequest:
    """The same request in the words of the OpenAI API."""
    fields: dict[str, Any] = body.dials() | {
        "model": body.model,
        "messages": messages,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "min_p": body.min_p,
        "repetition_penalty": body.repeat_penalty,
        "max_tokens": body.max_output_tokens,
    }
    if body.reasoning is not None:
        fields["reasoning_effort"] = shapes.EFFORTS[body.reasoning]
    return made(ChatRequest, fields)


def _within_context(work: Job, body: shapes.ChatV1) -> Job:
    """The work with no more tokens than the client's own context. Raises ContextOverflow."""
    [asked] = work.requests
    if body.context_length is None:
        return work
    room = body.context_length - len(asked.prompt)
    if room < (body.max_output_tokens or 1):
        message = f"context_length is {body.context_length}, and the conversation alone has {len(asked.prompt)} tokens"
        raise ContextOverflow("context_length", message)
    return replace(work, requests=[replace(asked, max_new_tokens=min(asked.max_new_tokens, room))])


class ChatTeller(Teller):
    """`store` None: the answer is not kept, and has no id."""

    def __init__(self, view: ChatView, messages: list[dict[str, Any]], store: ResponseStore | None, owner: str) -> None:
        self.view, self.messages = view, messages
        self.store, self.owner = store, owner
        self.text, self.tokens = "", 0
        self._announced = False

    def whole(self, result: GenerationResult) -> dict[str, Any]:
        answer = self._answer(result)
        if self.store is not None:
            key = f"resp_{uuid.uuid4().hex}"
            messages = [*self.messages, {"role": "assistant", "content": result.text}]
            if self.store.put(self.owner, Stored(key, messages, answer)):
                answer["response_id"] = key
        return answer

    def opening(self) -> Iterator[str]:
        yield from self._announce()
        yield named_event("prompt_processing.end")
        yield named_event("message.start")

    def token(self, chunk: GenerationChunk) -> Iterator[str]:
        self.tokens += 1
        self.text += chunk.text
        if chunk.text:
            yield named_event("message.delta", content=chunk.text)

    def closing(self, result: GenerationResult) -> Iterator[str]:
        yield named_event("message.end")
        yield named_event("chat.end", result=self.whole(result))

    def failing(self, problem: Problem) -> Iterator[str]:
        yield named_event("error", **dress(problem))
        partial = GenerationResult(text=self.text, token_ids=(0,) * self.tokens)
        yield named_event("chat.end", result=self._answer(partial))

    def waiting(self, request: "ScheduledRequest") -> str:
        """How far the prompt has been read, while it is being read."""
        if self.opened:
            return super().waiting(request)
        whole = 0.0 if request.prepared is None else request.prepared.prompt_work
        progress = 1 - request.prompt_left / whole if whole else 0.0
        return "".join([*self._announce(), named_event("prompt_processing.progress", progress=round(progress, 4))])

    def _announce(self) -> Iterator[str]:
        if not self._announced:
            self._announced = True
            yield named_event("chat.start", model_instance_id=self.view.model)
            yield named_event("prompt_processing.start")

    def _answer(self, result: GenerationResult) -> dict[str, Any]:
        per_second, first_s, _ = rate(result)
        stats = shapes.StatsV1(
            input_tokens=len(self.view.prompts[0]),
            total_output_tokens=len(result.token_ids),
            tokens_per_second=per_second,
            time_to_first_token_seconds=first_s,
        )
        output = [shapes.MessageOutput(content=result.text)]
        answer = shapes.ChatAnswerV1(
            model_instance_id=self.view.model,
            output=output,
            stats=stats,
            tinyloop=loop_report([result], self.view.slo),
        )
        return answer.model_dump(exclude={"response_id"})


def _config(info: "ModelInfo") -> shapes.LoadConfig:
    return shapes.LoadConfig(context_length=info.max_context)


def _entry(info: "ModelInfo") -> shapes.ModelV1:
    name, bits = quantization(info)
    return shapes.ModelV1(
        key=info.id,
        display_name=info.id,
        architecture=info.family,
        quantization=shapes.Quantization(name=name, bits_per_weight=bits),
        size_bytes=info.parameters * bits // 8,
        params_string=f"{info.parameters / 1e6:.0f}M",
        loaded_instances=[shapes.Instance(id=info.id, config=_config(info))],
        max_context_length=info.max_context,
        capabilities=shapes.Capabilities(
            reasoning=shapes.ReasoningChoice(allowed_options=list(shapes.EFFORTS), default="medium")
        ),
    )
