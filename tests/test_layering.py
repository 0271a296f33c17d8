"""Imports between the packages, and the size of modules, read from the source.

The front process must not load jax, and a scheduling policy must be testable without it.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("jaxserve", "server", "pallas_kernels")

# Slow to import, or for devices only. Host-only modules import none of them, not even indirectly.
HEAVY = {"jax", "jaxlib", "flax", "orbax", "torch", "transformers"}

# The modules and packages of jaxserve that may use jax. All others are host-only: the front process
# and the scheduler's tests may import them.
DEVICE = (
    "jaxserve.checkpoint.orbax_cache",
    "jaxserve.engine.choices",
    "jaxserve.engine.factory",
    "jaxserve.engine.loading",
    "jaxserve.engine.memory",
    "jaxserve.models",
    "jaxserve.ops",
    "jaxserve.runner",
    "jaxserve.sampling",
    "jaxserve.testing.example_stages",
    "jaxserve.testing.one_step",
)


@cache
def modules() -> dict[str, Path]:
    """Returns the path of every module of the project by its dotted name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(tree: ast.AST, *, at_import_time: bool) -> Iterator[str]:
    """Yields the dotted names that a module imports; ``from a import b`` gives ``a.b``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import of {node.module}"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif is_skipped(node, at_import_time):
            continue
        else:
            yield from imports(node, at_import_time=at_import_time)


def is_skipped(node: ast.AST, at_import_time: bool) -> bool:
    """Whether the code under a node never runs, or does not run when its module is imported."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return True
    return at_import_time and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


@cache
def imported_by(module: str, *, at_import_time: bool = False) -> frozenset[str]:
    """Returns the imports of a module: modules of the project, and other names unchanged."""
    tree = ast.parse(modules()[module].read_text())
    names = set()
    for name in imports(tree, at_import_time=at_import_time):
        if name.split(".")[0] not in PACKAGES:
            names.add(name)
            continue
        imported = name
        while imported not in modules():
            imported = imported.rpartition(".")[0]
            assert imported, f"{module} imports {name}, which does not exist"
        names.add(imported)
    return frozenset(names)


def top(name: str) -> str:
    return name.split(".")[0]


def is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def is_host_only(name: str) -> bool:
    return is_in(name, "jaxserve") and not any(is_in(name, package) for package in DEVICE)


def modules_in(package: str) -> list[str]:
    return [name for name in modules() if is_in(name, package)]


def external(module: str) -> set[str]:
    """Returns the top-level names outside the standard library and the project."""
    names = {top(name) for name in imported_by(module)}
    return names - set(PACKAGES) - sys.stdlib_module_names - {"__future__"}


def project_imports(module: str) -> set[str]:
    return {name for name in imported_by(module) if top(name) in PACKAGES}


@pytest.mark.parametrize("module", modules_in("server"))
def test_server_imports_host_only_modules(module: str) -> None:
    wrong = {
        name
        for name in project_imports(module)
        if not is_in(name, "server") and not is_host_only(name)
    }
    assert not wrong
    assert not external(module) & HEAVY


@pytest.mark.parametrize("module", modules_in("pallas_kernels"))
def test_kernels_import_only_jax_and_numpy(module: str) -> None:
    assert external(module) <= {"jax", "jaxtyping", "numpy"}
    assert all(is_in(name, "pallas_kernels") for name in project_imports(module))


@pytest.mark.parametrize("module", modules_in("jaxserve.core"))
def test_core_is_pure_python(module: str) -> None:
    assert external(module) <= {"msgspec"}
    allowed = (
        "jaxserve.core",
        "jaxserve.ipc.messages",
        "jaxserve.sampling_params",
        "jaxserve.errors",
    )
    assert not {
        name for name in project_imports(module) if not any(is_in(name, a) for a in allowed)
    }
    # Time and randomness are arguments.
    assert not {top(n) for n in imported_by(module)} & {"time", "random", "os", "socket", "asyncio"}


LAYERS = (
    *("pallas_kernels", "jaxserve.errors", "jaxserve.conversion", "jaxserve.sampling_params"),
    "jaxserve.config",
    *("jaxserve.arrays", "jaxserve.device", "jaxserve.program", "jaxserve.ipc", "jaxserve.cli"),
    "jaxserve.text",
    *("jaxserve.core",),
    *("jaxserve.structured_output", "jaxserve.parsing", "jaxserve.checkpoint", "jaxserve.ops"),
    *("jaxserve.models", "jaxserve.sampling", "jaxserve.runner", "jaxserve.engine"),
    *("jaxserve.client", "jaxserve.front", "jaxserve.openai", "jaxserve.offline", "jaxserve.llm"),
    *("jaxserve.testing", "jaxserve.bench", "jaxserve", "server"),
)
"""Packages and root modules, each of which imports only those before it."""


def layer(module: str) -> str:
    """Returns the entry of `LAYERS` that a module belongs to."""
    return max((name for name in LAYERS if is_in(module, name)), key=len)


@pytest.mark.parametrize("module", [name for name in modules() if name != "jaxserve"])
def test_a_module_imports_no_higher_layer(module: str) -> None:
    """Imports within functions count, too. ``jaxserve`` itself has the version."""
    below = LAYERS[: LAYERS.index(layer(module)) + 1]
    wrong = {
        name for name in project_imports(module) if name != "jaxserve" and layer(name) not in below
    }
    assert not wrong


def test_the_documents_list_the_packages_in_this_order() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    _, _, table = text.partition("## The packages")
    rows = re.findall(r"^\|[^|]*\| `([\w/]+)[`/]", table, re.MULTILINE)
    listed = [name.rstrip("/").replace("/", ".") for name in rows]
    assert len(listed) > 15
    assert listed == sorted(listed, key=LAYERS.index, reverse=True)


def all_imports(module: str) -> frozenset[str]:
    """Returns the modules of the project that a module imports anywhere, for type checkers too."""
    found = set()
    for node in ast.walk(ast.parse(modules()[module].read_text())):
        for name in imports(ast.Module([node], []), at_import_time=False):  # type: ignore[list-item]
            while name and name not in modules():
                name = name.rpartition(".")[0]
            found |= {name} - {"", module}
    return frozenset(found)


def test_there_are_no_import_cycles() -> None:
    rest = {module: all_imports(module) for module in modules()}
    while free := {module for module, needs in rest.items() if not needs & rest.keys()}:
        rest = {module: needs for module, needs in rest.items() if module not in free}
    assert not rest


def test_detects_an_import_cycle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "all_imports", lambda module: modules().keys() - {module})
    with pytest.raises(AssertionError):
        test_there_are_no_import_cycles()


def test_the_root_package_has_few_modules_with_several_importers() -> None:
    root = [name for name in modules() if name.count(".") == 1 and name.startswith("jaxserve.")]
    files = [name for name in root if modules()[name].name != "__init__.py"]
    assert len(files) < 8, "at most eight files with __init__.py"
    for file in files:
        importers = [module for module in modules() if file in project_imports(module)]
        assert len(importers) != 1, f"{file} belongs to its only importer {importers[0]}"


@pytest.mark.parametrize("module", modules())
def test_a_module_is_short_and_has_a_docstring(module: str) -> None:
    source = modules()[module].read_text()
    assert len(source.splitlines()) <= 330
    assert ast.get_docstring(ast.parse(source)), "the docstring is missing"


FORBIDDEN = [
    # (package, lower modules that it must not import)
    ("jaxserve.ipc", ("jaxserve.cli",)),
    ("jaxserve.models", ("jaxserve.core", "jaxserve.ipc")),
    ("jaxserve.ops", ("jaxserve.core", "jaxserve.ipc")),
    ("jaxserve.sampling", ("jaxserve.models", "jaxserve.ops")),
    ("jaxserve.runner", ("jaxserve.ipc.transport",)),
    ("jaxserve.client", ("jaxserve.text",)),
    ("jaxserve.engine.core", ("jaxserve.runner", "jaxserve.models", "jaxserve.ipc.transport")),
    (
        "jaxserve.openai",
        ("jaxserve.client", "jaxserve.ipc.transport", "starlette", "uvicorn"),
    ),
    *(
        (package, ("jaxserve.testing", "jaxserve.bench"))
        for package in ("jaxserve.core", "jaxserve.engine", "jaxserve.front", "server.app")
    ),
]


@pytest.mark.parametrize(("package", "forbidden"), FORBIDDEN, ids=[b[0] for b in FORBIDDEN])
def test_a_package_imports_none_of_its_forbidden_modules(
    package: str, forbidden: tuple[str, ...]
) -> None:
    wrong = {
        f"{module} -> {name}"
        for module in modules_in(package)
        for name in imported_by(module)
        if any(is_in(name, f) for f in forbidden)
    }
    assert not wrong


@pytest.mark.parametrize("module", [name for name in modules() if is_host_only(name)])
def test_host_only_modules_import_no_heavy_packages(module: str) -> None:
    """Follows the imports that run at import time. Parent packages are imported with a module."""
    came_from: dict[str, str] = {module: ""}
    todo = [module]
    while todo:
        name = todo.pop()
        parents = {name.rpartition(".")[0]} - {""}
        for imported in imported_by(name, at_import_time=True) | parents:
            if top(imported) in HEAVY:
                chain = [imported, name]
                while came_from[chain[-1]]:
                    chain.append(came_from[chain[-1]])
                pytest.fail(" <- ".join(chain))
            if imported in modules() and imported not in came_from:
                came_from[imported] = name
                todo.append(imported)


def test_device_modules_exist() -> None:
    assert not [name for name in DEVICE if name not in modules()]


def test_no_module_imports_torch() -> None:
    assert not [m for m in modules() if any(top(n) == "torch" for n in imported_by(m))]


def test_the_front_process_runs_without_jax() -> None:
    """Checks in a fresh interpreter what the other tests read from the source."""
    code = (
        "import sys, server.app, server.__main__, jaxserve.client.engine_client\n"
        f"print(sorted({HEAVY!r} & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"
