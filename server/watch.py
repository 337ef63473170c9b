"""Watching the queue: every move of every request, to whoever asked to see them. Knows requests; no HTTP, no engine.

A watcher never holds up the scheduler: one who reads too slowly misses moves, and is told how many.
"""

import asyncio
from dataclasses import dataclass

from server.errors import QueueFullError
from server.request import RequestState, ScheduledRequest

MOST_WATCHERS = 16
MOST_UNREAD = 1024


@dataclass(frozen=True)
class Move:
    """`previous` is None for an arrival. `at`: seconds since 1970."""

    request: ScheduledRequest
    previous: RequestState | None
    state: RequestState
    at: float


class Watch:
    """One watcher's view."""

    def __init__(self) -> None:
        self._moves: asyncio.Queue[Move] = asyncio.Queue(MOST_UNREAD)
        self._missed = 0

    def tell(self, move: Move) -> None:
        if self._moves.full():
            self._moves.get_nowait()
            self._missed += 1
        self._moves.put_nowait(move)

    async def next(self, within_s: float) -> Move | None:
        """The next move; None if there is none for so long."""
        try:
            async with asyncio.timeout(within_s):
                return await self._moves.get()
        except TimeoutError:
            return None

    def take_missed(self) -> int:
        """How many moves were missed since this was last asked."""
        missed, self._missed = self._missed, 0
        return missed


class Watchers:
    """Everybody who watches."""

    def __init__(self) -> None:
        self._watches: set[Watch] = set()

    def __len__(self) -> int:
        return len(self._watches)

    def watch(self) -> Watch:
        """A new view, to be given back to `leave`. Raises QueueFullError."""
        if len(self._watches) >= MOST_WATCHERS:
            raise QueueFullError(f"{MOST_WATCHERS} are watching already")
        watch = Watch()
        self._watches.add(watch)
        return watch

    def leave(self, watch: Watch) -> None:
        self._watches.discard(watch)

    def tell(self, request: ScheduledRequest, previous: RequestState | None) -> None:
        """A request has arrived or moved."""
        if self._watches:
            move = Move(request, previous, request.state, request.unix_time(request.clock()))
            for watch in self._watches:
                watch.tell(move)
