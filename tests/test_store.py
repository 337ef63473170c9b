"""What is kept is bounded, and belongs to whoever made it."""

from hypothesis import given
from hypothesis import strategies as st

from server.store import ResponseStore, Stored

OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["put", "get", "delete"]), st.sampled_from("abcd"), st.integers(0, 4000)), max_size=60
)


def stored(key: str, length: int = 0) -> Stored:
    return Stored(key, [{"role": "user", "content": "x" * length}], {})


@given(OPERATIONS)
def test_the_size_is_that_of_what_is_kept_and_never_above_the_capacity(operations: list[tuple[str, str, int]]) -> None:
    store, sizes = ResponseStore(6000), dict[str, int]()
    for what, key, length in operations:
        if what == "put":
            entry = stored(key, length)
            assert store.put("me", entry) == (entry.size <= 6000)
            sizes[key] = entry.size
        elif what == "get":
            assert (store.get("me", key) is None) or key in sizes
        else:
            store.delete("me", key)
        kept = [key for key in "abcd" if store.get("me", key) is not None]
        assert store.size == sum(sizes[key] for key in kept) <= 6000
        assert len(store) == len(kept)


def test_the_longest_unused_is_forgotten_first() -> None:
    store = ResponseStore(3 * stored("a").size)
    for key in "abc":
        store.put("me", stored(key))
    store.get("me", "a")
    store.put("me", stored("d"))
    assert [key for key in "abcd" if store.get("me", key)] == ["a", "c", "d"]


def test_nobody_else_gets_or_deletes_it() -> None:
    store = ResponseStore(10_000)
    store.put("me", stored("a"))
    assert store.get("you", "a") is None
    assert not store.delete("you", "a")
    assert store.delete("me", "a")
    assert store.size == 0
