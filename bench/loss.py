"""What int8 weights cost in quality: mean loss on the same windows of text as bfloat16, at several depths.

    python bench/loss.py [--windows 20] [--tokens 512] [TEXT ...]

Without files, the text is this repository's own documentation and licence.
"""

import argparse
from pathlib import Path

import tinyloop as tl

ROOT = Path(__file__).resolve().parent.parent


def windows(model: tl.Model, files: list[Path], count: int, size: int) -> list[list[int]]:
    tokens = model.encode("".join(file.read_text() for file in files))
    if len(tokens) < count * size:
        raise SystemExit(f"{len(tokens)} tokens of text, {count * size} are needed")
    return [tokens[i * size : (i + 1) * size] for i in range(count)]


def mean_loss(model: tl.Model, texts: list[list[int]], loops: int) -> float:
    scores = [score for text in texts for score in model.score(text, loops)]
    return -sum(scores) / len(scores)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", nargs="*", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=512)
    args = parser.parse_args()
    files = args.text or [*sorted((ROOT / "docs").glob("*.md")), ROOT / "LICENSE"]
    sides = {kind: tl.Model.load(args.model, dtype="bfloat16", weights=kind) for kind in ("auto", "int8")}
    texts = windows(sides["auto"], files, args.windows, args.tokens)
    print(f"{'loops':>5} {'bfloat16':>10} {'int8':>10} {'change':>8}")
    for loops in range(1, min(4, sides["auto"].config.max_loops) + 1):
        plain, small = (mean_loss(model, texts, loops) for model in sides.values())
        print(f"{loops:5} {plain:10.4f} {small:10.4f} {small / plain - 1:8.2%}")


if __name__ == "__main__":
    main()
