"""The packed step against the slow oracle: whatever shares the batch, and however it is cut, the answer is the same."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny_models import GREEDY, RETROFIT, greedy_by_oracle, tiny_model
from tinyloop.errors import ContextOverflow, NeverFits, RequestError
from tinyloop.model import Model
from tinyloop.plan import make_plan
from tinyloop.sampling import SamplingParams
from tinyloop.sequence import Lease

FAMILIES = {"ouro": {}, "llama": {}, "retrofit": {"model_type": "llama", "tinyloop": RETROFIT}}


def model_of(family: str, **settings: int) -> Model:
    changes = dict(FAMILIES[family])
    return tiny_model(changes.pop("model_type", family), **changes, **settings)


def answer(model: Model, prompt: list[int], loops: int, count: int = 8, **options: object) -> list[int]:
    return list(model.generate(prompt, max_new_tokens=count, loops=loops, sampling=GREEDY, **options).token_ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_equals_the_oracle_at_every_depth(family: str) -> None:
    model = model_of(family)
    for loops in range(1, min(4, model.config.max_loops) + 1):
        assert answer(model, [5, 9, 200], loops) == greedy_by_oracle(model, [5, 9, 200], 8, loops)
    model.runner.check()


@pytest.mark.parametrize("family", ["ouro", "retrofit"])
def test_depth_changes_the_answer(family: str) -> None:
    model = model_of(family)
    assert len({tuple(answer(model, [5, 9, 200], loops)) for loops in (1, 2, 4)}) == 3


@pytest.mark.parametrize("family", ["ouro", "retrofit"])
def test_mixed_depths_packed_in_one_batch_equal_each_alone(family: str) -> None:
    model = model_of(family)
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6], [5], [3, 5, 8, 9], [7, 9, 3, 2], [3, 8]]
    depths = [1, 2, 4, 4, 2, 1]
    packed = model.generate_batch(prompts, max_new_tokens=12, loops=depths, sampling=GREEDY)
    for prompt, loops, got in zip(prompts, depths, packed, strict=True):
        assert list(got.token_ids) == answer(model, prompt, loops, 12) == greedy_by_oracle(model, prompt, 12, loops)
    model.runner.check()


def test_ordinary_llama_has_no_dial() -> None:
    with pytest.raises(RequestError, match="loops must be between 1 and 1, got 2"):
        model_of("llama").generate([1], loops=2)


def test_one_loop_of_a_retrofit_is_the_original_to_the_bit() -> None:
    plain, looped = model_of("llama"), model_of("retrofit")
    assert torch.equal(plain.oracle([5, 6, 7], 1), looped.oracle([5, 6, 7], 1))


@settings(max_examples=40, deadline=None)
@given(
    family=st.sampled_from(["ouro", "retrofit"]),
    jobs=st.lists(st.tuples(st.lists(st.integers(0, 255), min_size=1, max_size=30), st.integers(1, 5)), min_size=1,
                  max_size=4),
    page_size=st.sampled_from([1, 2, 4, 16]),
    max_chunk=st.integers(1, 12),
    window=st.sampled_from([0, 1, 3, 8]),
)  # fmt: skip
def test_chunks_pages_windows_and_neighbours_never_change_an_answer(
    family: str, jobs: list[tuple[list[int], int]], page_size: int, max_chunk: int, window: int
) -> None:
    model = model_of(family, page_size=page_size, max_chunk=max_chunk, pages=1200)
    prompts, depths = [job[0] for job in jobs], [job[1] for job in jobs]
    packed = model.generate_batch(prompts, max_new_tokens=4, loops=depths, cache_window=window, sampling=GREEDY)
    for (prompt, loops), got in zip(jobs, packed, strict=True):
        assert list(got.token_ids) == greedy_by_oracle(model, prompt, 4, loops, window)
    model.runner.check()
    assert model.runner.pool.free == model.runner.pool.num_pages


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_scores_equal_the_oracle_under_chunked_prefill(family: str) -> None:
    model = model_of(family, max_chunk=5)
    prompt = [random.Random(1).randrange(256) for _ in range(23)]
    expected = model.oracle(prompt).log_softmax(-1)[range(22), prompt[1:]]
    assert model.score(prompt) == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize(("prefill_loops", "loops"), [(1, 3), (2, 4), (3, 1), (4, 2)])
@pytest.mark.parametrize("family", ["ouro", "retrofit"])
def test_prompt_and_answer_may_run_different_depths(family: str, prefill_loops: int, loops: int) -> None:
    model = model_of(family, max_chunk=3)
    tokens = [7, 8, 9, 10, 11]
    got = answer(model, tokens, loops, 6, prefill_loops=prefill_loops)
    for token in got:
        depths = [prefill_loops] * 5 + [loops] * (len(tokens) - 5)
        assert token == int(model.oracle(tokens, depths)[-1].argmax())
        tokens.append(token)


def test_adaptive_answers_equal_the_oracle_at_the_exits_taken() -> None:
    model = tiny_model("ouro", total_ut_steps=4)
    got = model.generate([4, 5, 6], max_new_tokens=16, loops=4, exit_threshold=0.05, sampling=GREEDY)
    assert len(set(got.loops[1:])) > 1, "the test needs exits at different loops"
    tokens, depths = [4, 5, 6], [4, 4, 4]
    for token, used in zip(got.token_ids, got.loops[1:], strict=False):
        assert token == int(model.oracle(tokens, depths)[-1].argmax())
        tokens.append(token)
        depths.append(used)


def test_a_seed_decides_the_tokens_whatever_shares_the_batch() -> None:
    model = model_of("ouro")
    seeded = SamplingParams(temperature=1, seed=-7, ignore_eos=True)
    alone = model.generate([1, 2, 3], max_new_tokens=12, loops=2, sampling=seeded)
    packed = model.generate_batch([[9], [1, 2, 3], [4, 4]], max_new_tokens=12, loops=[1, 2, 4], sampling=seeded)
    assert packed[1].token_ids == alone.token_ids
    other = model.generate([1, 2, 3], max_new_tokens=12, loops=2, sampling=SamplingParams(seed=7, ignore_eos=True))
    assert other.token_ids != alone.token_ids


def test_pages_are_reserved_by_requested_loops() -> None:
    model = model_of("ouro")
    needed = {loops: model.runner.pages_needed(make_plan(model.config, loops=loops), 64) for loops in (2, 8)}
    assert needed[8] == 4 * needed[2]


def test_a_window_bounds_the_pages_of_a_long_answer() -> None:
    model = model_of("ouro", pages=40, max_chunk=4)
    assert len(answer(model, [1] * 40, 2, 100, cache_window=8)) == 100
    with pytest.raises(NeverFits, match="KV pages, the whole budget is 40"):
        answer(model, [1] * 40, 2, 100)


def test_what_can_never_run_is_refused_with_its_field() -> None:
    model = model_of("ouro")
    with pytest.raises(ContextOverflow, match="exceed the context of 256 tokens"):
        model.generate([1] * 250, max_new_tokens=7)
    for prompt in ([], [259], [-1]):
        with pytest.raises(RequestError, match="prompt"):
            model.generate(prompt)
    for count in (-1, -100, 1.5):
        with pytest.raises(RequestError, match="max_new_tokens must be"):
            model.generate([1], max_new_tokens=count)
    with pytest.raises(RequestError, match="logit_bias: token ids must be between 0 and 258, got 999"):
        model.generate([1], sampling=SamplingParams(logit_bias={999: 1.0}))
    with pytest.raises(RequestError, match="exit_threshold: family llama offers no exit signal"):
        model_of("llama").generate([1], exit_threshold=0.5)
    model.runner.check()


def test_more_prompts_than_pages_wait_their_turn() -> None:
    model = model_of("ouro", pages=30)
    prompts = [[i, i + 1] for i in range(12)]
    got = model.generate_batch(prompts, max_new_tokens=6, loops=4, sampling=GREEDY)
    assert [list(g.token_ids) for g in got] == [greedy_by_oracle(model, p, 6, 4) for p in prompts]
    model.runner.check()


def test_segments_released_at_random_moments_leave_no_trace() -> None:
    model, rng = model_of("retrofit", max_chunk=4, pages=600), random.Random(3)
    runner = model.runner
    leases: list[Lease] = []
    for _ in range(400):
        if rng.random() < 0.5:
            plan = make_plan(model.config, loops=rng.randint(1, 8), cache_window=rng.choice([0, 5]))
            prompt = [rng.randrange(256) for _ in range(rng.randint(1, 20))]
            lease = runner.admit(prompt, plan, max_new_tokens=rng.randint(0, 9), sampling=GREEDY)
            leases += [lease] if lease else []
        if runner.ready():
            for done in runner.step(runner.ready()).finished:
                leases.remove(done)
                runner.release(done)
        if leases and rng.random() < 0.3:
            runner.release(leases.pop(rng.randrange(len(leases))))
        runner.check()
    for lease in leases:
        runner.release(lease)
        runner.release(lease)
    assert runner.pool.free == runner.pool.num_pages
    assert not runner.leases
    assert answer(model, [1, 2], 3) == greedy_by_oracle(model, [1, 2], 8, 3)


def test_streams_may_be_interleaved_and_dropped() -> None:
    model = model_of("ouro")
    first = model.stream([1, 2], max_new_tokens=8, loops=2, sampling=GREEDY)
    second = model.stream([3, 4], max_new_tokens=8, loops=4, sampling=GREEDY)
    got = [[next(first).token_id, next(second).token_id] for _ in range(4)]
    assert [pair[0] for pair in got] == greedy_by_oracle(model, [1, 2], 4, 2)
    assert [pair[1] for pair in got] == greedy_by_oracle(model, [3, 4], 4, 4)
    first.close()
    second.close()
    assert model.runner.pool.free == model.runner.pool.num_pages


def test_streams_that_hold_all_pages_leave_a_clear_error() -> None:
    model = model_of("ouro", pages=12)
    held = model.stream([1, 2], max_new_tokens=30, loops=1, sampling=GREEDY)
    next(held)
    with pytest.raises(RequestError, match="no room in the KV budget while other streams are open"):
        answer(model, [1], 4)
    held.close()
