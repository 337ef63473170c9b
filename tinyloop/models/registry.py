"""From a config.json to its family."""

from collections.abc import Mapping
from typing import Any

from tinyloop.arguments import shown
from tinyloop.errors import CheckpointError
from tinyloop.models.dory import Dory
from tinyloop.models.family import Facts, Family
from tinyloop.models.hrm_text import HrmText
from tinyloop.models.huginn import Huginn
from tinyloop.models.iquest import IQuestLoop
from tinyloop.models.llama import Llama, Qwen2, Qwen3
from tinyloop.models.nanbeige import Nanbeige
from tinyloop.models.ouro import Ouro

FAMILIES: tuple[Family, ...] = (
    Llama(), Qwen2(), Qwen3(), Ouro(), Nanbeige(), Dory(), HrmText(), IQuestLoop(), Huginn(),
)  # fmt: skip

# Looped models that are known and do not fit, with the reason.
INKLING = "its short convolutions keep states that KV pages do not hold, and its passes send messages at every layer"
REFUSED = {"inkling2_loop": INKLING, "inkling2_loop_text": INKLING}


def family_of(raw: Mapping[str, Any]) -> Family:
    """The family that reads this config.json. Raises CheckpointError naming the model type and the known ones."""
    model_type = raw.get("model_type")
    for family in FAMILIES:
        if model_type in family.model_types:
            _check_ours(raw, family)
            return family
    if isinstance(model_type, str) and model_type in REFUSED:
        raise CheckpointError(f"model_type {model_type} is not supported: {REFUSED[model_type]}")
    known = ", ".join(sorted(name for family in FAMILIES for name in family.model_types))
    raise CheckpointError(f"unknown architecture: model_type {shown(model_type)}; known are {known}")


def _check_ours(raw: Mapping[str, Any], family: Family) -> None:
    """Raises CheckpointError for what our own section of the config says and this family would not heed."""
    for key in Facts(raw).section("tinyloop").raw:
        if key not in family.ours:
            known = ", ".join(family.ours) or "nothing"
            raise CheckpointError(
                f"config.json: tinyloop: {shown(key)} is not for model_type {raw['model_type']}; known is {known}"
            )
