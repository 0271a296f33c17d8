"""Who may import whom, and how large a file is, read from the source.

The front process must not pay for jax, and a scheduling policy must be testable without it.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("jaxserve", "server", "pallas_kernels")

# Slow to import, or for devices only. Host-only modules reach none of them, however indirectly.
HEAVY = {"jax", "jaxlib", "flax", "orbax", "torch", "transformers"}

# The modules and packages of jaxserve that may use jax. All others are host-only: the front process
# and the scheduler's tests may import them.
DEVICE = (
    "jaxserve.checkpoint.orbax_cache",
    "jaxserve.engine.factory",
    "jaxserve.models",
    "jaxserve.ops",
    "jaxserve.runner",
    "jaxserve.sampling",
    "jaxserve.testing.one_step",
)


@cache
def modules() -> dict[str, Path]:
    """Every module of ours by its dotted name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(tree: ast.AST, *, at_import_time: bool) -> Iterator[str]:
    """The dotted names that a module imports; ``from a import b`` gives ``a.b``."""
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
    """Whether the code under this node never runs, or not when its module is imported."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return True
    return at_import_time and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


@cache
def imported_by(module: str, *, at_import_time: bool = False) -> frozenset[str]:
    """What a module imports: names of ours as modules, others as they stand."""
    tree = ast.parse(modules()[module].read_text())
    names = set()
    for name in imports(tree, at_import_time=at_import_time):
        if name.split(".")[0] not in PACKAGES:
            names.add(name)
            continue
        own = name
        while own not in modules():
            own = own.rpartition(".")[0]
            assert own, f"{module} imports {name}, which does not exist"
        names.add(own)
    return frozenset(names)


def top(name: str) -> str:
    return name.split(".")[0]


def is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def is_host_only(name: str) -> bool:
    return is_in(name, "jaxserve") and not any(is_in(name, package) for package in DEVICE)


def of_package(package: str) -> list[str]:
    return [name for name in modules() if is_in(name, package)]


def external(module: str) -> set[str]:
    """Top names outside the standard library and our packages."""
    names = {top(name) for name in imported_by(module)}
    return names - set(PACKAGES) - sys.stdlib_module_names - {"__future__"}


def own(module: str) -> set[str]:
    return {name for name in imported_by(module) if top(name) in PACKAGES}


@pytest.mark.parametrize("module", of_package("server"))
def test_server_imports_host_only_modules(module: str) -> None:
    wrong = {name for name in own(module) if not is_in(name, "server") and not is_host_only(name)}
    assert not wrong
    assert not external(module) & HEAVY


@pytest.mark.parametrize("module", of_package("pallas_kernels"))
def test_kernels_import_jax_alone(module: str) -> None:
    assert external(module) <= {"jax", "jaxtyping", "numpy"}
    assert all(is_in(name, "pallas_kernels") for name in own(module))


@pytest.mark.parametrize("module", of_package("jaxserve.core"))
def test_core_is_pure_python(module: str) -> None:
    assert external(module) <= {"msgspec"}
    allowed = (
        "jaxserve.core",
        "jaxserve.ipc.messages",
        "jaxserve.sampling_params",
        "jaxserve.errors",
    )
    assert not {name for name in own(module) if not any(is_in(name, a) for a in allowed)}
    # Time and randomness are arguments.
    assert not {top(n) for n in imported_by(module)} & {"time", "random", "os", "socket", "asyncio"}


LAYERS = (
    *("pallas_kernels", "jaxserve.errors", "jaxserve.sampling_params", "jaxserve.config"),
    *("jaxserve.arrays", "jaxserve.device", "jaxserve.ipc", "jaxserve.cli", "jaxserve.text"),
    *("jaxserve.core",),
    *("jaxserve.structured_output", "jaxserve.parsing", "jaxserve.checkpoint", "jaxserve.ops"),
    *("jaxserve.models", "jaxserve.sampling", "jaxserve.runner", "jaxserve.engine"),
    *("jaxserve.client", "jaxserve.front", "jaxserve.openai", "jaxserve.offline", "jaxserve.llm"),
    *("jaxserve.testing", "jaxserve.bench", "jaxserve", "server"),
)
"""Packages and root modules, each of which imports only those before it."""


def layer(module: str) -> str:
    """The entry of `LAYERS` that a module belongs to."""
    return max((name for name in LAYERS if is_in(module, name)), key=len)


@pytest.mark.parametrize("module", [name for name in modules() if name != "jaxserve"])
def test_a_layer_imports_only_those_below_it(module: str) -> None:
    """Also within functions, and for type checkers only. ``jaxserve`` itself has the version."""
    below = LAYERS[: LAYERS.index(layer(module)) + 1]
    wrong = {name for name in own(module) if name != "jaxserve" and layer(name) not in below}
    assert not wrong


def all_imports(module: str) -> frozenset[str]:
    """The modules of ours that a module imports anywhere, for type checkers too."""
    found = set()
    for node in ast.walk(ast.parse(modules()[module].read_text())):
        for name in imports(ast.Module([node], []), at_import_time=False):  # type: ignore[list-item]
            while name and name not in modules():
                name = name.rpartition(".")[0]
            found |= {name} - {"", module}
    return frozenset(found)


def test_no_modules_import_each_other_in_a_circle() -> None:
    rest = {module: all_imports(module) for module in modules()}
    while free := {module for module, needs in rest.items() if not needs & rest.keys()}:
        rest = {module: needs for module, needs in rest.items() if module not in free}
    assert not rest


def test_a_circle_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "all_imports", lambda module: modules().keys() - {module})
    with pytest.raises(AssertionError):
        test_no_modules_import_each_other_in_a_circle()


def test_the_root_is_small_and_shared() -> None:
    root = [name for name in modules() if name.count(".") == 1 and name.startswith("jaxserve.")]
    files = [name for name in root if modules()[name].name != "__init__.py"]
    assert len(files) < 8, "with __init__.py at most eight files"
    for file in files:
        importers = [module for module in modules() if file in own(module)]
        assert len(importers) != 1, f"{file} belongs to its only importer {importers[0]}"


@pytest.mark.parametrize("module", modules())
def test_a_file_is_short_and_a_package_is_described(module: str) -> None:
    source = modules()[module].read_text()
    assert len(source.splitlines()) <= 330
    assert ast.get_docstring(ast.parse(source)), "a module says what it is about"


BACKWARDS = [
    # (package, what nothing in it may import although it lies below)
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


@pytest.mark.parametrize(("package", "forbidden"), BACKWARDS, ids=[b[0] for b in BACKWARDS])
def test_no_arrow_goes_back(package: str, forbidden: tuple[str, ...]) -> None:
    wrong = {
        f"{module} -> {name}"
        for module in of_package(package)
        for name in imported_by(module)
        if any(is_in(name, f) for f in forbidden)
    }
    assert not wrong


@pytest.mark.parametrize("module", [name for name in modules() if is_host_only(name)])
def test_host_only_modules_reach_nothing_heavy(module: str) -> None:
    """Follows the imports at import time; the packages around a module are imported with it."""
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


def test_device_names_exist() -> None:
    assert not [name for name in DEVICE if name not in modules()]


def test_torch_is_imported_nowhere() -> None:
    assert not [m for m in modules() if any(top(n) == "torch" for n in imported_by(m))]


def test_the_front_process_runs_without_jax() -> None:
    """What the source says, once more in a fresh interpreter."""
    code = (
        "import sys, server.app, server.__main__, jaxserve.client.engine_client\n"
        f"print(sorted({HEAVY!r} & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"
