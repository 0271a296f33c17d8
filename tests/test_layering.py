"""Who may import whom, read from the source.

    server -> jaxserve (host-only modules)
    jaxserve.engine -> core;  engine.factory -> runner -> models -> ops -> pallas_kernels
                              runner -> sampling, checkpoint

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


BACKWARDS = [
    # (package, what nothing in it may import)
    ("jaxserve", ("server",)),
    (
        "jaxserve.models",
        ("jaxserve.runner", "jaxserve.engine", "jaxserve.core", "jaxserve.client"),
    ),
    ("jaxserve.ops", ("jaxserve.models", "jaxserve.runner", "jaxserve.engine", "jaxserve.core")),
    (
        "jaxserve.sampling",
        ("jaxserve.models", "jaxserve.runner", "jaxserve.engine", "jaxserve.ops"),
    ),
    (
        "jaxserve.checkpoint",
        ("jaxserve.models", "jaxserve.runner", "jaxserve.engine", "jaxserve.core", "jaxserve.ops"),
    ),
    (
        "jaxserve.runner",
        ("jaxserve.engine", "jaxserve.client", "jaxserve.ipc.transport"),
    ),
    ("jaxserve.engine.core", ("jaxserve.runner", "jaxserve.models", "jaxserve.ipc.transport")),
    (
        "jaxserve.openai",
        ("jaxserve.client", "jaxserve.ipc.transport", "starlette", "uvicorn"),
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
