"""How clients of the OpenAI endpoints say which form an answer must have: `response_format`, `tools`, `tool_choice`."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from server.schemas.common import Text
from tinyloop.constraint import check_schema
from tinyloop.errors import RequestError
from tinyloop.tools import NO_PARAMETERS, Tool, Tools

MAX_TOOLS = 128
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class _Form(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class JsonSchema(_Form):
    """Without a schema any JSON object will do. `strict` changes nothing: a schema is always kept to."""

    name: Annotated[str, Field(max_length=64)]
    description: str | None = None
    strict: bool | None = None
    schema_: Annotated[Any, Field(alias="schema")] = None  # what is wrong with it, its compiler says best


class TextFormat(_Form):
    type: Literal["text"]


class JsonObjectFormat(_Form):
    type: Literal["json_object"]


class JsonSchemaFormat(_Form):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


def schema_of(form: ResponseFormat | None) -> Any:
    """The JSON schema that an answer has to validate against, unchecked; None for plain text."""
    if isinstance(form, JsonSchemaFormat) and form.json_schema.schema_ is not None:
        return form.json_schema.schema_
    return None if form is None or isinstance(form, TextFormat) else {"type": "object"}


class Function(_Form):
    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(_Form):
    type: Literal["function"]
    function: Function


class FunctionRef(_Form):
    name: str


class NamedTool(_Form):
    type: Literal["function"]
    function: FunctionRef


class AllowedTools(_Form):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class AllowedChoice(_Form):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolList = Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)]
ToolChoice = Literal["none", "auto", "required"] | Annotated[NamedTool | AllowedChoice, Field(discriminator="type")]


def tools_of(listed: list[FunctionTool] | None, choice: ToolChoice | None, *, many: bool) -> Tools | None:
    """The tools that may be called, and whether one must be; None for none. Raises RequestError."""
    offered = tuple(_tool(at, given.function) for at, given in enumerate(listed or ()))
    names = [tool.name for tool in offered]
    if len(set(names)) < len(names):
        raise RequestError("tools", "tools: every function needs a name of its own")
    if choice in (None, "auto") or (choice == "none" and offered):
        return Tools(offered, many=many) if offered and choice != "none" else None
    if choice == "none":
        return None
    if not offered:
        raise RequestError("tool_choice", "tool_choice is only allowed when tools are given")
    if choice == "required":
        return Tools(offered, "call", many)
    if isinstance(choice, NamedTool):
        return Tools(_chosen(offered, [choice.function.name]), "call", many=False)
    assert isinstance(choice, AllowedChoice)
    allowed = _chosen(offered, [tool.function.name for tool in choice.allowed_tools.tools])
    return Tools(allowed, "call" if choice.allowed_tools.mode == "required" else "auto", many)


def _chosen(offered: tuple[Tool, ...], names: list[str]) -> tuple[Tool, ...]:
    by_name = {tool.name: tool for tool in offered}
    if not names or not all(name in by_name for name in names):
        raise RequestError("tool_choice", "tool_choice names a function that is not among the tools")
    return tuple(by_name[name] for name in dict.fromkeys(names))


def _tool(at: int, function: Function) -> Tool:
    field = f"tools[{at}].function.parameters"
    parameters = function.parameters or NO_PARAMETERS
    if parameters.get("type", "object") != "object":
        raise RequestError(field, f"{field} must be a schema of type object")
    check_schema(parameters, field)
    return Tool(function.name, function.description or "", {"type": "object", **parameters}, field)
