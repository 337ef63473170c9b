"""Connections: uvicorn's HTTP protocol with patience that ends, and a bound on how many there are. uvicorn itself waits
for ever for the rest of a request. Knows no routes and no requests' content.
"""

import asyncio
from functools import partial
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.settings import Settings


class PatientProtocol(HttpToolsProtocol):
    """Closes a connection that is one too many, and one on which no whole request has come for `request_timeout_s`
    while nothing is being answered. Bodies that are asked for have a limit of their own, with an answer."""

    def __init__(self, *args: Any, settings: Settings, **more: Any) -> None:
        super().__init__(*args, **more)
        self._settings = settings
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._settings.max_connections:
            transport.abort()
        else:
            self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_request()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._expect_nothing()

    def _expect_request(self) -> None:
        """One limit for the wait and the request together: whoever waited long must be quick."""
        if self._timer is None:
            self._timer = self.loop.call_later(self._settings.request_timeout_s, self._late)

    def _expect_nothing(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._expect_request()  # the answer to an earlier request is under way, or this one's body is being read
        else:
            self.transport.close()


def patient(settings: Settings) -> type[asyncio.Protocol]:
    """For `uvicorn.Config(http=...)`."""
    return cast(type[asyncio.Protocol], partial(PatientProtocol, settings=settings))
