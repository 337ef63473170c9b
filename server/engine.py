"""Engine: a model and its runner behind a few verbs, on a thread of their own. The scheduler is its only caller.

The engine thread is the only one that touches tensors, and only inside `step`, `trace_loop` and `register_prefix`.
Everything else is integer work, done between steps by whoever drives the engine. Knows no priorities or deadlines and
no HTTP.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from server.types import GenerationRequest
from tinyloop.arguments import whole
from tinyloop.errors import NeverFits, RequestError
from tinyloop.plan import LoopPlan, make_plan
from tinyloop.sequence import Lease, Segment, StepReport

if TYPE_CHECKING:
    from tinyloop.kv.prefix import PrefixPool
    from tinyloop.model import Model
    from tinyloop.tokenizer import Tokenizer
    from tinyloop.trace import Tracing


NICE = 5  # of the engine thread


@dataclass(frozen=True)
class ModelInfo:
    """What routers may tell a client about the model. `parameters` counts matrices and embeddings."""

    id: str
    family: str
    max_context: int
    min_loops: int
    max_loops: int
    default_loops: int
    trained_loops: int
    exit_signals: tuple[str, ...]  # what exit_threshold can be compared with, the default first
    has_chat_template: bool
    vocab_size: int
    weights: str  # what its matrices are kept in
    parameters: int
    kv_memory: int = 0  # bytes


@dataclass(frozen=True)
class Prepared:
    """A checked request: its tokens, its plan, and what a token costs outside of the core, in loops of the core."""

    req: GenerationRequest
    prompt: tuple[int, ...]
    plan: LoopPlan
    boundary: float

    @property
    def new_tokens(self) -> int:
        return 0 if self.req.mode == "score" else self.req.max_new_tokens

    @property
    def prompt_work(self) -> float:
        """Tokens x loops of the prompt."""
        return len(self.prompt) * self.plan.prefill_loops

    @property
    def answer_work(self) -> float:
        """Tokens x loops of the longest answer."""
        return self.new_tokens * self.plan.loops


@dataclass(frozen=True)
class KVUsage:
    """Pages as they are now. `available` pages are free, or held by prefixes that can be evicted."""

    num_pages: int
    available: int
    page_size: int


class Engine:
    """The stepping engine. `default_loops` is what a request without `loops` gets (None: the model's own default)."""

    def __init__(self, model: Model, *, default_loops: int | None = None) -> None:
        self.model = model
        self.runner = model.runner
        self.default_loops = make_plan(model.config, loops=default_loops).loops
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine", initializer=_step_aside)

    @classmethod
    def load(
        cls,
        path_or_name: str,
        *,
        dtype: str = "auto",
        weights: str = "auto",
        kv_memory: int | None = None,
        default_loops: int | None = None,
    ) -> Engine:
        """Load a model and put an engine around it. Raises CheckpointError or RequestError."""
        from tinyloop.model import Model  # here, so that importing the scheduler does not import torch

        return cls(
            Model.load(path_or_name, dtype=dtype, weights=weights, kv_memory=kv_memory), default_loops=default_loops
        )

    @property
    def info(self) -> ModelInfo:
        config, dtype = self.model.config, str(self.model.stack.dtype).removeprefix("torch.")
        return ModelInfo(
            id=self.model.name,
            family=config.family,
            max_context=config.max_context,
            min_loops=1,
            max_loops=config.max_loops,
            default_loops=self.default_loops,
            trained_loops=config.trained_loops,
            exit_signals=config.exit_signals,
            has_chat_template=self.tokenizer.chat_template is not None,
            vocab_size=config.vocab_size,
            weights="int8" if self.model.stack.int8 else dtype,
            parameters=config.parameters,
            kv_memory=self.model.kv_memory,
        )

    @property
    def tokenizer(self) -> Tokenizer:
        return self.model.tokenizer

    def usage(self) -> KVUsage:
        pool = self.runner.pool
        return KVUsage(pool.num_pages, pool.available, self.runner.page_size)

    def prepare(self, req: GenerationRequest) -> Prepared:
        """Tokenise, fill defaults and check every bound. Raises RequestError naming the field.

        Where `min_loops` allows it, a request that would never fit gets the most loops that do.
        """
        _check_mode(req)
        if req.keep:
            self.model.check_keeps_prefixes()
        loops = self.default_loops if req.loops is None else req.loops
        plan = make_plan(self.model.config, loops=loops, prefill_loops=req.prefill_loops,
                         exit_threshold=req.exit_threshold, exit_signal=req.exit_signal,
                         cache_window=req.cache_window)  # fmt: skip
        if req.min_loops is not None:
            whole("min_loops", req.min_loops, 1, loops)
        prompt = tuple(self.model.encode(req.prompt))
        prepared = Prepared(req, prompt, plan, self.model.config.boundary_loops)
        while True:
            try:
                self.runner.check_request(prepared.plan, prompt, prepared.new_tokens, req.sampling, _scored(req))
                return prepared
            except NeverFits:
                if prepared.plan.loops <= (req.min_loops or loops):
                    raise
                prepared = self.at_depth(prepared, prepared.plan.loops - 1)

    def at_depth(self, prepared: Prepared, loops: int) -> Prepared:
        """The same request with fewer loops. Its prompt keeps a depth that was asked for, unless that is deeper."""
        asked = prepared.req.prefill_loops
        prefill = loops if asked is None else min(asked, loops)
        return replace(prepared, plan=replace(prepared.plan, loops=loops, prefill_loops=prefill))

    def cached_tokens(self, prepared: Prepared, pool: PrefixPool) -> int:
        """How much of the prompt a prefix holds just now. A pure read."""
        if prepared.req.mode != "generate" or prepared.req.prompt_logprobs is not None:
            return 0
        return self.runner.cached_tokens(prepared.prompt, prepared.plan, pool, prepared.req.cache_salt)

    def admit(self, prepared: Prepared, pool: PrefixPool | None = None) -> Lease | None:
        """A lease, or None while there is no room. Never during a step."""
        req = prepared.req
        return self.runner.admit(
            prepared.prompt,
            prepared.plan,
            max_new_tokens=prepared.new_tokens,
            sampling=req.sampling,
            prompt_logprobs=_scored(req),
            pool=pool if req.mode == "generate" else None,
            salt=req.cache_salt,
        )

    def must_wait(self, prepared: Prepared, pool: PrefixPool) -> bool:
        """Whether a request under way is computing a prefix of this one that it had better wait for."""
        req = prepared.req
        waits = req.mode == "generate" and req.prompt_logprobs is None
        return waits and self.runner.must_wait(prepared.prompt, prepared.plan, pool, req.cache_salt)

    def shortage(self, segments: Sequence[Segment]) -> int:
        """Pages that a step of these segments lacks; somebody has to yield first."""
        return self.runner.shortage(segments)

    def suspend(self, lease: Lease) -> None:
        """Take a lease's pages; what it has done stays cached while there is room. Never during a step."""
        self.runner.suspend(lease)

    def resume(self, lease: Lease) -> bool:
        """Go on with a suspended lease; False while there is no room."""
        return self.runner.resume(lease)

    def unpin_shortest(self) -> bool:
        """The last resort when one request alone lacks room: let a registered prefix go."""
        return self.runner.unpin_shortest()

    def ready(self) -> list[Segment]:
        """What could step now, oldest lease first."""
        return self.runner.ready()

    async def step(self, segments: Sequence[Segment]) -> StepReport:
        """Move the segments by one loop, on the engine thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.runner.step, segments)

    def release(self, lease: Lease) -> None:
        """Give back all that a lease holds. Never while a step that holds it is running."""
        self.runner.release(lease)

    def keep_prefix(self, lease: Lease, pool: PrefixPool) -> int:
        """Register what a finished lease has read; returns the number of tokens cached. Before its release."""
        return self.runner.keep_prefix(lease, pool)

    def register_prefix(
        self, pool: PrefixPool, tokens: Sequence[int], loops: int = 8, cache_window: int = 0, salt: str = ""
    ) -> int:
        """Compute a prefix, keep it in `pool`, and return the number of tokens cached. Blocks until it is done.

        Call it from the thread that drives the engine: a step under way is waited for, and none can start meanwhile.
        """
        return self._thread.submit(
            self.model.register_prefix, pool, tokens, loops=loops, cache_window=cache_window, salt=salt
        ).result()

    def tracing(self, prompt: Sequence[int], loops: int, top: int) -> Tracing:
        """A trace to be made by `trace_loop`. Raises RequestError."""
        return self.model.tracing(prompt, loops=loops, top=top)

    async def trace_loop(self, tracing: Tracing) -> None:
        """One more loop of a trace, on the engine thread."""
        await asyncio.get_running_loop().run_in_executor(self._thread, tracing.step)

    def check(self) -> None:
        """Assert that the page accounts balance."""
        self.runner.check()

    async def start(self) -> None:
        """Nothing to do: the thread starts with the first step."""

    async def close(self) -> None:
        """Wait for the step under way and end the thread."""
        await asyncio.to_thread(self._thread.shutdown, wait=True)


def _step_aside() -> None:
    """Let the event loop have a processor when it wants one: what it does is short, and somebody waits for it. The
    threads that help with a kernel inherit this. Only Linux has it by thread."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def _scored(req: GenerationRequest) -> int | None:
    """How many likely tokens to name beside each of the prompt's; None if its log-probabilities are not wanted."""
    return req.prompt_logprobs or 0 if req.mode == "score" else req.prompt_logprobs


def _check_mode(req: GenerationRequest) -> None:
    if req.mode == "speculative":
        raise RequestError("mode", "mode speculative is not offered by this engine")
    if req.mode == "adaptive" and req.exit_threshold is None:
        raise RequestError("exit_threshold", "mode adaptive needs exit_threshold, above 0 and at most 1")
    if req.mode != "adaptive" and req.exit_threshold is not None:
        raise RequestError("exit_threshold", f"exit_threshold needs mode adaptive, got mode {req.mode}")
