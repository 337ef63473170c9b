"""Server-sent events, and work that stops when its caller leaves. Knows ASGI; knows no API's event shapes.

An `EventStream` sends its first byte with its first event, so that whatever goes wrong before is still a real HTTP
status. After that an error is an event of its own and the stream still ends as the API says.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

T = TypeVar("T")
KEEPALIVE = ": keep-alive\n\n"
_LINE_BREAKS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}  # some clients split lines at these too


class ClientGone(Exception):
    """The caller closed the connection before there was an answer. Nobody hears of it."""


def event(data: str, name: str | None = None) -> str:
    """One event. `data` is JSON, or a word such as [DONE]."""
    safe = data if data.isascii() else data.translate(_LINE_BREAKS)
    return f"data: {safe}\n\n" if name is None else f"event: {name}\ndata: {safe}\n\n"


def json_event(data: Any, name: str | None = None) -> str:
    """One event that says `data`, in which there may be pydantic models."""
    return event(to_json(data, inf_nan_mode="null").decode(), name)


def named_event(name: str, /, **fields: Any) -> str:
    """One event of an API whose events say their name twice."""
    return json_event({"type": name, **fields}, name)


async def disconnected(receive: Receive) -> None:
    """Returns when the caller has left. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the caller leaves first. Raises ClientGone then."""
    task, gone = asyncio.create_task(work), asyncio.create_task(disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await stop(task, gone)


async def stop(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait until they have ended; what they raise on the way is of no interest any more."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def merged(streams: Sequence[AsyncIterator[T]]) -> AsyncGenerator[tuple[int, T | None], None]:
    """Items of several iterators as they come, each with its iterator's index; None marks that one's end."""
    if len(streams) == 1:  # the common case needs neither tasks nor a queue
        async for item in streams[0]:
            yield 0, item
        yield 0, None
        return
    arrivals: asyncio.Queue[tuple[int, T | None] | Exception] = asyncio.Queue(maxsize=1)  # the slowest reader's pace

    async def pump(index: int, stream: AsyncIterator[T]) -> None:
        try:
            async for item in stream:
                await arrivals.put((index, item))
            await arrivals.put((index, None))
        except Exception as error:
            await arrivals.put(error)

    pumps = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        left = len(pumps)
        while left:
            arrival = await arrivals.get()
            if isinstance(arrival, Exception):
                raise arrival
            left -= arrival[1] is None
            yield arrival
    finally:
        await stop(*pumps)


class EventStream(Response):
    """Sends `events` (made by `event`) as they come.

    `headers` are asked for when the first byte goes out. `on_error` turns an error after that into the API's last
    events. A reader who takes nothing for `write_timeout_s` has left. `on_close` runs once at the end, however it came;
    it is where generation is cancelled. `keepalive` is what a stream says that has been silent for `keepalive_s`.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[str, None],
        *,
        on_error: Callable[[Exception], str],
        on_close: Callable[[], Awaitable[None]],
        headers: Callable[[], Mapping[str, str]] = dict,
        keepalive_s: float = 5.0,
        write_timeout_s: float = 60.0,
        keepalive: Callable[[], str] = lambda: KEEPALIVE,
    ) -> None:
        self.events, self.on_error, self.on_close = events, on_error, on_close
        self.late_headers, self.keepalive_s, self.write_timeout_s = headers, keepalive_s, write_timeout_s
        self.keepalive = keepalive
        self.status_code, self.background = 200, None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._started = False
        self._sending = 0  # sends that the reader has not let go on yet
        self._moved_at = 0.0  # when a send last began or ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._moved_at = asyncio.get_running_loop().time()
        body = asyncio.create_task(self._send_events(send))
        others = [asyncio.create_task(disconnected(receive)), asyncio.create_task(self._watch(send))]
        try:
            await asyncio.wait({body, *others}, return_when=asyncio.FIRST_COMPLETED)
            if not body.done():
                raise ClientGone
            body.result()
        finally:
            await stop(body, *others)
            await self.events.aclose()
            await self.on_close()

    async def _send_events(self, send: Send) -> None:
        try:
            async for text in self.events:
                await self._send(send, text.encode())
        except Exception as error:
            if not self._started or isinstance(error, ClientGone):
                raise
            await self._send(send, self.on_error(error).encode())
        await self._send(send, b"", more=False)

    async def _watch(self, send: Send) -> None:
        """Break long silences. Returns once the reader has taken nothing for too long."""
        loop = asyncio.get_running_loop()
        with suppress(TimeoutError):
            while True:
                still = loop.time() - self._moved_at
                left = (self.write_timeout_s if self._sending else self.keepalive_s) - still
                if left > 0:
                    await asyncio.sleep(min(left, self.write_timeout_s))
                elif self._sending:
                    return
                else:
                    async with asyncio.timeout(self.write_timeout_s):
                        await self._send(send, self.keepalive().encode())

    async def _send(self, send: Send, body: bytes, *, more: bool = True) -> None:
        """Sends that wait for the reader go on in the order in which they came."""
        now = asyncio.get_running_loop().time
        self._sending, self._moved_at = self._sending + 1, now()
        if not self._started:
            self._started = True
            await send(self._start())
        await send({"type": "http.response.body", "body": body, "more_body": more})
        self._sending, self._moved_at = self._sending - 1, now()

    def _start(self) -> Message:
        self.headers.update(self.late_headers())
        return {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
