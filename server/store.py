"""Answers that a client may come back to: kept in memory, up to a bound, the longest unused forgotten first.

Knows no API and no HTTP. What is kept belongs to whoever made it; to anybody else it does not exist.
"""

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OVERHEAD = 1024  # bytes that an entry is taken to cost beside its text


@dataclass(frozen=True)
class Stored:
    """One answer. `messages`: the whole conversation that led to it, itself included, as a chat template sees it."""

    id: str
    messages: Sequence[Mapping[str, Any]]
    body: Mapping[str, Any]
    items: Sequence[Mapping[str, Any]] = ()  # what this turn was given, in its API's words
    label: str = ""  # of its request in the scheduler

    @property
    def size(self) -> int:
        """Bytes, about. A conversation counts in full for each of its answers, though they share most of it."""
        return OVERHEAD + len(json.dumps([list(self.messages), self.body, list(self.items)]))


class ResponseStore:
    """`capacity` in bytes; 0 keeps nothing."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.size = capacity, 0
        self._entries: OrderedDict[tuple[str, str], tuple[Stored, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, owner: str, stored: Stored) -> bool:
        """Keep an answer; False if it alone is larger than everything that may be kept."""
        size = stored.size
        if size > self.capacity:
            return False
        self.delete(owner, stored.id)
        self._entries[owner, stored.id] = (stored, size)
        self.size += size
        while self.size > self.capacity:
            _, (_, freed) = self._entries.popitem(last=False)
            self.size -= freed
        return True

    def get(self, owner: str, key: str) -> Stored | None:
        entry = self._entries.get((owner, key))
        if entry is None:
            return None
        self._entries.move_to_end((owner, key))
        return entry[0]

    def delete(self, owner: str, key: str) -> bool:
        """Whether there was such an answer."""
        entry = self._entries.pop((owner, key), None)
        self.size -= entry[1] if entry else 0
        return entry is not None
