"""docs/models.md: its example family passes what every family passes, and its table is what `inspect` says."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from docs.check import blocks
from tests import agreement
from tests.agreement import Case, Reference
from tests.test_families import NINE_HEADS, SHAPE
from tests.test_family_configs import PUBLISHED
from tinyloop.errors import CheckpointError
from tinyloop.inspection import inspect
from tinyloop.models import registry

PAGE = (Path(__file__).parent.parent / "docs" / "models.md").read_text()


@pytest.fixture
def refrain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's family, registered as the page says."""
    names: dict[str, Any] = {"__name__": "refrain"}
    exec(next(block for block in blocks(PAGE, "python") if "(Family)" in block), names)
    monkeypatch.setattr(registry, "FAMILIES", (*registry.FAMILIES, names["Refrain"]()))


def reference(raw: dict[str, Any], tensors: dict[str, Tensor]) -> Reference:
    """Llama's layers out of `transformers`, looped by hand."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**raw | {"model_type": "llama"})).eval()
    model.load_state_dict(tensors)

    @torch.no_grad()
    def logits(tokens: Sequence[int], prompt: int, loops: int) -> Tensor:
        e = model.model.embed_tokens(torch.tensor([tokens]))
        turns = model.model.rotary_emb(e, torch.arange(len(tokens))[None])
        mask = torch.full((1, 1, len(tokens), len(tokens)), -torch.inf).triu(1)
        layers, prelude = list(model.model.layers), raw["num_prelude_layers"]
        for layer in layers[:prelude]:
            e = layer(e, attention_mask=mask, position_embeddings=turns)
        h = torch.zeros_like(e)
        for _ in range(loops):
            h = h + e
            for layer in layers[prelude:]:
                h = layer(h, attention_mask=mask, position_embeddings=turns)
        return model.lm_head(model.model.norm(h))[0]

    return logits


def case(**changes: Any) -> Case:
    raw = {**SHAPE, "model_type": "refrain", "num_loops": 3, "num_prelude_layers": 1, **changes}
    return Case(raw, reference, (3, 1, 6))


@pytest.mark.usefixtures("refrain")
@pytest.mark.parametrize("changes", [{}, {"num_prelude_layers": 0, **NINE_HEADS}])
@pytest.mark.parametrize(
    "check",
    [agreement.logits_agree, agreement.answers_agree, agreement.packed_answers_agree,
     agreement.answers_from_a_prefix_agree, agreement.different_depths_agree, agreement.a_yield_changes_nothing],
)  # fmt: skip
def test_the_example_passes_what_every_family_passes(check: Callable[[Case], None], changes: dict[str, Any]) -> None:
    check(case(**changes))


@pytest.mark.usefixtures("refrain")
def test_the_example_refuses_by_name() -> None:
    for wrong in ({"learned_steps": True}, {"num_loops": 0}, {"hidden_act": "gelu"}):
        with pytest.raises(CheckpointError, match=next(iter(wrong))):
            case(**wrong)


def test_the_table_of_memory_is_what_inspect_says() -> None:
    rows = re.findall(r"^\| (\S[^|]*) \| ([\d, ]+) \| ([\d, ]+) \| ([\d., ]+) \| ([\d.]+) GiB \|$", PAGE, re.MULTILINE)
    assert {name for name, *_ in rows} == set(PUBLISHED) - {"HRM-Text-1B causal"}
    for name, sections, loops, kib, gib in rows:
        found = inspect(PUBLISHED[name].raw, torch.bfloat16)
        config, layout = found.config, found.config.layout
        assert numbers(sections) == [layout.prelude, layout.core, layout.coda]
        assert numbers(loops) == [config.default_loops, config.max_loops]
        depths = (1, config.default_loops, config.max_loops)
        assert numbers(kib) == [found.kv_bytes(depth) / 1024 for depth in depths], name
        assert float(gib) == pytest.approx(found.weight_bytes / 2**30, abs=0.006), name


def numbers(text: str) -> list[float]:
    return [float(number) for number in text.split(", ")]


def test_every_family_stands_on_the_page() -> None:
    named = set(re.findall(r"`(\w+)`", PAGE))
    assert {name for family in registry.FAMILIES for name in family.model_types} <= named
    assert "inkling2_loop" in named
