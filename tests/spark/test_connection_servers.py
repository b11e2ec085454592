# SPDX-License-Identifier: Apache-2.0
"""Servers that are down, silent, late, full, or no nats-server."""

import socket
import threading
import time

import pytest

from pyspark_mqtt_nats.errors import RequestTimeout
from tests.conftest import NatsFactory
from tests.harness.nats import NatsServer
from tests.harness.waiting import free_port
from tests.spark.connecting import at_once, refusal, round_trip
from tests.spark.servers import INFO, connect, listener, says, says_hello


def test_a_server_that_is_down_is_passed_over(nats_server: NatsServer) -> None:
    servers = f"nats://127.0.0.1:{free_port()},{nats_server.url},nats://nowhere.invalid"
    for _ in range(6):
        with connect(servers) as connection:
            assert str(connection.server) == nats_server.url


def test_a_server_that_is_silent_leaves_time_for_the_others(nats_server: NatsServer) -> None:
    with listener(says(b"")) as silent:
        for _ in range(4):
            with connect(f"{silent},{nats_server.url}", connectTimeout=3) as connection:
                assert str(connection.server) == nats_server.url


def test_a_refused_login_is_told_before_servers_that_are_down(nats_factory: NatsFactory) -> None:
    server = nats_factory(config='authorization { token: "t" }')
    down = f"nats://127.0.0.1:{free_port()}"
    error = refusal(f"{down},{server.url}", token="u", connectTimeout=1)
    assert error.option == "token"
    assert down in str(error)


def test_a_server_that_starts_late_is_waited_for(nats_factory: NatsFactory) -> None:
    server = nats_factory()
    server.stop()
    thread = threading.Timer(1.0, server.start)
    thread.start()
    try:
        with connect(server.url, connectTimeout=60) as connection:
            round_trip(connection)
    finally:
        thread.join()


def test_the_time_limit(nats_factory: NatsFactory) -> None:
    url = f"nats://127.0.0.1:{free_port()}"
    started = time.monotonic()
    error = refusal(url, connectTimeout=1)
    assert 0.5 < time.monotonic() - started < 5
    assert str(error) == f"cannot connect to {url}: connection refused (option servers)"
    server = nats_factory()
    server.pause()
    started = time.monotonic()
    error = refusal(server.url, connectTimeout=1)
    assert 0.9 < time.monotonic() - started < 5
    assert "it sends nothing" in str(error)
    server.resume()
    assert "no host of this name" in str(refusal("nats://nowhere.invalid", connectTimeout=0.3))


def test_a_host_that_takes_no_connection() -> None:
    """Its queue is full, as Linux has it: the packets are dropped."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        address = server.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        try:
            for client in waiting:
                client.setblocking(False)
                client.connect_ex(address)
            url = f"nats://127.0.0.1:{address[1]}"
            assert "it does not answer" in str(refusal(url, connectTimeout=0.5))
            also = url.replace("127.0.0.1", "localhost")
            assert "no time was left to try it" in str(refusal(f"{url},{also}", connectTimeout=0.5))
        finally:
            for client in waiting:
                client.close()


def test_a_server_that_is_full(nats_factory: NatsFactory) -> None:
    """Tasks that are started together wait for their turn."""
    server = nats_factory(config="max_connections: 1")
    with connect(server.url) as first:
        error = refusal(server.url, connectTimeout=1)
        assert (error.option, "takes no more clients now" in str(error)) == ("servers", True)
        threading.Timer(0.5, first.close).start()
        with connect(server.url, connectTimeout=60) as second:
            round_trip(second)


@pytest.mark.parametrize(
    "answers",
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n",),
        (b"220 mail.example ESMTP\r\n",),
        (b"INFO what\r\n",),
        (b"INFO []\r\n",),
        (b"\x15\x03\x01\0\x02",),
        (INFO, b"x" * (1 << 21)),
        (INFO, b"MSG a b c d\r\n"),
    ],
)
def test_what_is_no_nats_server(answers: tuple[bytes, ...]) -> None:
    with listener(says(*answers)) as url:
        error = at_once(url)
    assert (error.option, "it is not a NATS server" in str(error)) == ("servers", True)


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ((), "it closed the connection before INFO"),
        ((INFO,), "after CONNECT"),
        ((INFO, b"+OK\r\nPING\r\nINFO {}\r\nPO"), "after CONNECT"),
        ((INFO, b"-ERR 'no reason'\r\n"), "it refused us, no reason"),
        ((b"-ERR 'no reason'\r\n",), "it refused us, no reason"),
    ],
)
def test_a_server_that_ends_the_connection(answers: tuple[bytes, ...], words: str) -> None:
    def serve(client: socket.socket) -> None:
        for answer in answers:
            client.sendall(answer)
            client.recv(65_536)

    with listener(serve) as url:
        assert words in str(refusal(url, connectTimeout=0.5))


def test_a_server_that_stops_after_connect() -> None:
    with listener(says(INFO)) as url:
        assert "does not continue after CONNECT" in str(refusal(url, connectTimeout=0.5))


def test_news_of_the_server_are_taken_in() -> None:
    def serve(client: socket.socket) -> None:
        says_hello(client)
        client.sendall(b'INFO {"max_payload":77}\r\n')
        while client.recv(65_536):
            pass

    with listener(serve) as url, connect(url) as connection:
        with pytest.raises(RequestTimeout):
            connection.request("a", timeout=0.3)
        assert connection.max_payload == 77
