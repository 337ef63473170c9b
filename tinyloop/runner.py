"""Runner: the step-level primitive. `admit` a request, `step` segments of many requests together, `release` it.

Every loop of every token uses the same core weights, so one packed forward carries whatever segments it is given:
decode tokens and prompt chunks, of different requests, at different depths. Who steps when is not decided here. The
runner knows no asyncio, no priorities and no deadlines. One thread at a time.
"""

import time
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from tinyloop.batch import PackedBatch, flat_slots
from tinyloop.config import Section
from tinyloop.errors import ContextOverflow, NeverFits, RequestError
from tinyloop.kv.cache import PagedKV
from tinyloop.kv.pages import PagePool, PageTable
from tinyloop.kv.prefix import Prefix, PrefixPool
from tinyloop.plan import LoopPlan
from tinyloop.sampling import Logits, Logprobs, Sampler, SamplingParams, logprobs_of
from tinyloop.sequence import Lease, Segment, StepReport, TokenEvent
from tinyloop.stack import LoopedStack
from tinyloop.text import TextStream
from tinyloop.tokenizer import Tokenizer

PAGE_SIZE = 16  # tokens
MAX_CHUNK = 512  # prompt tokens in one segment


class Runner:
    """A stack, its KV, and the leases on it. Between steps every method is integer work and quick."""

    def __init__(
        self,
        stack: LoopedStack,
        tokenizer: Tokenizer,
        *,
        num_pages: int,
        page_size: int = PAGE_SIZE,
        max_chunk: int = MAX_CHUNK,
    ) -> None:
        self.stack, self.tokenizer = stack, tokenizer
        self.layout = stack.config.layout
        self.page_size, self.max_chunk = page_size, max_chunk
        self.pool = PagePool(num_pages)
        self.kv = PagedKV(stack.config, num_pages, page_size, stack.dtype, stack.embedding.device)
        self.leases: dict[Lease, None] = {}  # in order of admission
        self._copies: list[tuple[list[int], list[int]]] = []  # pages to copy before the next step: from, to

    # Admission

    def pages_needed(self, plan: LoopPlan, tokens: int, cached: int = 0) -> int:
        """The most pages of its own that a request of `tokens` tokens holds at once, beside `cached` shared ones."""
        blocks = self._blocks(tokens) - cached // self.page_size
        if plan.cache_window:
            blocks = min(blocks, (plan.cache_window + self.max_chunk) // self.page_size + 2)
        return blocks * plan.rows

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def check_request(
        self, plan: LoopPlan, prompt: Sequence[int], max_new_tokens: int, sampling: SamplingParams
    ) -> None:
        """Refuse what can never run: an empty prompt, unknown ids, more than the context or the whole KV budget."""
        context, vocab = self.stack.config.max_context, self.stack.config.vocab_size
        if not prompt:
            raise RequestError("prompt", "prompt must hold at least one token")
        if min(prompt) < 0 or max(prompt) >= vocab:
            raise RequestError("prompt", f"prompt: token ids must be between 0 and {vocab - 1}")
        _check_ids(sampling, vocab)
        if len(prompt) + max_new_tokens > context:
            raise ContextOverflow(
                "max_new_tokens",
                f"prompt ({len(prompt)} tokens) and max_new_tokens ({max_new_tokens}) "
                f"exceed the context of {context} tokens",
            )
        needed = self.pages_needed(plan, len(prompt) + max_new_tokens)
        if needed > self.pool.num_pages:
            raise NeverFits(
                "max_new_tokens", f"the request needs {needed} KV pages, the whole budget is {self.pool.num_pages}"
            )

    def admit(
        self,
        prompt: Sequence[int],
        plan: LoopPlan,
        *,
        max_new_tokens: int,
        sampling: SamplingParams,
        prompt_logprobs: int | None = None,
        pool: PrefixPool | None = None,
    ) -> Lease | None:
        """Take a request in, with every page it can ever need reserved; None if there is no room for it now.

        Raises RequestError for what could never run. A prefix of `pool` that serves the request exactly is shared.
        """
        self.check_request(plan, prompt, max_new_tokens, sampling)
        tokens = len(prompt) + max_new_tokens
        prefix = self._match(pool, prompt, plan) if prompt_logprobs is None else None
        cached = min(len(prefix.tokens), len(prompt) - 1) if prefix else 0
        needed = self.pages_needed(plan, tokens, cached)
        if not self.pool.reserve(needed):
            return None
        table = PageTable(self.pool, plan.rows, self.page_size, total=self._blocks(tokens), reserved=needed)
        if prefix:
            self._share(prefix, cached, table)
        lease = self._lease(prompt, plan, max_new_tokens, sampling, table)
        lease.cached = lease.planned = cached
        lease.prompt_logprobs = prompt_logprobs
        self.leases[lease] = None
        return lease

    def _lease(
        self, prompt: Sequence[int], plan: LoopPlan, max_new_tokens: int, sampling: SamplingParams, table: PageTable
    ) -> Lease:
        ends = () if sampling.ignore_eos else self.tokenizer.eos_ids
        sampler = Sampler(sampling, prompt, (*ends, *sampling.stop_token_ids))
        text = TextStream(self.tokenizer, stop=tuple(sampling.stop), include_stop=sampling.include_stop)
        return Lease(plan, list(prompt), len(prompt), max_new_tokens, sampler, text, table)

    def release(self, lease: Lease) -> None:
        """Give back all that a lease holds. Safe to call twice; never while a step that holds it is running."""
        if not lease.released:
            lease.released = True
            lease.segments.clear()
            lease.pages.release()
            del self.leases[lease]

    def check(self, pool: PrefixPool | None = None) -> None:
        """Assert that every page is free, held by a lease, or held by `pool`."""
        prefixes = pool.tables() if pool else []
        self.pool.check([*(lease.pages for lease in self.leases), *prefixes])

    # Stepping

    def ready(self) -> list[Segment]:
        """What could step now: segments in flight and, fresh, the next chunk of each prompt. A pure read."""
        return [segment for lease in self.leases for segment in self._offers(lease)]

    def _offers(self, lease: Lease) -> list[Segment]:
        left = min(lease.prompt_tokens - lease.planned, self.max_chunk)
        if left <= 0 or lease.finish_reason or (lease.plan.cache_window and lease.segments):
            return list(lease.segments)  # a windowed prompt moves one chunk at a time, or it would outgrow its reserve
        fresh = Segment(lease, lease.planned, left, lease.plan.prefill_loops)
        return [*lease.segments, fresh]

    @torch.inference_mode()
    def step(self, segments: Sequence[Segment]) -> StepReport:
        """Boundary work for the segments that are due, then one loop of the core for all that are left."""
        began = time.perf_counter()
        _check_order(segments)
        self._copy_pages()
        moving = [s for s in segments if not s.at_boundary]
        tokens, following = self._leave([s for s in segments if s.at_boundary and not s.fresh])
        entering = [s for s in segments if s.fresh] + following
        self._enter(entering)
        core = moving + entering
        self._core(core)
        finished = list(dict.fromkeys(s.lease for s in segments if s.lease.finish_reason))
        return StepReport(tokens, finished, sum(s.rows for s in core), time.perf_counter() - began)

    def _copy_pages(self) -> None:
        for sources, targets in self._copies:
            self.kv.copy_pages(sources, targets)
        self._copies.clear()

    def _enter(self, entering: Sequence[Segment]) -> None:
        """Embedding and prelude."""
        for segment in entering:
            lease = segment.lease
            lease.segments.append(segment)
            lease.planned = max(lease.planned, segment.end)
            lease.pages.grow(segment.end)
        if entering:
            ids = np.concatenate([s.lease.tokens[s.start : s.end] for s in entering])
            h = self.stack.embed(torch.from_numpy(ids))
            self._keep(entering, self._section("prelude", entering, h))

    def _core(self, segments: Sequence[Segment]) -> None:
        """One loop for every segment; prompt chunks that need nothing of the boundary end here."""
        if not segments:
            return
        batch = PackedBatch.build(segments, "core", self.stack.config, self.stack.dtype)
        attend = partial(self.kv.attend, batch, "core")
        h = self.stack.core(_states(segments), batch.positions, batch.loops, attend)
        self._keep(segments, h)
        for segment in segments:
            segment.loop += 1
        self._apply_exits(segments)
        for segment in segments:
            if segment.loop >= segment.loops:
                self._fill_planes(segment)
                if not self.layout.coda and not self._rows_for_head(segment):
                    self._retire(segment)

    def _leave(self, leaving: Sequence[Segment]) -> tuple[list[TokenEvent], list[Segment]]:
        """Coda, head and sampling. Returns the tokens made, and the segments of the tokens that go on."""
        if not leaving:
            return [], []
        h = self._section("coda", leaving, _states(leaving))
        wanted = [self._rows_for_head(s) for s in leaving]
        logits = self._logits(h, leaving, wanted)
        events: list[TokenEvent] = []
        following: list[Segment] = []
        for segment, rows in zip(leaving, logits, strict=True):
            self._retire(segment)
            self._score(segment, rows)
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
        return run(h, batch.positions, partial(self.kv.attend, batch, section))

    @staticmethod
    def _keep(segments: Sequence[Segment], h: Tensor) -> None:
        for segment, state in zip(segments, torch.split(h, [s.rows for s in segments]), strict=True):
            segment.state = state

    # Boundary details

    @staticmethod
    def _rows_for_head(segment: Segment) -> int:
        """How many of the segment's last rows need logits."""
        lease = segment.lease
        if lease.prompt_logprobs is not None and segment.is_prompt:
            return segment.rows
        return int(segment.end == len(lease.tokens) and lease.answer_tokens < lease.max_new_tokens)

    def _logits(self, h: Tensor, segments: Sequence[Segment], wanted: Sequence[int]) -> list[Logits]:
        """Per segment, [wanted rows, vocab_size] in float32."""
        if not any(wanted):
            return [np.empty((0, self.stack.config.vocab_size), np.float32)] * len(segments)
        ends = list(accumulate(s.rows for s in segments))
        rows = np.concatenate([np.arange(end - count, end) for end, count in zip(ends, wanted, strict=True)])
        logits = self.stack.head(h[torch.from_numpy(rows)]).numpy(force=True)
        return np.split(logits, list(accumulate(wanted))[:-1])

    def _score(self, segment: Segment, logits: Logits) -> None:
        """Log-probabilities of the prompt's own next tokens."""
        lease = segment.lease
        if lease.prompt_logprobs is None or not segment.is_prompt:
            return
        targets = lease.tokens[segment.start + 1 : lease.prompt_tokens][: segment.rows]
        for row, target in zip(logits, targets, strict=False):  # the last row of the prompt has no target
            lease.prompt_logprob_values.append(logprobs_of(row, target, lease.prompt_logprobs))

    def _choose(self, segment: Segment, logits: Logits) -> TokenEvent | None:
        """The next token of the answer, if one is due; decides whether the answer ends with it."""
        lease = segment.lease
        if segment.end != len(lease.tokens) or lease.finish_reason:
            return None
        token, logprobs = lease.sampler.choose(logits[-1])
        return self._accept(lease, token, logprobs, segment.loop)

    def _accept(self, lease: Lease, token: int, logprobs: Logprobs | None, loops: int) -> TokenEvent:
        lease.tokens.append(token)
        ends = token in lease.sampler.stop_ids
        text = "" if ends else lease.text.push(token)
        stop_reason: str | int | None = token if ends else lease.text.stopped
        if stop_reason is not None:
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
        if lease.plan.cache_window:
            lease.pages.drop_before(segment.end - lease.plan.cache_window)
        if segment.end == lease.prompt_tokens and not lease.max_new_tokens:
            lease.finish_reason = "length"

    # Depth

    def _apply_exits(self, segments: Sequence[Segment]) -> None:
        """Adaptive depth: stop at the first loop where the chance of having exited reaches the threshold."""
        adaptive = [s for s in segments if s.lease.plan.exit_threshold is not None and not s.is_prompt]
        if not adaptive:
            return
        chances = self.stack.exit_probability(_states(adaptive)).tolist()
        for segment, chance in zip(adaptive, chances, strict=True):
            segment.survival *= 1 - chance
            if 1 - segment.survival >= (segment.lease.plan.exit_threshold or 0):
                segment.loops = segment.loop

    def _fill_planes(self, segment: Segment) -> None:
        """Tokens that stop early leave their last plane's keys and values in the deeper planes of the plan."""
        pages = self.layout.pages("core")
        for loop in range(segment.loop, segment.lease.plan.loops):
            source = self.layout.first_row("core", segment.loop - 1)
            target = self.layout.first_row("core", loop)
            slots = [flat_slots(segment, slice(row, row + pages)) for row in (source, target)]
            self.kv.copy_slots(*(torch.from_numpy(s) for s in slots))

    # Prefixes

    def keep_prefix(self, lease: Lease, pool: PrefixPool) -> int:
        """Register the prompt of a finished lease in `pool`; returns the number of tokens cached."""
        assert lease.finish_reason, "only a finished prompt may serve others"
        prompt = tuple(lease.tokens[: lease.prompt_tokens])
        return pool.add(Prefix(prompt, lease.plan.loops, lease.plan.cache_window, lease.pages.fork()))

    def _match(self, pool: PrefixPool | None, prompt: Sequence[int], plan: LoopPlan) -> Prefix | None:
        if pool is None or plan.loops != plan.prefill_loops or plan.exit_threshold is not None:
            return None
        across = self.layout.coda == 0  # a coda plane belongs to one depth
        return pool.match_tokens(prompt, plan.loops, plan.cache_window, across_depths=across)

    def _share(self, prefix: Prefix, cached: int, table: PageTable) -> None:
        """Hold the prefix's full pages; copy the page that the request will write into."""
        assert prefix.pages is not None
        full, rest = divmod(cached, self.page_size)
        ids = prefix.pages.ids[: table.rows]
        table.adopt(ids[:, :full], min(prefix.pages.first, full))
        if rest:
            self._copies.append(table.copy_block(ids[:, full]))


def _states(segments: Sequence[Segment]) -> Tensor:
    return torch.cat([s.state for s in segments]) if len(segments) > 1 else segments[0].state


def _check_order(segments: Sequence[Segment]) -> None:
    """Loop r of a chunk reads plane r of the chunks before it: they must be ahead, or beside it in this step."""
    chosen = set(segments)
    for lease in {s.lease: None for s in segments if s.is_prompt}:
        line = [*lease.segments, *(s for s in segments if s.lease is lease and s.fresh)]
        for before, after in pairwise(line):
            beside = before.loop == after.loop and before in chosen
            assert after not in chosen or beside or before.loop > after.loop, "a chunk overtook the one before it"


def _check_ids(sampling: SamplingParams, vocab_size: int) -> None:
    for field, ids in (("logit_bias", sampling.logit_bias), ("stop_token_ids", sampling.stop_token_ids)):
        for token in ids:
            if not 0 <= token < vocab_size:
                raise RequestError(field, f"{field}: token ids must be between 0 and {vocab_size - 1}, got {token}")
