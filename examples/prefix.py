"""Register a prefix once, then answer prompts that begin with it without computing it again.

python examples/prefix.py
"""

import time

import tinyloop as tl

LOOPS = 2

model = tl.Model.load("smollm2", dtype="float32")  # in bfloat16 rounding may turn an answer at a tie
greedy = tl.SamplingParams(temperature=0)
preface = model.encode("The lighthouse stood on a rock in the bay, and its keeper wrote down every ship. " * 20)
pool = tl.PrefixPool()
print(f"{model.register_prefix(pool, preface, loops=LOOPS)} tokens registered")

prompt = preface + model.encode("One morning")
for name, chosen in (("cold", tl.PrefixPool()), ("from the prefix", pool)):
    began = time.perf_counter()
    answer = model.generate_with_pool(chosen, prompt, max_new_tokens=8, loops=LOOPS, sampling=greedy)
    print(f"{name}: {answer.cached_tokens} cached tokens, {time.perf_counter() - began:.2f} s,{answer.text!r}")
