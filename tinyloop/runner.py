"""Runner: the step-level primitive. `admit` a request, `step` segments of many requests together, `release` it.

Who is admitted, with which pages, is in `leases`; here is what a step computes.

Every loop of every token uses the same core weights, so one packed forward carries whatever segments it is given:
decode tokens and prompt chunks, of different requests, at different depths. Who steps when is not decided here. The
runner knows no asyncio, no priorities and no deadlines. One thread at a time.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from tinyloop import kernels
from tinyloop.batch import PackedBatch, flat_slots
from tinyloop.config import ExitSignal, Section
from tinyloop.kv.cache import PagedAttention, PagedKV
from tinyloop.leases import Leases
from tinyloop.sampling import Logits, Logprobs, logprobs_of
from tinyloop.sequence import Lease, Segment, StepReport, TokenEvent
from tinyloop.stack import LoopedStack
from tinyloop.tokenizer import Tokenizer

PAGE_SIZE = 16  # tokens
MAX_CHUNK = 512  # prompt tokens in one segment


@dataclass(frozen=True)
class _Head:
    """What comes of the head for a segment: the most likely token after its last row and the logit of that, or the
    logits [rows, vocab_size] in float32."""

    token: int = -1
    largest: float = math.nan
    logits: Logits | None = None


_NOTHING = _Head()


class Runner(Leases):
    """A stack and its KV, and the leases on them."""

    def __init__(
        self,
        stack: LoopedStack,
        tokenizer: Tokenizer,
        *,
        num_pages: int,
        page_size: int = PAGE_SIZE,
        max_chunk: int = MAX_CHUNK,
    ) -> None:
        super().__init__(stack.config, tokenizer, num_pages=num_pages, page_size=page_size, max_chunk=max_chunk)
        self.stack = stack
        self.kv = PagedKV(stack.config, num_pages, page_size, stack.dtype, stack.embedding.device)

    def stats(self) -> dict[str, int]:
        """Pages and bytes as they are now. `leased` pages are in use by requests, `idle` ones only by prefixes."""
        page_bytes = self.kv.page_bytes(self.stack.config, self.page_size, self.stack.dtype)
        leased = len({page for lease in self.leases for page in lease.pages.held()})
        return {
            "num_pages": self.pool.num_pages,
            "free": self.pool.free,
            "idle": self.pool.idle,
            "leased": leased,
            "page_bytes": page_bytes,
            "leased_bytes": leased * page_bytes,
        }

    @torch.inference_mode()
    def step(self, segments: Sequence[Segment]) -> StepReport:
        """Boundary work for the segments that are due, then one loop of the core for all that are left."""
        began = time.perf_counter()
        _check_order(segments)
        self._copy_pages()
        self._bring_back([s for s in segments if s.fresh and s.loop])
        moving = [s for s in segments if not s.at_boundary]
        leaving = [s for s in segments if s.at_boundary and not s.fresh]
        heads = sum(map(self._rows_for_head, leaving))
        tokens, following = self._leave(leaving)
        entering = [s for s in segments if s.fresh] + following
        self._enter(entering)
        boundary_s = time.perf_counter() - began
        core = moving + entering
        self._core(core)
        finished = list(dict.fromkeys(s.lease for s in segments if s.lease.finish_reason))
        for lease in finished:
            self._publish(lease)
        return StepReport(
            tokens,
            finished,
            rows=sum(s.rows for s in core),
            seconds=time.perf_counter() - began,
            boundary_rows=self._boundary_rows(leaving, entering, heads),
            boundary_seconds=boundary_s,
            leaving=sum(s.rows for s in leaving),
        )

    def _boundary_rows(self, leaving: Sequence[Segment], entering: Sequence[Segment], heads: int) -> float:
        """What passed through coda, head and prelude, in loops of the core."""
        layout, core = self.layout, self.layout.core
        coda, prelude = (sum(s.rows for s in segments) for segments in (leaving, entering))
        return (coda * layout.coda + prelude * layout.prelude) / core + heads * self.stack.config.head_loops

    def _copy_pages(self) -> None:
        for sources, targets in self._copies:
            self.kv.copy_pages(sources, targets)
        self._copies.clear()

    def _bring_back(self, segments: Sequence[Segment]) -> None:
        """Tokens of a prefix that need more loops, or another coda, go on from their kept states."""
        for segment in segments:
            self._start(segment)
            row = self.layout.first_row("core", segment.loop - 1)
            slots = torch.from_numpy(flat_slots(segment, slice(row, row + 1)))
            segment.state = self.kv.read_states(slots)

    def _enter(self, entering: Sequence[Segment]) -> None:
        """Embedding and prelude."""
        for segment in entering:
            self._start(segment)
        if entering:
            ids = np.concatenate([s.lease.tokens[s.start : s.end] for s in entering])
            h = self.stack.embed(torch.from_numpy(ids))
            positions = torch.from_numpy(np.concatenate([np.arange(s.start, s.end) for s in entering]))
            self._keep(entering, self.stack.enter(self._section("prelude", entering, h), positions))

    def _core(self, segments: Sequence[Segment]) -> None:
        """One loop for every segment; prompt chunks that need nothing of the boundary end here."""
        if not segments:
            return
        batch = PackedBatch.build(segments, "core", self.stack.config, self.stack.dtype)
        attend = PagedAttention(self.kv, batch)
        before = _states(segments)
        state = self.stack.core(before, batch.positions, batch.loops, attend)
        self.kv.keep_states(batch.slots[0], state)
        self._keep(segments, state)
        for segment in segments:
            segment.loop += 1
        self._apply_exits(segments, before, state)
        for segment in segments:
            if segment.loop >= segment.loops:
                self._fill_planes(segment)
                if not self.layout.coda and not self._rows_for_head(segment):
                    self._retire(segment)

    def _leave(self, leaving: Sequence[Segment]) -> tuple[list[TokenEvent], list[Segment]]:
        """Coda, head and sampling. Returns the tokens made, and the segments of the tokens that go on."""
        if not leaving:
            return [], []
        h = self._section("coda", leaving, self.stack.leave(_states(leaving)))
        events: list[TokenEvent] = []
        following: list[Segment] = []
        for segment, rows in zip(leaving, self._heads(h, leaving), strict=True):
            self._retire(segment)
            if rows.logits is not None:
                self._score(segment, rows.logits)
            event = self._choose(segment, rows)
            if event:
                events.append(event)
                if not event.finish_reason:
                    following.append(Segment(segment.lease, segment.end, 1, segment.lease.plan.loops))
        return events, following

    def _section(self, section: Section, segments: Sequence[Segment], h: Tensor) -> Tensor:
        if not self.layout.span(section):
            return h
        batch = PackedBatch.build(segments, section, self.stack.config, self.stack.dtype)
        run = self.stack.prelude if section == "prelude" else self.stack.coda
        return run(h, batch.positions, PagedAttention(self.kv, batch))

    @staticmethod
    def _keep(segments: Sequence[Segment], states: Tensor) -> None:
        for segment, state in zip(segments, torch.split(states, [s.rows for s in segments]), strict=True):
            segment.state = state

    # Boundary details

    def _rows_for_head(self, segment: Segment) -> int:
        """How many of the segment's last rows need logits."""
        lease = segment.lease
        if self._scores(segment):
            return segment.rows
        return int(segment.end == len(lease.tokens) and lease.answer_tokens < lease.max_new_tokens)

    @staticmethod
    def _scores(segment: Segment) -> bool:
        """Whether log-probabilities of the prompt are wanted from this segment."""
        lease = segment.lease
        wanted = lease.prompt_logprobs is not None and segment.start < lease.prompt_tokens
        return wanted and len(lease.prompt_logprob_values) < lease.prompt_tokens - 1

    def _heads(self, h: Tensor, segments: Sequence[Segment]) -> list[_Head]:
        """Per segment, what is wanted of its last rows: for a plain sampler the most likely token is enough."""
        wanted = [self._rows_for_head(s) for s in segments]
        if not any(wanted):
            return [_NOTHING] * len(segments)
        ends = list(accumulate(s.rows for s in segments))
        rows = np.concatenate([np.arange(end - count, end) for end, count in zip(ends, wanted, strict=True)])
        logits = self.stack.head(h[torch.from_numpy(rows)])
        largest, tokens = (found.tolist() for found in kernels.most_likely(logits))
        heads = []
        for segment, count, end in zip(segments, wanted, accumulate(wanted), strict=True):
            if not count:
                heads.append(_NOTHING)
            elif segment.lease.sampler.plain and not self._scores(segment):
                heads.append(_Head(tokens[end - 1], largest[end - 1]))
            else:
                heads.append(_Head(logits=logits[end - count : end].float().numpy(force=True)))
        return heads

    def _score(self, segment: Segment, logits: Logits) -> None:
        """Log-probabilities of the prompt's own next tokens."""
        lease = segment.lease
        if lease.prompt_logprobs is None or not self._scores(segment):
            return
        targets = lease.tokens[segment.start + 1 : lease.prompt_tokens][: segment.rows]
        for row, target in zip(logits, targets, strict=False):  # the last row of the prompt has no target
            lease.prompt_logprob_values.append(logprobs_of(row, target, lease.prompt_logprobs))

    def _choose(self, segment: Segment, rows: _Head) -> TokenEvent | None:
        """The next token of the answer, if one is due; decides whether the answer ends with it."""
        lease = segment.lease
        if segment.end != len(lease.tokens) or lease.finish_reason:
            return None
        if rows.logits is None:
            token, logprobs = lease.sampler.take(rows.token, rows.largest), None
        else:
            token, logprobs = lease.sampler.choose(rows.logits[-1])
        return self._accept(lease, token, logprobs, segment.loop)

    def _accept(self, lease: Lease, token: int, logprobs: Logprobs | None, loops: int) -> TokenEvent:
        lease.tokens.append(token)
        ends = token in lease.sampler.stop_ids
        text = "" if ends else lease.text.push(token)
        stop_reason: str | int | None = token if ends else lease.text.stopped
        if lease.sampler.lost:
            lease.finish_reason, stop_reason = "length", None
        elif stop_reason is not None or lease.sampler.complete:
            lease.finish_reason = "stop"
        elif lease.answer_tokens == lease.max_new_tokens:
            lease.finish_reason = "length"
        if lease.finish_reason:
            text += lease.text.finish()
        return TokenEvent(lease, token, text, loops, logprobs, lease.finish_reason, stop_reason)

    def _retire(self, segment: Segment) -> None:
        """The segment's tokens are done in every plane."""
        lease = segment.lease
        lease.segments.remove(segment)
        lease.done = segment.end
        if not segment.is_prompt:
            lease.depths.append(segment.loop)
        if segment.end == lease.known:
            self._publish(lease)
        if lease.plan.cache_window and lease.max_new_tokens:  # a prompt without answer is there to be kept
            lease.pages.drop_before(segment.end - lease.plan.cache_window)
        if segment.end == lease.prompt_tokens and not lease.max_new_tokens:
            lease.finish_reason = "length"

    # Depth

    def _apply_exits(self, segments: Sequence[Segment], before: Tensor, after: Tensor) -> None:
        """Adaptive depth: an answer token leaves after the first loop where the signal of its plan says so."""
        asking = defaultdict[ExitSignal, list[tuple[Segment, int]]](list)  # with their rows
        for segment, end in zip(segments, accumulate(s.rows for s in segments), strict=True):
            if (signal := segment.lease.plan.exit_signal) and not segment.is_prompt:
                asking[signal].append((segment, end - 1))
        for signal, asked in asking.items():
            rows = torch.tensor([row for _, row in asked])
            values = self.stack.exit_signal(signal, before[rows], after[rows]).tolist()
            for (segment, _), value in zip(asked, values, strict=True):
                if segment.leaves(value):
                    segment.loops = segment.loop

    def _fill_planes(self, segment: Segment) -> None:
        """Tokens that stop early leave their last plane's keys and values in the deeper planes of the plan."""
        if self.layout.one_plane:
            return
        pages = self.layout.pages("core")
        for loop in range(segment.loop, segment.lease.plan.loops):
            source = self.layout.first_row("core", segment.loop - 1)
            target = self.layout.first_row("core", loop)
            slots = [flat_slots(segment, slice(row, row + pages)) for row in (source, target)]
            self.kv.copy_slots(*(torch.from_numpy(s) for s in slots))


def _states(segments: Sequence[Segment]) -> Tensor:
    return torch.cat([s.state for s in segments]) if len(segments) > 1 else segments[0].state


def _check_order(segments: Sequence[Segment]) -> None:
    """Loop r of a chunk reads plane r of the chunks before it: they must be ahead, or beside it in this step."""
    chosen = set(segments)
    for lease in {s.lease: None for s in segments}:
        line = [*lease.segments, *(s for s in segments if s.lease is lease and s.fresh)]
        for before, after in pairwise(line):
            beside = before.loop == after.loop and before in chosen
            assert after not in chosen or beside or before.loop > after.loop, "a chunk overtook the one before it"
