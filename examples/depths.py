"""One prompt at several depths, in packed steps: each answer stops after its own number of loops per token.

python examples/depths.py
"""

import tinyloop as tl

DEPTHS = [1, 2, 4, 8]

model = tl.Model.load("smollm2")
prompt = model.chat([{"role": "user", "content": "Name the capital of France."}])
greedy = tl.SamplingParams(temperature=0)
answers = model.generate_batch([prompt] * len(DEPTHS), max_new_tokens=24, loops=DEPTHS, sampling=greedy)
for loops, answer in zip(DEPTHS, answers, strict=True):
    print(f"{loops} loops: {answer.text}")

text = "The quick brown fox jumps over the lazy dog."
for loops in DEPTHS:
    values = model.score(text, loops=loops)
    print(f"{loops} loops: mean log-probability of a known sentence {sum(values) / len(values):.3f}")
