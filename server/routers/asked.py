"""What a client asks for beside its text: depth, order, deadline and length, from body, headers and the model's name.

Every API takes these the same way. Knows the model's bounds; knows no prompt, no scheduler and no API's own fields.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from server.routers.shared import refusal
from server.schemas.common import SHOWN, Deadlines, Dialled, LoopSpan
from server.types import GenerationResult
from tinyloop.errors import ContextOverflow, RequestError

if TYPE_CHECKING:
    from server.engine import ModelInfo

T = TypeVar("T")
TTFT_HEADERS = ("x-tinyloop-slo-ms", "x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
TPOT_HEADERS = ("x-tinyloop-slo-tpot-ms", "x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
TIER_PRIORITY = {"flex": -10, "priority": 10, "fast": 10}
EFFORT = {"none": 0.0, "minimal": 0.25, "low": 0.5, "medium": 1.0, "high": 1.0, "xhigh": 1.0, "max": 1.0}


def alias_loops(name: str, info: "ModelInfo") -> int | None:
    """The loops that a model name such as `smollm2@loops=4` asks for. Raises 404 for a model that is not served."""
    base, _, loops = name.partition("@loops=")
    if base != info.id or (name != base and not (loops.isascii() and loops.isdecimal() and len(loops) < 6)):
        shown = name if len(name) <= SHOWN else name[:SHOWN] + "..."
        message = f"The model `{shown}` does not exist. Served models: {info.id}."
        raise refusal(404, "model_not_found", message, "model")
    return within("loops", int(loops), info) if loops else None


def within(field: str, loops: int, info: "ModelInfo") -> int:
    if not info.min_loops <= loops <= info.max_loops:
        raise RequestError(field, f"{field} must be between {info.min_loops} and {info.max_loops}, got {loops}")
    return loops


def effort_loops(effort: str, info: "ModelInfo") -> int:
    """How many loops a reasoning effort stands for. Never more than the model was trained with."""
    loops = math.ceil(EFFORT[effort] * info.trained_loops)
    return min(max(loops, info.min_loops), info.max_loops)


def depth(body: Dialled, headers: Mapping[str, str], alias: int | None, info: "ModelInfo") -> dict[str, Any]:
    """The depth fields of a GenerationRequest. The body beats the headers, then come the effort and the model's name.

    A depth out of bounds is refused, unless `loops_policy` says to take the nearest.
    """
    span = body.loops if isinstance(body.loops, LoopSpan) else LoopSpan()
    loops: int | str | None = span.max if isinstance(body.loops, LoopSpan) else body.loops
    if body.loops is None:
        loops = _asked_elsewhere(body, headers, alias, info)
    least = _one("min_loops", "loops.min", body.min_loops, span.min)
    if least is None and "x-tinyloop-min-loops" in headers:
        least = int(_header_number(headers, "x-tinyloop-min-loops", 1))
    if loops == "auto":
        loops, least = None, least or info.min_loops
    given: dict[str, Any] = {"loops": loops, "min_loops": least, "prefill_loops": body.prefill_loops}
    for field, value in given.items():
        if value is not None:
            given[field] = _bounded(field, value, info, body.loops_policy)
    least, most = given["min_loops"], given["loops"] or info.default_loops
    if least is not None and least > most:
        raise RequestError("min_loops", f"min_loops must be at most loops ({most}), got {least}")
    threshold = _one("exit_threshold", "loops.exit_threshold", body.exit_threshold, span.exit_threshold)
    signal = _one("exit_signal", "loops.exit_signal", body.exit_signal, span.exit_signal)
    given |= {} if threshold is None else {"mode": "adaptive", "exit_threshold": threshold}
    return given | ({} if signal is None else {"exit_signal": signal})


def _asked_elsewhere(
    body: Dialled, headers: Mapping[str, str], alias: int | None, info: "ModelInfo"
) -> int | str | None:
    if headers.get("x-tinyloop-loops") == "auto":
        return "auto"
    if "x-tinyloop-loops" in headers:
        return int(_header_number(headers, "x-tinyloop-loops", 1))
    return alias if body.reasoning_effort is None else effort_loops(body.reasoning_effort, info)


def _one(field: str, other: str, value: T | None, same: T | None) -> T | None:
    """The value of a field that has two names."""
    if value is not None and same is not None and value != same:
        raise RequestError(field, f"{field} and {other} differ")
    return same if value is None else value


def _bounded(field: str, loops: int, info: "ModelInfo", policy: str | None) -> int:
    if policy == "clamp":
        return min(max(loops, info.min_loops), info.max_loops)
    return within(field, loops, info)


def _header_number(headers: Mapping[str, str], name: str, least: float) -> float:
    text = headers[name]
    try:
        number = float(text[:20])
    except ValueError:
        number = math.nan
    if not least <= number < 1e12:
        raise RequestError(name, f"the header {name} must be a number of at least {least:g}")
    return number


@dataclass(frozen=True)
class Slo:
    """What a client accepts, in milliseconds: until the first token, between two tokens, until the last."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    @property
    def wait_ms(self) -> float | None:
        """The longest wait for the first token: one later than the whole answer may take is as bad."""
        return min((limit for limit in (self.ttft_ms, self.e2e_ms) if limit is not None), default=None)

    def met(self, results: Sequence[GenerationResult]) -> bool | None:
        """Whether all of these were in time; None where no limit was set."""
        if self == NO_LIMIT:
            return None
        return all(
            limit is None or seconds is None or 1000 * seconds <= limit
            for result in results
            for limit, seconds in (
                (self.ttft_ms, result.timings.first_token_s),
                (self.tpot_ms, result.token_s),
                (self.e2e_ms, result.timings.total_s),
            )
        )


NO_LIMIT = Slo()


def slo(body: Dialled, headers: Mapping[str, str]) -> Slo:
    """The body beats the headers. A bare number means the first token."""
    if isinstance(body.slo_ms, Deadlines):
        return Slo(body.slo_ms.ttft_ms, body.slo_ms.tpot_ms, body.slo_ms.e2e_ms)
    if body.slo_ms is not None:
        return Slo(body.slo_ms)
    return Slo(*(_header_limit(headers, names) for names in (TTFT_HEADERS, TPOT_HEADERS)))


def _header_limit(headers: Mapping[str, str], names: Sequence[str]) -> float | None:
    return next((_header_number(headers, name, 0) for name in names if name in headers), None)


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
