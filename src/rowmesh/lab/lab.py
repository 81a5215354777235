"""A lab: emulated hosts on this machine, and the programs that run in them."""

import atexit
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rowmesh.errors import InputError, LabError, check_range
from rowmesh.lab.command import rank_words
from rowmesh.lab.iproute import find_program
from rowmesh.lab.network import (
    INTERFACE,
    HostBytes,
    address,
    build_network,
    host_file,
    read_counters,
    shape,
)
from rowmesh.lab.permission import check_permitted
from rowmesh.lab.rates import format_rate, parse_rate
from rowmesh.lab.remains import remove
from rowmesh.lab.run import RUN_MARK, Run, check_timeout
from rowmesh.lab.signals import deferred_signals, exit_on_signals, restore_signals
from rowmesh.lab.tags import MARK, Tag, new_tag

__all__ = ["Lab"]

_MAX_HOSTS = 200
_FIRST_PORT, _NUM_PORTS = 29_500, 300  # below those the kernel hands out
_GRACE_S = 2.0
# in the host's own view of the file system, so that nothing is written below /etc
_WITH_HOST_FILE = 'mount --bind "$0" /etc/hosts && exec "$@"'
_WITH_LOGS = 'exec "$@" >"$ROWMESH_LAB_LOGS/rank$RANK.out" 2>"$ROWMESH_LAB_LOGS/rank$RANK.err"'


class Lab:
    """Hosts with a link of a chosen rate each, as network namespaces of this machine.

    A context manager: hosts are made on entry, and on exit, whatever the reason, everything of
    the lab is removed, its processes first. Inside, in the main thread, a SIGTERM or SIGHUP that
    nobody handles becomes SystemExit, so that it counts as an exit. Labs do not see each other.

    Args:
        hosts: From 1 to 200.
        rate: Of each host's link in each direction, as ``200mbit``; None leaves links unshaped.
        loopback: No namespaces and no rate: "hosts" are just groups of processes that share the
            machine's loopback. Needs no permission.

    Raises:
        InputError: If ``hosts`` or ``rate`` is out of range; on entry, `check_permitted`'s
            sentence.
        LabError: On entry, if a command fails all the same.
    """

    def __init__(self, hosts: int, *, rate: str | None = None, loopback: bool = False) -> None:
        check_range("hosts", hosts, 1, _MAX_HOSTS)
        self.hosts, self.loopback = hosts, loopback
        self._bits = parse_rate(rate)
        if loopback and self._bits is not None:
            raise InputError(f"rate is {rate}, but loopback cannot be shaped: leave one out")
        self._tag: Tag | None = None
        self._processes: list[subprocess.Popen[Any]] = []
        self._num_runs = 0
        self._lock = threading.Lock()
        self._signals: dict[int, Any] = {}

    @property
    def tag(self) -> Tag:
        """The name that all parts of this lab carry."""
        if self._tag is None:
            raise LabError("the lab is not open: use it in a with statement")
        return self._tag

    @property
    def addresses(self) -> list[str]:
        """The address of each host."""
        return ["127.0.0.1" if self.loopback else address(i) for i in range(self.hosts)]

    @property
    def rate(self) -> str:
        """Of each link now, as ``200mbit`` or ``none``."""
        return format_rate(self._bits)

    @property
    def bits(self) -> int | None:
        """Of each link now, a second; None if links are not shaped."""
        return self._bits

    def __enter__(self) -> "Lab":
        reason = None if self.loopback else check_permitted()
        if reason is not None:
            raise InputError(reason)
        self._signals = exit_on_signals()
        atexit.register(self.close)
        try:
            self._tag = new_tag()
            for i in range(self.hosts):
                text = host_file(self.hosts, i, name=socket.gethostname())
                (self._tag.folder / f"hosts{i}").write_text(text)
            if not self.loopback:
                build_network(self._tag, hosts=self.hosts, bits=self._bits)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove everything of the lab: SIGTERM to its processes, SIGKILL after 2 s; may repeat."""
        with deferred_signals():
            tag, self._tag = self._tag, None
            atexit.unregister(self.close)
            try:
                if tag is not None and tag.pid == os.getpid():  # not in a forked child
                    remove(tag, grace_s=_GRACE_S, children=self._running)
                    for process in self._processes:
                        process.wait()
            finally:
                self._processes.clear()
                restore_signals(self._signals)

    def _running(self) -> set[int]:
        return {process.pid for process in self._processes if process.poll() is None}

    def set_rate(self, rate: str | None) -> None:
        """Change the rate of all links, also while programs use them."""
        bits = parse_rate(rate)
        if self.loopback and bits is not None:
            raise InputError(f"rate is {rate}, but loopback cannot be shaped")
        was_shaped = self._bits is not None
        shape(self.tag, hosts=self.hosts, bits=bits, was_shaped=was_shaped)
        self._bits = bits

    def counters(self) -> list[HostBytes]:
        """Bytes on each host's link so far, from its interface; empty on loopback."""
        return [] if self.loopback else read_counters(self.tag, hosts=self.hosts)

    def environment(self, host: int) -> dict[str, str]:
        """What programs in ``host`` find in their environment, beyond this process's own."""
        interface = "lo" if self.loopback else INTERFACE
        ours = {
            MARK: str(self.tag),
            "GLOO_SOCKET_IFNAME": interface,
            "TP_SOCKET_IFNAME": interface,
            "TB_HOST": str(host),
            "TB_HOSTS": str(self.hosts),
            "TB_RATE": self.rate,
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        return ours if self.loopback else ours | {"TB_IFNAME": interface}

    def spawn(
        self,
        host: int,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> "subprocess.Popen[Any]":
        """Start a program in a host, in a session of its own; the lab ends it if need be.

        Args:
            host: From 0.
            argv: The program and its arguments.
            env: Added to `environment`.
            options: Of `subprocess.Popen`.
        """
        check_range("host", host, 0, self.hosts - 1)
        words = list(argv)
        if not self.loopback:
            file = str(self.tag.folder / f"hosts{host}")
            inside = [find_program("ip") or "ip", "netns", "exec", self.tag.host(host)]
            words = [*inside, "sh", "-c", _WITH_HOST_FILE, file, *words]
        given = {**os.environ, **self.environment(host), **(env or {})}
        process = subprocess.Popen(words, env=given, start_new_session=True, **options)
        self._processes.append(process)
        return process

    def launch(
        self,
        command: Sequence[str],
        *,
        ranks_per_host: int = 2,
        python: str = sys.executable,
        port: int | None = None,
        env: Mapping[str, str] | None = None,
        log_dir: str | os.PathLike[str] | None = None,
        timeout_s: float | None = None,
    ) -> Run:
        """Start ``command`` by torchrun in every host; rank = host * ranks_per_host + local rank.

        Several runs may live in one lab, sharing its links.

        Args:
            command: ``["script.py", ...]``, ``["-m", "module", ...]`` or a program, see
                `rank_words`.
            ranks_per_host: At least 1.
            python: The interpreter of torchrun and of the ranks.
            port: Of the rendezvous in host 0; default one that no other run of the lab has.
            env: Added to the environment of all ranks.
            log_dir: Where all output is kept; default a folder that goes with the lab.
            timeout_s: See `Run`.

        Raises:
            InputError: If ``ranks_per_host``, ``timeout_s`` or ``command`` is wrong.
        """
        check_range("ranks_per_host", ranks_per_host, 1)
        check_timeout("timeout_s", timeout_s)
        words = rank_words(command, python=python)
        with self._lock:
            number, self._num_runs = self._num_runs, self._num_runs + 1
        folder = Path(log_dir or self.tag.folder / f"run{number}").absolute()
        _make_folder(folder)
        mark = f"{self.tag}/{number}"
        more = {**(env or {}), RUN_MARK: mark, "ROWMESH_LAB_LOGS": str(folder)}
        torchrun = [
            *(python, "-m", "torch.distributed.run", f"--nnodes={self.hosts}"),
            *(f"--nproc_per_node={ranks_per_host}", f"--master_addr={self.addresses[0]}"),
            f"--master_port={port or self._port(number)}",
            f"--log_dir={self.tag.folder / 'torchrun'}",
        ]
        agents = []
        for i, own in enumerate(self.addresses):
            here = [f"--node_rank={i}", f"--local_addr={own}", "--no_python"]
            with (folder / f"host{i}.log").open("wb") as log:
                argv = [*torchrun, *here, "sh", "-c", _WITH_LOGS, "sh", *words]
                streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
                agents.append(self.spawn(i, argv, env=more, **streams))
        return Run(agents, folder=folder, mark=mark, timeout_s=timeout_s)

    def _port(self, number: int) -> int:
        """In a lab ports are free but for our own; on loopback the machine is asked."""
        if not self.loopback:
            return _FIRST_PORT + 10 * (number % _NUM_PORTS)
        with socket.socket() as probe:
            probe.bind((self.addresses[0], 0))
            return int(probe.getsockname()[1])


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in (*folder.glob("rank*.out"), *folder.glob("rank*.err")):
            old.unlink()
    except OSError as error:
        raise InputError(f"cannot write logs to {folder}: {error.strerror}") from None
