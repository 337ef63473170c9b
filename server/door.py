"""Door: from a caller's request to a place in the queue, at the depth that can be granted. The gates in order, the
cheap ones first, and no await between check and place.

Knows admission, depth and the dispatcher's queue; no HTTP, no event loop's tasks, no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

from server.admission import Ask
from server.depth import DepthCeilings
from server.dispatcher import Dispatcher
from server.errors import EngineError, log_fault
from server.request import PreparedRequest, ScheduledRequest
from server.types import GenerationRequest
from tinyloop.errors import RequestError


class Door:
    """`default_min_loops`: what a request that names no depth at all may be lowered to; None: not at all."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        ceilings: DepthCeilings,
        clock: Callable[[], float],
        default_min_loops: int | None = None,
    ) -> None:
        self.dispatcher, self.ceilings, self.default_min_loops = dispatcher, ceilings, default_min_loops
        self.engine, self.admission, self.metrics = dispatcher.engine, dispatcher.admission, dispatcher.metrics
        self.arriving = 0  # places held for requests that are being prepared
        self._steps = hasattr(self.engine, "step")
        self._clock = clock

    def enter(
        self, req: GenerationRequest, priority: int, slo_ms: float | None, *, streaming: bool
    ) -> ScheduledRequest:
        """A request in the queue. Raises QueueFullError, AdmissionRejected, RequestError or EngineError."""
        self.check_depth()
        req = self._with_least(req)
        prepared, why = self._granted(req, priority, slo_ms)
        ask = self._ask(prepared, priority)
        predicted_ms = self.admission.check_wait(slo_ms, *self._load, ask)
        if prepared is not None:
            self.admission.check_pace(req.token_ms, prepared.plan.loops, prepared.boundary, predicted_ms)
        request = ScheduledRequest(
            req=req, priority=priority, slo_ms=slo_ms, streaming=streaming, prepared=prepared, clock=self._clock,
            on_move=self.dispatcher.on_move,
        )  # fmt: skip
        request.predicted_ms, request.prompt_left = predicted_ms, ask.prompt_work
        if why:
            request.loops_requested, request.downgraded_by = self._asked_loops(req), why
            self.metrics.on_downgrade(why)
        self.dispatcher.enter(request)
        return request

    def check_depth(self) -> None:
        """Raises QueueFullError."""
        self.admission.check_depth(len(self.dispatcher.waiting) + self.arriving)

    def _with_least(self, req: GenerationRequest) -> GenerationRequest:
        """The server's own least depth holds for requests that name no depth."""
        if self.default_min_loops is None or req.loops is not None or req.min_loops is not None:
            return req
        return replace(req, min_loops=min(self.default_min_loops, self._asked_loops(req)))

    def _asked_loops(self, req: GenerationRequest) -> int:
        return cast(int, self.engine.info.default_loops) if req.loops is None else req.loops

    def _prepare(self, req: GenerationRequest) -> PreparedRequest:
        try:
            return cast(PreparedRequest, self.engine.prepare(req))
        except RequestError:
            raise
        except Exception as error:
            raise EngineError(log_fault("preparing a request failed", error)) from error

    def _granted(
        self, req: GenerationRequest, priority: int, slo_ms: float | None
    ) -> tuple[PreparedRequest | None, str]:
        """The request at the deepest that memory, the ceiling and the SLO allow, and what lowered it. Without
        `min_loops` it is what was asked for. Only an engine that steps can say what a depth costs."""
        if not self._steps:
            return None, ""
        asked = self._prepare(req)
        if req.min_loops is None:
            return asked, ""
        fitting, least = asked.plan.loops, req.min_loops
        wait_ms = self.admission.predictor.predict_ms(*self._load, Ask(0, 0, level=priority))
        most = self.ceilings.allowed(priority, wait_ms, self.admission.limit_ms(slo_ms), fitting, least)
        granted = asked
        for loops in range(most, least - 1, -1):
            granted = asked if loops == fitting else self.engine.at_depth(asked, loops)
            in_time = self.admission.meets(slo_ms, *self._load, self._ask(granted, priority))
            if in_time and self.admission.keeps_pace(req.token_ms, loops, granted.boundary):
                break
        return granted, self._why(granted.plan.loops, most, fitting, self._asked_loops(req))

    @staticmethod
    def _why(granted: int, most: int, fitting: int, asked: int) -> str:
        """What lowered the depth last; nothing if nothing did."""
        if granted < most:
            return "slo"
        return "pressure" if most < fitting else "memory" if fitting < asked else ""

    def _ask(self, prepared: PreparedRequest | None, level: int) -> Ask:
        """What a newcomer puts before its first token; what a prefix holds now counts as read."""
        if prepared is None:
            return Ask(0, 0, level=level)
        loops = prepared.plan.prefill_loops
        tokens = len(prepared.prompt) - self.engine.cached_tokens(prepared, self.dispatcher.pool)
        return Ask(tokens * loops, loops, tokens * prepared.boundary, level)

    @property
    def _load(self) -> tuple[int, int]:
        return len(self.dispatcher.waiting), self.dispatcher.in_flight
