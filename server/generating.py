"""Engines that only generate: one request at a time, and what they do not tell is made up for here.

Knows the prefix pool, the counters and who is told of a chunk; no queue and no turns.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

from server.dispatcher import Dispatcher
from server.request import ScheduledRequest
from server.types import GenerationChunk, GenerationRequest, GenerationResult

DEFAULT_LOOPS = 8


class GeneratingEngine(Protocol):
    """The seed's engine. `generate_with_pool(pool, req)` is optional."""

    async def generate(self, req: GenerationRequest) -> GenerationResult: ...
    def generate_stream(self, req: GenerationRequest) -> AsyncIterator[GenerationChunk]: ...


async def generated(dispatcher: Dispatcher, request: ScheduledRequest) -> GenerationResult:
    """The answer to a request that has been dispatched; its chunks go to its caller if it wants them."""
    return await (_relay if request.streaming else _generate)(dispatcher, request)


async def _generate(dispatcher: Dispatcher, request: ScheduledRequest) -> GenerationResult:
    req, engine = request.req, dispatcher.engine
    pooled = _matches_pool(dispatcher, req)
    call = engine.generate_with_pool(dispatcher.pool, req) if pooled else engine.generate(req)
    result: GenerationResult = await call
    dispatcher.metrics.on_answer(len(result.token_ids))
    return result


def _matches_pool(dispatcher: Dispatcher, req: GenerationRequest) -> bool:
    if req.mode != "generate" or isinstance(req.prompt, str) or not hasattr(dispatcher.engine, "generate_with_pool"):
        return False
    prefix = dispatcher.pool.match_tokens(req.prompt, req.loops or DEFAULT_LOOPS, req.cache_window, req.cache_salt)
    dispatcher.metrics.on_prefix_lookup(len(req.prompt), len(prefix.tokens) if prefix else 0)
    return prefix is not None


async def _relay(dispatcher: Dispatcher, request: ScheduledRequest) -> GenerationResult:
    """Pass the engine's chunks on, and make the result that the engine does not give."""
    stream: Any = dispatcher.engine.generate_stream(request.req)
    chunks: list[GenerationChunk] = []
    try:
        async for chunk in stream:
            if request.abandoned:
                break
            chunks.append(chunk)
            dispatcher.metrics.on_token(chunk.loops, request.emit(chunk))
    finally:
        if hasattr(stream, "aclose"):
            await stream.aclose()
    return request.result_from_chunks(chunks)
