"""Holds the documentation to the code: links, Python blocks, curl bodies and metric names. Run it with `make docs`.

A Python block that starts with `# not run` is only shown. Needs no model, no server and no network.
"""

import ast
import inspect
import json
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from server.routers import ops
from server.scheduler import Scheduler
from server.schemas import anthropic, decisions, lmstudio, native, responses
from server.schemas.common import Body, parse
from server.schemas.openai import ChatRequest, CompletionRequest
from tinyloop.errors import RequestError

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
BODY = re.compile(r"(?:-d|--data) '(.*?)'(?:\s|$)", re.DOTALL)
# What a path is sent; a longer path stands before one that it ends with.
BODIES: dict[str, type[Body]] = {
    "/api/v1/chat": lmstudio.ChatV1,
    "/v1/decisions": decisions.DecisionRequest,
    "/v1/messages": anthropic.MessagesRequest,
    "/tinyloop/v1/generate": native.Generate,
    "/tinyloop/v1/prefixes": native.Register,
    "/v1/responses": responses.CreateRequest,
    "/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
}
# Of the extra `clients`, which need not be there; tests/clients runs what imports them.
ELSEWHERE = ("instructor", "langchain_openai", "litellm")
SERIES = re.compile(r"\btinyloop_\w+")


def blocks(text: str, *languages: str) -> Iterator[str]:
    return (body for language, body in FENCE.findall(text) if language in languages)


def broken_links(page: Path, text: str) -> Iterator[str]:
    for link in LINK.findall(FENCE.sub("", text)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists():
            yield f"no such file: {link}"
        elif anchor and target.suffix == ".md" and anchor not in anchors(target.read_text()):
            yield f"no such heading: {link}"


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def broken_python(text: str) -> Iterator[str]:
    for block in blocks(text, "python"):
        if block.startswith("# not run"):
            continue
        try:
            tree = compile(block, "block", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        except SyntaxError as error:
            yield f"Python block, line {error.lineno}: {error.msg}"
            continue
        yield from missing_imports(tree)


def missing_imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = (alias.name for alias in node.names if alias.name not in ELSEWHERE)
            yield from (f"no module {name}" for name in names if find_spec(name) is None)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module not in ELSEWHERE:
            module = import_module(node.module)
            yield from (f"no {a.name} in {node.module}" for a in node.names if not hasattr(module, a.name))
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "tl":
            yield from () if hasattr(import_module("tinyloop"), node.attr) else (f"no tinyloop.{node.attr}",)


def broken_bodies(text: str) -> Iterator[str]:
    for block in blocks(text, "sh", "bash"):
        for call in block.split("curl ")[1:]:
            kind = next((kind for path, kind in BODIES.items() if re.search(rf"{path}[\s'\"]", call)), None)
            if kind is not None:
                body = BODY.search(call)
                yield from refused(kind, body[1] if body else "")
    for block in blocks(text, "json"):
        try:
            json.loads(block)
        except json.JSONDecodeError as error:
            yield f"JSON block: {error}"


def refused(kind: type[Body], body: str) -> Iterator[str]:
    try:
        parse(kind, body.encode())
    except RequestError as error:
        yield f"curl body {body[:60]!r}: {error}"


def broken_series(text: str) -> Iterator[str]:
    """Both ways: what is named exists, and what exists is named. Routers add the series of the model."""
    engine: Any = object()  # a fresh scheduler asks nothing of it
    exposed = set(re.findall(r"^# TYPE (\w+)", Scheduler(engine).metrics_text(), re.MULTILINE))
    exposed |= set(SERIES.findall(inspect.getsource(ops)))
    named = {re.sub(r"_(bucket|sum|count)$", "", name) for name in SERIES.findall(text)}
    yield from (f"{name} does not exist" for name in sorted(named - exposed))
    yield from (f"{name} is not documented" for name in sorted(exposed - named))


def main() -> None:
    problems: list[str] = []
    for page in PAGES:
        text = page.read_text()
        found = [*broken_links(page, text), *broken_python(text), *broken_bodies(text)]
        found += broken_series(text) if page.name == "metrics.md" else []
        problems += [f"{page.relative_to(ROOT)}: {problem}" for problem in found]
    print("\n".join(problems) if problems else f"{len(PAGES)} pages agree with the code")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
