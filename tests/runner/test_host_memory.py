"""The free memory of the host: cgroups of both versions, parents, page cache and rlimits."""

import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from jaxserve.runner.host_memory import free_memory, memory_limit

MIB = 1 << 20
UNLIMITED = 9223372036854771712  # what version 1 says without a limit
MACHINE = "the memory of the machine"


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine with 8000 MiB of free memory, and no limit of the process."""
    memory = SimpleNamespace(available=8000 * MIB, total=9000 * MIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: unlimited)


def proc(tmp_path: Path, cgroup: str, mountinfo: str, statm: str = "100 50 20 5 0 60 0") -> Path:
    """Writes the files of /proc; ``mountinfo`` has {mount} in place of the mount point."""
    folder = tmp_path / "proc/self"
    folder.mkdir(parents=True)
    (folder / "cgroup").write_text(cgroup)
    (folder / "mountinfo").write_text(mountinfo.format(mount=tmp_path / "cg"))
    (folder / "statm").write_text(statm)
    return tmp_path / "proc"


def write_v1(folder: Path, limit: int, used: int = 0, cache: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    stat = f"cache 1\ntotal_inactive_file {cache - cache // 4}\ntotal_active_file {cache // 4}\n"
    (folder / "memory.stat").write_text(stat)


def write_v2(folder: Path, limit: str, used: int = 0, cache: int = 0, high: str = "max") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.high").write_text(f"{high}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    stat = f"anon 5\ninactive_file {cache}\nactive_file 0\n"
    (folder / "memory.stat").write_text(stat)


V1 = "35 31 0:32 {root} {{mount}} rw,relatime shared:9 - cgroup cgroup rw,memory\n"
V2 = "31 23 0:28 / /sys rw - sysfs sysfs rw\n41 31 0:38 {root} {{mount}} rw - cgroup2 cgroup2 rw\n"


def test_without_cgroups_the_machine_counts(tmp_path):
    found = free_memory(tmp_path)
    assert (found.num_bytes, found.limited_by) == (8000 * MIB, MACHINE)


class TestVersion1:
    @pytest.mark.parametrize(
        ("root", "path"),
        [("/", "/"), ("/docker/abc", "/docker/abc"), ("/docker/abc", "/"), ("/", "/../..")],
    )
    def test_a_container(self, tmp_path, root, path):
        """With a namespace for cgroups or without. The page cache of files is not in the way."""
        write_v1(tmp_path / "cg", 1300 * MIB, used=700 * MIB, cache=400 * MIB)
        cgroup = f"9:name=systemd:/x\n4:cpu,memory:{path}\n0::/\n"
        found = free_memory(proc(tmp_path, cgroup, V1.format(root=root)))
        assert found.num_bytes == 1000 * MIB
        assert "1300 MiB, of which its processes use 300 MiB" in found.limited_by

    def test_the_smallest_limit_of_all_parents_counts(self, tmp_path):
        write_v1(tmp_path / "cg", UNLIMITED)
        write_v1(tmp_path / "cg/a", 2000 * MIB, used=1900 * MIB)
        write_v1(tmp_path / "cg/a/b", 900 * MIB, used=200 * MIB)
        found = free_memory(proc(tmp_path, "4:memory:/a/b\n", V1.format(root="/")))
        assert found.num_bytes == 100 * MIB
        assert str(tmp_path / "cg/a:") in found.limited_by
        assert memory_limit(tmp_path / "proc") == 900 * MIB

    def test_no_limit(self, tmp_path):
        write_v1(tmp_path / "cg", UNLIMITED, used=5000 * MIB)
        found = free_memory(proc(tmp_path, "4:memory:/\n", V1.format(root="/")))
        assert found.limited_by == MACHINE
        assert memory_limit(tmp_path / "proc") == 9000 * MIB


class TestVersion2:
    def test_parents_and_page_cache(self, tmp_path):
        write_v2(tmp_path / "cg/pod", str(1300 * MIB), used=500 * MIB, cache=100 * MIB)
        write_v2(tmp_path / "cg/pod/main", "max", used=400 * MIB)
        found = free_memory(proc(tmp_path, "0::/pod/main\n", V2.format(root="/")))
        assert found.num_bytes == 900 * MIB

    def test_the_high_limit_counts(self, tmp_path):
        write_v2(tmp_path / "cg/a", str(2000 * MIB), used=100 * MIB, high=str(600 * MIB))
        found = free_memory(proc(tmp_path, "0::/a\n", V2.format(root="/")))
        assert (found.num_bytes, "memory.high" in found.limited_by) == (500 * MIB, True)

    def test_more_used_than_allowed_is_nothing_free(self, tmp_path):
        write_v2(tmp_path / "cg", str(200 * MIB), used=300 * MIB)
        assert free_memory(proc(tmp_path, "0::/\n", V2.format(root="/"))).num_bytes == 0

    def test_both_versions_at_once(self, tmp_path):
        """A machine that changes over: memory is still in version 1."""
        write_v1(tmp_path / "cg", 1000 * MIB)
        mounts = V1.format(root="/") + V2.format(root="/").replace("{mount}", "{mount}/unified")
        found = free_memory(proc(tmp_path, "4:memory:/\n0::/\n", mounts))
        assert found.num_bytes == 1000 * MIB


def test_a_mount_without_a_source(tmp_path):
    """The kernel writes two spaces after ``mount -t tmpfs "" /mnt``."""
    write_v2(tmp_path / "cg", str(600 * MIB), used=100 * MIB)
    mounts = "63 43 0:39 / /mnt rw - tmpfs  rw\n" + V2.format(root="/")
    assert free_memory(proc(tmp_path, "0::/\n", mounts)).num_bytes == 500 * MIB


@pytest.mark.parametrize(
    ("which", "pages", "name"),
    [(resource.RLIMIT_AS, 100, "ulimit -v"), (resource.RLIMIT_DATA, 60, "ulimit -d")],
)
def test_limits_of_the_process(tmp_path, monkeypatch, which, pages, name):
    limits = {which: (500 * MIB, 600 * MIB)}
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda one: limits.get(one, unlimited))
    found = free_memory(proc(tmp_path, "", ""))
    assert found.num_bytes == 500 * MIB - pages * resource.getpagesize()
    assert name in found.limited_by
    assert memory_limit(tmp_path / "proc") == 500 * MIB


def test_a_real_limit_of_a_process():
    """In a process of its own, with the files of this machine."""
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30));"
        "from jaxserve.runner.host_memory import free_memory; found = free_memory();"
        "print(found.num_bytes, found.limited_by)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    num_bytes, _, limited_by = run.stdout.partition(" ")
    assert 0 < int(num_bytes) < 3 << 30
    assert limited_by
