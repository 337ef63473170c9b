"""The parts of bench/ that a figure rests on: the peer in plain torch, and processes that start, answer and end."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import write_checkpoint
from tests.tiny_models import GREEDY, RandomTensors, raw_config, tiny_model

BENCH = Path(__file__).parent.parent / "bench"


@pytest.fixture(autouse=True)
def _bench_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


def program(directory: Path, text: str) -> Any:
    """A piped side that runs this text."""
    from serving import Spec

    path = directory / "program.py"
    path.write_text(textwrap.dedent(text))
    command = [sys.executable, str(path)]
    return Spec("program", lambda port: command, {"PYTHONPATH": str(BENCH)}, start_limit_s=20, piped=True)


def test_the_eager_peer_gives_the_tokens_of_the_model(tmp_path: Path) -> None:
    import eager

    shape = raw_config(num_key_value_heads=4, vocab_size=259)
    model, weights = tiny_model(num_key_value_heads=4), RandomTensors()
    tiny = write_checkpoint(tmp_path / "tiny", shape, taken_by(model, weights))
    prompts = [[5, 6, 7, 8], [90, 80, 70, 60]]
    steps = list(eager.load(tiny, torch.float32).generate(prompts, 12))
    answers = model.generate_batch(prompts, max_new_tokens=12, loops=shape["total_ut_steps"], sampling=GREEDY)
    assert torch.stack(steps, dim=1).tolist() == [list(answer.token_ids) for answer in answers]


def taken_by(model: Any, weights: RandomTensors) -> dict[str, torch.Tensor]:
    """The tensors of a tiny model, which are drawn from their names."""
    from tinyloop.models.family import Weights
    from tinyloop.stack import LoopedStack

    LoopedStack(model.stack.family, model.config, Weights(weights, torch.float32, torch.device("cpu")))
    return weights.taken


def test_a_program_answers_over_its_pipes(tmp_path: Path) -> None:
    echo = """
        from pipe import answer_lines
        answer_lines(lambda prompts, tokens: [len(prompts)] * tokens)
    """
    with program(tmp_path, echo).started(tmp_path) as side:
        assert [side.ask([[1], [2]], tokens).tokens for tokens in (3, 5)] == [6, 10]


def test_a_side_is_gone_when_it_is_left(tmp_path: Path) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        program(tmp_path, "print('ready', flush=True); input()").started(tmp_path) as side,
    ):
        raise KeyboardInterrupt
    assert side.process.returncode is not None


def test_a_side_that_does_not_start_says_why(tmp_path: Path) -> None:
    from serving import DidNotStart

    with (
        pytest.raises(DidNotStart, match=r"program did not start\n.*no weights here"),
        program(tmp_path, "raise SystemExit('no weights here')").started(tmp_path),
    ):
        pytest.fail("it said that it was ready")


def test_prompts_never_begin_alike() -> None:
    from peers import Prompts

    prompts = Prompts().take(40, 32)
    assert {len(prompt) for prompt in prompts} == {32}
    assert len({tuple(prompt[:2]) for prompt in prompts}) == 40


def test_a_model_of_random_weights_takes_the_memory_that_was_predicted() -> None:
    """In a process of its own, since what this one has freed would be used again."""
    code = """
        from full_size import CONFIGS, measure
        sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8, "num_key_value_heads": 8}
        for weights in ("auto", "int8"):
            figures = measure("small", CONFIGS["Ouro-1.4B"] | sizes, weights, kv_memory=1 << 28)
            assert figures.predicted > 500 << 20
            assert abs(figures.off) < 0.05, figures
    """
    environment = os.environ | {"PYTHONPATH": str(BENCH), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True,
                          text=True, check=False, timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr
