"""A section that was recorded computes what its layers compute one by one, to the bit."""

import pytest
import torch

from tests.tiny_models import GREEDY, RETROFIT, RandomTensors, raw_config, tiny_tokenizer
from tinyloop.kernels import native
from tinyloop.kernels.program import Program
from tinyloop.kv.cache import PagedAttention
from tinyloop.model import Model
from tinyloop.models.family import Weights
from tinyloop.models.registry import family_of
from tinyloop.stack import LoopedStack

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native build is absent")
CHANGES: dict[str, dict[str, object]] = {
    "retrofit": {"model_type": "llama", "tinyloop": RETROFIT},
    "square": {"model_type": "llama", "intermediate_size": 64},
    "hrm_text": {"model_type": "hrm_text", "num_key_value_heads": None, "prefix_lm": False, "num_hidden_layers": 2},
}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


def model_of(model_type: str, int8: bool = False, dtype: torch.dtype = torch.bfloat16, **changes: object) -> Model:
    raw = raw_config(model_type, **{**SIZES, **changes})
    family = family_of(raw)
    stack = LoopedStack(family, family.config(raw), Weights(RandomTensors(), dtype, torch.device("cpu"), int8))
    return Model("tiny", stack, tiny_tokenizer(), kv_memory=2**22, page_size=4)


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    """The programs that ran."""
    ran: list[Program] = []
    run = PagedAttention.run

    def watched(self: PagedAttention, program: Program, *rows: torch.Tensor) -> torch.Tensor | None:
        ran.append(program)
        return run(self, program, *rows)

    monkeypatch.setattr(PagedAttention, "run", watched)
    return ran


@pytest.mark.parametrize(("dtype", "int8"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, False)])
@pytest.mark.parametrize("model_type", ["ouro", "llama", "square", "retrofit", "hrm_text"])
def test_programs_equal_their_layers(
    model_type: str, dtype: torch.dtype, int8: bool, programs: list[Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = CHANGES.get(model_type, {"model_type": model_type})
    model = model_of(int8=int8, dtype=dtype, **changes)
    prompts = [[i % 250 for i in range(start, start + size)] for start, size in ((1, 40), (90, 1), (7, 133), (3, 17))]
    most = model.config.max_loops
    depths = [1, most, min(2, most), max(1, most - 1)]

    def answers() -> list[tuple[int, ...]]:
        return [a.token_ids for a in model.generate_batch(prompts, max_new_tokens=12, loops=depths, sampling=GREEDY)]

    def scores() -> list[list[float]]:
        return [model.score(prompt, loops) for prompt, loops in zip(prompts, depths, strict=True)]

    recorded = answers(), scores()
    assert programs
    monkeypatch.setattr(PagedAttention, "run", lambda *_: None)
    assert recorded == (answers(), scores())


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("qwen3", {}),
        ("llama", {"hidden_size": 48}),
        ("llama", {"head_dim": 1056}),
        ("qwen2", {}),
        ("iquestloopcoder", {"loop_num": 2, "loop_window_size": 5}),  # its layers look at the loop
    ],
)
def test_what_is_more_than_kernels_runs_layer_by_layer(
    model_type: str, changes: dict[str, object], programs: list[Program]
) -> None:
    model = model_of(model_type, **changes)
    model.generate([1, 2, 3], max_new_tokens=3, sampling=GREEDY)
    assert not programs
    assert set(model.stack._programs.values()) == {None}


def test_float16_runs_layer_by_layer(programs: list[Program]) -> None:
    model_of("ouro", dtype=torch.float16).generate([1, 2, 3], max_new_tokens=3, sampling=GREEDY)
    assert not programs


def test_buffers_are_used_again() -> None:
    model = model_of("llama", num_hidden_layers=30)
    model.generate([1, 2, 3], max_new_tokens=2, sampling=GREEDY)
    (program,) = model.stack._programs.values()
    assert program is not None
    assert len(program.steps) == 30 * 8
    assert len(program.widths) <= 9
