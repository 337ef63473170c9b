"""From one row of logits to one token. Knows nothing of batches, models or torch.

A sequence owns its `Sampler`, and the sampler owns its random numbers: one uniform per sampled token, from a generator
seeded per request. So the same seed gives the same tokens whatever shares the batch.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tinyloop.arguments import number, shown, whole
from tinyloop.errors import RequestError

if TYPE_CHECKING:
    from tinyloop.constraint import Constraint

Logits = NDArray[np.float32]
MAX_LOGPROBS = 128
MAX_STOPS = 64
_COLDEST = 1e-5  # below this a draw is greedy in all but name, and dividing by it can overflow
_BLOCK = 256  # tokens whose weights are summed up before a draw looks at each
_NUCLEUS_GUESS = 1024  # top-p looks at this many tokens before it sorts the whole vocabulary


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and where the answer stops. Raises RequestError naming the field that is out of bounds.

    temperature 0 (or below 1e-5) is greedy. `top_k` 0 and `min_p` 0 are off. `repetition_penalty` (Keskar et al. 2019)
    looks at prompt and answer, `presence_penalty` and `frequency_penalty` at the answer only. `logprobs` None: none; n:
    the chosen token's log-probability and the n most likely ones, and those of `logprob_tokens`. Log-probabilities are
    those of the model itself, before temperature, penalties, bias and `constraint`, the form that the answer must have.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    logprob_tokens: tuple[int, ...] = ()
    constraint: "Constraint | None" = None

    def __post_init__(self) -> None:
        number("temperature", self.temperature, 0, 100)
        number("top_p", self.top_p, 0, 1)
        whole("top_k", self.top_k, 0, 2**31)
        number("min_p", self.min_p, 0, 1)
        number("repetition_penalty", self.repetition_penalty, 0.01, 100)
        number("presence_penalty", self.presence_penalty, -2, 2)
        number("frequency_penalty", self.frequency_penalty, -2, 2)
        whole("min_tokens", self.min_tokens, 0, 2**31)
        if self.logprobs is not None:
            whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.seed is not None:
            whole("seed", self.seed)
            object.__setattr__(self, "seed", int(self.seed))
        self._check_tokens()
        object.__setattr__(self, "stop", _stops(self.stop))

    def _check_tokens(self) -> None:
        """Types and what no model could have; how many tokens there are is for the model to say."""
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError("logit_bias", f"logit_bias must map token ids to biases, got {shown(self.logit_bias)}")
        for token, bias in self.logit_bias.items():
            whole("logit_bias", token, 0, 2**31)
            number("logit_bias", bias, -100, 100)
        if not isinstance(self.stop_token_ids, Sequence):
            raise RequestError("stop_token_ids", f"stop_token_ids must be token ids, got {shown(self.stop_token_ids)}")
        for token in self.stop_token_ids:
            whole("stop_token_ids", token, 0, 2**31)
        for token in self.logprob_tokens:
            whole("logprob_tokens", token, 0, 2**31)

    @property
    def greedy(self) -> bool:
        return self.temperature < _COLDEST

    @property
    def filtered(self) -> bool:
        """Whether some tokens are left out of a draw."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def plain(self) -> bool:
        """Whether the most likely token is all that is wanted: nothing else is done with a row of logits."""
        changed = self.logit_bias or self.constraint is not None or self.min_tokens or self.repetition_penalty != 1
        penalised = self.presence_penalty or self.frequency_penalty
        return self.greedy and self.logprobs is None and not changed and not penalised


def _stops(stop: str | Sequence[str]) -> tuple[str, ...]:
    """Always a tuple of texts."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Sequence) else (None,)
    if not all(isinstance(text, str) for text in stops):
        raise RequestError("stop", f"stop must be a string or several, got {shown(stop)}")
    if len(stops) > MAX_STOPS:
        raise RequestError("stop", f"stop takes at most {MAX_STOPS} strings, got {len(stops)}")
    if not all(stops):
        raise RequestError("stop", "stop strings must not be empty")
    return stops


@dataclass(frozen=True)
class Logprobs:
    """Log-probability of the chosen token, the most likely tokens with theirs, best first, and those asked for."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()
    wanted: tuple[tuple[int, float], ...] = ()


class Sampler:
    """Chooses the tokens of one sequence. `stop_ids` are the tokens that end it, banned until `min_tokens`."""

    def __init__(self, params: SamplingParams, prompt: Iterable[int] = (), stop_ids: Iterable[int] = ()) -> None:
        self.params, self.plain = params, params.plain
        self.stop_ids = tuple(stop_ids)
        self._rng = np.random.Generator(np.random.Philox(None if params.seed is None else params.seed % 2**64))
        self._answer: Counter[int] = Counter()
        self._form = None if params.constraint is None else params.constraint.start()
        self._seen = set(prompt) if params.repetition_penalty != 1 else set()

    def choose(self, logits: Logits) -> tuple[int, Logprobs | None]:
        """The next token and, if asked for, its log-probabilities. `logits`: [vocab_size], left unchanged."""
        adjusted = self._adjust(logits)
        token = int(adjusted.argmax()) if self.params.greedy else self._draw(adjusted)
        _check(adjusted[token])
        logprobs = None
        if self.params.logprobs is not None:
            logprobs = logprobs_of(logits, token, self.params.logprobs, self.params.logprob_tokens)
        self._answer[token] += 1
        if self._form is not None and token not in self.stop_ids:
            self._form.advance(token)
        if self.params.repetition_penalty != 1:
            self._seen.add(token)
        return token, logprobs

    def take(self, token: int, logit: float) -> int:
        """The most likely token, where nothing else is wanted (`plain`)."""
        _check(logit)
        return token

    @property
    def complete(self) -> bool:
        """The answer has the form it must have, and nothing can follow."""
        return self._form is not None and self._form.complete

    @property
    def lost(self) -> bool:
        """The form could not be followed any further, so the answer has to be cut."""
        return self._form is not None and self._form.lost

    def _adjust(self, logits: Logits) -> Logits:
        """Bias, penalties and banned tokens; a copy only where something changes."""
        params, out = self.params, logits
        ban = self.stop_ids if self._answer.total() < params.min_tokens else ()
        penalised = bool(self._answer) and (params.presence_penalty != 0 or params.frequency_penalty != 0)
        if not (ban or penalised or self._seen or params.logit_bias or self._form):
            return out
        out = logits.copy()
        if self._seen:
            seen = np.fromiter(self._seen, np.int64)
            scale = np.where(out[seen] > 0, 1 / params.repetition_penalty, params.repetition_penalty)
            out[seen] *= scale.astype(np.float32)
        if penalised:
            tokens = np.fromiter(self._answer.keys(), np.int64)
            counts = np.fromiter(self._answer.values(), np.float32)
            out[tokens] -= params.presence_penalty + params.frequency_penalty * counts
        for token, bias in params.logit_bias.items():
            out[token] += bias
        if self._form is not None:
            out[~self._form.allowed(len(out))] = -np.inf
        if ban and (self._form is None or np.isfinite(np.delete(out, ban)).any()):  # a form that must end, ends
            out[list(ban)] = -np.inf
        return out

    def _draw(self, logits: Logits) -> int:
        """Inverse-CDF sampling in vocabulary order, so that rounding in the logits rarely changes the outcome."""
        if not self.params.filtered:  # single precision is enough to draw from all of it, not to say who is the k-th
            weights = np.exp((logits - logits.max()) / np.float32(self.params.temperature))
            return drawn_of(weights, self._rng.random())
        scaled = (logits.astype(np.float64) - logits.max()) / self.params.temperature
        weights = _filtered(np.exp(scaled), self.params)
        cumulative = weights.cumsum()
        drawn = np.searchsorted(cumulative, self._rng.random() * cumulative[-1], side="right")
        return int(min(drawn, np.flatnonzero(weights)[-1]))


def drawn_of(weights: Logits, uniform: float) -> int:
    """Where the running sum of `weights` [vocab_size] passes the part `uniform` of the whole. Sums are in float64.

    First the block, then the place in it: a running sum over the whole vocabulary takes ten times as long.
    """
    sums = np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK), dtype=np.float64)
    ends = sums.cumsum()
    if not math.isfinite(ends[-1]):
        raise FloatingPointError("the model produced logits that are not numbers")
    target = uniform * ends[-1]
    block = min(int(np.searchsorted(ends, target, side="right")), int(np.flatnonzero(sums)[-1]))
    part = weights[block * _BLOCK : (block + 1) * _BLOCK]
    within = part.cumsum(dtype=np.float64) + (ends[block] - sums[block])
    place = min(int(np.searchsorted(within, target, side="right")), int(np.flatnonzero(part)[-1]))
    return block * _BLOCK + place


def _check(logit: float) -> None:
    if math.isnan(logit):
        raise FloatingPointError("the model produced logits that are not numbers")


def _filtered(weights: NDArray[np.float64], params: SamplingParams) -> NDArray[np.float64]:
    """Zero the weights that top-k, min-p (Nguyen et al. 2024) or top-p (Holtzman et al. 2019) leave out."""
    floor = params.min_p * weights.max()
    if 0 < params.top_k < len(weights):
        floor = max(floor, np.partition(weights, -params.top_k)[-params.top_k])
    if params.top_p < 1:
        kept = np.where(weights >= floor, weights, 0)
        floor = max(floor, _nucleus_floor(kept, params.top_p * kept.sum()))
    return np.where(weights >= floor, weights, 0) if floor > 0 else weights


def _nucleus_floor(weights: NDArray[np.float64], mass: float) -> float:
    """The smallest weight among the fewest largest ones that together reach `mass`."""
    for count in (min(_NUCLEUS_GUESS, len(weights)), len(weights)):
        largest = np.sort(np.partition(weights, -count)[-count:])[::-1]
        reached = int(np.searchsorted(largest.cumsum(), mass))
        if reached < count:
            return float(largest[reached])
    return 0.0


def logprobs_of(logits: Logits, token: int, top: int, wanted: Sequence[int] = ()) -> Logprobs:
    """Log-softmax of one row at `token`, at its `top` largest entries and at `wanted`. `logits`: [vocab_size]."""
    wide = logits.astype(np.float64)
    wide -= wide.max()
    wide -= math.log(np.exp(wide).sum())
    best: list[int] = []
    if top:
        largest = np.argpartition(wide, -top)[-top:] if top < len(wide) else np.arange(len(wide))
        best = largest[np.lexsort((largest, -wide[largest]))].tolist()
    return Logprobs(
        float(wide[token]), tuple((i, float(wide[i])) for i in best), tuple((i, float(wide[i])) for i in wanted)
    )
