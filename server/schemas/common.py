"""Reading what clients send: strict types, the fields that every API shares, and refusals that name what is wrong.

Requests are read strictly: no number in a string, no unknown field. What this version cannot do is refused by name
unless it is sent with the value that means "off". Every refusal is a RequestError whose message holds at most a few
characters of the input. Knows no endpoint's own fields and no scheduler.
"""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NoReturn, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from tinyloop.config import ExitSignal
from tinyloop.errors import RequestError

Tier = Literal["auto", "default", "flex", "scale", "priority", "fast"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
SHOWN = 40  # characters of a client's own text that a message may hold


class UnsupportedParameter(RequestError):
    """A field that the API has and this server does not."""

    code = "unsupported_parameter"


class UnknownParameter(RequestError):
    """A field that the API does not have."""

    code = "unknown_parameter"


def _encodable(text: str) -> str:
    """JSON can spell half a surrogate pair; no tokenizer can read one."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("not valid Unicode text") from None
    return text


Text = Annotated[str, AfterValidator(_encodable)]
# The length first: once a function has been there, pydantic counts "items".
StopText = Annotated[str, Field(max_length=1024), AfterValidator(_encodable)]
Salt = Annotated[str, Field(max_length=128), AfterValidator(_encodable)]
Label = Annotated[str, Field(max_length=128, pattern=r"^[\x20-\x7e]*$")]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
OrRest = Annotated[int, Field(ge=-1, lt=2**31)]  # -1: no limit of its own
Whole = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Positive = Annotated[float, Field(gt=0)]
MAX_BIASES = 1024
MAX_MESSAGES = 4096  # far more than any context holds; a template takes its time for each


def _few(biases: Any) -> Any:
    if isinstance(biases, dict) and len(biases) > MAX_BIASES:
        raise ValueError(f"at most {MAX_BIASES} tokens")
    return biases


# fail_fast: a list of a million wrong elements must not become a million error objects.
Texts = Annotated[list[Text], Field(fail_fast=True)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Bias = Annotated[dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], float], BeforeValidator(_few)]


def _true_schema(schema: dict[str, Any], kind: Any) -> None:
    """Unknown fields are let in by the model only to be refused by name."""
    schema["additionalProperties"] = False
    ignored = {name: {"description": "Read and ignored."} for name in sorted(getattr(kind, "ignored", ()))}
    schema.setdefault("properties", {}).update(ignored)
    if ignored:
        schema["properties"]["tinyloop"] = {"type": "object", "description": "Depth, order and deadline together."}


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, json_schema_extra=_true_schema)


class LoopSpan(Strict):
    """A depth that may vary: down to `min` under pressure, up to `max`, and per token where the model can tell."""

    min: Whole | None = None
    max: Whole | None = None
    exit_threshold: float | None = None
    exit_signal: ExitSignal | None = None


class Deadlines(Strict):
    """In milliseconds: to the first token, between two, to the last."""

    ttft_ms: Positive | None = None
    tpot_ms: Positive | None = None
    e2e_ms: Positive | None = None


class Closed(Strict):
    """A part of a body, which has exactly the declared fields."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class Body(Strict):
    """A whole body. `ignored` and `unsupported` name further fields: accepted whatever they say, and refused unless
    they hold one of the values that ask for nothing. `unknown_says` is the complaint about any other."""

    ignored: ClassVar[frozenset[str]] = frozenset()
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    unknown_says: ClassVar[str] = "Unknown parameter: {}"

    def check(self) -> None:
        """Fields that only make sense together. Raises RequestError."""


class Dialled(Body):
    """Depth, order and deadline: what a request of any API may ask for beside the API's own fields.

    `priority`: higher goes first.
    """

    loops: Whole | Literal["auto"] | LoopSpan | None = None
    loops_policy: Literal["strict", "clamp"] | None = None
    min_loops: Whole | None = None
    prefill_loops: Whole | None = None
    exit_threshold: float | None = None
    exit_signal: ExitSignal | None = None
    cache_window: Count | None = None
    cache_salt: Salt | None = None
    priority: Whole | None = None
    service_tier: Tier | None = None
    slo_ms: Positive | Deadlines | None = None
    reasoning_effort: Effort | None = None
    request_id: Label | None = None

    def dials(self) -> dict[str, Any]:
        """Those that were given."""
        given = {name: getattr(self, name) for name in Dialled.model_fields}
        return {name: value for name, value in given.items() if value is not None}


R = TypeVar("R", bound=Body)


def parse(kind: type[R], raw: bytes) -> R:
    """A request from a body. Raises RequestError (also UnsupportedParameter, UnknownParameter) and nothing else."""
    return made(kind, _with_bag(load_object(raw)))


def made(kind: type[R], data: Mapping[str, Any]) -> R:
    """A request from its fields. Raises like `parse`."""
    try:
        request = kind.model_validate(data)
    except ValidationError as error:
        raise_readable(error)
    _check_extras(request)
    request.check()
    return request


def _with_bag(data: dict[str, Any]) -> dict[str, Any]:
    """Depth, order and deadline may also stand together in an object `tinyloop`."""
    bag = data.pop("tinyloop", None) or {}
    if not isinstance(bag, dict):
        raise RequestError("tinyloop", "tinyloop must be an object")
    for name, value in bag.items():
        if name not in Dialled.model_fields:
            refuse_unknown(f"tinyloop.{name}")
        if data.get(name) not in (None, value):
            raise RequestError(name, f"{name} and tinyloop.{name} differ")
    return {**data, **bag}


def load_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in a body. Raises RequestError."""
    data = _load(raw)
    if not isinstance(data, dict):
        raise RequestError("", "the body must be a JSON object")
    return data


def _load(raw: bytes) -> Any:
    def refuse(word: str) -> NoReturn:
        raise RequestError("", f"the body is not valid JSON: {word} is not a JSON number")

    try:
        return json.loads(raw.decode(), parse_constant=refuse)
    except RequestError:
        raise
    except json.JSONDecodeError as error:
        raise RequestError("", f"the body is not valid JSON: {error.msg} at character {error.pos}") from None
    except (ValueError, RecursionError):  # not UTF-8, a number of thousands of digits, or nested too deep
        raise RequestError("", "the body is not valid JSON") from None


def raise_readable(error: ValidationError) -> NoReturn:
    """The first wrong field, with everything it could have been."""
    details = error.errors(include_url=False, include_input=False, include_context=False)
    field = str(details[0]["loc"][0]) if details[0]["loc"] else ""
    same = [detail for detail in details if detail["loc"][:1] == details[0]["loc"][:1]]
    if same[0]["type"] == "missing" and len(same[0]["loc"]) == 1:
        raise RequestError(field, f"{field} is required") from None
    wanted = " or ".join(dict.fromkeys(re.sub(r"^(Input|String|List|Value error,) ", "", d["msg"]) for d in same))
    raise RequestError(field, f"{_path(same[0]['loc'])}: {wanted}") from None


def _path(loc: tuple[int | str, ...]) -> str:
    """`messages[2].content`; without the names that pydantic gives to the branches of a union."""
    if not loc:
        return "the body"
    path = str(loc[0])
    for step in loc[1:]:
        if isinstance(step, int):
            path += f"[{step}]"
        elif re.fullmatch(r"[a-z_]+", step) and step not in ("str", "int", "float", "constrained"):
            path += f".{step[:SHOWN]}"
    return path


def _check_extras(request: Body) -> None:
    for field in ("loops", "slo_ms"):
        for name in getattr(getattr(request, field, None), "model_extra", None) or ():
            refuse_unknown(f"{field}.{name}")
    for name, value in (request.model_extra or {}).items():
        if value is None or name in request.ignored or value in request.unsupported.get(name, ()):
            continue
        if name in request.unsupported:
            raise UnsupportedParameter(name, f"{name} is not supported by this server")
        refuse_unknown(name, request.unknown_says)


def refuse_unknown(name: str, says: str = Body.unknown_says) -> NoReturn:
    """Raises UnknownParameter, with as much of the name as a message may hold."""
    shown = name if len(name) <= SHOWN else name[:SHOWN] + "..."
    shown = shown.encode("utf-8", "backslashreplace").decode()  # half of a surrogate pair could not be sent back
    raise UnknownParameter(shown, says.format(repr(shown)))
