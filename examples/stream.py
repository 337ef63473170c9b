"""Stream a chat answer from a running server with the openai package. Start `make serve` first.

python examples/stream.py [loops] [http://127.0.0.1:8000]
"""

import sys

from openai import OpenAI

loops = int(sys.argv[1]) if len(sys.argv) > 1 else 2
address = sys.argv[2] if len(sys.argv) > 2 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{address}/v1", api_key="none")  # the server asks for no key, the package does

stream = client.chat.completions.create(
    model="smollm2",
    messages=[{"role": "user", "content": "Name the capital of France."}],
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
    extra_body={"loops": loops},
)
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
    if chunk.usage:
        print(f"\n{chunk.usage.completion_tokens} tokens at {loops} loops")
