"""What a client asks for beside its text: depth, order, deadline and length, from body, headers and the model's name.

Every API takes these the same way. Knows the model's bounds; knows no prompt, no scheduler and no API's own fields.
"""

import math
import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from server.routers.shared import refusal
from server.schemas.common import SHOWN, Dialled
from tinyloop.errors import ContextOverflow, RequestError

if TYPE_CHECKING:
    from server.engine import ModelInfo

TIER_PRIORITY = {"flex": -10, "priority": 10, "fast": 10}
EFFORT = {"none": 0.0, "minimal": 0.25, "low": 0.5, "medium": 1.0, "high": 1.0, "xhigh": 1.0, "max": 1.0}


def alias_loops(name: str, info: "ModelInfo") -> int | None:
    """The loops that a model name such as `smollm2@loops=4` asks for. Raises 404 for a model that is not served."""
    base, _, loops = name.partition("@loops=")
    if base != info.id or (name != base and not (loops.isascii() and loops.isdecimal() and len(loops) < 6)):
        shown = name if len(name) <= SHOWN else name[:SHOWN] + "..."
        message = f"The model `{shown}` does not exist. Served models: {info.id}."
        raise refusal(404, "model_not_found", message, "model")
    return _within("loops", int(loops), info) if loops else None


def _within(field: str, loops: int, info: "ModelInfo") -> int:
    if not info.min_loops <= loops <= info.max_loops:
        raise RequestError(field, f"{field} must be between {info.min_loops} and {info.max_loops}, got {loops}")
    return loops


def effort_loops(effort: str, info: "ModelInfo") -> int:
    """How many loops a reasoning effort stands for. Never more than the model was trained with."""
    loops = math.ceil(EFFORT[effort] * info.trained_loops)
    return min(max(loops, info.min_loops), info.max_loops)


def depth(body: Dialled, headers: Mapping[str, str], alias: int | None, info: "ModelInfo") -> dict[str, Any]:
    """The depth fields of a GenerationRequest. The body beats the header, then come the effort and the model's name."""
    loops, least = body.loops, body.min_loops
    if loops is None and "x-tinyloop-loops" in headers:
        loops = int(_header_number(headers, "x-tinyloop-loops", 1))
    if loops is None and body.reasoning_effort is not None:
        loops = effort_loops(body.reasoning_effort, info)
    if loops is None:
        loops = alias
    if loops == "auto":
        loops, least = None, least or info.min_loops
    given = {"loops": loops, "min_loops": least, "prefill_loops": body.prefill_loops}
    for field, value in given.items():
        if value is not None:
            _within(field, value, info)
    if least is not None and least > (loops or info.default_loops):
        most = loops or info.default_loops
        raise RequestError("min_loops", f"min_loops must be at most loops ({most}), got {least}")
    mode = {} if body.exit_threshold is None else {"mode": "adaptive", "exit_threshold": body.exit_threshold}
    return given | mode


def _header_number(headers: Mapping[str, str], name: str, least: float) -> float:
    text = headers[name]
    try:
        number = float(text[:20])
    except ValueError:
        number = math.nan
    if not least <= number < 1e12:
        raise RequestError(name, f"the header {name} must be a number of at least {least:g}")
    return number


def deadline_ms(body: Dialled, headers: Mapping[str, str]) -> float | None:
    """The longest wait that a client accepts; the body beats the header."""
    if body.slo_ms is None and "x-tinyloop-slo-ms" in headers:
        return _header_number(headers, "x-tinyloop-slo-ms", 0)
    return body.slo_ms


def order(body: Dialled) -> int:
    """The priority, or what the tier stands for."""
    return TIER_PRIORITY.get(body.service_tier or "", 0) if body.priority is None else body.priority


def tier(body: Dialled) -> str:
    """The tier that was served."""
    return body.service_tier if body.service_tier in TIER_PRIORITY else "default"


def answer_limit(prompt: int, asked: int | None, default: int, info: "ModelInfo", field: str) -> int:
    """How many tokens an answer may have. `asked` -1 is the rest of the context. Raises ContextOverflow."""
    room = info.max_context - prompt
    limit = min(default, max(room, 1)) if asked is None else max(room, 1) if asked == -1 else asked
    if limit > room:
        raise ContextOverflow(
            field,
            f"This model's maximum context length is {info.max_context} tokens. However, you requested "
            f"{prompt + limit} tokens ({prompt} in the {field}, {limit} for the answer).",
        )
    return limit


def cache_salt(own: str | None, tenant: str) -> str:
    """What keeps prefixes apart: the tenant, whose digest has one length, and the request's own salt."""
    return tenant + (own or "")


def choice_seed(seed: int | None, choice: int) -> int | None:
    """Every choice draws its own numbers; the first draws those that it would draw alone."""
    return seed if seed is None or choice == 0 else random.Random(f"{seed}:{choice}").getrandbits(63)


def check_tokens(vocab_size: int, **used: Sequence[int]) -> None:
    """Token ids index rows of the vocabulary: one outside must not get as far as the engine. `used`: ids by field."""
    for field, tokens in used.items():
        token = max(tokens, default=0)
        if token >= vocab_size:
            raise RequestError(field, f"{field}: token ids must be below {vocab_size}, got {token}")
