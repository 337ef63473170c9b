"""What clients send to the OpenAI endpoints. Knows no scheduler and runs nothing; answers are in openai_answers.

Requests are read strictly: no number in a string, no unknown field. What this version cannot do is refused by name
unless it is sent with the value that means "off". Every refusal is a RequestError whose message holds at most a few
characters of the input.
"""

import json
import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
)

from tinyloop.errors import RequestError
from tinyloop.sampling import MAX_LOGPROBS

Tier = Literal["auto", "default", "flex", "scale", "priority", "fast"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
SHOWN = 40  # characters of a client's own text that a message may hold


class UnsupportedParameter(RequestError):
    """A field that the API has and this server does not."""

    code = "unsupported_parameter"


class UnknownParameter(RequestError):
    """A field that the API does not have."""

    code = "unknown_parameter"


# Accepted whatever they say: labels, and hints that ask for nothing.
_IGNORED = frozenset({
    "metadata", "moderation", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "safety_identifier", "store", "user", "verbosity",
})  # fmt: skip
# Not built yet; the values that ask for nothing pass.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "web_search_options": (),
}


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


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: bool = False  # nothing to do: it pads chunks against eavesdroppers
    continuous_usage_stats: bool = False


class TextPart(_Strict):
    type: Literal["text"]
    text: Text


_SAME_ROLE = {"developer": "system", "function": "tool"}  # a newer and an older word; templates know the other


class Message(BaseModel):
    """One turn of a chat. `plain` is what a template gets to see."""

    model_config = ConfigDict(strict=True, extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: Text | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _text_only(cls, content: Any) -> Any:
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") != "text":
                raise ValueError("only parts of type text are supported")
        return content

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())

    def plain(self) -> dict[str, Any]:
        role = _SAME_ROLE.get(self.role, self.role)
        extra = {"tool_calls": self.tool_calls, "tool_call_id": self.tool_call_id}
        return {"role": role, "content": self.text} | {key: value for key, value in extra.items() if value}


class Request(_Strict):
    """What both endpoints take. `priority`: higher goes first."""

    model: Text
    n: Annotated[int, Field(ge=1, le=128)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: OrRest | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: OrRest | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Bias | None = None
    seed: int | None = None
    stop: StopText | Annotated[list[StopText], Field(fail_fast=True)] | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    loops: Whole | Literal["auto"] | None = None
    min_loops: Whole | None = None
    prefill_loops: Whole | None = None
    exit_threshold: float | None = None
    cache_window: Count | None = None
    cache_salt: Salt | None = None
    priority: Whole | None = None
    service_tier: Tier | None = None
    slo_ms: Annotated[float, Field(gt=0)] | None = None
    reasoning_effort: Effort | None = None
    request_id: Label | None = None

    @property
    @abstractmethod
    def logprob_count(self) -> int | None:
        """How many alternatives per token are shown; None: no log-probabilities at all."""

    def sampling(self) -> dict[str, Any]:
        """Arguments of SamplingParams; what the client left out is left out."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        given: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty",
                         "repetition_penalty", "min_tokens", "ignore_eos")
        }  # fmt: skip
        given |= {
            "top_k": None if self.top_k is None else max(self.top_k, 0),  # -1 is another way to say off
            "logit_bias": {int(token): bias for token, bias in (self.logit_bias or {}).items()},
            "stop": stop,
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "include_stop": self.include_stop_str_in_output,
            "logprobs": self.logprob_count,
        }
        return {name: value for name, value in given.items() if value is not None}


class ChatRequest(Request):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: OrRest | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def logprob_count(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(Request):
    """POST /v1/completions."""

    prompt: Text | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Whole | None = None

    @property
    def logprob_count(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Always a list of prompts. Raises RequestError for one without any."""
        prompt: Any = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt or [] in prompt:
            raise RequestError("prompt", "prompt must not be empty")
        return [prompt] if isinstance(prompt[0], int) else prompt


R = TypeVar("R", bound=Request)


def parse(kind: type[R], raw: bytes) -> R:
    """A request from a body. Raises RequestError (also UnsupportedParameter, UnknownParameter) and nothing else."""
    data = _load(raw)
    if not isinstance(data, dict):
        raise RequestError("", "the body must be a JSON object")
    try:
        request = kind.model_validate(data)
    except ValidationError as error:
        _raise_readable(error)
    _check_extras(request)
    _check_pairs(request)
    return request


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


def _raise_readable(error: ValidationError) -> NoReturn:
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


def _check_extras(request: Request) -> None:
    for name, value in (request.model_extra or {}).items():
        if value is None or name in _IGNORED or value in _UNSUPPORTED.get(name, ()):
            continue
        if name in _UNSUPPORTED:
            raise UnsupportedParameter(name, f"{name} is not supported by this server")
        _refuse_unknown(name)
    for name in (request.stream_options and request.stream_options.model_extra) or ():
        _refuse_unknown(f"stream_options.{name}")


def _refuse_unknown(name: str) -> NoReturn:
    shown = name if len(name) <= SHOWN else name[:SHOWN] + "..."
    raise UnknownParameter(shown, f"Unknown parameter: {shown!r}")


def _check_pairs(request: Request) -> None:
    """Fields that only make sense together."""
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options", "stream_options is only allowed when stream is true")
    if isinstance(request, ChatRequest) and request.top_logprobs and not request.logprobs:
        raise RequestError("top_logprobs", "top_logprobs is only allowed when logprobs is true")
    if isinstance(request, ChatRequest) and request.continue_final_message and request.add_generation_prompt:
        if "add_generation_prompt" in request.model_fields_set:
            raise RequestError("continue_final_message", "continue_final_message excludes add_generation_prompt")
        request.add_generation_prompt = False
    if isinstance(request, CompletionRequest) and request.best_of not in (None, request.n):
        raise UnsupportedParameter("best_of", "best_of other than n is not supported by this server")
    if isinstance(request, CompletionRequest) and request.echo and request.stream and request.logprobs is not None:
        raise UnsupportedParameter("stream", "echo with logprobs cannot be streamed")
