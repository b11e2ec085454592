# SPDX-License-Identifier: Apache-2.0
"""Not a broker: hands on the bytes of QoS 0 publishers as they are, to see how much the load generator itself can do.

Pairs and fan-out only. The first PUBLISH of a connection decides which subscribers get all its bytes.
"""

from __future__ import annotations

import select
import socket
import sys


def main(port: int) -> None:
    """Serve until killed."""
    server = socket.create_server(("127.0.0.1", port), backlog=1024)
    epoll = select.epoll()
    epoll.register(server.fileno(), select.EPOLLIN)
    clients: dict[int, socket.socket] = {}
    subscribers: dict[bytes, list[socket.socket]] = {}
    routes: dict[int, list[socket.socket]] = {}
    properties: dict[int, bytes] = {}  # of every answer to a client: their length, 0, in 5.0
    buffer = memoryview(bytearray(1 << 18))
    while True:
        for fd, _ in epoll.poll():
            if fd == server.fileno():
                sock, _ = server.accept()
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                clients[sock.fileno()] = sock
                epoll.register(sock.fileno(), select.EPOLLIN)
                continue
            size = clients[fd].recv_into(buffer)
            data = buffer[:size]
            if not size or data[0] == 0xE0:
                epoll.unregister(fd)
                clients.pop(fd).close()
                routes.pop(fd, None)
            elif fd in routes:
                for each in routes[fd]:
                    each.sendall(data)
            elif data[0] == 0x10:
                none = properties[fd] = b"\x00" if data[8] == 5 else b""
                clients[fd].sendall(bytes((0x20, 2 + len(none), 0, 0)) + none)
            elif data[0] == 0x82:
                none = properties[fd]
                subscribers.setdefault(bytes(data[6 + len(none) : -1]), []).append(clients[fd])
                clients[fd].sendall(bytes((0x90, 3 + len(none), data[2], data[3])) + none + bytes(data[-1:]))
            else:
                start = 2 if data[1] < 128 else 3 if data[2] < 128 else 4
                length = data[start] << 8 | data[start + 1]
                routes[fd] = subscribers.get(bytes(data[start + 2 : start + 2 + length]), [])
                for each in routes[fd]:
                    each.sendall(data)


if __name__ == "__main__":
    main(int(sys.argv[1]))
