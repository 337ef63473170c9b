"""PrefixPool: which pages hold which token prefix, and to which depth. Integers only; no tensors.

An entry is found by its tokens, compared one by one. Whether an entry may serve a request at another depth is a fact
of the model's family, and the caller passes it as `across_depths`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tinyloop.kv.pages import PageTable


@dataclass(frozen=True, eq=False)
class Prefix:
    """A registered prefix. `pages` is None for an engine that keeps its KV to itself."""

    tokens: tuple[int, ...]
    loops: int
    cache_window: int
    pages: PageTable | None = None

    def serves(self, prompt: Sequence[int], loops: int, cache_window: int, across_depths: bool) -> bool:
        """Whether every plane that the request reads is here, exactly as it would compute it."""
        deep_enough = loops <= self.loops if across_depths else loops == self.loops
        return deep_enough and cache_window == self.cache_window and tuple(prompt[: len(self.tokens)]) == self.tokens


class PrefixPool:
    """At most `capacity` prefixes. When it is full the shortest goes first."""

    def __init__(self, capacity: int = 16) -> None:
        if capacity < 0:
            raise ValueError(f"capacity must be at least 0, got {capacity}")
        self.capacity = capacity
        self._entries: list[Prefix] = []

    def stats(self) -> dict[str, int]:
        """`{"entries", "total_cached_tokens"}`."""
        return {"entries": len(self._entries), "total_cached_tokens": sum(len(e.tokens) for e in self._entries)}

    def tables(self) -> list[PageTable]:
        """The pages that the pool holds, for the accounts."""
        return [entry.pages for entry in self._entries if entry.pages is not None]

    def register_tokens(self, tokens: Sequence[int], loops: int = 8, cache_window: int = 0) -> int:
        """Register a prefix whose KV the engine keeps to itself; returns the number of tokens cached."""
        return self.add(Prefix(tuple(tokens), loops, cache_window))

    def add(self, entry: Prefix) -> int:
        """Take over an entry and its pages; returns the number of tokens now cached for it."""
        if not entry.tokens or not self.capacity:
            self._drop(entry)
            return 0
        for twin in [e for e in self._entries if _same(e, entry)]:
            self._evict(twin)
        while len(self._entries) >= self.capacity:
            self._evict(min(self._entries, key=lambda e: len(e.tokens)))
        self._entries.append(entry)
        return len(entry.tokens)

    def match_tokens(
        self, prompt: Sequence[int], loops: int, cache_window: int = 0, *, across_depths: bool = False
    ) -> Prefix | None:
        """The longest entry that the prompt starts with and that serves the request exactly. A pure read."""
        hits = [e for e in self._entries if e.serves(prompt, loops, cache_window, across_depths)]
        return max(hits, key=lambda e: len(e.tokens), default=None)

    def clear(self) -> None:
        """Drop every entry and give its pages back."""
        while self._entries:
            self._evict(self._entries[-1])

    def _evict(self, entry: Prefix) -> None:
        self._entries.remove(entry)
        self._drop(entry)

    def _drop(self, entry: Prefix) -> None:
        if entry.pages is not None:
            entry.pages.release()


def _same(one: Prefix, other: Prefix) -> bool:
    return (one.tokens, one.loops, one.cache_window) == (other.tokens, other.loops, other.cache_window)
