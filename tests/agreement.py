"""What every family has to show against a reference: the same tokens and log-probabilities, however it is run.

A reference gives the logits [tokens, vocab_size] of a whole sequence, of which the first tokens are the prompt.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import tinyloop as tl
from tests.tiny_models import RandomTensors, tiny_tokenizer
from tinyloop.kv.cache import PagedKV
from tinyloop.model import Generation, Model
from tinyloop.models.family import Weights
from tinyloop.models.registry import family_of
from tinyloop.plan import make_plan
from tinyloop.sequence import Lease
from tinyloop.stack import LoopedStack

LOGGED = tl.SamplingParams(temperature=0, ignore_eos=True, logprobs=20)
PROMPT = [3, 141, 59, 26, 53, 58, 97, 93, 238, 46, 26, 43, 38, 32, 79, 50, 28, 84, 197, 16, 93, 99, 37]
TOLERANCE = 1e-4
LONG = 32  # tokens of an answer
Reference = Callable[[Sequence[int], int, int], Tensor]  # tokens, how many are the prompt, loops


@dataclass
class Case:
    """A config.json, and what makes a reference of it and the weights that were drawn for it. `depths`: loops to try,
    the first being the model's default."""

    raw: dict[str, Any]
    reference: Callable[[dict[str, Any], dict[str, Tensor]], Reference]
    depths: tuple[int, ...]
    scale: float = 1.0
    has: tuple[str, ...] = ()
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stack = self._stack()
        self._compute, self._computed = self.reference(self.raw, self.tensors), dict[Any, Tensor]()

    def _stack(self) -> LoopedStack:
        source, family = RandomTensors(self.scale, self.has), family_of(self.raw)
        stack = LoopedStack(family, family.config(self.raw), Weights(source, torch.float32, torch.device("cpu")))
        self.tensors.update(source.taken)
        return stack

    def expected(self, tokens: Sequence[int], prompt: int, loops: int) -> Tensor:
        """The reference's logits. They are computed once: the same answer is checked in many ways."""
        asked = tuple(tokens), prompt, loops
        if asked not in self._computed:
            self._computed[asked] = self._compute(*asked)
        return self._computed[asked]

    def model(self, *, pages: int = 3000, page_size: int = 4, max_chunk: int = 512) -> Model:
        memory = pages * PagedKV.page_bytes(self.stack.config, page_size, self.stack.dtype)
        return Model("tiny", self.stack, tiny_tokenizer(), kv_memory=memory, page_size=page_size, max_chunk=max_chunk)

    def check(self, prompt: Sequence[int], got: Generation, loops: int) -> None:
        """The answer is the reference's, token by token, and so are its log-probabilities."""
        tokens = [*prompt, *got.token_ids]
        expected = self.expected(tokens, len(prompt), loops).log_softmax(-1)[len(prompt) - 1 : -1]
        assert list(got.token_ids) == expected.argmax(-1).tolist()
        for row, logprobs in zip(expected, got.logprobs, strict=True):
            ids, values = zip(*logprobs.top, strict=True)
            assert torch.allclose(row[list(ids)], torch.tensor(values), atol=TOLERANCE, rtol=0)


def logits_agree(case: Case) -> None:
    model = case.model()
    for loops in case.depths:
        expected = case.expected(PROMPT, len(PROMPT), loops)
        assert torch.allclose(model.oracle(PROMPT, loops), expected, atol=TOLERANCE, rtol=0)
        assert expected.std() > 100 * TOLERANCE, "the test needs logits that differ"


def prompts_agree(case: Case) -> None:
    """Prefill alone, in one piece and in chunks: what is said of every token but the first, and of its likeliest
    rivals."""
    for settings in ({}, {"max_chunk": 5, "page_size": 16}):
        runner = case.model(**settings).runner
        for loops in case.depths:
            lease = runner.admit(PROMPT, make_plan(runner.config, loops=loops), max_new_tokens=0, sampling=LOGGED,
                                 prompt_logprobs=20)  # fmt: skip
            assert lease is not None
            while not lease.finish_reason:
                runner.step(runner.ready())
            runner.release(lease)
            rows = case.expected(PROMPT, len(PROMPT), loops).log_softmax(-1)
            for row, token, found in zip(rows, PROMPT[1:], lease.prompt_logprob_values, strict=False):
                ids, values = zip(*found.top, (token, found.chosen), strict=True)
                assert torch.allclose(row[list(ids)], torch.tensor(values), atol=TOLERANCE, rtol=0)
            assert len(lease.prompt_logprob_values) == len(PROMPT) - 1
        runner.check()


def answers_agree(case: Case) -> None:
    """Prefill and decode, the prompt in one piece and in chunks, beyond every window."""
    for settings in ({}, {"max_chunk": 5, "page_size": 16}):
        model = case.model(**settings)
        for loops in case.depths:
            got = model.generate(PROMPT, max_new_tokens=LONG, loops=loops, sampling=LOGGED)
            case.check(PROMPT, got, loops)
        model.runner.check()


def packed_answers_agree(case: Case) -> None:
    """Requests of different lengths and depths in the same steps."""
    model = case.model(max_chunk=6)
    prompts = [PROMPT[:length] for length in (1, 9, 23, 4, 17, 2)]
    depths = [case.depths[i % len(case.depths)] for i in range(len(prompts))]
    got = model.generate_batch(prompts, max_new_tokens=LONG, loops=depths, sampling=LOGGED)
    for prompt, loops, answer in zip(prompts, depths, got, strict=True):
        case.check(prompt, answer, loops)
    model.runner.check()
    assert model.runner.pool.free == model.runner.pool.num_pages


def answers_from_a_prefix_agree(case: Case) -> None:
    """A prefix held at one depth serves every other: fewer loops as it is, more after it has been deepened."""
    for held in case.depths:
        for asked in case.depths:
            model, pool = case.model(), tl.PrefixPool()
            model.register_prefix(pool, PROMPT[:18], loops=held)
            got = model.generate_with_pool(pool, PROMPT, max_new_tokens=LONG, loops=asked, sampling=LOGGED)
            assert got.cached_tokens == 18
            case.check(PROMPT, got, asked)
            model.runner.check()


def different_depths_agree(case: Case) -> None:
    """Prompt and answer at different loops equal the slow oracle, which has been compared with the reference."""
    model = case.model(max_chunk=5)
    for prompt_loops, loops in ((case.depths[1], case.depths[0]), (case.depths[0], case.depths[1])):
        got = model.generate(PROMPT, max_new_tokens=8, loops=loops, prefill_loops=prompt_loops, sampling=LOGGED)
        tokens, depths = [*PROMPT, *got.token_ids], [prompt_loops] * len(PROMPT) + [loops] * 8
        expected = model.oracle(tokens, depths, prompt_tokens=len(PROMPT))[len(PROMPT) - 1 : -1]
        assert list(got.token_ids) == expected.argmax(-1).tolist()


def windows_agree(case: Case) -> None:
    """With `cache_window` answers equal the slow oracle's, and pages go back."""
    for window in (1, 4, 11):
        model = case.model(max_chunk=5)
        for loops in case.depths:
            got = model.generate(PROMPT, max_new_tokens=8, loops=loops, cache_window=window, sampling=LOGGED)
            tokens = [*PROMPT, *got.token_ids]
            expected = model.oracle(tokens, loops, window, prompt_tokens=len(PROMPT))[len(PROMPT) - 1 : -1]
            assert list(got.token_ids) == expected.argmax(-1).tolist()
        assert model.runner.pool.free == model.runner.pool.num_pages


def finish(model: Model, lease: Lease, moment: int) -> None:
    """Run a request to its end. At one moment it gives everything back and goes on."""
    for step in range(200):
        if lease.finish_reason:
            break
        if step == moment:
            model.runner.suspend(lease)
            assert model.runner.resume(lease)
        model.runner.step(model.runner.ready())


def a_yield_changes_nothing(case: Case) -> None:
    """At one moment a request gives everything back and goes on; where it is computed again, it comes out the same."""
    loops = case.depths[0]
    for moment in range(1, 24, 3):
        model, pool = case.model(max_chunk=5), tl.PrefixPool()
        lease = model.runner.admit(PROMPT, make_plan(model.config, loops=loops), max_new_tokens=8, sampling=LOGGED,
                                   pool=pool)  # fmt: skip
        assert lease is not None
        finish(model, lease, moment)
        expected = case.expected(lease.tokens, len(PROMPT), loops)[len(PROMPT) - 1 : -1]
        assert lease.tokens[len(PROMPT) :] == expected.argmax(-1).tolist(), moment
        model.runner.release(lease)
        model.runner.check()


def nothing_is_shared(case: Case) -> None:
    model, pool = case.model(), tl.PrefixPool()
    for loops in (case.depths[0], case.depths[0], case.depths[-1]):
        got = model.generate_with_pool(pool, PROMPT, max_new_tokens=LONG, loops=loops, sampling=LOGGED)
        assert got.cached_tokens == 0
        case.check(PROMPT, got, loops)
    assert model.runner.pool.free == model.runner.pool.num_pages
