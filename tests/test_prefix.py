"""Prefixes that serve every depth: an answer from a kept prefix equals a cold one, however deep either was run."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tinyloop as tl
from tests.tiny_models import GREEDY, RETROFIT, greedy_by_oracle, tiny_model
from tinyloop import oracle
from tinyloop.config import Layout, prefix_serves_every_depth
from tinyloop.model import Generation, Model
from tinyloop.plan import make_plan
from tinyloop.sequence import Lease

LOGGED = tl.SamplingParams(temperature=0, ignore_eos=True, logprobs=100)


def model_of(family: str, **options: object) -> Model:
    options = {"scale": 0.5} | options
    return tiny_model("ouro", **options) if family == "ouro" else tiny_model("llama", tinyloop=RETROFIT, **options)


def assert_equals_cold(model: Model, prompt: list[int], warm: Generation, loops: int, window: int = 0) -> None:
    """Tokens equal the oracle's, and so do the logits to 1e-5."""
    tokens = [*prompt, *warm.token_ids]
    expected = model.oracle(tokens, loops, window).log_softmax(-1)[len(prompt) - 1 :]
    assert list(warm.token_ids) == expected[:-1].argmax(-1).tolist()
    for row, got in zip(expected, warm.logprobs, strict=False):
        ids, values = zip(*got.top, strict=True)
        assert torch.allclose(row[list(ids)], torch.tensor(values), atol=1e-5, rtol=0)


def ask(model: Model, pool: tl.PrefixPool, prompt: list[int], loops: int, **options: object) -> Generation:
    return model.generate_with_pool(pool, prompt, max_new_tokens=5, loops=loops, sampling=LOGGED, **options)


@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("max_chunk", [512, 5])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("family", ["ouro", "retrofit"])
def test_a_registered_prefix_serves_any_depth(family: str, page_size: int, max_chunk: int, window: int) -> None:
    for held, asked in ((8, 8), (8, 4), (8, 2), (4, 8), (2, 3), (1, 8)):
        model = model_of(family, page_size=page_size, max_chunk=max_chunk, pages=4000)
        pool, prefix = tl.PrefixPool(), [(7 * i + held) % 256 for i in range(37)]
        assert model.register_prefix(pool, prefix, loops=held, cache_window=window) == 37
        warm = ask(model, pool, [*prefix, 9, 8], asked, cache_window=window)
        assert warm.cached_tokens == 37
        assert_equals_cold(model, [*prefix, 9, 8], warm, asked, window)
        again = ask(model, pool, [*prefix, 9, 8, 7], asked, cache_window=window)
        assert_equals_cold(model, [*prefix, 9, 8, 7], again, asked, window)
        model.runner.check()


@settings(max_examples=60, deadline=None)
@given(data=st.data(), family=st.sampled_from(["ouro", "retrofit"]), page_size=st.sampled_from([1, 2, 4, 8]),
       max_chunk=st.integers(1, 20), window=st.sampled_from([0, 0, 4]))  # fmt: skip
def test_any_history_of_depths_gives_cold_answers(
    data: st.DataObject, family: str, page_size: int, max_chunk: int, window: int
) -> None:
    model = model_of(family, page_size=page_size, max_chunk=max_chunk, pages=3000)
    pool = tl.PrefixPool(2)
    trunk = data.draw(st.lists(st.integers(0, 3), min_size=24, max_size=24))
    for _ in range(data.draw(st.integers(2, 6))):
        split, loops = data.draw(st.integers(0, 24)), data.draw(st.integers(1, 6))
        prompt = trunk[:split] + data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
        if data.draw(st.booleans()):
            model.register_prefix(pool, prompt, loops=loops, cache_window=window)
        else:
            warm = ask(model, pool, prompt, loops, cache_window=window)
            assert list(warm.token_ids) == greedy_by_oracle(model, prompt, 5, loops, window)
        model.runner.check()
    pool.clear()
    model.runner.check()
    assert model.runner.pool.free == model.runner.pool.num_pages


def test_what_a_request_computes_is_kept_for_the_next_one() -> None:
    model, pool = model_of("ouro"), tl.PrefixPool()
    first = ask(model, pool, list(range(20)), 2)
    assert first.cached_tokens == 0
    followed = [*range(20), *first.token_ids, 99]
    second = ask(model, pool, followed, 2)
    assert second.cached_tokens == 24
    assert_equals_cold(model, followed, second, 2)
    assert pool.stats() == {"entries": 0, "total_cached_tokens": 0}


def test_deepening_is_done_once_and_the_entry_grows() -> None:
    model, pool = model_of("retrofit"), tl.PrefixPool()
    model.register_prefix(pool, list(range(16)), loops=2)
    hits = []
    for loops in (4, 4, 2, 3):
        lease = model.runner.admit([*range(16), 50 + loops], make_plan(model.config, loops=loops), max_new_tokens=1,
                                   sampling=GREEDY, pool=pool)  # fmt: skip
        assert lease is not None
        hits.append((lease.hit, [(span.start, span.end, span.loop) for span in lease.todo]))
        while not lease.finish_reason:
            model.runner.step(model.runner.ready())
        model.runner.release(lease)
    assert hits == [
        ("deepened", [(0, 16, 2), (16, 17, 0)]),
        ("exact", [(16, 17, 0)]),
        ("shallower", [(16, 17, 0)]),
        ("shallower", [(0, 16, 3), (16, 17, 0)]),  # the planes are there, the coda of this depth is not
    ]
    model.runner.check()


def test_a_salt_separates() -> None:
    model, pool = model_of("ouro"), tl.PrefixPool()
    prompt = list(range(20))
    assert ask(model, pool, prompt, 2, salt="one").cached_tokens == 0
    assert ask(model, pool, prompt, 2, salt="two").cached_tokens == 0
    assert ask(model, pool, prompt, 2).cached_tokens == 0
    assert ask(model, pool, prompt, 2, salt="one").cached_tokens == 19
    pool.clear()
    assert not pool._roots


def test_a_window_separates() -> None:
    model, pool = model_of("ouro"), tl.PrefixPool()
    model.register_prefix(pool, list(range(20)), loops=2, cache_window=6)
    assert ask(model, pool, list(range(20)), 2).cached_tokens == 0


def test_a_family_whose_planes_depend_on_the_depth_shares_at_one_depth_only() -> None:
    model, pool = model_of("ouro"), tl.PrefixPool()
    model.runner._across_depths = False
    prompt = list(range(20))
    assert ask(model, pool, prompt, 4).cached_tokens == 0
    assert ask(model, pool, prompt, 2).cached_tokens == 0
    assert ask(model, pool, prompt, 4).cached_tokens == 19


@pytest.mark.parametrize(
    "fact",
    [
        {"loop_reads_total": True},
        {"random_start": True},
        {"bidirectional_prompt": True},
        {"layout": Layout(0, 3, 0, one_plane=True)},
    ],
)
def test_each_fact_alone_forbids_sharing_between_depths(fact: dict[str, object]) -> None:
    config = model_of("ouro").config
    assert prefix_serves_every_depth(config)
    assert not prefix_serves_every_depth(replace(config, **fact))


# Negative controls: the bugs that these tests are there to see


def test_sharing_planes_between_loops_would_change_the_answer() -> None:
    model = model_of("ouro")
    tokens = list(range(30, 60))

    class OnePlane(oracle.WholeAttention):
        def __call__(self, layer, q, k, v, rope, **look):  # every loop reads the first loop's keys and values
            active = self.active
            if layer in self.kept:
                self.active = torch.zeros_like(active)
            seen = super().__call__(layer, q, k, v, rope, **look)
            self.active = active
            return seen

    right = model.oracle(tokens, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oracle, "WholeAttention", OnePlane)
        wrong = oracle.logits(model.stack, tokens, 4)
    assert (right.argmax(-1) != wrong.argmax(-1)).any()


def test_reusing_a_coda_of_another_depth_would_change_the_logits() -> None:
    model, pool = model_of("retrofit"), tl.PrefixPool()
    prefix = list(range(32))
    model.register_prefix(pool, prefix, loops=4)
    for node in pool._pinned:
        node.codas[2] = node.codas[4]
        pool._pool.share(node.codas[2])
    prompt = [*prefix, 9]
    warm = ask(model, pool, prompt, 2)
    with pytest.raises(AssertionError):
        assert_equals_cold(model, prompt, warm, 2)


# Memory


def test_depth_decides_how_much_is_leased() -> None:
    model = model_of("ouro")
    leased = {}
    for loops in (2, 8):
        lease = model.runner.admit([1] * 32, make_plan(model.config, loops=loops), max_new_tokens=4, sampling=GREEDY)
        assert lease is not None
        model.runner.step(model.runner.ready())
        leased[loops] = model.runner.stats()["leased_bytes"]
        model.runner.release(lease)
    assert leased[8] == 4 * leased[2] > 0


def test_unpinned_prefixes_go_first_and_the_oldest_of_them() -> None:
    model, pool = model_of("ouro", pages=40), tl.PrefixPool()
    model.register_prefix(pool, [1] * 16, loops=2)
    for first in (50, 60, 70):
        ask(model, pool, [first] * 12, 2)
    assert ask(model, pool, [50] * 12, 2).cached_tokens == 11
    ask(model, pool, [80] * 40, 2)
    model.runner.check()
    assert ask(model, pool, [1] * 16, 2).cached_tokens == 15
    assert pool.match([60] * 12, make_plan(model.config, loops=2)).tokens == 0
    assert pool.stats() == {"entries": 1, "total_cached_tokens": 16}


def test_pages_counted_as_available_can_be_had_also_in_the_middle_of_the_tree() -> None:
    """Two requests compute one block at the same time; the tree keeps the first one's, and what follows is of the
    second's pages. When the first has gone nobody reads the block, and what hangs on it is in use."""
    model, pool = tiny_model("ouro", pages=20, page_size=4), tl.PrefixPool()
    runner, plan = model.runner, make_plan(model.config, loops=1)
    trunk = list(range(8))
    first, second = (
        runner.admit([*trunk, *end], plan, max_new_tokens=new, sampling=GREEDY, pool=pool)
        for end, new in (([1], 1), ([2, 3, 4, 5, 6], 20))
    )
    while not first.finish_reason:
        runner.step(runner.ready())
    runner.release(first)
    assert not second.finish_reason
    available = runner.pool.available
    pool.evict(available)
    assert runner.pool.free == available
    runner.check()
    while not second.finish_reason:
        runner.step(runner.ready())
    assert second.tokens[13:] == greedy_by_oracle(model, second.tokens[:13], 20, 1)
    runner.release(second)
    runner.check()


def test_a_registered_prefix_goes_only_when_one_request_alone_lacks_room() -> None:
    model, pool = model_of("ouro", pages=40), tl.PrefixPool()
    model.register_prefix(pool, [1] * 40, loops=2)
    warm = model.generate_with_pool(pool, [5] * 60, max_new_tokens=4, loops=2, sampling=GREEDY)
    assert list(warm.token_ids) == greedy_by_oracle(model, [5] * 60, 4, 2)
    assert pool.stats()["entries"] == 0
    model.runner.check()


def test_a_full_pool_unpins_the_shortest() -> None:
    model, pool = model_of("ouro"), tl.PrefixPool(2)
    for tokens in ([1, 2, 3, 4, 5, 6], [1, 2, 3], [7, 8, 9, 10]):
        model.register_prefix(pool, tokens, loops=2)
    assert pool.stats() == {"entries": 2, "total_cached_tokens": 10}
    model.register_prefix(pool, [7, 8, 9, 10], loops=2)
    assert pool.stats() == {"entries": 2, "total_cached_tokens": 10}
    model.runner.check()
    assert model.register_prefix(tl.PrefixPool(0), [1, 2], loops=1) == 0


def test_engines_without_pages_get_the_same_pool() -> None:
    pool = tl.PrefixPool(2)
    for tokens, loops in (([1, 2], 4), ([1, 2, 3, 4], 4), ([1, 2, 3], 2), ([1, 2], 2)):
        assert pool.register_tokens(tokens, loops) == len(tokens)
    assert pool.stats() == {"entries": 2, "total_cached_tokens": 6}
    hit = pool.match_tokens([1, 2, 3, 4, 5], 4)
    assert hit is not None
    assert hit.tokens == (1, 2, 3, 4)
    assert pool.match_tokens([1, 2, 3, 4], 3) is None
    assert pool.match_tokens([1, 2, 3, 4], 4, cache_window=8) is None


def test_a_pool_belongs_to_one_model() -> None:
    pool = tl.PrefixPool()
    model_of("ouro").register_prefix(pool, [1, 2], loops=1)
    with pytest.raises(tl.RequestError, match="holds the pages of another model"):
        model_of("ouro").generate_with_pool(pool, [1, 2])


def finish_with_a_yield(model: Model, lease: Lease, moment: int) -> None:
    """Step a lease to its end; at one moment it gives everything back and goes on."""
    for step in range(200):
        if lease.finish_reason:
            break
        if step == moment:
            model.runner.suspend(lease)
            assert model.runner.pool.available == model.runner.pool.num_pages
            assert model.runner.resume(lease)
        model.runner.step(model.runner.ready())


@pytest.mark.parametrize("family", ["ouro", "retrofit"])
@pytest.mark.parametrize("plan", [{"loops": 3}, {"loops": 3, "prefill_loops": 1}, {"loops": 2, "cache_window": 5}])
def test_a_yield_at_any_moment_changes_nothing(family: str, plan: dict[str, int]) -> None:
    for moment in range(1, 40, 3):
        model, pool = model_of(family, max_chunk=5), tl.PrefixPool()
        sampling = tl.SamplingParams(temperature=1, seed=5, ignore_eos=True, logprobs=1)
        calm = model.generate(list(range(12)), max_new_tokens=8, sampling=sampling, **plan)
        lease = model.runner.admit(list(range(12)), make_plan(model.config, **plan), max_new_tokens=8,
                                   sampling=sampling, pool=pool)  # fmt: skip
        assert lease is not None
        finish_with_a_yield(model, lease, moment)
        assert tuple(lease.tokens[12:]) == calm.token_ids
        assert lease.text.text == calm.text
        model.runner.release(lease)
        model.runner.check()


def test_an_adaptive_answer_survives_a_yield() -> None:
    for moment in range(2, 30, 4):
        model = model_of("ouro")
        calm = model.generate([4, 5, 6], max_new_tokens=12, loops=4, exit_threshold=0.05, sampling=GREEDY)
        plan = make_plan(model.config, loops=4, exit_threshold=0.05)
        lease = model.runner.admit([4, 5, 6], plan, max_new_tokens=12, sampling=GREEDY)
        assert lease is not None
        finish_with_a_yield(model, lease, moment)
        assert tuple(lease.tokens[3:]) == calm.token_ids
        assert tuple(lease.depths) == calm.loops[1:]


def test_scores_survive_a_yield() -> None:
    model, prompt = model_of("ouro", max_chunk=4), list(range(18))
    for moment in range(1, 20, 2):
        lease = model.runner.admit(prompt, make_plan(model.config, loops=3), max_new_tokens=0, sampling=GREEDY,
                                   prompt_logprobs=0)  # fmt: skip
        assert lease is not None
        finish_with_a_yield(model, lease, moment)
        assert [v.chosen for v in lease.prompt_logprob_values] == pytest.approx(model.score(prompt, 3), abs=1e-5)
        model.runner.release(lease)


@pytest.mark.parametrize("family", ["ouro", "retrofit"])
def test_a_batch_larger_than_memory_yields_and_answers_the_same(family: str) -> None:
    model = model_of(family, pages=100)
    prompts = [[i] * 6 for i in range(8)]
    got = model.generate_batch(prompts, max_new_tokens=30, loops=2, sampling=GREEDY)
    assert [list(g.token_ids) for g in got] == [greedy_by_oracle(model, p, 30, 2) for p in prompts]
    model.runner.check()
    assert model.runner.pool.free == 100


def test_a_cancelled_prefill_serves_nobody() -> None:
    model, pool = model_of("ouro", max_chunk=4), tl.PrefixPool()
    plan = make_plan(model.config, loops=2)
    lease = model.runner.admit(list(range(40)), plan, max_new_tokens=4, sampling=GREEDY, pool=pool)
    assert lease is not None
    for _ in range(9):
        model.runner.step(model.runner.ready())
    assert 0 < lease.done < 40
    model.runner.release(lease)
    assert pool.match(list(range(40)), plan).tokens == 0
    assert model.runner.pool.free == model.runner.pool.num_pages


def test_requests_wait_for_a_prefix_under_way_only_if_it_helps() -> None:
    model, pool = model_of("ouro", max_chunk=8), tl.PrefixPool()
    plan, prompt = make_plan(model.config, loops=2), list(range(40))
    lease = model.runner.admit(prompt, plan, max_new_tokens=4, sampling=GREEDY, pool=pool)
    assert lease is not None
    waits = model.runner.must_wait
    assert waits([*range(30), 99], plan, pool)
    assert waits(prompt, make_plan(model.config, loops=4), pool)
    assert not waits([*range(3), 99, 98], plan, pool)
    assert not waits(prompt, plan, pool, "salt")
    assert not waits(prompt, plan, tl.PrefixPool())
    assert not waits(prompt, make_plan(model.config, loops=2, prefill_loops=1), pool)
    while lease.done < 40:
        model.runner.step(model.runner.ready())
    assert not waits(prompt, plan, pool)
    model.runner.release(lease)


def test_random_leases_on_one_pool_keep_the_accounts() -> None:
    rng = random.Random(5)
    model, pool = model_of("retrofit", pages=260, max_chunk=6), tl.PrefixPool(3)
    running: list[Lease] = []
    trunk = [rng.randrange(256) for _ in range(24)]
    for _ in range(500):
        if rng.random() < 0.4:
            prompt = trunk[: rng.randrange(24)] + [rng.randrange(256) for _ in range(rng.randint(1, 8))]
            plan = make_plan(model.config, loops=rng.randint(1, 6), cache_window=rng.choice([0, 0, 0, 7]))
            lease = model.runner.admit(prompt, plan, max_new_tokens=rng.randint(0, 8), sampling=GREEDY, pool=pool)
            running += [lease] if lease else []
        if running and rng.random() < 0.2:
            lease = running.pop(rng.randrange(len(running)))
            rng.choice([model.runner.release, model.runner.suspend])(lease)
        while running and model.runner.shortage(model.runner.ready()):
            if len(running) > 1:
                model.runner.suspend(running.pop())
            else:
                assert model.runner.unpin_shortest()
        for done in model.runner.step(model.runner.ready()).finished if running else ():
            expected = greedy_by_oracle(
                model, done.tokens[: done.prompt_tokens], done.answer_tokens, done.plan.loops, done.plan.cache_window
            )
            assert done.tokens[done.prompt_tokens :] == expected
            if rng.random() < 0.2 and not done.max_new_tokens and not done.plan.cache_window:
                model.runner.keep_prefix(done, pool)
            running.remove(done)
            model.runner.release(done)
        model.runner.check()
    for lease in running:
        model.runner.release(lease)
    pool.clear()
    assert model.runner.pool.free == model.runner.pool.num_pages
    assert np.isfinite(model.runner.kv.states.numpy()).all()
