"""Nanbeige 4.2 (arXiv 2607.22083): a Llama stack that loops as a whole, with the final norm after every loop."""

from collections.abc import Mapping
from typing import Any

from tinyloop.config import Layout, ModelConfig
from tinyloop.models.family import BEYOND_TRAINED, Facts, Family

# Switches of the published configuration class, with the values that leave what they switch off.
OFF: dict[str, tuple[Any, ...]] = {
    "qk_layernorm": (None, False),
    "use_sliding_window": (None, False),
    "sliding_window": (None,),
    "loop_share_kv": (None, False),
    "loop_middle_layers": (None, 0),
    "emb_neighbor_num": (None, 0),
    "emb_split_num": (None, 0),
    "ngram_vocab_size_ratio": (None, 0),
    "ngram_insert_all_layers": (None, False),
    "insert_ngram_layer_idx": (None, []),
    "pretraining_tp": (None, 1),
}


class Nanbeige(Family):
    model_types = ("nanbeige",)

    def config(self, raw: Mapping[str, Any]) -> ModelConfig:
        facts = Facts(raw)
        decoder = facts.decoder()
        for switch, off in OFF.items():
            facts.refuse(switch, *off)
        for switch in raw:  # loop split, hyper-connections, depth attention and whatever comes
            if switch.startswith("enable_"):
                facts.refuse(switch, None, False)
        facts.full_attention()
        facts.refuse("kv_channels", None, decoder["head_dim"])
        trained = _trained_loops(facts)
        return ModelConfig(
            family="nanbeige",
            layout=Layout(0, facts.few("num_hidden_layers"), 0),
            default_loops=trained,
            max_loops=BEYOND_TRAINED * trained,
            trained_loops=trained,
            norm_each_loop=not facts.flag("skip_loop_final_norm", False),
            **decoder,
        )


def _trained_loops(facts: Facts) -> int:
    """Where intermediate loops were trained too, there is one weight for each of them, and they decide."""
    weights = facts.raw.get("loop_loss_weights") or []
    return len(weights) + 1 if isinstance(weights, list) and weights else facts.few("num_loops", 1)
