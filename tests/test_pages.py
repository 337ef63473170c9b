"""The page accounts: whatever happens, every page is free or held, and by whom it says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyloop.kv.pages import NONE, OutOfPages, PagePool, PageTable


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30), st.integers(1, 9)), max_size=60))
def test_accounts_balance_after_any_order_of_events(events: list[tuple[int, int, int]]) -> None:
    pool, held, offered = PagePool(40), list[PageTable](), list[int]()
    for kind, start, tokens in events:
        if kind == 0:
            held.append(PageTable(pool, 1 + start % 3, 2))
        elif held and kind == 1 and held[-1].missing(start, start + tokens) <= pool.free:
            held[-1].fill(start, start + tokens)
            assert held[-1].missing(start, start + tokens) == 0
        elif held and kind == 2:
            held[0].drop_before(start)
        elif held and kind == 3 and held[0].held():
            twin = PageTable(pool, held[0].rows, 2)
            column = held[0].ids[:, start % held[0].ids.shape[1]]
            rows = [row for row, page in enumerate(column) if page != NONE]
            twin.adopt(tokens, rows, column[rows].tolist())
            held.append(twin)
        elif held and kind == 4:
            held.pop(tokens % len(held)).release()
        elif held and kind == 5 and not offered:
            pool.share(held[0].held())
            pool.offer(held[0].held())
            offered = held[0].held()
        pool.check([*(table.held() for table in held), offered])
        assert pool.available == pool.free + pool.idle
    for table in held:
        table.release()
    assert pool.available == 40
    pool.offer(offered, -1)
    pool.give(offered)
    pool.check([])
    assert (pool.free, pool.idle) == (40, 0)


def test_taking_is_all_or_nothing() -> None:
    pool = PagePool(3)
    with pytest.raises(OutOfPages, match="4 pages wanted, 3 are free"):
        pool.take(4)
    assert len(pool.take(3)) == 3
    with pytest.raises(OutOfPages):
        pool.take(1)


def test_a_page_is_idle_while_only_caches_hold_it() -> None:
    pool = PagePool(1)
    (page,) = pool.take(1)
    pool.share([page])
    pool.offer([page])
    assert pool.idle == 0
    pool.give([page])
    assert (pool.idle, pool.free, pool.available) == (1, 0, 1)
    pool.share([page])
    assert pool.idle == 0


def test_a_page_given_back_twice_is_caught() -> None:
    pool = PagePool(1)
    page = pool.take(1)
    pool.give(page)
    with pytest.raises(AssertionError, match="given back twice"):
        pool.give(page)


def test_a_leak_is_caught() -> None:
    pool = PagePool(2)
    pool.take(1)
    with pytest.raises(AssertionError, match="held by nobody"):
        pool.check([])
