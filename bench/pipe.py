"""Questions and answers over a program's pipes, for peers that have no server. Runs in the peers' environments too.

A question is a line {"prompts": [[token ids]], "tokens": n}; the answer is a line with the tokens made, the seconds
they took, and the seconds until the first.
"""

import json
import sys
import time
from collections.abc import Callable, Iterable
from typing import IO

READY = "ready"
Generate = Callable[[list[list[int]], int], Iterable[int]]  # prompts and tokens for each -> how many, as they are made


def answer_lines(generate: Generate) -> None:
    """Be such a program, until the questions end."""
    print(READY, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        began = time.perf_counter()
        stamps, tokens = [], 0
        for made in generate(question["prompts"], question["tokens"]):
            tokens += made
            stamps.append(time.perf_counter() - began)
        print(json.dumps({"tokens": tokens, "seconds": stamps[-1], "first_s": stamps[0]}), flush=True)


def ask(to: IO[str], back: IO[str], prompts: list[list[int]], tokens: int) -> dict[str, float]:
    """Put a question to such a program. Raises EOFError if it is gone."""
    to.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
    to.flush()
    if not (line := back.readline()):
        raise EOFError("the program ended before it answered")
    answer: dict[str, float] = json.loads(line)
    return answer
