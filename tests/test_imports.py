"""Imports point one way: cli -> app -> routers -> scheduler -> engine -> tinyloop. Imports for types only are free."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WEB = ("asyncio", "fastapi", "starlette", "uvicorn", "typer")
# A module may import its own layer and those after it.
LAYERS = ("server.cli", "server.app", "server.routers", "server.scheduler", "server.engine")


def modules(package: str) -> Iterator[tuple[str, Path]]:
    for path in sorted((ROOT / package).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        yield name.removesuffix(".__init__"), path


def run_time_imports(source: str) -> Iterator[str]:
    """Dotted names of all imports, also those inside functions, but not those under `if TYPE_CHECKING`."""
    pending: list[ast.AST] = [ast.parse(source)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            pending.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        pending.extend(ast.iter_child_nodes(node))


def inside(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def layer(name: str) -> int | None:
    return next((i for i, package in enumerate(LAYERS) if inside(name, package)), None)


def complaint(module: str, imported: str) -> str | None:
    """Why `module` may not import `imported`; None if it may."""
    if inside(module, "tinyloop") and inside(imported, "server", *WEB):
        return "the library knows no server, no asyncio and no web framework"
    if inside(imported, "server.engine") and module not in ("server.scheduler", "server.engine"):
        return "only server.scheduler imports the engine"
    if inside(module, "server.routers") and inside(imported, "tinyloop.model", "tinyloop.Model"):
        return "routers talk to the scheduler, not to a model"
    mine, other = layer(module), layer(imported)
    if other is not None and mine is not None and other < mine:
        return f"imports point from {' to '.join(LAYERS)}"
    if other is not None and mine is None and inside(module, "server"):
        return "what the layers share must not import a layer"
    return None


def test_imports_point_one_way() -> None:
    wrong = [
        f"{module} imports {imported}, but {reason}"
        for package in ("tinyloop", "server")
        for module, path in modules(package)
        for imported in run_time_imports(path.read_text())
        if (reason := complaint(module, imported))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("tinyloop.runner", "asyncio"),
        ("tinyloop.kv.pages", "server.types.Mode"),
        ("server.routers.openai", "server.engine.Engine"),
        ("server.routers.ops", "tinyloop.model.Model"),
        ("server.scheduler", "server.routers.ops"),
        ("server.policy", "server.scheduler.Scheduler"),
    ],
)
def test_a_wrong_import_is_noticed(module: str, imported: str) -> None:
    assert complaint(module, imported)


def test_an_import_for_types_is_not_counted() -> None:
    source = "if TYPE_CHECKING:\n    import a\nelse:\n    import b\ndef f():\n    import c"
    assert set(run_time_imports(source)) == {"b", "c"}


@pytest.mark.parametrize(
    "names",
    [
        "server.scheduler, server.policy, server.admission, server.request, tinyloop.kv.pages, tinyloop.kv.prefix",
        "tinyloop.leases, tinyloop.sequence, tinyloop.text, tinyloop.chat",
        "server.app",
        "server.cli",
    ],
)
def test_torch_is_not_loaded_by_what_does_not_compute(names: str) -> None:
    code = f"import {names}, sys; sys.exit('torch was imported' if 'torch' in sys.modules else 0)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"importing {names}: {done.stderr}"
