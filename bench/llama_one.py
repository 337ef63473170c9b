"""llama-cpp-python without its server, one sequence at a time. Runs in that package's environment.

    python bench/llama_one.py MODEL.gguf THREADS

`peers.py` talks to it (`pipe.py`). Nothing is turned into text and no request is parsed, so it is a little ahead of
any server over the same library.
"""

import sys
from collections.abc import Iterator
from itertools import islice

from llama_cpp import Llama
from pipe import answer_lines


def main() -> None:
    path, threads = sys.argv[1], int(sys.argv[2])
    model = Llama(path, n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False)

    def generate(prompts: list[list[int]], tokens: int) -> Iterator[int]:
        for prompt in prompts:
            yield from (1 for _ in islice(model.generate(prompt, top_k=1, temp=0), tokens))

    answer_lines(generate)


if __name__ == "__main__":
    main()
