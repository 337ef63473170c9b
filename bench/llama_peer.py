"""llama-cpp-python, with and without its server. Runs in that package's environment.

    python bench/llama_peer.py [--plain] pipe MODEL.gguf THREADS
    python bench/llama_peer.py [--plain] serve [options of python -m llama_cpp.server]

As `pipe` it takes one sequence at a time from `peers.py` (`pipe.py`): nothing is turned into text and no request is
parsed, so it is a little ahead of any server over the same library. `--plain` keeps weights in the order of the file.
It is needed where the compiler has broken the kernels for AMX: GCC 12 drops stores before tile loads, and the first
product ends in an illegal instruction. For Q4_1 there is no other reordering to lose.
"""

import sys
from collections.abc import Iterator
from itertools import islice

import llama_cpp
from pipe import answer_lines


def keep_order() -> None:
    """Load all models without `use_extra_bufts`, for which the class has no argument."""
    defaults = llama_cpp.llama_cpp.llama_model_default_params

    def plain() -> llama_cpp.llama_model_params:
        params = defaults()
        params.use_extra_bufts = False
        return params

    llama_cpp.llama_cpp.llama_model_default_params = plain


def answer(path: str, threads: int) -> None:
    model = llama_cpp.Llama(path, n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False)

    def generate(prompts: list[list[int]], tokens: int) -> Iterator[int]:
        for prompt in prompts:
            yield from (1 for _ in islice(model.generate(prompt, top_k=1, temp=0), tokens))

    answer_lines(generate)


def main() -> None:
    if sys.argv[1] == "--plain":
        del sys.argv[1]
        keep_order()
    if sys.argv.pop(1) == "pipe":
        answer(sys.argv[1], int(sys.argv[2]))
    else:
        from llama_cpp.server.__main__ import main as serve

        serve()


if __name__ == "__main__":
    main()
