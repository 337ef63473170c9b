"""The native kernels equal the reference in torch on random shapes, at every level of instruction set there is here."""

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tinyloop.kernels import native, reference
from tinyloop.kernels.linear import Int8Linear, Linear
from tinyloop.kernels.reads import Reads

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
many = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def _levels() -> list[str]:
    """The builds that exist and that this processor can run."""
    plain = native._module("plain")
    best = native.LEVELS.index(plain.best_level()) if plain else 0
    return [level for level in native.LEVELS[: best + 1] if native._module(level)]


@pytest.fixture(params=_levels() or [pytest.param("", marks=pytest.mark.skip(reason="the native build is absent"))])
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("TINYLOOP_NATIVE", request.param)
    _forget()
    assert native.library().__name__.endswith(f"_{request.param}")
    yield request.param
    _forget()


def _forget() -> None:
    native.library.cache_clear()
    native._kernel.cache_clear()


def near(got: Tensor, exact: Tensor, size: float = 1.0) -> bool:
    """Within 1e-5 in float32; in bfloat16 within two units in the last place of the exact value.

    `size`: the largest number that enters a sum. What is rounded there does not shrink when the sum is small.
    """
    assert got.shape == exact.shape
    bound = 1e-5 if got.dtype == torch.float32 else 2**-7
    return bool(torch.allclose(got.float(), exact.float(), rtol=bound, atol=bound / 4 * max(size, 1)))


@many
@given(dtype=DTYPES, rows=st.integers(1, 70), size=st.integers(1, 700), seed=st.integers(0, 99))
def test_norms(level: str, dtype: torch.dtype, rows: int, size: int, seed: int) -> None:
    torch.manual_seed(seed)
    x, weight, more = torch.randn(rows, size).to(dtype), torch.randn(size).to(dtype), torch.randn(rows, size).to(dtype)
    for extra in (more, None):
        exact = reference.rms_norm(x.float(), weight.float(), 1e-6, None if extra is None else extra.float())
        assert near(native.rms_norm(x, weight, 1e-6, extra), exact)


@many
@given(dtype=DTYPES, rows=st.integers(1, 70), size=st.integers(1, 700), scale=st.sampled_from([1.0, 30.0]))
def test_gated_activation(level: str, dtype: torch.dtype, rows: int, size: int, scale: float) -> None:
    gate_up = (scale * torch.randn(rows, 2 * size)).to(dtype)
    assert near(native.silu_mul(gate_up), reference.silu_mul(gate_up.float()))


@many
@given(dtype=DTYPES, rows=st.integers(1, 70), size=st.integers(1, 700), scale=st.sampled_from([1.0, 30.0]))
def test_gates(level: str, dtype: torch.dtype, rows: int, size: int, scale: float) -> None:
    gate, x = (scale * torch.randn(2, rows, size)).to(dtype)
    assert near(native.sigmoid_mul(gate, x), reference.sigmoid_mul(gate.float(), x.float()))


@many
@given(
    dtype=DTYPES,
    rows=st.integers(1, 9),
    size=st.integers(1, 300),
    values=st.sampled_from([3, 1000]),
    odd=st.sampled_from([0.0, float("nan"), float("inf"), float("-inf")]),
    seed=st.integers(0, 99),
)
def test_the_most_likely_is_the_first_of_the_largest(
    level: str, dtype: torch.dtype, rows: int, size: int, values: int, odd: float, seed: int
) -> None:
    torch.manual_seed(seed)
    logits = torch.randint(-values, values, (rows, size)).to(dtype)  # with many ties
    logits[torch.rand(rows, size) < 0.02] = odd
    for got, exact in zip(native.most_likely(logits), reference.most_likely(logits), strict=True):
        assert torch.equal(torch.nan_to_num(got), torch.nan_to_num(exact))
    assert native.most_likely(torch.full((2, size), float("-inf"), dtype=dtype))[1].tolist() == [0, 0]


@many
@given(
    dtype=DTYPES, rows=st.integers(1, 40), kv_heads=st.integers(1, 4), shared=st.integers(1, 4),
    half=st.integers(1, 40), page_size=st.sampled_from([1, 4, 16]), seed=st.integers(0, 99),
)  # fmt: skip
def test_rope_and_write(
    level: str, dtype: torch.dtype, rows: int, kv_heads: int, shared: int, half: int, page_size: int, seed: int
) -> None:
    torch.manual_seed(seed)
    heads = kv_heads * shared
    qkv = torch.randn(rows, heads + 2 * kv_heads, 2 * half).to(dtype)
    parts = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
    angles = 100 * torch.rand(rows, 1, half)
    pages = rows // page_size + 1
    slots = torch.randperm(pages * page_size)[:rows].repeat_interleave(2)[::2]  # may lie across a table
    caches = torch.zeros(2, 2, pages, page_size, kv_heads, 2 * half, dtype=dtype)
    turned = [
        kernels.rope_write(*parts, angles.cos(), angles.sin(), *cache, slots)
        for kernels, cache in zip((native, reference), caches, strict=True)
    ]
    assert near(*turned)
    assert near(caches[0, 0], caches[1, 0])
    assert torch.equal(caches[0, 1], caches[1, 1])


def history(
    segments: list[tuple[int, int]], page_size: int, window: int, shared: int, dtype: torch.dtype, pages: int, seed: int
) -> Reads:
    """Segments (tokens before, rows) with pages drawn at random, in two page rows."""
    rng = random.Random(seed)
    spans, ids = [], []
    row = 0
    for before, rows in segments:
        first = max(0, before - window + 1) // page_size if window else 0
        last = (before + rows - 1) // page_size + 1
        spans.append((row, rows, before, window, first * page_size, len(ids)))
        ids += [rng.randrange(pages) for _ in range(first, last)]
        row += rows
    table = torch.tensor([ids, [(page + 1) % pages for page in ids]])
    return Reads(torch.tensor(spans), table, page_size, shared, dtype)


@many
@given(
    dtype=DTYPES,
    segments=st.lists(st.tuples(st.integers(0, 300), st.just(1) | st.integers(1, 90)), min_size=1, max_size=5),
    kv_heads=st.integers(1, 3), shared=st.integers(1, 5), head_dim=st.sampled_from([2, 6, 12, 16, 32, 64, 80, 128]),
    page_size=st.sampled_from([1, 3, 4, 16, 32]), window=st.sampled_from([0, 1, 7, 64, 100]), seed=st.integers(0, 99),
)  # fmt: skip
def test_attention_of_mixed_segments(
    level: str, dtype: torch.dtype, segments: list[tuple[int, int]], kv_heads: int, shared: int, head_dim: int,
    page_size: int, window: int, seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    keys, values = torch.randn(2, 40, page_size, kv_heads, head_dim).to(dtype)
    q = torch.randn(sum(rows for _, rows in segments), kv_heads * shared, head_dim).to(dtype)
    reads = history(segments, page_size, window, shared, dtype, 40, seed)
    wide = history(segments, page_size, window, shared, torch.float32, 40, seed)
    for page_row in (0, 1):
        got = native.attention(q, keys, values, reads, page_row)
        exact = reference.attention(q.float(), keys.float(), values.float(), wide, page_row)
        assert near(got, exact, float(values.abs().max()))  # weights are rounded


@many
@given(
    segments=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 40)), min_size=1, max_size=4),
    page_size=st.sampled_from([1, 3, 16]), window=st.sampled_from([0, 5, 40]), layer=st.integers(1, 60),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_a_layer_with_a_window_sees_the_nearer_of_both(
    level: str, segments: list[tuple[int, int]], page_size: int, window: int, layer: int, seed: int
) -> None:
    torch.manual_seed(seed)
    keys, values = torch.randn(2, 40, page_size, 2, 12)
    q = torch.randn(sum(rows for _, rows in segments), 4, 12)
    reads = history(segments, page_size, window, 2, torch.float32, 40, seed)
    both = min(window, layer) if window else layer
    same_pages = Reads(reads.spans.clone(), reads.pages, page_size, 2, torch.float32)
    same_pages.spans[:, 3] = both
    for kernels in (native, reference):
        assert near(kernels.attention(q, keys, values, reads.within(layer), 1),
                    reference.attention(q, keys, values, same_pages, 1))  # fmt: skip


@pytest.mark.parametrize("window", [0, 4])
def test_rows_that_look_ahead_see_their_segment_and_no_more(level: str, window: int) -> None:
    torch.manual_seed(3)
    keys, values = torch.randn(2, 40, 4, 2, 12)
    segments = [(0, 9), (0, 7), (5, 3)]
    causal = history(segments, 4, window, 2, torch.float32, 40, 0)
    reads = replace(causal, ahead=torch.tensor([False, True, False]))
    q = torch.randn(19, 4, 12)
    got, others = native.attention(q, keys, values, reads, 0), [*range(9), *range(16, 19)]
    assert near(got[others], reference.attention(q, keys, values, causal, 0)[others])
    _, _, _, _, _, offset = causal.spans[1].tolist()
    for row in range(7):
        seen = slice(max(0, row - window + 1) if window else 0, 7)
        k, v = (cache[causal.pages[0, offset : offset + 2]].flatten(0, 1)[seen].repeat_interleave(2, 1)
                for cache in (keys, values))  # fmt: skip
        weights = (torch.einsum("hd,khd->hk", q[9 + row], k) / 12**0.5).softmax(-1)
        assert near(got[9 + row], torch.einsum("hk,khd->hd", weights, v).flatten())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_of_a_segment_does_not_depend_on_its_neighbours(level: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    keys, values = torch.randn(2, 40, 16, 3, 64).to(dtype)
    segments = [(200, 1), (5, 100), (77, 33), (300, 1)]
    q = torch.randn(135, 9, 64).to(dtype)
    reads = history(segments, 16, 50, 3, dtype, 40, 0)
    together = native.attention(q, keys, values, reads, 0)
    for row, rows, *_ in reads.spans.tolist():
        span = next(span for span in reads.spans.tolist() if span[0] == row)
        alone = Reads(torch.tensor([[0, *span[1:]]]), reads.pages, 16, 3, dtype)
        assert torch.equal(native.attention(q[row : row + rows], keys, values, alone, 0), together[row : row + rows])


@many
@given(
    dtype=DTYPES, rows=st.integers(1, 70), sizes=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    added=st.booleans(), biased=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_products(
    level: str, dtype: torch.dtype, rows: int, sizes: tuple[int, int], added: bool, biased: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    weight, bias = torch.randn(sizes).to(dtype), torch.randn(sizes[0]).to(dtype) if biased else None
    linear = Linear(weight, bias)
    assert linear.native
    x, more = torch.randn(rows, sizes[1]).to(dtype), torch.randn(rows, sizes[0]).to(dtype)
    exact = x.double() @ weight.double().T + (more.double() if added else 0)
    whole = exact if bias is None else exact + bias.double()  # rounded before and after
    got = linear(x, more if added else None)
    bound = 2**-7 if dtype == torch.bfloat16 else 1e-6
    terms = x.double().abs() @ weight.double().abs().T  # what a sum was made of
    assert bool(((got.double() - whole).abs() <= bound * (1 + exact.abs() + whole.abs()) + 1e-6 * terms).all())
    alone = torch.cat([linear(x[i : i + 1], more[i : i + 1] if added else None) for i in range(rows)])
    assert torch.equal(got, alone), "a row depends on its neighbours"


@many
@given(
    dtype=DTYPES, rows=st.integers(1, 40), sizes=st.tuples(st.integers(1, 150), st.integers(1, 300)),
    added=st.booleans(), biased=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_products_in_int8(
    level: str, dtype: torch.dtype, rows: int, sizes: tuple[int, int], added: bool, biased: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    weight, bias = torch.randn(sizes).to(dtype), torch.randn(sizes[0]).to(dtype) if biased else None
    linear = Int8Linear(weight, bias)
    assert linear.native
    x = (torch.randn(rows, sizes[1]) * torch.rand(rows, 1) * 9).to(dtype)
    x[0] = 0
    more = torch.randn(rows, sizes[0]).to(dtype) if added else None
    exact = reference.linear_int8(x.float(), *reference.quantize(weight), None if more is None else more.float())
    got = linear(x, more)
    whole = exact if bias is None else exact + bias.float()
    bound = 1e-5 if dtype == torch.float32 else 2**-7
    terms = x.float().abs() @ weight.float().abs().T  # what a small sum was made of
    assert bool(((got.float() - whole).abs() <= bound * (1 + exact.abs() + whole.abs()) + 1e-6 * terms).all())
    alone = torch.cat([linear(x[i : i + 1], None if more is None else more[i : i + 1]) for i in range(rows)])
    assert torch.equal(got, alone), "a row depends on its neighbours"


def test_int8_is_near_what_it_stands_for(level: str) -> None:
    torch.manual_seed(3)
    weight, x = torch.randn(96, 640), torch.randn(20, 640)
    x[:, 7] *= 100  # one large input costs its own group of 64, not the row
    exact, got = x @ weight.T, Int8Linear(weight)(x)
    assert (got - exact).norm() < 0.02 * exact.norm()


def test_what_the_native_kernels_do_not_take_goes_to_torch(level: str) -> None:
    x = torch.randn(4, 32)
    half, weight = x.half(), torch.ones(32)
    assert torch.equal(native.rms_norm(half, weight.half(), 1e-6), reference.rms_norm(half, weight.half(), 1e-6))
    assert torch.equal(native.rms_norm(x.T, weight[:4], 1e-6), reference.rms_norm(x.T, weight[:4], 1e-6))
    assert torch.equal(native.silu_mul(x.T), reference.silu_mul(x.T))
    assert not Linear(torch.ones(33, 32).half()).native


@pytest.mark.parametrize("slot", [-1, 160, 2**40])
def test_places_outside_of_the_pages_are_refused(level: str, slot: int) -> None:
    q, k, v = reference.heads(torch.randn(3, 64), 4, 2, 8)
    cache, angles = torch.zeros(2, 10, 16, 2, 8), torch.rand(3, 1, 4)
    with pytest.raises(IndexError, match=f"slot {slot} of 160"):
        native.rope_write(q, k, v, angles, angles, *cache, torch.tensor([0, 5, slot]))
    assert not cache.any()
    for reads in ([(0, 3, 0, 0, 0, 0)], [[slot]]), ([(1, 3, 0, 0, 0, 0)], [[0]]), ([(0, 3, 14, 0, 0, 0)], [[0]]):
        spans, pages = map(torch.tensor, reads)
        with pytest.raises(IndexError):
            native.attention(q.contiguous(), *cache, Reads(spans, pages, 16, 2, torch.float32), 0)


def test_a_number_that_is_none_stays_none(level: str) -> None:
    x = torch.full((1, 40), torch.nan).bfloat16()
    assert native.rms_norm(x, x[0], 1e-6).isnan().all()
    assert native.silu_mul(x).isnan().all()
    assert Int8Linear(torch.randn(32, 40).bfloat16())(x).isnan().all()


@pytest.mark.parametrize(("setting", "logged"), [("0", ""), ("missing", "native kernels are not built")])
def test_torch_serves_where_there_is_nothing_native(setting: str, logged: str) -> None:
    block = "[sys.modules.__setitem__(f'tinyloop.kernels._{level}', None) for level in native.LEVELS]"
    code = f"""
import sys, torch
from tinyloop.kernels import native, reference
{block if setting == "missing" else ""}
x = torch.randn(3, 2 * 8)
assert torch.equal(native.silu_mul(x), reference.silu_mul(x)) and native.silu_mul(x) is not None
assert native.library() is None
"""
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"TINYLOOP_NATIVE": setting},
                          capture_output=True, text=True, check=True)  # fmt: skip
    assert done.stderr.count("native kernels") == bool(logged)
    assert logged in done.stderr
