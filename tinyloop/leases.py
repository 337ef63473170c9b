"""Leases: who is in the engine, with which pages, and what of it came from a prefix. The runner's integer half.

A lease is admitted if its prompt has room, takes pages as it grows, and gives them back when it is released or yields.
Knows no tensors: every method is quick and may run between steps, on the thread that drives the runner.
"""

from collections.abc import Sequence

from tinyloop.config import ModelConfig, prefix_serves_every_depth
from tinyloop.errors import ContextOverflow, NeverFits, RequestError
from tinyloop.kv.pages import PagePool, PageTable
from tinyloop.kv.prefix import Match, Node, PrefixPool
from tinyloop.plan import LoopPlan
from tinyloop.sampling import Sampler, SamplingParams
from tinyloop.sequence import Lease, Segment, Span
from tinyloop.text import TextStream
from tinyloop.tokenizer import Tokenizer

SLACK = 16  # tokens that each running request should be able to grow by when another one is admitted


class Leases:
    """The leases on one pool of pages. `max_chunk`: prompt tokens in one segment, at most."""

    def __init__(
        self, config: ModelConfig, tokenizer: Tokenizer, *, num_pages: int, page_size: int, max_chunk: int
    ) -> None:
        self.config, self.layout, self.tokenizer = config, config.layout, tokenizer
        self.page_size, self.max_chunk = page_size, max_chunk
        self.pool = PagePool(num_pages)
        self.leases: dict[Lease, None] = {}  # in order of admission
        self._copies: list[tuple[list[int], list[int]]] = []  # pages to copy before the next step: from, to
        self._prefixes: list[PrefixPool] = []  # those that keep pages of ours
        self._across_depths = prefix_serves_every_depth(config)

    # Admission

    def pages_needed(self, plan: LoopPlan, tokens: int, *, keep: bool = False) -> int:
        """The most pages that `tokens` tokens hold at once; all of them, if what leaves the window is to be kept."""
        blocks = self._blocks(tokens)
        if plan.cache_window and not keep and not self.config.whole_prompt:
            blocks = min(blocks, (plan.cache_window + self.max_chunk) // self.page_size + 2)
        return blocks * plan.rows

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def check_request(
        self,
        plan: LoopPlan,
        prompt: Sequence[int],
        max_new_tokens: int,
        sampling: SamplingParams,
        prompt_logprobs: int | None = None,
    ) -> None:
        """Refuse what can never run: an empty prompt, unknown ids, more than the context or the whole KV budget."""
        context, vocab = self.config.max_context, self.config.vocab_size
        if not isinstance(max_new_tokens, int) or max_new_tokens < 0:
            raise RequestError("max_new_tokens", f"max_new_tokens must be a whole number, at least 0: {max_new_tokens}")
        if not prompt:
            raise RequestError("prompt", "prompt must hold at least one token")
        if min(prompt) < 0 or max(prompt) >= vocab:
            raise RequestError("prompt", f"prompt: token ids must be between 0 and {vocab - 1}")
        _check_ids(sampling, vocab)
        if prompt_logprobs is not None and self.config.bidirectional_prompt:
            raise RequestError("prompt_logprobs", f"prompt_logprobs: {self.config.family} reads a prompt both ways")
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
        self.check_request(plan, prompt, max_new_tokens, sampling, prompt_logprobs)
        ends = () if sampling.ignore_eos and sampling.constraint is None else self.tokenizer.eos_ids
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

    # What may step

    def ready(self) -> list[Segment]:
        """What could step now: segments in flight and, fresh, the next chunk of each prompt. A pure read."""
        return [segment for lease in self.leases for segment in self._offers(lease)]

    def _offers(self, lease: Lease) -> list[Segment]:
        """In flight, then what may enter: tokens of a prefix that lack loops and the prompt behind them go together."""
        offers = list(lease.segments)
        # A windowed prompt moves one chunk at a time, to hold few pages. In a plane that all loops share, each segment
        # reads what the last loop of those before it left.
        alone = bool(lease.plan.cache_window) or self.layout.one_plane
        if alone and offers:
            return offers
        for span in lease.todo:
            if offers and span.start >= lease.known:
                break  # the token that goes on after a yield comes behind everything that is read again
            offers.append(self._next_of(lease, span))
            if offers[-1].end < span.end or alone:
                break
        return offers

    def _next_of(self, lease: Lease, span: Span) -> Segment:
        whole = self.config.whole_prompt and span.start < lease.prompt_tokens
        most = span.end if whole else 1 if self.layout.one_plane else self.max_chunk
        rows, loops = min(span.end - span.start, most), lease.loops_at(span.start)
        return Segment(lease, span.start, rows, loops, span.loop, whole=whole)

    def _start(self, segment: Segment) -> None:
        """The segment is in flight: no longer to do, and with pages to write to."""
        lease = segment.lease
        if lease.todo and lease.todo[0].start == segment.start:
            lease.todo[0].start = segment.end
            if segment.end == lease.todo[0].end:
                lease.todo.pop(0)
        lease.segments.append(segment)
        self._take(lease, segment.start, segment.end)

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

    def cached_tokens(self, prompt: Sequence[int], plan: LoopPlan, pool: PrefixPool, salt: str = "") -> int:
        """How many tokens of a prompt `pool` holds now, at any depth. A pure read."""
        return 0 if self._bound(pool, plan) is None else pool.match(prompt, plan, salt).tokens

    def keep_prefix(self, lease: Lease, pool: PrefixPool) -> int:
        """Register the prompt of a finished lease in `pool`; returns the number of tokens cached."""
        assert lease.finish_reason, "only a finished prompt may serve others"
        return pool.register(lease.tokens[: lease.prompt_tokens], lease.plan, lease.pages, lease.salt)

    def _bound(self, pool: PrefixPool | None, plan: LoopPlan) -> PrefixPool | None:
        """The pool, if this plan's tokens may be shared: all of them ran the same, fixed number of loops."""
        fixed = plan.loops == plan.prefill_loops and plan.exit_threshold is None
        if pool is None or not fixed or self.config.whole_prompt:
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


def _extend(spans: list[Span], span: Span) -> None:
    """Append a span, joined to the one before it where they meet at the same loop."""
    if spans and (spans[-1].end, spans[-1].loop) == (span.start, span.loop):
        spans[-1].end = span.end
    else:
        spans.append(span)


def _check_ids(sampling: SamplingParams, vocab_size: int) -> None:
    for field, ids in (("logit_bias", sampling.logit_bias), ("stop_token_ids", sampling.stop_token_ids),
                       ("logprob_tokens", sampling.logprob_tokens)):  # fmt: skip
        for token in ids:
            if not 0 <= token < vocab_size:
                raise RequestError(field, f"{field}: token ids must be between 0 and {vocab_size - 1}, got {token}")
