"""What only Linux has is used in one file, and everything works without it."""

from __future__ import annotations

import os
import re
import socket
import ssl
import stat
import subprocess
from pathlib import Path

import pytest

from peers import system
from peers.daemon.link import LinkMemory
from peers.net.identity import load_or_create
from peers.net.paths.tls import Credentials, _load_key
from peers.reduce import bandwidth

ROOT = Path(__file__).parents[3]
GIB = 2**30
LINUX_ALONE = re.compile(
    r"memfd_create|sched_getaffinity|prctl|socket\.TCP_(?:INFO|KEEP\w+)|/proc/self/fd|get_native_id|\.unshare\(|/proc/sys/"
)
# Judging programs that models have written needs namespaces, so it is refused on other systems.
ISOLATION = ROOT / "diloco" / "rl" / "sandbox" / "run.py"


@pytest.fixture
def elsewhere(monkeypatch):
    """Makes this system look like macOS, as far as Python shows the difference."""
    for owner, name in (
        *((os, name) for name in ("memfd_create", "sched_getaffinity")),
        *((socket, name) for name in ("TCP_INFO", "TCP_KEEPIDLE")),
    ):
        monkeypatch.delattr(owner, name, raising=False)
    monkeypatch.setattr(socket, "TCP_KEEPALIVE", 0x10, raising=False)
    monkeypatch.setattr(system, "IS_LINUX", False)


def test_calls_that_linux_alone_has_are_in_one_file():
    files = [path for package in ("peers", "diloco") for path in (ROOT / package).rglob("*.py")]
    users = [path for path in files if LINUX_ALONE.search(path.read_text(encoding="utf-8"))]
    assert users == [ROOT / "peers" / "system.py", ISOLATION]


def test_the_memories_of_worker_and_daemon_are_the_same_without_memfd(elsewhere):
    memory, descriptors = LinkMemory.create(0, 4)
    again = LinkMemory(descriptors, 4)
    for descriptor in descriptors:
        assert not os.get_inheritable(descriptor)
        os.close(descriptor)
    memory.out[:4] = b"abcd"
    assert again.out[:4] == b"abcd" and again.inn[:4] == bytes(4)


def test_a_key_that_tls_reads_from_a_file_is_nobody_elses_and_goes_again(elsewhere, tmp_path):
    identity = load_or_create(tmp_path / "a.key")
    _load_key(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), Credentials.of(identity)._pem)
    identity.release()
    with system.private_file(b"secret") as path:
        assert Path(path).read_bytes() == b"secret"
        assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
    assert not Path(path).exists()


def test_cores_are_counted_and_connections_kept_alive_by_the_names_that_are_there(elsewhere):
    assert system.num_cores() == os.cpu_count()
    options = dict(system.keepalive_options(idle_s=30, interval_s=10, count=3))
    assert options == {0x10: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}


def test_a_connection_of_which_the_kernel_tells_nothing_is_one_of_another_kind(elsewhere):
    left, right = socket.socketpair()
    with left, right, pytest.raises(OSError, match="no struct tcp_info"):
        bandwidth.bytes_acked(left)


def test_the_buffers_of_tcp_are_the_smaller_of_both_directions_where_the_system_tells(monkeypatch):
    files = {"tcp_wmem": "4096\t16384\t4194304\n", "tcp_rmem": "4096\t131072\t6291456\n"}
    monkeypatch.setattr(system, "IS_LINUX", True)
    monkeypatch.setattr(Path, "read_text", lambda path: files[path.name])
    assert system.tcp_buffer_bytes() == 4194304
    files["tcp_rmem"] = ""
    assert system.tcp_buffer_bytes() is None


def test_nothing_is_known_of_the_buffers_of_tcp_elsewhere(elsewhere):
    assert system.tcp_buffer_bytes() is None


def test_no_other_process_is_made_nicer_in_a_threads_stead(elsewhere, monkeypatch):
    monkeypatch.setattr(os, "setpriority", lambda *_: pytest.fail("a thread's id is no process's there"))
    system.make_thread_nicer(5)


def test_a_child_starts_as_without_it_and_ends_at_once_if_its_parent_has_gone():
    argv = system.with_parent(["echo", "lives"])
    assert subprocess.run(argv, capture_output=True, timeout=30, check=True).stdout == b"lives\n"
    ignored = "grep SigIgn /proc/self/status"
    with_python_between, alone = (
        subprocess.run(command, capture_output=True, timeout=30, check=True).stdout
        for command in (system.with_parent(["sh", "-c", ignored]), ["sh", "-c", ignored])
    )
    assert with_python_between == alone
    of_another = [word if word != str(os.getpid()) else "1" for word in argv]
    assert subprocess.run(of_another, capture_output=True, timeout=30, check=True).stdout == b""


def machine(root, *, free_gib, cgroup="", files=()):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {free_gib * 2**20} kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_bare_machine_has_what_the_kernel_says(tmp_path):
    assert system.available_memory_bytes(machine(tmp_path, free_gib=5)) == 5 * GIB


def test_a_container_has_what_its_group_leaves_and_cache_gives_way(tmp_path):
    files = [
        ("sys/fs/cgroup/pod/box/memory.max", "max\n"),
        ("sys/fs/cgroup/pod/box/memory.current", f"{GIB}\n"),
        ("sys/fs/cgroup/pod/memory.max", f"{4 * GIB}\n"),
        ("sys/fs/cgroup/pod/memory.current", f"{3 * GIB}\n"),
        ("sys/fs/cgroup/pod/memory.stat", f"anon 1\ninactive_file {GIB // 4}\nactive_file {3 * GIB // 4}\n"),
    ]
    assert (
        system.available_memory_bytes(machine(tmp_path, free_gib=9, cgroup="0::/pod/box\n", files=files))
        == 2 * GIB
    )


def test_an_old_container_has_what_its_group_leaves(tmp_path):
    folder = "sys/fs/cgroup/memory"
    files = [
        (f"{folder}/memory.limit_in_bytes", f"{2 * GIB}\n"),
        (f"{folder}/memory.usage_in_bytes", f"{2 * GIB}\n"),
        (
            f"{folder}/memory.stat",
            f"inactive_file 7\ntotal_inactive_file {GIB // 2}\ntotal_active_file {GIB // 2}\n",
        ),
    ]
    root = machine(tmp_path, free_gib=9, cgroup="4:cpu,memory:/docker/abc\n1:name=x:/\n", files=files)
    assert system.available_memory_bytes(root) == GIB


def test_a_system_that_says_nothing_is_not_guessed_at(tmp_path):
    assert system.available_memory_bytes(tmp_path) is None
