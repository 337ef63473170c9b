"""POST /v1/responses and what goes with it. Talks to the scheduler and the store of answers.

A response may go on from an earlier one that is still kept. What is kept is bounded, in memory, and belongs to the API
key that made it.
"""

import uuid
from dataclasses import replace
from typing import Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from server.openapi import NamedEvent, described
from server.routers.asked import alias_loops
from server.routers.openai import chat_job, rendered
from server.routers.responses_views import ResponseTeller
from server.routers.shared import read_body, read_json, refusal, scheduler_of, store_of, tenant_of
from server.routers.telling import renaming, tell
from server.schemas import responses as shapes
from server.schemas import responses_answers as answers
from server.schemas.common import made, parse
from server.schemas.openai import ChatRequest
from server.store import Stored
from tinyloop.errors import RequestError

router = APIRouter(prefix="/v1/responses", tags=["Responses"])
NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema.schema": "text.format.schema",
}
EXAMPLE = {"model": "smollm2", "input": "Name the capital of France.", "instructions": "Be brief.", "loops": 2}
CREATE = described(
    shapes.CreateRequest,
    answers.Resource,
    EXAMPLE | {"max_output_tokens": 16, "temperature": 0},
    events=NamedEvent,
    busy=True,
)
COUNT = described(shapes.CountRequest, answers.InputTokens, EXAMPLE)
KEPT = (400, 404)
GOES_ON = ("completed", "incomplete")


@router.post("", **CREATE)
async def create(request: Request) -> Response:
    """An answer, whole or as a stream of named events."""
    with scheduler_of(request).arrival() as arrival, renaming(_named):
        with scheduler_of(request).counting_refusals():
            body = parse(shapes.CreateRequest, await read_body(request, arrival))
            conversation = [*_earlier(request, body), *body.said()]
            key = f"resp_{uuid.uuid4().hex}"
            asked = _translated(body, conversation, body.request_id or key)
            view, work = await chat_job(request, arrival, asked)
        kept = Stored(key, conversation, {}, _items(body), asked.request_id or "")
        store = store_of(request) if body.store else None
        teller = ResponseTeller(body, view, kept, store, tenant_of(request))
        return await tell(request, teller, work, stream=body.stream)


@router.post("/input_tokens", **COUNT)
async def input_tokens(request: Request) -> answers.InputTokens:
    """How many tokens a request would put before the model."""
    with renaming(_named):
        body = parse(shapes.CountRequest, await read_json(request))
        alias_loops(body.model, scheduler_of(request).info)
        asked = _translated(body, [*_earlier(request, body), *body.said()])
        tokens = await rendered(request, asked, asked.tools_asked())
    return answers.InputTokens(input_tokens=len(tokens))


@router.get("/{response_id}", **described(None, answers.Resource, refusals=KEPT))
async def retrieve(request: Request, response_id: str, stream: bool = False) -> dict[str, Any]:
    """An answer that is kept, or as far as it has come."""
    if stream:
        raise RequestError("stream", "stream: a kept response is not streamed again")
    return dict(_kept(request, response_id).body)


@router.delete("/{response_id}", **described(refusals=KEPT))
async def delete(request: Request, response_id: str) -> answers.Deleted:
    """Forget an answer. One in progress is cancelled."""
    kept = _kept(request, response_id)
    store_of(request).delete(tenant_of(request), response_id)
    if kept.body["status"] == "in_progress":
        scheduler_of(request).cancel_named(kept.label, tenant_of(request))
    return answers.Deleted(id=response_id)


@router.post("/{response_id}/cancel", **described(None, answers.Resource, refusals=KEPT))
async def cancel(request: Request, response_id: str) -> dict[str, Any]:
    """Stop an answer that is being streamed. What was said so far stays said."""
    kept, owner = _kept(request, response_id), tenant_of(request)
    if kept.body["status"] != "in_progress":
        raise RequestError("response_id", f"response_id: the response is {kept.body['status']}, not in progress")
    body = {**kept.body, "status": "cancelled"}
    store_of(request).put(owner, replace(kept, body=body))
    scheduler_of(request).cancel_named(kept.label, owner)
    return body


@router.get("/{response_id}/input_items", **described(refusals=KEPT))
async def input_items(
    request: Request,
    response_id: str,
    limit: int = Query(default=20, ge=1, le=100),
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> answers.ItemList:
    """What a kept answer's own turn was given."""
    items = list(_kept(request, response_id).items)
    if order == "desc":
        items.reverse()
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise RequestError("after", "after: no such item in this list")
    start = 0 if after is None else ids.index(after) + 1
    page = [dict(item) for item in items[start : start + limit]]
    first, last = (page[0]["id"], page[-1]["id"]) if page else ("", "")
    return answers.ItemList(data=page, first_id=first, last_id=last, has_more=start + limit < len(items))


def _named(field: str) -> str:
    return NAMES.get(field, field.replace(".function.", "."))


def _kept(request: Request, key: str) -> Stored:
    stored = store_of(request).get(tenant_of(request), key)
    if stored is None or stored.body.get("object") != "response":  # other APIs keep their answers there, too
        raise refusal(404, "response_not_found", "no response of this id is kept here", "response_id")
    return stored


def _earlier(request: Request, body: shapes.Prompted) -> list[dict[str, Any]]:
    """The conversation that is gone on with, without the instructions that led it."""
    if body.previous_response_id is None:
        return []
    stored = store_of(request).get(tenant_of(request), body.previous_response_id)
    field = "previous_response_id"
    if stored is None or stored.body.get("object") != "response":
        raise refusal(404, "previous_response_not_found", f"{field}: no such response is kept here", field)
    if stored.body["status"] not in GOES_ON:
        raise RequestError(field, f"{field}: that response is {stored.body['status']}, it cannot be gone on with")
    return [dict(message) for message in stored.messages]


def _translated(body: shapes.Prompted, conversation: list[dict[str, Any]], label: str | None = None) -> ChatRequest:
    """The same request in the words of chat completions."""
    lead = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    fields = body.dials() | {"model": body.model, "messages": [*lead, *conversation], "request_id": label}
    if body.reasoning is not None and body.reasoning.effort is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    choice = body.tool_choice if isinstance(body.tool_choice, str) else body.tool_choice.asked()
    fields |= {"tools": [tool.asked() for tool in body.tools], "tool_choice": choice}
    fields["parallel_tool_calls"] = body.parallel_tool_calls
    if body.text is not None:
        fields["response_format"] = body.text.asked()
    if isinstance(body, shapes.CreateRequest):
        same = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
                "repetition_penalty", "seed")  # fmt: skip
        fields |= {name: getattr(body, name) for name in same}
        fields |= {"max_tokens": body.max_output_tokens, "logprobs": body.logprobs}
        fields["top_logprobs"] = body.top_logprobs if body.logprobs else None
    return made(ChatRequest, fields)


def _items(body: shapes.CreateRequest) -> list[dict[str, Any]]:
    """This turn's input as the API lists it."""
    if isinstance(body.input, str):
        return [_message("user", [{"type": "input_text", "text": body.input}])]
    return [_listed(item) for item in body.input]


def _listed(item: Any) -> dict[str, Any]:
    if not isinstance(item, shapes.MessageItem):
        fields: dict[str, Any] = item.model_dump()
        return {"id": f"item_{uuid.uuid4().hex}", "status": "completed"} | fields
    kind = "output_text" if item.role == "assistant" else "input_text"
    part = {"type": kind, "text": item.plain()["content"]}
    return _message(item.role, [part | ({"annotations": []} if kind == "output_text" else {})])


def _message(role: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "message", "id": f"msg_{uuid.uuid4().hex}", "status": "completed", "role": role, "content": content}
