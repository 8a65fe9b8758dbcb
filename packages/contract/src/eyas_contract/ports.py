"""A port for a server that will bind it only once it is up, which can be minutes later."""

from __future__ import annotations

import random
import socket
from pathlib import Path

from eyas_contract.errors import EngineFailure

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST = 10000


def try_port(host: str, port: int) -> int:
    """The port, 0 for the system's choice, if it can be listened on now. Raises OSError where it cannot."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a closed server's TIME_WAIT is no server
        probe.bind((host, port))
        return int(probe.getsockname()[1])


def free_port(host: str = "127.0.0.1") -> int:
    """A port on which nothing listens now, below those that the system gives to outgoing connections: one of these
    could take it before the server does.

    Raises:
        EngineFailure: none found.
    """
    try:
        end = int(EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        end = 0
    draw, error = random.SystemRandom(), OSError()
    for _ in range(50):
        try:  # the system chooses where it keeps too few ports back
            return try_port(host, draw.randrange(LOWEST, end) if end > LOWEST + 1000 else 0)
        except OSError as found:
            error = found
    raise EngineFailure(host, f"no port can be listened on ({error.strerror})", "a free port, by eyas",
                        "Give an address of this machine, or --port.")
