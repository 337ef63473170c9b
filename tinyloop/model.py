"""Model: load a checkpoint and use it from Python. Thin drivers over `Runner`; the server uses the same runner.

Knows no HTTP and no asyncio. One thread at a time.
"""

import ctypes
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from tinyloop import chat, oracle
from tinyloop.arguments import shown, whole
from tinyloop.checkpoint import open_checkpoint
from tinyloop.config import ModelConfig
from tinyloop.drive import Batch, Job
from tinyloop.errors import CheckpointError, ContextOverflow, RequestError
from tinyloop.kv.cache import PagedKV
from tinyloop.kv.prefix import PrefixPool
from tinyloop.models.family import Weights
from tinyloop.models.registry import family_of
from tinyloop.plan import LoopPlan, make_plan
from tinyloop.runner import MAX_CHUNK, PAGE_SIZE, Runner
from tinyloop.sampling import MAX_LOGPROBS, Logprobs, SamplingParams
from tinyloop.sequence import Lease, TokenEvent
from tinyloop.stack import LoopedStack
from tinyloop.tokenizer import Tokenizer
from tinyloop.trace import Trace, Tracing

Prompt = str | Sequence[int]
LEAST_KV_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Generation:
    """A finished answer. `finish_reason` is "stop" or "length"; `loops` is what was run for each answer token."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    loops: tuple[int, ...]
    stop_reason: str | int | None = None
    logprobs: tuple[Logprobs, ...] = ()


class Model:
    """A loaded checkpoint: `config`, `tokenizer`, and the ways to run it. `name` is what it is called in an API."""

    def __init__(
        self,
        name: str,
        stack: LoopedStack,
        tokenizer: Tokenizer,
        *,
        kv_memory: int | None = None,
        page_size: int = PAGE_SIZE,
        max_chunk: int = MAX_CHUNK,
    ) -> None:
        self.name, self.stack, self.tokenizer = name, stack, tokenizer
        self.config: ModelConfig = stack.config
        check_kv_memory(kv_memory)
        self.kv_memory = default_kv_memory(stack.config, stack.dtype) if kv_memory is None else kv_memory
        page_bytes = PagedKV.page_bytes(stack.config, page_size, stack.dtype)
        num_pages = max(1, self.kv_memory // page_bytes)
        self.runner = Runner(stack, tokenizer, num_pages=num_pages, page_size=page_size, max_chunk=max_chunk)

    @classmethod
    def load(
        cls,
        path_or_name: str | Path,
        *,
        dtype: str = "auto",
        weights: str = "auto",
        device: str = "auto",
        kv_memory: int | None = None,
    ) -> "Model":
        """Load a directory, a GGUF file, a built-in name ("smollm2") or a Hugging Face hub name ("owner/name").

        `dtype`: "float32", "bfloat16", "float16", or "auto" (bfloat16 where the processor has it). `weights`: "auto"
        (as `dtype` says) or "int8", half of bfloat16's bytes at a small loss. `kv_memory` in bytes. Raises
        CheckpointError naming what is missing, unknown or broken, RequestError for the other arguments.
        """
        check_kv_memory(kv_memory)
        checkpoint = open_checkpoint(path_or_name)
        family = family_of(checkpoint.config)
        config = family.config(checkpoint.config)
        check_vocabulary(checkpoint.tokenizer, config)
        source = Weights(checkpoint, pick_dtype(dtype), pick_device(device), pick_int8(weights))
        stack = LoopedStack(family, config, source)
        checkpoint.finish()
        name, tokenizer = checkpoint.name, checkpoint.tokenizer
        del checkpoint, source  # the files are closed before there is memory for keys and values
        _give_back_freed()
        return cls(name, stack, tokenizer, kv_memory=kv_memory)

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 128,
        loops: int | None = None,
        prefill_loops: int | None = None,
        exit_threshold: float | None = None,
        exit_signal: str | None = None,
        cache_window: int = 0,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 - frozen
    ) -> Generation:
        """Answer one prompt (text or token ids). Raises RequestError naming the field that is out of bounds."""
        plan = make_plan(self.config, loops=loops, prefill_loops=prefill_loops, exit_threshold=exit_threshold,
                         exit_signal=exit_signal, cache_window=cache_window)  # fmt: skip
        return self._run([self._job(prompt, plan, max_new_tokens, sampling)])[0]

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        *,
        max_new_tokens: int = 128,
        loops: int | Sequence[int] | None = None,
        cache_window: int = 0,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 - frozen
    ) -> list[Generation]:
        """Answer many prompts in packed steps. `loops`: one depth for all, or one for each prompt."""
        if isinstance(prompts, str | bytes) or not isinstance(prompts, Sequence):
            raise RequestError("prompts", f"prompts must be a list of prompts, got {shown(prompts)}")
        plans = self._plans(loops, len(prompts), cache_window)
        pairs = zip(prompts, plans, strict=True)
        return self._run([self._job(prompt, plan, max_new_tokens, sampling) for prompt, plan in pairs])

    def generate_with_pool(
        self,
        pool: PrefixPool,
        prompt: Prompt,
        *,
        max_new_tokens: int = 128,
        loops: int | None = None,
        cache_window: int = 0,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 - frozen
        salt: str = "",
    ) -> Generation:
        """Like `generate`, but what `pool` holds of the prompt is not computed again; prompt and answer go there.

        A prefix serves any depth that is exact (`config.prefix_serves_every_depth`). Different salts share nothing.
        """
        plan = make_plan(self.config, loops=loops, cache_window=cache_window)
        return self._run([self._job(prompt, plan, max_new_tokens, sampling, pool=pool, salt=salt)])[0]

    def register_prefix(
        self,
        pool: PrefixPool,
        tokens: Prompt,
        *,
        loops: int | None = None,
        cache_window: int = 0,
        salt: str = "",
    ) -> int:
        """Compute a prefix and pin it in `pool`; returns the number of tokens cached."""
        self.check_keeps_prefixes()
        plan = make_plan(self.config, loops=loops, cache_window=cache_window)
        kept: list[int] = []
        job = self._job(tokens, plan, pool=pool, salt=salt)
        Batch(self.runner, [job], lambda lease: kept.append(self.runner.keep_prefix(lease, pool))).run()
        return kept[0]

    def check_keeps_prefixes(self) -> None:
        """Raises RequestError for a family of which no prefix can be kept."""
        if self.config.whole_prompt:
            raise RequestError(
                "tokens", f"{self.config.family} runs each prompt as a whole: no prefix of it can be kept"
            )

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 128,
        loops: int | None = None,
        prefill_loops: int | None = None,
        exit_threshold: float | None = None,
        exit_signal: str | None = None,
        cache_window: int = 0,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 - frozen
    ) -> Iterator[TokenEvent]:
        """The tokens of one answer as they are made; `.text` is what became readable with each."""
        plan = make_plan(self.config, loops=loops, prefill_loops=prefill_loops, exit_threshold=exit_threshold,
                         exit_signal=exit_signal, cache_window=cache_window)  # fmt: skip
        return Batch(self.runner, [self._job(prompt, plan, max_new_tokens, sampling)]).events()

    def score(self, prompt: Prompt, loops: int | None = None) -> list[float]:
        """Log-probabilities of tokens 1, 2, ... of the prompt, each given those before it."""
        job = self._job(prompt, make_plan(self.config, loops=loops), prompt_logprobs=0)
        return [value.chosen for value in Batch(self.runner, [job]).run().leases[0].prompt_logprob_values]

    def oracle(
        self,
        prompt: Prompt,
        loops: int | Sequence[int] | None = None,
        cache_window: int = 0,
        prompt_tokens: int | None = None,
    ) -> Tensor:
        """Logits [tokens, vocab_size] by the slow way that fast paths are compared with.

        The first `prompt_tokens` (None: all) are the prompt, the others an answer; few families tell them apart.
        """
        tokens = self._known(prompt)
        depths = [plan.loops for plan in self._plans(loops, len(tokens), cache_window)]
        return oracle.logits(self.stack, tokens, depths, cache_window, prompt_tokens)

    def trace(self, prompt: Prompt, *, loops: int | None = None, top: int = 5) -> Trace:
        """What the model would say after each loop, for each token of the prompt: see `tinyloop.trace`.

        Slow, like the oracle, and quadratic in the prompt. Raises RequestError naming the field that is out of bounds.
        """
        tracing = self.tracing(prompt, loops=loops, top=top)
        while not tracing.done:
            tracing.step()
        return tracing.result()

    def tracing(self, prompt: Prompt, *, loops: int | None = None, top: int = 5) -> Tracing:
        """`trace`, a loop at a time. Raises like it."""
        plan, tokens = make_plan(self.config, loops=loops), self._known(prompt)
        whole("top", top, 1, MAX_LOGPROBS)
        if len(tokens) > self.config.max_context:
            raise ContextOverflow(
                "prompt", f"prompt must have at most {self.config.max_context} tokens, got {len(tokens)}"
            )
        return Tracing(self.name, self.stack, self.tokenizer, tokens, plan.loops, top)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt given as text or as ids. Raises RequestError("prompt") for anything else."""
        if not isinstance(prompt, str):
            return _token_ids(prompt)
        start = [self.tokenizer.bos_id] if self.tokenizer.add_bos and self.tokenizer.bos_id is not None else []
        return start + self.tokenizer.encode(prompt)

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """A conversation as a prompt, through the model's chat template."""
        return chat.render(self.tokenizer, messages)

    def _known(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt for which there are rows in the embedding, at least one."""
        tokens = self.encode(prompt)
        if not tokens or min(tokens) < 0 or max(tokens) >= self.config.vocab_size:
            raise RequestError("prompt", f"prompt must hold token ids between 0 and {self.config.vocab_size - 1}")
        return tokens

    def _plans(self, loops: int | Sequence[int] | None, count: int, cache_window: int) -> list[LoopPlan]:
        """One plan for each of `count` prompts or tokens, from one depth for all or one for each."""
        several = isinstance(loops, Sequence) and not isinstance(loops, str)
        depths = list(cast(Sequence[int], loops)) if several else [cast("int | None", loops)] * count
        if len(depths) != count:
            raise RequestError("loops", f"loops holds {len(depths)} depths where {count} are needed")
        return [make_plan(self.config, loops=depth, cache_window=cache_window) for depth in depths]

    def _job(
        self,
        prompt: Prompt,
        plan: LoopPlan,
        max_new_tokens: int = 0,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 - frozen
        **more: Any,
    ) -> Job:
        """A job that can run. What is wrong with it is said here, before anything has started."""
        whole("max_new_tokens", max_new_tokens, high=2**31)
        if not isinstance(sampling, SamplingParams):
            raise RequestError("sampling", f"sampling must be SamplingParams, got {shown(sampling)}")
        tokens = self.encode(prompt)
        self.runner.check_request(plan, tokens, max_new_tokens, sampling, more.get("prompt_logprobs"))
        return Job(tokens, plan, max_new_tokens, sampling, **more)

    def _run(self, jobs: Sequence[Job]) -> list[Generation]:
        batch = Batch(self.runner, jobs)
        events = defaultdict[Lease, list[TokenEvent]](list)
        for event in batch.events():
            events[event.lease].append(event)
        return [_generation(lease, events[lease]) for lease in batch.leases]


def _generation(lease: Lease, events: Sequence[TokenEvent]) -> Generation:
    return Generation(
        token_ids=tuple(lease.tokens[lease.prompt_tokens :]),
        text=lease.text.text,
        finish_reason=lease.finish_reason or "length",
        prompt_tokens=lease.prompt_tokens,
        cached_tokens=lease.cached,
        loops=tuple(event.loops for event in events),
        stop_reason=events[-1].stop_reason if events else None,
        logprobs=tuple(event.logprobs for event in events if event.logprobs),
    )


def _token_ids(prompt: Sequence[int]) -> list[int]:
    """Plain integers. `index` takes those of numpy and torch too, and refuses 1.0."""
    try:
        tokens = list(prompt)
        if isinstance(prompt, bytes) or bool in map(type, tokens):
            raise TypeError
        return list(map(index, tokens))
    except TypeError:
        raise RequestError("prompt", f"prompt must be text or whole token ids, got {shown(prompt)}") from None


def _give_back_freed() -> None:
    """To the system: what loading took for a moment lies scattered over the heap. Only glibc does it when asked."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def pick_dtype(name: str) -> torch.dtype:
    """ "auto" is bfloat16 where the CPU multiplies it natively, else float32."""
    if name == "auto":
        return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise RequestError("dtype", f"dtype must be auto or one of {', '.join(known)}, got {name!r}")
    return known[name]


def pick_int8(weights: str) -> bool:
    """Whether matrices are kept in 8 bits."""
    if weights not in ("auto", "int8"):
        raise RequestError("weights", f"weights must be auto or int8, got {weights!r}")
    return weights == "int8"


def pick_device(name: str) -> torch.device:
    """Only the CPU has been built and tested so far."""
    if name not in ("auto", "cpu"):
        raise RequestError("device", f"device must be auto or cpu, got {name!r}")
    return torch.device("cpu")


def check_vocabulary(tokenizer: Tokenizer, config: ModelConfig) -> None:
    """Raises CheckpointError for tokens that have no row in the embedding: they would fail in the middle of a step."""
    if tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(f"the tokenizer has {tokenizer.vocab_size} tokens, vocab_size is {config.vocab_size}")
    for token in tokenizer.eos_ids:
        if not 0 <= token < config.vocab_size:
            raise CheckpointError(f"eos_token_id {shown(token)} is outside of vocab_size {config.vocab_size}")


def check_kv_memory(kv_memory: int | None) -> None:
    """Raises RequestError unless the machine could have that much."""
    if kv_memory is None:
        return
    whole("kv_memory", kv_memory, 1)
    if kv_memory > machine_memory():
        raise RequestError("kv_memory", f"kv_memory must be at most the machine's {machine_memory()} bytes")


def machine_memory() -> int:
    """Bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def default_kv_memory(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes: two full contexts at the default depth, at least 256 MiB, at most a quarter of the machine's memory."""
    layers = config.layout.rows(config.default_loops) * config.layout.layers_per_page
    context = config.max_context * layers * config.kv_elements * dtype.itemsize
    return min(machine_memory() // 4, max(LEAST_KV_BYTES, 2 * context))
