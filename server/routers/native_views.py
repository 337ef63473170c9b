"""How the native endpoints show a generation, token by token, and a request in the queue."""

from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

from server.routers.openai_views import finite, spelling
from server.routers.shared import Problem, openai_error
from server.routers.telling import Teller
from server.schemas import native as shapes
from server.sse import named_event
from server.types import GenerationChunk, GenerationResult

if TYPE_CHECKING:
    from server.request import ScheduledRequest
    from tinyloop.sampling import Logprobs
    from tinyloop.tokenizer import Tokenizer


class GenerateTeller(Teller):
    """Events: `start`, a `token` for each token, `done` with the whole answer but its tokens, or `error`."""

    def __init__(self, request_id: str, prompt: Sequence[int], model: str, tokenizer: "Tokenizer") -> None:
        self.request_id, self.prompt, self.model, self.tokenizer = request_id, prompt, model, tokenizer

    def whole(self, result: GenerationResult) -> dict[str, Any]:
        loops = chain(result.token_loops, repeat(None))
        logprobs = chain(result.logprobs, repeat(None))
        tokens = [shapes.Token(**self._token(*one)) for one in zip(result.token_ids, loops, logprobs, strict=False)]
        return self._answer(result, tokens).model_dump()

    def opening(self) -> Iterator[str]:
        yield named_event("start", request_id=self.request_id, model=self.model)

    def token(self, chunk: GenerationChunk) -> Iterator[str]:
        yield named_event("token", **self._token(chunk.token_id, chunk.loops, chunk.logprobs, chunk.text))

    def closing(self, result: GenerationResult) -> Iterator[str]:
        yield named_event("done", **self._answer(result, []).model_dump(exclude={"tokens"}))

    def failing(self, problem: Problem) -> Iterator[str]:
        yield named_event("error", **openai_error(problem))

    def _answer(self, result: GenerationResult, tokens: list[shapes.Token]) -> shapes.Generated:
        first_s = result.timings.first_token_s
        tokens_scored = zip(tuple(self.prompt)[1:], result.prompt_logprobs, strict=False)
        scored = [shapes.Token(**self._token(token, None, logprobs)) for token, logprobs in tokens_scored]
        return shapes.Generated(
            request_id=self.request_id,
            model=self.model,
            text=result.text,
            tokens=tokens,
            finish_reason=result.finish_reason,
            stop_reason=result.stop_reason,
            prompt_tokens=len(self.prompt),
            cached_tokens=result.cached_tokens,
            cache_hit=result.cache_hit,
            loops_requested=result.loops_requested,
            loops_granted=result.loops_granted,
            degraded=result.loops_granted is not None and result.degraded,
            prompt_logprobs=scored if result.prompt_logprobs else None,
            times_ms=shapes.Times(
                queued=_ms(result.timings.queued_s),
                first_token=None if first_s is None else _ms(first_s),
                total=_ms(result.timings.total_s),
            ),
        )

    def _token(
        self, token: int, loops: int | None, logprobs: "Logprobs | None", text: str | None = None
    ) -> dict[str, Any]:
        """`shapes.Token`. `text` is what a token adds to the answer; alone it is spelled out."""
        text = spelling(self.tokenizer, token)[1] if text is None else text
        shown = {"id": token, "text": text, "loops": loops, "logprob": None, "top": None}
        if logprobs is not None:
            top = [
                {"id": one, "text": spelling(self.tokenizer, one)[1], "logprob": finite(logprob)}
                for one, logprob in logprobs.top
            ]
            shown |= {"logprob": finite(logprobs.chosen), "top": top}
        return shown


def row(request: "ScheduledRequest", tenant: str) -> shapes.Row:
    """A request as it is now. What its caller calls it is nobody else's business."""
    plan = request.prepared.plan.loops if request.prepared is not None else None
    return shapes.Row(
        id=request.request_id,
        label=request.req.request_id if request.tenant == tenant else None,
        state=request.state.value,
        priority=request.priority,
        level=request.level,
        streaming=request.streaming,
        loops_requested=request.loops_requested,
        loops_granted=plan,
        prompt_tokens=request.prompt_tokens,
        answer_tokens=request.answer_tokens,
        max_new_tokens=request.req.max_new_tokens,
        age_ms=_ms(request.timings().total_s),
        predicted_ms=None if request.predicted_ms is None else round(request.predicted_ms, 3),
        outcome=request.outcome_reason,
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
