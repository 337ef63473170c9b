"""Drive a runner until a set of prompts is answered: the library's own small scheduler, first come first served.

Everything that is running steps together. The server has a scheduler of its own and does not use this.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tinyloop.errors import RequestError
from tinyloop.kv.prefix import PrefixPool
from tinyloop.plan import LoopPlan
from tinyloop.runner import Runner
from tinyloop.sampling import SamplingParams
from tinyloop.sequence import Lease, Segment, TokenEvent

NO_ROOM = "no room in the KV budget while other streams are open"


@dataclass(frozen=True)
class Job:
    """What `Runner.admit` takes."""

    prompt: Sequence[int]
    plan: LoopPlan
    max_new_tokens: int = 0
    sampling: SamplingParams = field(default_factory=SamplingParams)
    prompt_logprobs: int | None = None
    pool: PrefixPool | None = None
    salt: str = ""


class Batch:
    """Jobs on their way. `leases` are in the order of the jobs; `on_finish` sees each before its pages go back."""

    def __init__(
        self, runner: Runner, jobs: Sequence[Job], on_finish: Callable[[Lease], None] = lambda lease: None
    ) -> None:
        self.runner, self.on_finish = runner, on_finish
        self.leases: list[Lease] = []
        self._waiting = list(jobs)[::-1]
        self._yielded: list[Lease] = []
        self._running: list[Lease] = []

    def run(self) -> "Batch":
        """To the end."""
        for _ in self.events():
            pass
        return self

    def events(self) -> Iterator[TokenEvent]:
        """The tokens of all answers as they are made. Raises RequestError where other streams hold the room."""
        try:
            while self._waiting or self._yielded or self._running:
                self._admit()
                yield from self.runner.step(self._segments()).tokens
                self._collect()
        finally:
            for lease in self._running:
                self.runner.release(lease)

    def _admit(self) -> None:
        while self._yielded and self.runner.resume(self._yielded[-1]):
            self._running.append(self._yielded.pop())
        while self._waiting and not self._yielded:
            lease = self.runner.admit(**vars(self._waiting[-1]))
            if lease is None:
                break
            self._waiting.pop()
            self.leases.append(lease)
            self._running.append(lease)
        if not self._running:
            raise RequestError("max_new_tokens", NO_ROOM)

    def _segments(self) -> list[Segment]:
        """All that can step, after as many have yielded as must."""
        while True:
            segments = [s for s in self.runner.ready() if s.lease in self._running]
            if not self.runner.shortage(segments):
                return segments
            self._make_room()

    def _make_room(self) -> None:
        """The newest yields; one alone may push out registered prefixes, but not what other streams hold."""
        if len(self._running) > 1:
            self._yielded.append(self._running.pop())
            self.runner.suspend(self._yielded[-1])
        elif not self.runner.unpin_shortest():
            raise RequestError("max_new_tokens", NO_ROOM)

    def _collect(self) -> None:
        for lease in [one for one in self._running if one.finish_reason]:
            self.on_finish(lease)
            self._running.remove(lease)
            self.runner.release(lease)
