"""The sockets of a server: every address once, one port, nobody else's port, nothing left in the file system."""

import errno
import socket

import pytest

from octavo.serving.listening import open_sockets, port_of, remove_unix_socket
from octavo.serving.options import ServerOptions


def close(sockets: list[list[socket.socket]]) -> None:
    for one in {one for mine in sockets for one in mine}:
        one.close()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("host", [None, "127.0.0.1", "localhost"])
def test_all_processes_get_the_same_port(host, count):
    sockets = open_sockets(ServerOptions(host=host, port=0), count)
    assert len(sockets) == count
    ports = {one.getsockname()[1] for mine in sockets for one in mine}
    assert ports == {port_of(sockets[0])}
    with socket.create_connection(("127.0.0.1", ports.pop()), timeout=5):
        pass
    close(sockets)


def test_connections_are_spread():
    """Each process accepts some of 64 connections, which one socket for all would not give."""
    sockets = open_sockets(ServerOptions(host="127.0.0.1", port=0), 3)
    clients = [socket.create_connection(("127.0.0.1", port_of(sockets[0])), timeout=5) for _ in range(64)]
    accepted = []
    for [one] in sockets:
        one.setblocking(False)
        accepted.append(0)
        try:
            while True:
                one.accept()[0].close()
                accepted[-1] += 1
        except BlockingIOError:
            pass
    for client in clients:
        client.close()
    close(sockets)
    assert sum(accepted) == 64
    assert min(accepted) > 0


@pytest.mark.parametrize("counts", [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_a_port_has_one_server(counts):
    first = open_sockets(ServerOptions(host="127.0.0.1", port=0), counts[0])
    with pytest.raises(OSError) as caught:
        open_sockets(ServerOptions(host="127.0.0.1", port=port_of(first[0]) or 0), counts[1])
    assert caught.value.errno == errno.EADDRINUSE
    close(first)


def test_no_address_at_all():
    with pytest.raises(OSError):
        open_sockets(ServerOptions(host="203.0.113.7", port=0))  # for documentation, never on a machine


def test_a_unix_socket_that_was_left_is_replaced_one_in_use_is_not(tmp_path):
    path = str(tmp_path / "server.sock")
    first = open_sockets(ServerOptions(uds=path), 2)
    assert first[0] == first[1]
    with pytest.raises(OSError) as caught:
        open_sockets(ServerOptions(uds=path))
    assert caught.value.errno == errno.EADDRINUSE
    close(first)  # the file stays, as after kill -9
    second = open_sockets(ServerOptions(uds=path))
    assert port_of(second[0]) is None
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
    close(second)
    remove_unix_socket(path)
    remove_unix_socket(path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_not_replaced(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("keep")
    with pytest.raises(OSError):
        open_sockets(ServerOptions(uds=str(path)))
    assert path.read_text() == "keep"


@pytest.mark.parametrize("name", ["missing/socket", "a_file", "long" * 40])
def test_a_path_that_cannot_be_listened_on_is_named(tmp_path, name):
    (tmp_path / "a_file").write_text("not a socket")
    with pytest.raises(OSError, match=name):
        open_sockets(ServerOptions(uds=str(tmp_path / name)))
    assert (tmp_path / "a_file").read_text() == "not a socket"
