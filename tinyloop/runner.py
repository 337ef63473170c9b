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
from tinyloop.config import Section, prefix_serves_every_depth
from tinyloop.errors import ContextOverflow, NeverFits, RequestError
from tinyloop.kv.cache import PagedKV
from tinyloop.kv.pages import PagePool, PageTable
from tinyloop.kv.prefix import Match, Node, PrefixPool
from tinyloop.plan import LoopPlan
from tinyloop.sampling import Logits, Logprobs, Sampler, SamplingParams, logprobs_of
from tinyloop.sequence import Lease, Segment, Span, StepReport, TokenEvent
from tinyloop.stack import LoopedStack
from tinyloop.text import TextStream
from tinyloop.tokenizer import Tokenizer

PAGE_SIZE = 16  # tokens
MAX_CHUNK = 512  # prompt tokens in one segment
SLACK = 16  # tokens that each running request should be able to grow by when another one is admitted


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
        self._prefixes: list[PrefixPool] = []  # those that keep pages of ours
        self._across_depths = prefix_serves_every_depth(stack.config)

    # Admission

    def pages_needed(self, plan: LoopPlan, tokens: int, *, keep: bool = False) -> int:
        """The most pages that `tokens` tokens hold at once; all of them, if what leaves the window is to be kept."""
        blocks = self._blocks(tokens)
        if plan.cache_window and not keep:
            blocks = min(blocks, (plan.cache_window + self.max_chunk) // self.page_size + 2)
        return blocks * plan.rows

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def check_request(
        self, plan: LoopPlan, prompt: Sequence[int], max_new_tokens: int, sampling: SamplingParams
    ) -> None:
        """Refuse what can never run: an empty prompt, unknown ids, more than the context or the whole KV budget."""
        context, vocab = self.stack.config.max_context, self.stack.config.vocab_size
        if not isinstance(max_new_tokens, int) or max_new_tokens < 0:
            raise RequestError("max_new_tokens", f"max_new_tokens must be a whole number, at least 0: {max_new_tokens}")
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
        needed = self.pages_needed(plan, len(prompt) + max_new_tokens, keep=not max_new_tokens)
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
        salt: str = "",
    ) -> Lease | None:
        """Take a request in, or None if there is no room for it now. Pages are taken as the sequence grows.

        What `pool` holds of the prompt is not computed again; the finished prompt and answer go there. Requests with
        different `salt` share nothing. Raises RequestError for what could never run.
        """
        self.check_request(plan, prompt, max_new_tokens, sampling)
        ends = () if sampling.ignore_eos else self.tokenizer.eos_ids
        lease = Lease(
            plan=plan,
            tokens=list(prompt),
            prompt_tokens=len(prompt),
            max_new_tokens=max_new_tokens,
            sampler=Sampler(sampling, prompt, (*ends, *sampling.stop_token_ids)),
            text=TextStream(self.tokenizer, stop=tuple(sampling.stop), include_stop=sampling.include_stop),
            pages=PageTable(self.pool, plan.rows, self.page_size),
            prefixes=self._bound(pool, plan),
            salt=salt,
            prompt_logprobs=prompt_logprobs,
        )
        return lease if self.resume(lease) else None

    def resume(self, lease: Lease) -> bool:
        """Start a lease, or go on with one that yielded. False if there is no room now."""
        match = self._match(lease)
        if self.leases and not self._has_room(lease, match):
            return False
        if not lease.known:  # what is found again after a yield is the request's own work
            lease.cached, lease.hit = min(match.tokens, lease.prompt_tokens), self._hit(lease, match)
        answered = lease.answer_tokens > 0  # then the last token is not read again, but goes on as it was
        lease.known = len(lease.tokens) - answered
        lease.todo = self._adopt(lease, match)
        lease.todo += self._spans(lease, match.tokens)
        lease.done = lease.todo[0].start
        self.leases[lease] = None
        return True

    def suspend(self, lease: Lease) -> None:
        """Yield: what is done goes to the prefix pool, the pages back. `resume` continues where it stood."""
        self._publish(lease)
        scored = len(lease.prompt_logprob_values) == lease.prompt_tokens - 1
        if not scored:
            lease.prompt_logprob_values.clear()
        self.release(lease)

    def release(self, lease: Lease) -> None:
        """Give back all that a lease holds. Safe to call twice; never while a step that holds it is running."""
        if lease in self.leases:
            lease.segments.clear()
            lease.todo.clear()
            lease.pages.release()
            del self.leases[lease]

    def check(self) -> None:
        """Assert that every page is free, held by a lease, or held by a prefix."""
        self.pool.check(
            [*(lease.pages.held() for lease in self.leases), *(h for p in self._prefixes for h in p.held())]
        )

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

    # Room

    def shortage(self, segments: Sequence[Segment]) -> int:
        """Pages that a step of these segments lacks, after everything that may be evicted has been."""
        return max(0, self._growth(segments) - self.pool.available)

    def unpin_shortest(self) -> bool:
        """The last resort: let go of a registered prefix. False if there is none."""
        return any(prefixes.unregister_shortest() for prefixes in self._prefixes)

    def _growth(self, segments: Sequence[Segment]) -> int:
        """Pages that the step will take: for what enters, and for the token after each that may make one."""
        entering = sum(s.lease.pages.missing(s.start, s.end) for s in segments if s.fresh)
        following = [s for s in segments if s.at_boundary and not s.fresh and s.end == len(s.lease.tokens)]
        return entering + sum(s.lease.pages.missing(s.end, s.end + 1) for s in following)

    def _take(self, lease: Lease, start: int, end: int) -> None:
        """Hold pages for positions `[start, end)` in every plane, evicting what must go."""
        lacking = lease.pages.missing(start, end) - self.pool.free
        for prefixes in self._prefixes:
            if lacking > 0:
                prefixes.evict(lacking)
                lacking = lease.pages.missing(start, end) - self.pool.free
        lease.pages.fill(start, end)

    def _has_room(self, lease: Lease, match: Match) -> bool:
        """Whether the known tokens fit, with some slack for everybody to grow."""
        shared = [page for node in self._whole(match) for page in self._wanted(node, lease.plan)]
        needed = self.pages_needed(lease.plan, len(lease.tokens)) - len(shared)
        slack = sum(self._slack(one) for one in (*self.leases, lease))
        return needed + slack <= self.pool.available - sum(map(self.pool.is_idle, shared))

    def _slack(self, lease: Lease) -> int:
        return self._blocks(min(SLACK, lease.max_new_tokens - lease.answer_tokens)) * lease.plan.rows

    # Prefixes

    def must_wait(self, prompt: Sequence[int], plan: LoopPlan, pool: PrefixPool, salt: str = "") -> bool:
        """Whether somebody is computing a prefix of this prompt that it had better wait for."""
        if self._bound(pool, plan) is None:
            return False
        useful = pool.match(prompt, plan, salt).tokens + self.page_size
        begin = list(prompt[:useful])
        return useful < len(prompt) and any(
            one.prefixes is pool
            and one.salt == salt
            and one.done < one.known
            and one.plan.cache_window == plan.cache_window
            and (self._across_depths or one.plan.loops == plan.loops)
            and one.tokens[:useful] == begin
            for one in self.leases
        )

    def keep_prefix(self, lease: Lease, pool: PrefixPool) -> int:
        """Register the prompt of a finished lease in `pool`; returns the number of tokens cached."""
        assert lease.finish_reason, "only a finished prompt may serve others"
        return pool.register(lease.tokens[: lease.prompt_tokens], lease.plan, lease.pages, lease.salt)

    def _bound(self, pool: PrefixPool | None, plan: LoopPlan) -> PrefixPool | None:
        """The pool, if this plan's tokens may be shared: all of them ran the same, fixed number of loops."""
        if pool is None or plan.loops != plan.prefill_loops or plan.exit_threshold is not None:
            return None
        if not pool.bind(self.pool, self.layout, self.page_size, across_depths=self._across_depths):
            raise RequestError("pool", "this prefix pool holds the pages of another model")
        if pool not in self._prefixes:
            self._prefixes.append(pool)
        return pool

    def _match(self, lease: Lease) -> Match:
        unscored = lease.prompt_logprobs is not None and len(lease.prompt_logprob_values) < lease.prompt_tokens - 1
        if lease.prefixes is None or unscored:
            return Match()
        return lease.prefixes.match(lease.tokens, lease.plan, lease.salt)

    def _whole(self, match: Match) -> Sequence[Node]:
        """The nodes whose pages can be shared; the last one, if used in part, has to be copied."""
        return match.nodes if match.tokens % self.page_size == 0 else match.nodes[:-1]

    def _wanted(self, node: Node, plan: LoopPlan) -> dict[int, int]:
        """Row of the page table -> page, for everything of a node that the plan can use."""
        coda = self.layout.first_row("coda")
        rows = [*range(coda), *range(coda + self.layout.pages("coda"), plan.rows)]  # all but the coda's
        wanted = dict(zip(rows, node.pages, strict=False))
        return wanted | dict(enumerate(node.codas.get(plan.loops, ()), coda))

    def _adopt(self, lease: Lease, match: Match) -> list[Span]:
        """Share what a prefix has; returns what it lacks: more loops, or the coda of this depth."""
        if not match.nodes:
            return []
        assert lease.prefixes is not None
        for block, node in enumerate(self._whole(match)):
            wanted = self._wanted(node, lease.plan)
            lease.pages.adopt(block, wanted.keys(), wanted.values())
        if len(self._whole(match)) < len(match.nodes):
            self._copy_partly(lease, match)
        lease.prefixes.touch(match.nodes[-1])
        return self._lacking(lease, match)

    def _copy_partly(self, lease: Lease, match: Match) -> None:
        """The request will write into this block, so it gets pages of its own."""
        block = len(match.nodes) - 1
        wanted = self._wanted(match.nodes[-1], lease.plan)
        self._take(lease, block * self.page_size, match.tokens)
        self._copies.append((list(wanted.values()), lease.pages.ids[list(wanted), block].tolist()))

    def _lacking(self, lease: Lease, match: Match) -> list[Span]:
        loops, spans = lease.plan.loops, list[Span]()
        for block, node in enumerate(match.nodes):
            start, have = block * self.page_size, min(self._depth(node), loops)
            if have < loops or (self.layout.coda and loops not in node.codas):
                _extend(spans, Span(start, min(start + self.page_size, match.tokens), have))
        return spans

    def _hit(self, lease: Lease, match: Match) -> str:
        """How the depth that a prefix was held at compares with the depth that is asked for."""
        held = [self._depth(node) for node in match.nodes]
        if not held:
            return ""
        return "deepened" if min(held) < lease.plan.loops else "shallower" if max(held) > lease.plan.loops else "exact"

    def _depth(self, node: Node) -> int:
        return (len(node.pages) - self.layout.pages("prelude")) // self.layout.pages("core")

    def _spans(self, lease: Lease, start: int) -> list[Span]:
        """What is known beyond the prefix, cut where the depth of its tokens changes."""
        spans: list[Span] = []
        edges = {lease.known, lease.prompt_tokens, len(lease.tokens)}
        edges |= {
            lease.prompt_tokens + i for i in range(1, len(lease.depths)) if lease.depths[i] != lease.depths[i - 1]
        }
        for end in sorted(edge for edge in edges if edge > start):
            spans.append(Span(start, end))
            start = end
        return spans

    def _publish(self, lease: Lease) -> None:
        if lease.prefixes is not None and lease.done:
            lease.prefixes.publish(lease.tokens[: lease.done], lease.plan, lease.pages, lease.salt)

    # Stepping

    def ready(self) -> list[Segment]:
        """What could step now: segments in flight and, fresh, the next chunk of each prompt. A pure read."""
        return [segment for lease in self.leases for segment in self._offers(lease)]

    def _offers(self, lease: Lease) -> list[Segment]:
        """In flight, then what may enter: tokens of a prefix that lack loops and the prompt behind them go together."""
        offers = list(lease.segments)
        if lease.plan.cache_window and offers:
            return offers  # a windowed prompt moves one chunk at a time, to hold few pages
        for span in lease.todo:
            if offers and span.start >= lease.known:
                break  # the token that goes on after a yield comes behind everything that is read again
            rows = min(span.end - span.start, self.max_chunk)
            offers.append(Segment(lease, span.start, rows, lease.loops_at(span.start), span.loop))
            if rows < span.end - span.start or lease.plan.cache_window:
                break
        return offers

    @torch.inference_mode()
    def step(self, segments: Sequence[Segment]) -> StepReport:
        """Boundary work for the segments that are due, then one loop of the core for all that are left."""
        began = time.perf_counter()
        _check_order(segments)
        self._copy_pages()
        self._bring_back([s for s in segments if s.fresh and s.loop])
        moving = [s for s in segments if not s.at_boundary]
        tokens, following = self._leave([s for s in segments if s.at_boundary and not s.fresh])
        entering = [s for s in segments if s.fresh] + following
        self._enter(entering)
        core = moving + entering
        self._core(core)
        finished = list(dict.fromkeys(s.lease for s in segments if s.lease.finish_reason))
        for lease in finished:
            self._publish(lease)
        return StepReport(tokens, finished, sum(s.rows for s in core), time.perf_counter() - began)

    def _copy_pages(self) -> None:
        for sources, targets in self._copies:
            self.kv.copy_pages(sources, targets)
        self._copies.clear()

    def _start(self, segment: Segment) -> None:
        """The segment is in flight: no longer to do, and with pages to write to."""
        lease = segment.lease
        if lease.todo and lease.todo[0].start == segment.start:
            lease.todo[0].start = segment.end
            if segment.end == lease.todo[0].end:
                lease.todo.pop(0)
        lease.segments.append(segment)
        self._take(lease, segment.start, segment.end)

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
            self._keep(entering, self._section("prelude", entering, h))

    def _core(self, segments: Sequence[Segment]) -> None:
        """One loop for every segment; prompt chunks that need nothing of the boundary end here."""
        if not segments:
            return
        batch = PackedBatch.build(segments, "core", self.stack.config, self.stack.dtype)
        attend = partial(self.kv.attend, batch, "core")
        h = self.stack.core(_states(segments), batch.positions, batch.loops, attend)
        self.kv.keep_states(batch.slots[0], h)
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
        if lease.prompt_logprobs is None or not self._scores(segment):
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


def _extend(spans: list[Span], span: Span) -> None:
    """Append a span, joined to the one before it where they meet at the same loop."""
    if spans and (spans[-1].end, spans[-1].loop) == (span.start, span.loop):
        spans[-1].end = span.end
    else:
        spans.append(span)


def _check_ids(sampling: SamplingParams, vocab_size: int) -> None:
    for field, ids in (("logit_bias", sampling.logit_bias), ("stop_token_ids", sampling.stop_token_ids)):
        for token in ids:
            if not 0 <= token < vocab_size:
                raise RequestError(field, f"{field}: token ids must be between 0 and {vocab_size - 1}, got {token}")
