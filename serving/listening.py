"""The sockets that a server listens on, for one or for several processes."""

import errno
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

from .options import ServerOptions

BACKLOG = 2048
"""Connections that may wait to be accepted, as far as the kernel allows."""


def open_sockets(options: ServerOptions, num_processes: int = 1) -> list[list[socket.socket]]:
    """The listening sockets of each process. Raises OSError when the address cannot be had.

    Each process has sockets of its own on the same port, so that the kernel spreads connections evenly. A Unix socket
    is shared. Port 0 is any free one.
    """
    with ExitStack() as opened:
        if options.uds is not None:
            shared = opened.enter_context(_unix_socket(options.uds))
            sockets = [[shared] for _ in range(num_processes)]
        else:
            port = options.port
            if num_processes > 1 and port:
                # With SO_REUSEPORT another server of this user on the port would not be noticed.
                for one in _tcp_sockets(options.host, port, reuse_port=False):
                    one.close()
            sockets = []
            for _ in range(num_processes):
                mine = _tcp_sockets(options.host, port, reuse_port=num_processes > 1)
                for one in mine:
                    opened.enter_context(one)
                port = mine[0].getsockname()[1]
                sockets.append(mine)
        opened.pop_all()
    return sockets


def port_of(sockets: list[socket.socket]) -> int | None:
    """None for a Unix socket."""
    return None if sockets[0].family == socket.AF_UNIX else int(sockets[0].getsockname()[1])


def remove_unix_socket(path: str | None) -> None:
    """Removes what a server leaves in the file system."""
    if path is not None:
        with suppress(OSError):
            Path(path).unlink()


def _tcp_sockets(host: str | None, port: int, *, reuse_port: bool) -> list[socket.socket]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    addresses = list(dict.fromkeys((family, address) for family, _, _, _, address in found))
    problem: OSError | None = None
    sockets: list[socket.socket] = []
    with ExitStack() as opened:
        for family, address in addresses:
            if sockets:  # one port for all, also when any free one was asked for
                address = (address[0], sockets[0].getsockname()[1], *address[2:])
            try:
                one = socket.create_server(address, family=family, backlog=BACKLOG, reuse_port=reuse_port)
            except OSError as error:
                if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                    raise
                problem = error  # a name may stand for addresses that this machine does not have, such as IPv6 ones
            else:
                sockets.append(opened.enter_context(one))
        if problem is not None and not sockets:
            raise problem
        opened.pop_all()
    return sockets


def _unix_socket(path: str) -> socket.socket:
    if Path(path).is_socket():
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            if probe.connect_ex(path) == 0:
                raise OSError(errno.EADDRINUSE, f"a server listens on {path}")
        Path(path).unlink()  # left by a server that was killed
    one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        one.bind(path)
        one.listen(BACKLOG)
    except OSError as error:
        one.close()
        # The system does not name the path.
        raise OSError(error.errno or errno.ENAMETOOLONG, error.strerror or str(error), path) from error
    return one
