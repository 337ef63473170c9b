"""Where keys and values live: every layer at every loop has a slot of its own."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny_models import raw_config
from tinyloop.config import Layout, ModelConfig, Retrofit
from tinyloop.errors import CheckpointError, RequestError
from tinyloop.models.registry import family_of
from tinyloop.plan import LoopPlan, make_plan

layouts = st.builds(Layout, st.integers(0, 12), st.integers(1, 12), st.integers(0, 12))


def config() -> ModelConfig:
    return family_of(raw_config("ouro")).config(raw_config("ouro"))


@given(layouts, st.integers(1, 6))
def test_slots_are_distinct_and_fill_the_table(layout: Layout, loops: int) -> None:
    plan = LoopPlan(layout=layout, loops=loops, prefill_loops=loops)
    outer = [*layout.span("prelude"), *layout.span("coda")]
    slots = [plan.slot(layer) for layer in outer]
    slots += [plan.slot(layer, loop) for layer in layout.span("core") for loop in range(loops)]
    assert len(set(slots)) == len(slots) == plan.rows * layout.layers_per_page
    assert {slot.row for slot in slots} == set(range(plan.rows))


@given(layouts, st.integers(1, 6), st.integers(0, 11))
def test_a_deeper_plan_keeps_the_slots_of_a_shallower_one(layout: Layout, loops: int, layer: int) -> None:
    layer %= layout.layers
    shallow = LoopPlan(layout=layout, loops=loops, prefill_loops=1)
    deep = LoopPlan(layout=layout, loops=loops + 2, prefill_loops=1)
    assert shallow.slot(layer) == deep.slot(layer)


def test_a_slot_outside_of_the_plan_is_an_index_error() -> None:
    plan = make_plan(config(), loops=2)
    with pytest.raises(IndexError, match="loop 2 of a plan with 2 core planes"):
        plan.slot(0, 2)
    with pytest.raises(IndexError, match="layer 3 of 3"):
        plan.slot(3)


def test_plans_are_values() -> None:
    assert make_plan(config(), loops=2) == make_plan(config(), loops=2)
    assert len({make_plan(config(), loops=loops) for loops in (1, 2, 2, 4)}) == 3


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("loops", 99, "loops must be between 1 and 8, got 99"),
        ("loops", 0, "loops must be between 1 and 8, got 0"),
        ("prefill_loops", 9, "prefill_loops must be between 1 and 8, got 9"),
        ("cache_window", -1, "cache_window must be at least 0, got -1"),
        ("exit_threshold", 1.5, "exit_threshold must be above 0 and at most 1, got 1.5"),
        ("exit_threshold", 10**400, "exit_threshold must be above 0 and at most 1, got an integer of 1329 bits"),
        ("exit_threshold", "x", "exit_threshold must be a number, got 'x'"),
        ("loops", 10**4000, "loops must be between 1 and 8, got an integer of 13288 bits"),
        ("loops", "2", "loops must be a whole number, got '2'"),
        ("loops", 2.0, "loops must be a whole number, got 2.0"),
        ("loops", True, "loops must be a whole number, got True"),
        ("prefill_loops", [2], r"prefill_loops must be a whole number, got \[2\]"),
        ("cache_window", 1.5, "cache_window must be a whole number, got 1.5"),
    ],
)
def test_bounds_and_types_are_named(field: str, value: object, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        make_plan(config(), **{field: value})
    assert caught.value.field == field


@pytest.mark.parametrize("field", ["prelude", "core", "default_loops", "max_loops", "decay"])
@pytest.mark.parametrize("value", [None, "4", [4], math.nan, math.inf])
def test_a_retrofit_of_no_numbers_names_the_key(field: str, value: object) -> None:
    raw = raw_config("llama", tinyloop={"retrofit": {"prelude": 2, "core": 2, field: value}})
    with pytest.raises(CheckpointError, match=f"retrofit needs a (whole|finite) number as {field}"):
        family_of(raw).config(raw)


def test_a_retrofit_must_fit_the_layers() -> None:
    raw = raw_config("llama", tinyloop={"retrofit": {"prelude": 5, "core": 2}})
    with pytest.raises(CheckpointError, match="do not split into prelude, core and coda"):
        family_of(raw).config(raw)
    with pytest.raises(CheckpointError, match="default_loops <= max_loops"):
        Retrofit(prelude=1, core=1, default_loops=3, max_loops=2)
    raw["tinyloop"] = {"retrofit": {"prelude": 1, "core": 1, "colour": "red"}}
    with pytest.raises(CheckpointError, match=r"tinyloop.retrofit: .*colour"):
        family_of(raw).config(raw)
