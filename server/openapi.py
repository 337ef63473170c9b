"""The description at /openapi.json. Bodies are read by the routers themselves, so the framework has to be told of them.

    @router.post("/chat/completions", **described(ChatRequest, ChatCompletion, {"model": "m", "messages": []}))

Knows how to describe a route; knows no route.
"""

from collections.abc import Collection, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict

from tinyloop import __version__

REF = "#/components/schemas/{model}"
ANY = {401: "no key, or an unknown one", 403: "a Host header that is not served here", 500: "a fault of ours"}
READING = {
    400: "a field is wrong; `param` names it",
    404: "no such model",
    408: "the body did not come in time",
    413: "the body is too large",
    415: "not application/json",
}
SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
BUSY = {429: "busy, if the operator prefers that to 503", 503: "no room, no hope for the SLO, or shutting down"}


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(BaseModel):
    """How every refusal looks."""

    error: ErrorDetail


class NamedEvent(BaseModel):
    """An event of a stream; its fields go with its `type`, which is also its name."""

    model_config = ConfigDict(extra="allow")

    type: str


def described(
    body: type[BaseModel] | None = None,
    answer: type[BaseModel] | None = None,
    example: Mapping[str, Any] | None = None,
    *,
    events: type[BaseModel] | None = None,
    busy: bool = False,
    refusals: Collection[int] = (),
    error: type[BaseModel] = ErrorBody,
) -> dict[str, Any]:
    """Arguments of a route's decorator. `events`: one event of its stream, if it has one; `busy`: it may be refused for
    lack of room; `refusals`: further statuses; `error`: what those hold."""
    reasons = ANY | (READING if body else {}) | (BUSY if busy else {}) | dict.fromkeys(refusals, "refused")
    responses: dict[int | str, Any] = {
        status: {"model": error, "description": reason} for status, reason in sorted(reasons.items())
    }
    if events is not None:
        stream = {"text/event-stream": {"schema": _event(events)}}
        responses[200] = {"content": stream, "description": "The answer, or with `stream` its events"}
    more: dict[str, Any] = {"responses": responses}
    if answer is not None:
        more["response_model"] = answer
    if body is not None:
        content = {"schema": _schema(body)} | ({"example": example} if example else {})
        more["openapi_extra"] = {"requestBody": {"required": True, "content": {"application/json": content}}}
    return more


def _schema(kind: type[BaseModel]) -> dict[str, Any]:
    """With its definitions inside, until `describe` hoists them."""
    return kind.model_json_schema(ref_template=REF)


def _event(kind: type[BaseModel]) -> dict[str, Any]:
    """One server-sent event, as OpenAPI 3.2 says it. Streams whose events have no names end with a word."""
    data: Any = {"type": "string", "contentMediaType": "application/json", "contentSchema": _schema(kind)}
    if not issubclass(kind, NamedEvent):
        data = {"anyOf": [data, {"const": "[DONE]"}]}
    name = {"type": "string"}
    return {"type": "object", "properties": {"event": name, "data": data}, "required": ["data"]}


def describe(app: FastAPI) -> None:
    """Let `app` answer with a description that is true."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title="TinyLoop", version=__version__, routes=app.routes)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for operation in (operation for path in document["paths"].values() for operation in path.values()):
        operation["responses"].pop("422", None)  # the framework's own refusal, which is never given
        _hoist(operation, schemas)
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    schemes = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    document["components"]["securitySchemes"] = schemes
    document["security"] = [{}, *({name: []} for name in schemes)]  # {}: a server without keys asks for none
    return document


def _hoist(value: Any, schemas: dict[str, Any]) -> None:
    """Move definitions to where references look for them."""
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _hoist(item, schemas)
    if isinstance(value, dict) and "$defs" in value:
        schemas |= value.pop("$defs")
