"""Nodes on one machine: network namespaces, joined by links of a speed that `tc` sets (Linux, as root)."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from support.processes import Processes

_INTERFACE = "net0"
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_numbers = itertools.count()


@dataclass
class Network:
    """Nodes that a switch joins. Each has a namespace, in which its only interface is the link to the switch."""

    nodes: list[str]
    """Names of the namespaces."""
    switch: str

    def shape(self, rate: str, queue: str = "4mb") -> None:
        """Set the rate of every link in both directions, such as "100mbit".

        Packets wait in a queue of so many bytes, the only delay of a link, and are lost where it is full.
        """
        for name, interface in self._ends():
            bucket = f"tc qdisc replace dev {interface} root tbf rate {rate} burst 64kb limit {queue}"
            _run(f"ip netns exec {name} {bucket}")

    def lost(self) -> int:
        """Return the packets that were lost on all links since the last `shape`."""
        shown = [_run(f"ip netns exec {name} tc -s qdisc show dev {interface}") for name, interface in self._ends()]
        return sum(int(count) for text in shown for count in re.findall(r"dropped (\d+)", text))

    def set_link(self, node: int, state: str) -> None:
        """Take the link of a node "down" or "up"."""
        _run(f"ip -n {self.switch} link set port{node} {state}")

    def processes(self, ranks_of_node: int, timeout: float) -> Processes:
        """Return ranks, gloo between them: so many neighbours in each node."""
        size = ranks_of_node * len(self.nodes)
        return Processes(size, timeout, enter=partial(_enter, self.nodes, ranks_of_node))

    def _ends(self) -> Iterator[tuple[str, str]]:
        for number, name in enumerate(self.nodes):
            yield name, _INTERFACE
            yield self.switch, f"port{number}"


@contextmanager
def network(nodes: int, rate: str) -> Iterator[Network]:
    """Make nodes, until the context ends. Skips the test where the system does not permit it."""
    if not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("needs the programs ip and tc (iproute2)")
    prefix = f"cpd{os.getpid()}x{next(_numbers)}"
    made = Network([f"{prefix}n{node}" for node in range(nodes)], f"{prefix}s")
    with ExitStack() as namespaces:
        try:
            for name in (made.switch, *made.nodes):
                _run(f"ip netns add {name}")
                namespaces.callback(_run, f"ip netns del {name}")
            _run(f"ip -n {made.switch} link add bridge0 type bridge")
            _run(f"ip -n {made.switch} link set bridge0 up")
            for number, name in enumerate(made.nodes):
                _run(f"ip link add {_INTERFACE} netns {name} type veth peer name port{number} netns {made.switch}")
                _run(f"ip -n {name} addr add 10.77.0.{number + 1}/24 dev {_INTERFACE}")
                _run(f"ip -n {name} link set lo up")
                _run(f"ip -n {name} link set {_INTERFACE} up")
                _run(f"ip -n {made.switch} link set port{number} master bridge0 up")
            made.shape(rate)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
        yield made


def received_bytes() -> int:
    """Return the bytes that have come to this process's node, by the counter of its interface."""
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    (numbers,) = (line.split(":")[1].split() for line in lines if line.split(":")[0].strip() == _INTERFACE)
    return int(numbers[0])


def _run(command: str) -> str:
    return subprocess.run(command.split(), check=True, capture_output=True, text=True).stdout


def _enter(names: list[str], ranks_of_node: int, rank: int) -> None:
    """Move this process to the namespace of its node."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", names[rank // ranks_of_node]).open() as namespace:
        if libc.setns(namespace.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "setns")
    os.environ["GLOO_SOCKET_IFNAME"] = _INTERFACE
