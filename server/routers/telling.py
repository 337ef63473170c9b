"""One generation in the words of an API that names its events: whole, or as a stream. Knows no API.

A `Teller` turns chunks and results into an API's words; `tell` has the generation admitted and sees to its one end.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from typing import TYPE_CHECKING, Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from server.routers.shared import (
    Job,
    Problem,
    close_all,
    depth_headers,
    granted_loops,
    open_streams,
    problem_of,
    result_of,
    run_all,
    scheduler_of,
    settings_of,
)
from server.schemas.common import UnknownParameter
from server.sse import KEEPALIVE, EventStream, unless_gone
from server.types import GenerationChunk, GenerationResult
from tinyloop.errors import RequestError

if TYPE_CHECKING:
    from server.request import ScheduledRequest
    from server.scheduler import ChunkStream


class Teller(ABC):
    """How one generation looks in an API. Belongs to one HTTP request; `opened` once its first event has gone out."""

    opened = False

    @abstractmethod
    def whole(self, result: GenerationResult) -> dict[str, Any]:
        """The body of an answer that is not streamed."""

    @abstractmethod
    def opening(self) -> Iterator[str]:
        """Events before the first token; to be called once."""

    @abstractmethod
    def token(self, chunk: GenerationChunk) -> Iterator[str]:
        """Events that one token adds; none for nothing that shows."""

    @abstractmethod
    def closing(self, result: GenerationResult) -> Iterator[str]:
        """The last events of an answer."""

    @abstractmethod
    def failing(self, problem: Problem) -> Iterator[str]:
        """The last events where there is no answer, or no more of it."""

    def waiting(self, request: "ScheduledRequest") -> str:
        """What a stream says that has been silent for long."""
        return KEEPALIVE

    def closed(self) -> None:  # noqa: B027 - most have nothing to tidy
        """Called once when nothing more is said, however it ended."""

    def open(self) -> Iterator[str]:
        """The opening, if it is still to come."""
        if not self.opened:
            self.opened = True
            yield from self.opening()


async def tell(request: Request, teller: Teller, job: Job, *, stream: bool) -> Response:
    """Be admitted and answer. Raises what admission raises."""
    scheduler = scheduler_of(request)
    with ExitStack() as untold:
        untold.callback(teller.closed)
        if not stream:
            [result] = await unless_gone(request.receive, run_all(scheduler, job))
            headers = depth_headers(result.loops_granted, degraded=result.degraded)
            return JSONResponse(teller.whole(result), headers=headers)
        [source] = await open_streams(scheduler, job)
        untold.pop_all()

    async def close() -> None:
        await close_all([source])
        teller.closed()

    def failed(error: Exception) -> str:
        return "".join([*teller.open(), *teller.failing(problem_of(error, request.state.request_id))])

    return EventStream(
        _events(teller, source),
        on_error=failed,
        on_close=close,
        headers=stream_headers([source], scheduler.info.default_loops),
        keepalive_s=settings_of(request).keepalive_s,
        write_timeout_s=settings_of(request).write_timeout_s,
        keepalive=lambda: teller.waiting(source.request),
    )


async def _events(teller: Teller, source: "ChunkStream") -> AsyncGenerator[str, None]:
    """The events of a streamed answer, the opening with the first token."""
    async with aclosing(source):
        async for chunk in source:
            opening = "" if teller.opened else "".join(teller.open())
            if text := opening + "".join(teller.token(chunk)):
                yield text
    yield "".join([*teller.open(), *teller.closing(result_of(source))])


def stream_headers(streams: "Sequence[ChunkStream]", default: int) -> Callable[[], dict[str, str]]:
    """What was granted, known when the first byte goes out."""
    return lambda: depth_headers(
        min(granted_loops(stream, default) for stream in streams),
        degraded=any(stream.request.downgraded_by for stream in streams),
    )


@contextmanager
def renaming(names: Callable[[str], str | None]) -> Iterator[None]:
    """A field's complaint under the name that the caller's API has for it, if it has another."""
    try:
        yield
    except RequestError as error:
        name = names(error.field)
        if name is None or isinstance(error, UnknownParameter):  # which is named as the client wrote it
            raise
        renamed = type(error)(name, str(error).replace(error.field, name, 1))
        raise renamed from error
