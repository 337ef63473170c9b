"""PrefixPool: which pages hold which token prefix, and to which depth. Integers only; no tensors.

Prefixes form a tree of blocks (Kwon et al. 2023; Zheng et al. 2024): a node is up to `page_size` tokens after its
parent, found by comparing the tokens themselves. What is new here is depth. A node keeps the planes of as many loops as
were ever run for its tokens, and the coda of each depth that was asked for, so one node serves requests at any depth:
what it lacks is computed from the state that its deepest plane left, and the node grows.

Registered prefixes are pinned and stay. Finished prompts and answers are kept in spare pages, least recently used first
out. Nothing is shared between different salts or windows; where planes depend on the final depth, nor between depths.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from threading import RLock

from tinyloop.config import Layout
from tinyloop.kv.pages import PagePool, PageTable
from tinyloop.plan import LoopPlan

MOST_SIBLINGS = 64  # children with the same first token that a search for a partial match looks at


@dataclass(frozen=True)
class Root:
    """What must be equal before tokens are compared. `loops` is None where a prefix serves every depth."""

    cache_window: int
    salt: str
    loops: int | None


@dataclass(eq=False)
class Node:
    """Up to `page_size` tokens. `pages`: the prelude's, then plane after plane. `codas`: by their depth."""

    tokens: tuple[int, ...]
    parent: "Node | None" = None
    pages: list[int] = field(default_factory=list)
    codas: dict[int, list[int]] = field(default_factory=dict)
    children: dict[int, dict[tuple[int, ...], "Node"]] = field(default_factory=dict)  # by first token, by all tokens
    pins: int = 0
    root: Root | None = None  # set on roots, which hold no tokens

    def held(self) -> list[int]:
        return [*self.pages, *(page for coda in self.codas.values() for page in coda)]

    def child(self, tokens: tuple[int, ...]) -> "Node | None":
        return self.children.get(tokens[0], {}).get(tokens)

    def chain(self) -> Iterator["Node"]:
        """The node and its ancestors, without the root."""
        node: Node | None = self
        while node is not None and node.parent is not None:
            yield node
            node = node.parent


@dataclass(frozen=True)
class Match:
    """The nodes that a prompt runs through, and how many of its tokens they cover; the last may be used in part."""

    nodes: tuple[Node, ...] = ()
    tokens: int = 0


@dataclass(frozen=True)
class Entry:
    """A registered prefix. `last` is None for an engine that keeps its KV to itself."""

    tokens: tuple[int, ...]
    loops: int
    cache_window: int
    last: Node | None = None
    salt: str = ""


class PrefixPool:
    """At most `capacity` registered prefixes (when it is full the shortest goes first), and what is cached beside them.

    A pool belongs to the first runner that uses it. `match` may be asked from another thread while a step publishes.
    """

    def __init__(self, capacity: int = 16) -> None:
        if capacity < 0:
            raise ValueError(f"capacity must be at least 0, got {capacity}")
        self.capacity = capacity
        self._entries: list[Entry] = []
        self._roots: dict[Root, Node] = {}
        self._recent: OrderedDict[Node, None] = OrderedDict()  # unpinned nodes; a node is older than its ancestors
        self._pinned: set[Node] = set()
        self._pool: PagePool | None = None
        self._lock = RLock()

    def bind(self, pool: PagePool, layout: Layout, page_size: int, *, across_depths: bool) -> bool:
        """Keep pages of `pool` from now on; False if they are another runner's already."""
        if self._pool is None:
            self._pool, self._layout, self._page_size, self._across = pool, layout, page_size, across_depths
        return self._pool is pool

    def stats(self) -> dict[str, int]:
        """Of the registered prefixes: `{"entries", "total_cached_tokens"}`."""
        return {"entries": len(self._entries), "total_cached_tokens": sum(len(e.tokens) for e in self._entries)}

    @property
    def registered(self) -> tuple[Entry, ...]:
        return tuple(self._entries)

    def held(self) -> list[list[int]]:
        """Every node's pages, for the accounts."""
        return [node.held() for node in (*self._recent, *self._pinned)]

    # Reading

    def match(self, tokens: Sequence[int], plan: LoopPlan, salt: str = "") -> Match:
        """The longest prefix of `tokens` that is here, at whatever depth. A pure read.

        At least one token is left over: somebody has to make the logits.
        """
        with self._lock:
            return self._match(tokens, plan, salt)

    def _match(self, tokens: Sequence[int], plan: LoopPlan, salt: str) -> Match:
        node, nodes, done, limit = self._roots.get(self._root(plan, salt)), list[Node](), 0, len(tokens) - 1
        while node is not None and done < limit:
            block = tuple(tokens[done : done + self._page_size])
            following = node.child(block) if done + self._page_size <= limit else None
            used = self._page_size
            if following is None:
                following, used = self._partial(node, block[: limit - done], plan.loops)
            if following is None:
                break
            nodes.append(following)
            done += used
            node = following if used == self._page_size else None
        return Match(tuple(nodes), done)

    def _partial(self, node: Node, block: tuple[int, ...], loops: int) -> tuple[Node | None, int]:
        """The child that shares most tokens with the start of a block, and how many; of equals the fittest."""
        siblings = islice(node.children.get(block[0], {}).values(), MOST_SIBLINGS)
        rated = [(_common(one.tokens, block), loops in one.codas, len(one.pages), one) for one in siblings]
        common, _, _, best = max(rated, key=lambda row: row[:3], default=(0, False, 0, None))
        return best, common

    def match_tokens(self, prompt: Sequence[int], loops: int, cache_window: int = 0, salt: str = "") -> Entry | None:
        """The longest registered prefix at this depth; for engines that keep their KV to themselves."""
        hits = [
            entry
            for entry in self._entries
            if (entry.loops, entry.cache_window, entry.salt) == (loops, cache_window, salt)
            and tuple(prompt[: len(entry.tokens)]) == entry.tokens
        ]
        return max(hits, key=lambda entry: len(entry.tokens), default=None)

    # Writing

    def publish(self, tokens: Sequence[int], plan: LoopPlan, table: PageTable, salt: str = "") -> Node | None:
        """Keep the whole blocks of finished tokens, or add to nodes what they lack. Returns the last node."""
        if table.first or self._pool is not table.pool:
            return None  # a window has dropped the beginning
        whole = len(tokens) // self._page_size * self._page_size
        with self._lock:
            return self._publish(tokens[:whole], plan, table, salt)

    def register(self, tokens: Sequence[int], plan: LoopPlan, table: PageTable, salt: str = "") -> int:
        """Publish a prefix with its partial last page, and pin it. Returns the number of tokens cached."""
        if not self.capacity or not tokens:
            return 0
        assert self._pool is table.pool, "the pool belongs to another model"
        node = self._publish(tokens, plan, table, salt)
        self._enter(Entry(tuple(tokens), plan.loops, plan.cache_window, node, salt))
        return len(tokens)

    def register_tokens(self, tokens: Sequence[int], loops: int = 8, cache_window: int = 0, salt: str = "") -> int:
        """Register a prefix whose KV the engine keeps to itself; returns the number of tokens cached."""
        if not self.capacity or not tokens:
            return 0
        self._enter(Entry(tuple(tokens), loops, cache_window, salt=salt))
        return len(tokens)

    def touch(self, node: Node) -> None:
        """Mark a chain as just used. Ancestors last, so that a node is always older than those it hangs on."""
        for one in node.chain():
            if one in self._recent:
                self._recent.move_to_end(one)

    def evict(self, count: int) -> None:
        """Let go of unpinned prefixes, least recently used first, until `count` more pages are free or none is left."""
        assert self._pool is not None
        goal = min(self._pool.free + count, self._pool.num_pages)
        with self._lock:
            while self._pool.free < goal and (leaves := self._idle_leaves(goal - self._pool.free)):
                for node in leaves:
                    self._forget(node)
            if self._pool.free < goal:
                self._strip(goal)
            if self._pool.free < goal:
                self._uproot(goal)

    def unregister_shortest(self) -> bool:
        """Unpin the shortest registered prefix; it stays cached while there is room. False if there is none."""
        entry = min(self._entries, key=lambda e: len(e.tokens), default=None)
        if entry is None:
            return False
        self.unregister(entry)
        return True

    def unregister(self, entry: Entry) -> None:
        """Unpin one of `registered`; it stays cached while there is room."""
        self._entries.remove(entry)
        self._unpin(entry.last)

    def clear(self) -> None:
        """Drop everything and give the pages back."""
        while self.unregister_shortest():
            pass
        for node in list(self._recent):
            self._forget(node)
        self._roots.clear()

    def _root(self, plan: LoopPlan, salt: str) -> Root:
        return Root(plan.cache_window, salt, None if self._across else plan.loops)

    def _publish(self, tokens: Sequence[int], plan: LoopPlan, table: PageTable, salt: str) -> Node | None:
        if not tokens:
            return None
        key = self._root(plan, salt)
        node = self._roots.setdefault(key, Node((), root=key))
        for start in range(0, len(tokens), self._page_size):
            block = tuple(tokens[start : start + self._page_size])
            node = self._keep(node, block, start // self._page_size, plan, table)
        self.touch(node)
        return node

    def _keep(self, parent: Node, tokens: tuple[int, ...], block: int, plan: LoopPlan, table: PageTable) -> Node:
        """The child with these tokens, made or completed from a table's block. Registered beginnings of it grow too."""
        for sibling in list(parent.children.get(tokens[0], {}).values()):
            if len(sibling.tokens) < len(tokens) and tokens[: len(sibling.tokens)] == sibling.tokens:
                self._complete(sibling, block, plan, table)
        node = parent.child(tokens)
        if node is None:
            node = Node(tokens, parent)
            parent.children.setdefault(tokens[0], {})[tokens] = node
            self._recent[node] = None
        self._complete(node, block, plan, table)
        return node

    def _complete(self, node: Node, block: int, plan: LoopPlan, table: PageTable) -> None:
        """Hold the planes and the coda that the node lacks and the table has."""
        layout = self._layout
        column: list[int] = table.ids[:, block].tolist()
        coda = slice(layout.first_row("coda"), layout.first_row("coda") + layout.pages("coda"))
        planes = column[: coda.start] + column[coda.stop : layout.rows(plan.loops)]
        new = planes[len(node.pages) :]
        node.pages += new
        if column[coda] and plan.loops not in node.codas:
            node.codas[plan.loops] = column[coda]
            new = new + column[coda]
        self._hold(node, new)

    def _hold(self, node: Node, pages: Sequence[int]) -> None:
        assert self._pool is not None
        self._pool.share(pages)
        if not node.pins:
            self._pool.offer(pages)

    def _let_go(self, node: Node, pages: Iterable[int]) -> None:
        assert self._pool is not None
        pages = list(pages)
        if not node.pins:
            self._pool.offer(pages, -1)
        self._pool.give(pages)

    def _enter(self, entry: Entry) -> None:
        for twin in [e for e in self._entries if _same(e, entry)]:
            self._entries.remove(twin)
            self._unpin(twin.last)
        while len(self._entries) >= self.capacity:
            self._pin(entry.last)  # it may share blocks with the one that goes
            self.unregister_shortest()
            self._unpin(entry.last)
        self._entries.append(entry)
        self._pin(entry.last)

    def _pin(self, node: Node | None) -> None:
        assert self._pool is not None or node is None
        for one in node.chain() if node else ():
            if not one.pins and self._pool:
                self._pool.offer(one.held(), -1)
                self._recent.pop(one)
                self._pinned.add(one)
            one.pins += 1

    def _unpin(self, node: Node | None) -> None:
        for one in node.chain() if node else ():
            one.pins -= 1
            if not one.pins and self._pool:
                self._pool.offer(one.held())
                self._pinned.remove(one)
                self._recent[one] = None
        if node:
            self.touch(node)

    def _idle_leaves(self, count: int) -> list[Node]:
        """The oldest nodes that nobody uses, until they hold `count` pages; ancestors come after their last child."""
        assert self._pool is not None
        leaves: list[Node] = []
        for node in self._recent:
            if count <= 0:
                break
            if not node.children and self._pool.is_idle(node.pages[0]):
                leaves.append(node)
                count -= len(node.held())
        return leaves

    def _forget(self, node: Node) -> None:
        self._let_go(node, node.held())
        del self._recent[node]
        parent = node.parent
        assert parent is not None
        siblings = parent.children[node.tokens[0]]
        del siblings[node.tokens]
        if not siblings:
            del parent.children[node.tokens[0]]
        if parent.root is not None and not parent.children:
            del self._roots[parent.root]

    def _strip(self, goal: int) -> None:
        """Take planes and codas that nobody reads out of nodes whose other pages are in use."""
        assert self._pool is not None
        per_loop = self._layout.pages("core")
        for node in self._recent:
            if self._pool.free >= goal:
                return
            for loops in [loops for loops, coda in node.codas.items() if all(map(self._pool.is_idle, coda))]:
                self._let_go(node, node.codas.pop(loops))
            least = self._layout.rows(1) - self._layout.pages("coda")
            while len(node.pages) > least and all(map(self._pool.is_idle, node.pages[-per_loop:])):
                self._let_go(node, node.pages[-per_loop:])
                del node.pages[-per_loop:]

    def _uproot(self, goal: int) -> None:
        """Let go of nodes that nobody reads although what hangs on them is in use, and of that too.

        It comes about when a request has computed a block again that was here: its own pages serve it, and the blocks
        that follow are made of its pages.
        """
        assert self._pool is not None
        for node in list(self._recent):
            if self._pool.free >= goal:
                return
            if node in self._recent and self._pool.is_idle(node.pages[0]):
                for one in _subtree(node):
                    self._forget(one)


def _subtree(node: Node) -> list[Node]:
    """A node and all that hangs on it, children before their parents."""
    below = [one for siblings in node.children.values() for child in siblings.values() for one in _subtree(child)]
    return [*below, node]


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences begin with in common."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _same(one: Entry, other: Entry) -> bool:
    return (one.tokens, one.loops, one.cache_window, one.salt) == (
        other.tokens, other.loops, other.cache_window, other.salt)  # fmt: skip
