"""A request's tokens do not depend on who else is in the step: alone, and among 31 others at random depths."""

import hashlib
import random

import pytest
from torch import Tensor

from tests.tiny_models import GREEDY, tiny_model
from tinyloop.kernels import native
from tinyloop.model import Model

AT_ONCE = 32
Answers = list[tuple[int, ...]]


def requests(count: int, vocab: int, most: int, deepest: int) -> list[tuple[list[int], int]]:
    """Random prompts and depths."""
    rng = random.Random(11)
    return [
        ([rng.randrange(vocab) for _ in range(rng.randint(1, most))], rng.randint(1, deepest)) for _ in range(count)
    ]


def alone_and_packed(model: Model, wanted: list[tuple[list[int], int]], tokens: int) -> tuple[Answers, Answers]:
    alone = [
        model.generate(prompt, loops=loops, max_new_tokens=tokens, sampling=GREEDY).token_ids
        for prompt, loops in wanted
    ]
    packed: Answers = []
    for first in range(0, len(wanted), AT_ONCE):
        prompts, depths = zip(*wanted[first : first + AT_ONCE], strict=True)
        answers = model.generate_batch(list(prompts), loops=list(depths), max_new_tokens=tokens, sampling=GREEDY)
        packed += [answer.token_ids for answer in answers]
    return alone, packed


@pytest.mark.skipif(native.library() is None, reason="torch's own products in bfloat16 depend on the number of rows")
def test_200_requests_get_the_same_tokens_alone_and_packed_in_bfloat16() -> None:
    model = Model.load("smollm2", dtype="bfloat16", kv_memory=2**28)
    alone, packed = alone_and_packed(model, requests(200, 49152, 40, 3), tokens=6)
    assert alone == packed


@pytest.mark.skipif(native.library() is None, reason="torch's own products depend on the number of rows")
def test_32_requests_get_the_same_logits_alone_and_packed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model.load("smollm2", dtype="float32", kv_memory=2**28)
    seen: list[bytes] = []
    head = model.stack.head

    def watched(h: Tensor) -> Tensor:
        logits = head(h)
        seen.extend(hashlib.sha256(row.numpy().tobytes()).digest() for row in logits)
        return logits

    monkeypatch.setattr(model.stack, "head", watched)
    wanted = requests(AT_ONCE, 49152, 40, 3)
    alone, packed = alone_and_packed(model, wanted, tokens=4)
    assert alone == packed
    assert len(seen) == 2 * AT_ONCE * 4
    assert sorted(seen[: AT_ONCE * 4]) == sorted(seen[AT_ONCE * 4 :]), "a row's logits depend on its neighbours"


def test_requests_get_the_same_tokens_alone_and_packed_in_float32() -> None:
    model = tiny_model("ouro", pages=4000)
    alone, packed = alone_and_packed(model, requests(64, 250, 40, 6), tokens=6)
    assert alone == packed
