"""The view after each loop: what the oracle says at that depth, for every family; table, JSON and picture."""

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import tinyloop as tl
from server import trace_plot
from server.cli import cli
from server.cli_model import table
from tests import agreement
from tests.test_families import CASES, case_of
from tests.tiny_models import GREEDY, tiny_model
from tinyloop.model import Model
from tinyloop.plan import make_plan
from tinyloop.trace import Trace

PROMPT = agreement.PROMPT


@pytest.mark.parametrize("name", CASES)
def test_each_loop_is_the_oracle_at_that_depth(name: str) -> None:
    case = case_of(name)
    model, most = case.model(), max(case.depths)
    traced = model.trace(PROMPT, loops=most, top=3)
    assert [token.token for token in traced.tokens] == PROMPT
    assert traced.loops == most
    for loop in range(most):
        expected = model.oracle(PROMPT, loop + 1).softmax(-1)
        views = [token.loops[loop] for token in traced.tokens]
        assert [[guess.token for guess in view.top] for view in views] == expected.topk(3).indices.tolist()
        found = torch.tensor([[guess.probability for guess in view.top] for view in views])
        assert torch.allclose(found, expected.topk(3).values, atol=1e-5)
        entropy = [-sum(p * math.log(p) for p in row if p) for row in expected.double().tolist()]
        assert [view.entropy for view in views] == pytest.approx(entropy, abs=1e-3)


def states(model: Model, tokens: list[int], loops: int) -> list[torch.Tensor]:
    """What the head reads before the first loop and after each, out of the runner. For families without a prelude."""
    stack, runner = model.stack, model.runner
    lease = runner.admit(tokens, make_plan(model.config, loops=loops), max_new_tokens=1, sampling=GREEDY)
    assert lease is not None
    with torch.inference_mode():
        seen = [stack.leave(stack.enter(stack.embed(torch.tensor(tokens)), torch.arange(len(tokens))))]
        for _ in range(loops):
            runner.step(runner.ready())
            seen.append(stack.leave(lease.segments[0].state))
    runner.release(lease)
    return seen


@pytest.mark.parametrize("name", ["ouro", "nanbeige", "hrm_text"])
def test_distance_is_how_far_a_loop_moved_what_is_read(name: str) -> None:
    model = case_of(name).model()
    seen = states(model, PROMPT, 3)
    assert len(seen) == 4
    traced = model.trace(PROMPT, loops=3)
    for loop in range(3):
        before, after = seen[loop].numpy(), seen[loop + 1].numpy()
        for token, (x, y) in enumerate(zip(before, after, strict=True)):
            expected = sum((y - x) ** 2) ** 0.5 / sum(y**2) ** 0.5
            assert traced.tokens[token].loops[loop].distance == pytest.approx(float(expected), rel=1e-3)


def test_the_first_loop_of_a_core_that_starts_from_zeros_moves_by_its_own_size() -> None:
    traced = case_of("huginn").model().trace(PROMPT, loops=1)
    assert [token.loops[0].distance for token in traced.tokens] == pytest.approx([1.0] * len(PROMPT))


def test_exited_is_what_the_threshold_is_compared_with() -> None:
    """An answer token leaves at the first loop where the trace of prompt and answer reaches the threshold."""
    model = tiny_model("ouro", total_ut_steps=8)
    for threshold in (0.3, 0.6, 0.9, 0.99):
        got = model.generate(PROMPT, max_new_tokens=3, loops=8, exit_threshold=threshold, sampling=GREEDY)
        traced = model.trace([*PROMPT, got.token_ids[0]], loops=8)
        chances = [view.exited or 0 for view in traced.tokens[-1].loops]
        assert chances == sorted(chances)
        expected = next((loop for loop, chance in enumerate(chances, 1) if chance >= threshold), 8)
        assert got.loops[1] == expected


def test_a_family_without_a_gate_has_no_exit_signal() -> None:
    traced = case_of("nanbeige").model().trace(PROMPT, loops=2)
    assert {view.exited for token in traced.tokens for view in token.loops} == {None}


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ([], {}, "prompt"), ([259], {}, "prompt"), ([1] * 257, {}, "prompt"), ("x", {"loops": 9}, "loops"),
        ("x", {"loops": 0}, "loops"), ("x", {"top": 0}, "top"), ("x", {"top": 129}, "top"),
    ],
)  # fmt: skip
def test_what_cannot_be_traced_is_refused_by_name(prompt: Any, options: dict[str, int], field: str) -> None:
    with pytest.raises(tl.RequestError, match=field) as caught:
        tiny_model("ouro").trace(prompt, **options)
    assert caught.value.field == field


def test_more_tokens_than_there_are_is_all_of_them() -> None:
    traced = tiny_model("ouro", vocab_size=300).trace("x", loops=1, top=128)
    top = traced.tokens[0].loops[0].top
    assert len(top) == 128
    assert {guess.text for guess in top if guess.token >= 259} == {""}


# Presentations


@pytest.fixture(scope="module")
def traced() -> Trace:
    return tiny_model("ouro").trace("a\x1b[31m$[b]", loops=3)


def test_json_holds_everything(traced: Trace) -> None:
    told = json.loads(traced.to_json())
    assert (told["model"], told["loops"], len(told["tokens"])) == ("tiny", 3, len(traced.tokens))
    view, original = told["tokens"][2]["loops"][1], traced.tokens[2].loops[1]
    assert view["top"][0] == vars(original.top[0])
    assert (view["entropy"], view["distance"], view["exited"]) == (original.entropy, original.distance, original.exited)


def test_the_table_has_a_row_for_each_token_and_loop_and_no_control_characters(traced: Trace) -> None:
    found = table(traced)
    assert found.row_count == 3 * len(traced.tokens)
    console = Console(width=100, file=io.StringIO())
    console.print(found)
    shown = console.file.getvalue()
    assert "\x1b" not in shown
    assert r"'\x1b'" in shown
    assert "exited" in shown
    assert "exited" not in [column.header for column in table(tiny_model("llama").trace("x")).columns]


def test_the_picture_has_a_cell_for_each_token_and_loop(traced: Trace, tmp_path: Path) -> None:
    axes, *_ = trace_plot.heat_map(traced).axes
    assert len(axes.texts) == 3 * len(traced.tokens)
    assert axes.texts[1].get_text().startswith(trace_plot.short(traced.tokens[0].loops[1].top[0].text))
    assert axes.images[0].get_array()[2, 1] == pytest.approx(traced.tokens[2].loops[1].entropy)
    trace_plot.save_heat_map(traced, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_is_said_before_a_model_is_loaded(
    traced: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Model, "load", lambda *_, **__: pytest.fail("loaded a model"))
    result = CliRunner().invoke(cli, ["trace", "x", "--png", "x.jpg"])
    assert "must end in .png" in str(result.exception)
    with pytest.raises(tl.TinyLoopError, match="cannot write"):
        trace_plot.save_heat_map(traced, tmp_path / "no" / "x.png")
    monkeypatch.setattr(trace_plot, "find_spec", lambda _: None)
    result = CliRunner().invoke(cli, ["trace", "x", "--png", "x.png"])
    assert "pip install 'tinyloop[plot]'" in str(result.exception)


def test_the_command_prints_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def load(name: str, **options: Any) -> Model:
        asked.update(name=name, **options)
        return tiny_model("ouro")

    monkeypatch.setattr(Model, "load", load)
    out = tmp_path / "x.json"
    result = CliRunner().invoke(cli, ["trace", "Hi", "--model", "m", "--loops", "2", "--top", "1", "--json", str(out)])
    assert result.exit_code == 0
    assert asked == {"name": "m", "dtype": "auto", "weights": "auto"}
    assert "'H'" in result.output
    told = json.loads(out.read_text())
    assert told["loops"] == 2
    assert len(told["tokens"][0]["loops"][0]["top"]) == 1
