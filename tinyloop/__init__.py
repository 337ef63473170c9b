"""TinyLoop: inference for looped language models, with depth as a dial.

    import tinyloop as tl

    model = tl.Model.load("smollm2")
    print(model.generate("The capital of France is", max_new_tokens=8, loops=2).text)

Names are imported when first used, so that code which only needs integers (the scheduler) never loads torch.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinyloop.config import ModelConfig, Retrofit
    from tinyloop.errors import CheckpointError, ContextOverflow, NeverFits, RequestError, TinyLoopError
    from tinyloop.kv.prefix import PrefixPool
    from tinyloop.model import Generation, Model
    from tinyloop.plan import LoopPlan
    from tinyloop.sampling import Logprobs, SamplingParams
    from tinyloop.trace import Trace

__version__ = "0.1.0"

# Threads of OpenMP spin for a while after each piece of work of torch, on the cores that our own kernels then want; at
# eight requests at once that costs a quarter of the speed. They read this when torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

_HOME = {
    "CheckpointError": "errors",
    "ContextOverflow": "errors",
    "Generation": "model",
    "Logprobs": "sampling",
    "LoopPlan": "plan",
    "Model": "model",
    "ModelConfig": "config",
    "NeverFits": "errors",
    "PrefixPool": "kv.prefix",
    "RequestError": "errors",
    "Retrofit": "config",
    "SamplingParams": "sampling",
    "TinyLoopError": "errors",
    "Trace": "trace",
}
__all__ = [
    "CheckpointError",
    "ContextOverflow",
    "Generation",
    "Logprobs",
    "LoopPlan",
    "Model",
    "ModelConfig",
    "NeverFits",
    "PrefixPool",
    "RequestError",
    "Retrofit",
    "SamplingParams",
    "TinyLoopError",
    "Trace",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tinyloop' has no attribute {name!r}")
    value = getattr(import_module(f"tinyloop.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
