"""The page accounts: whatever happens, every page is free, promised or held, and by whom it says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyloop.kv.pages import PagePool, PageTable
from tinyloop.kv.prefix import Prefix, PrefixPool


def table(pool: PagePool, rows: int, tokens: int, page_size: int = 2) -> PageTable:
    blocks = -(-tokens // page_size)
    assert pool.reserve(rows * blocks)
    return PageTable(pool, rows, page_size, total=blocks, reserved=rows * blocks)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3), st.integers(1, 9)), max_size=40))
def test_accounts_balance_after_any_order_of_events(events: list[tuple[int, int, int]]) -> None:
    pool, held = PagePool(40), list[PageTable]()
    for kind, rows, tokens in events:
        if kind == 0 and pool.available >= rows * -(-tokens // 2):
            held.append(table(pool, rows, tokens))
        elif held and kind == 1:
            held[0].grow(min(tokens, held[0].total * 2))
        elif held and kind == 2:
            held[-1].drop_before(tokens)
        elif held and kind == 3:
            held.append(held[0].fork())
        elif held and kind == 4:
            held.pop(tokens % len(held)).release()
        pool.check(held)
    for one in held:
        one.release()
    pool.check([])
    assert pool.available == 40


def test_a_reserve_is_all_or_nothing() -> None:
    pool = PagePool(3)
    assert not pool.reserve(4)
    assert pool.reserve(3)
    assert not pool.reserve(1)


def test_dropping_blocks_renews_the_promise_for_what_is_to_come() -> None:
    pool = PagePool(2)
    assert pool.reserve(2)
    sequence = PageTable(pool, 1, 2, total=10, reserved=2)
    for end in range(2, 21, 2):
        sequence.grow(end)
        sequence.drop_before(end - 2)
        pool.check([sequence])
    assert sequence.blocks == 10


def test_a_page_given_back_twice_is_caught() -> None:
    pool = PagePool(1)
    pool.reserve(1)
    page = pool.take(1)
    pool.give(page)
    with pytest.raises(AssertionError, match="given back twice"):
        pool.give(page)


def test_a_leak_is_caught() -> None:
    pool = PagePool(2)
    pool.reserve(1)
    pool.take(1)
    with pytest.raises(AssertionError, match="held by nobody"):
        pool.check([])


def test_the_longest_prefix_at_the_right_depth_matches() -> None:
    pool = PrefixPool(4)
    for tokens, loops in (([1, 2], 4), ([1, 2, 3], 4), ([1, 2, 3, 4], 2)):
        assert pool.register_tokens(tokens, loops) == len(tokens)
    hit = pool.match_tokens([1, 2, 3, 4, 5], 4)
    assert hit is not None
    assert hit.tokens == (1, 2, 3)
    assert pool.match_tokens([1, 2, 3], 3) is None
    assert pool.match_tokens([1, 2, 3], 3, across_depths=True) is not None
    assert pool.match_tokens([1, 2, 3], 5, across_depths=True) is None
    assert pool.match_tokens([1, 2, 3], 4, cache_window=8) is None
    assert pool.match_tokens([9, 1, 2], 4) is None


def test_a_full_pool_evicts_the_shortest_and_gives_its_pages_back() -> None:
    pages, pool = PagePool(20), PrefixPool(2)
    for tokens in ((1, 2, 3, 4), (1, 2), (5, 6, 7)):
        held = table(pages, 1, len(tokens))
        held.grow(len(tokens))
        pool.add(Prefix(tokens, 1, 0, held))
    assert pool.stats() == {"entries": 2, "total_cached_tokens": 7}
    pages.check(pool.tables())
    pool.register_tokens((5, 6, 7), 1)
    assert pool.stats()["entries"] == 2
    pool.clear()
    pages.check([])
    assert PrefixPool(0).register_tokens([1]) == 0
