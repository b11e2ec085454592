# SPDX-License-Identifier: Apache-2.0
"""The clients when options are wrong, or the server is not there, silent, or speaks something else."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from mqtt_nats.__main__ import CLIENTS
from mqtt_nats.codec import EncodeError
from mqtt_nats.mqtt_clients import commands, connection, publisher
from mqtt_nats.mqtt_clients.commands import COMMANDS
from tests.harness.nats import ROOT
from tests.harness.waiting import free_port
from tests.mqtt_clients.support import run

PUB = ("pub", "-t", "a", "-m", "x")
SUB = ("sub", "-t", "a")
ASK = ("request", "-t", "a", "-e", "b", "-n")

WRONG: list[tuple[tuple[str, ...], str]] = [
    (("pub", "-m", "x"), "Missing option '-t'"),
    (("pub", "-t", "", "-m", "x"), "topic name is empty"),
    (("pub", "-t", "a/#", "-m", "x"), "topic name contains a wildcard"),
    (("pub", "-t", "a/+", "-m", "x"), "topic name contains a wildcard"),
    (("pub", "-t", "a"), "exactly one of --message, --file"),
    ((*PUB, "-n"), "exactly one of --message, --file"),
    ((*PUB, "-l"), "exactly one of --message, --file"),
    (("pub", "-t", "a", "-f", "no-such-file"), "'no-such-file' does not exist"),
    ((*PUB, "-q", "3"), "0<=x<=2"),
    ((*PUB, "-q", "one"), "not a valid integer"),
    ((*PUB, "-p", "0"), "1<=x<=65535"),
    ((*PUB, "-p", "65536"), "1<=x<=65535"),
    ((*PUB, "-V", "6"), "neither 3.1.1 nor 5.0"),
    ((*PUB, "-W", "0"), "x>0"),
    ((*PUB, "-k", "65536"), "0<=x<=65535"),
    ((*PUB, "-c"), "--session needs --id"),
    ((*PUB, "-x", "5"), "--session-expiry needs --session"),
    ((*PUB, "-V", "3.1.1", "-c", "-i", "x", "-x", "5"), "--session-expiry is for MQTT 5.0"),
    ((*PUB, "-V", "3.1.1", "--expiry", "5"), "properties are for MQTT 5.0: message expiry interval"),
    ((*PUB, "-V", "3.1.1", "--user-property", "a=b", "--utf8"), "user property, payload format indicator"),
    ((*PUB, "-V", "3.1.1", "-P", "secret"), "a password without --username needs MQTT 5.0"),
    ((*PUB, "--user-property", "unit"), "--user-property is NAME=VALUE, not 'unit'"),
    ((*PUB, "--expiry", "0"), "1<=x<=4294967295"),
    ((*PUB, "--response-topic", "a/#"), "topic name contains a wildcard"),
    ((*PUB, "--will-payload", "x"), "--will-payload needs --will-topic"),
    ((*PUB, "--will-qos", "1"), "--will-qos needs --will-topic"),
    ((*PUB, "--will-retain"), "--will-retain needs --will-topic"),
    ((*PUB, "--will-delay", "0"), "--will-delay needs --will-topic"),
    ((*PUB, "--will-topic", "+"), "topic name contains a wildcard"),
    ((*PUB, "-V", "4", "--will-topic", "w", "--will-delay", "1"), "--will-delay is for MQTT 5.0"),
    ((*PUB, "--key", __file__), "--key needs --cert"),
    ((*PUB, "--cafile", "no-such-file"), "'no-such-file' does not exist"),
    ((*PUB, "--password-file", "no-such-file"), "'no-such-file' does not exist"),
    ((*PUB, "--password-file", __file__, "-P", "secret"), "--password-file is instead of --password"),
    ((*PUB, "--url", "http://localhost"), "--url is mqtt://"),
    ((*PUB, "--url", "mqtt://"), "--url is mqtt://"),
    ((*PUB, "--url", "mqtt://localhost:x"), "--url is mqtt://"),
    ((*PUB, "--url", "mqtt://[::1"), "--url is mqtt://"),
    ((*PUB, "--url", "mqtt://localhost/a"), "mqtt:// has no path"),
    ((*PUB, "--url", "mqtt://u:p@localhost"), "do not belong in --url"),
    ((*PUB, "--url", "mqtt://localhost", "-h", "x"), "--url is instead of --host and --port"),
    ((*PUB, "--url", "ws://localhost", "-p", "1"), "--url is instead of --host and --port"),
    ((*PUB, "--url", "ws://localhost", "--tls"), "ws:// is without TLS"),
    (("sub",), "Missing option '-t'"),
    (("sub", "-t", ""), "topic filter is empty"),
    (("sub", "-t", "a#"), "# is not the whole of the last level"),
    (("sub", "-t", "a+/b"), "+ is not the whole of a level"),
    (("sub", "-t", "$share/group"), "a shared subscription is $share/<group>/<filter>"),
    ((*SUB, "-C", "0"), "x>=1"),
    ((*SUB, "-F", "%z"), "%z stands for nothing"),
    ((*SUB, "-F", "100%"), "% stands for nothing"),
    ((*SUB, "-F", "%p", "-v"), "--format is instead of --verbose"),
    ((*SUB, "-V", "3.1.1", "--no-local"), "are for MQTT 5.0"),
    ((*SUB, "-V", "3.1.1", "--retain-handling", "1"), "are for MQTT 5.0"),
    (("sub", "-t", "$share/g/a", "--no-local"), "--no-local is not for shared subscriptions"),
    ((*ASK, "-V", "3.1.1"), "a request needs MQTT 5.0"),
    (("request", "-t", "a", "-n"), "Missing option '-e'"),
    (("request", "-t", "a", "-e", "b/#", "-n"), "topic name contains a wildcard"),
]


@pytest.mark.parametrize(("arguments", "text"), WRONG, ids=[" ".join(one)[-50:] for one, _ in WRONG])
def test_wrong_usage(arguments: tuple[str, ...], text: str) -> None:
    done = CliRunner().invoke(COMMANDS[arguments[0]], list(arguments[1:]))
    assert done.exit_code == 2, done.output
    assert text in " ".join(done.output.split()), done.output
    assert "secret" not in done.output


def failed(*arguments: str) -> str:
    """The line that a command says that has to fail."""
    done = CliRunner().invoke(COMMANDS[arguments[0]], list(arguments[1:]))
    assert done.exit_code == 1, done.output
    assert "Traceback" not in done.output
    (line,) = done.stderr.splitlines()
    return line.removeprefix("mqtt-nats: ")


LONG = "x" * 65_536


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((*PUB, "-i", LONG), "field of 65536 bytes is longer than 65,535"),
        ((*PUB, "-i", "a\0b"), "string contains U+0000"),
        ((*PUB, "-i", "a\udcff"), "string contains a surrogate"),
    ],
)
def test_a_packet_without_legal_form(arguments: tuple[str, ...], text: str) -> None:
    with server(lambda peer: None) as port:
        assert failed(*arguments, "-p", str(port)) == text


@contextmanager
def server(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """A server that gives its only connection to ``serve``; the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            peer, _ = listener.accept()
            with peer:
                serve(peer)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(10)
        assert not thread.is_alive()


def answering(*answers: bytes) -> Callable[[socket.socket], None]:
    """Read once before each answer, and wait for DISCONNECT or the end of the client."""

    def serve(peer: socket.socket) -> None:
        for answer in answers:
            peer.recv(65536)
            peer.sendall(answer)
        while (data := peer.recv(65536)) and not data.endswith(DISCONNECT):
            pass

    return serve


DISCONNECT = b"\xe0\0"
CONNACK = b"\x20\x03\0\0\0"
CONNACK_4 = b"\x20\x02\0\0"


def test_nobody_listens() -> None:
    port = free_port()
    assert failed(*PUB, "-p", str(port)) == f"cannot connect to localhost:{port}: Connection refused"


def test_an_unknown_host() -> None:
    assert failed(*PUB, "-h", "nobody.invalid").startswith("cannot connect to nobody.invalid:1883: ")


def test_a_silent_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "ANSWER_WAIT_S", 0.2)
    monkeypatch.setattr(commands, "ANSWER_WAIT_S", 0.2)
    with server(answering()) as port:
        assert failed(*PUB, "-p", str(port)) == "no CONNACK within 0 s"
    with server(answering()) as port:
        text = failed(*PUB, "--url", f"ws://127.0.0.1:{port}")
        assert text == f"127.0.0.1:{port} has not answered the WebSocket request in time"


@pytest.mark.parametrize(
    ("arguments", "answers", "text"),
    [
        (PUB, (b"HTTP/1.1 400 Bad Request\r\n\r\n",), "the server has sent a wrong packet: "),
        (PUB, (b"\x20\x02\0\x01",), "reason code 0x01 is not one of CONNACK's; a server of MQTT 3.1.1 needs -V 3.1.1"),
        ((*PUB, "-V", "3.1.1"), (b"\x20\x02\0\x03",), "connection refused: server unavailable (return code 3)"),
        (PUB, (b"\x20\x10\0\x89\x0d\x1f\0\x0atry later!",), "connection refused: server busy (reason code 0x89): try"),
        (PUB, (b"\xd0\0\x90\x04\0\x01\0\0",), "the server has sent Suback before CONNACK"),
        ((*PUB, "-q", "1"), (CONNACK, b"\x40\x03\0\x01\x97"), "message refused: quota exceeded (reason code 0x97)"),
        ((*PUB, "-q", "2"), (CONNACK, b"\xe0\x01\x8b"), "the server has disconnected: server shutting down"),
        ((*PUB, "-q", "2"), (b"\x20\x05\0\0\x02\x24\x01",), "the server accepts QoS 1 at most"),
        ((*PUB, "-r"), (b"\x20\x05\0\0\x02\x25\0",), "the server has no retained messages"),
        (PUB, (b"\x20\x08\0\0\x05\x27\0\0\0\x04",), "the message has 7 bytes, the server accepts 4 at most"),
        (SUB, (CONNACK, b"\x90\x04\0\x01\0\x8f"), "subscription to 'a' refused: topic filter invalid"),
        ((*SUB, "-V", "3.1.1"), (CONNACK_4, b"\x90\x03\0\x01\x80"), "subscription to 'a' refused: failure"),
        ((*SUB, "-V", "3.1.1"), (CONNACK_4, b"\x90\x03\0\x01\0\x36\0"), "the server has sent a wrong packet: "),
    ],
)
def test_answers_that_refuse(arguments: tuple[str, ...], answers: tuple[bytes, ...], text: str) -> None:
    with server(answering(*answers)) as port:
        assert text in failed(*arguments, "-p", str(port))


def test_a_reason_string_that_repeats_the_name() -> None:
    refused = b"\x40\x15\0\x01\x87\x11\x1f\0\x0enot authorized"
    with server(answering(CONNACK, refused)) as port:
        assert failed(*PUB, "-q", "1", "-p", str(port)) == "message refused: not authorized (reason code 0x87)"


@pytest.mark.parametrize(
    ("arguments", "answers", "text"),
    [
        ((*PUB, "-q", "1"), (CONNACK, b"\x40\x03\0\x01\x97"), "message refused: quota exceeded"),
        ((*PUB, "-q", "2"), (CONNACK, b"\x50\x03\0\x01\x87"), "message refused: not authorized"),
        ((*PUB, "-r"), (b"\x20\x05\0\0\x02\x25\0",), "the server has no retained messages"),
        ((*PUB, "-V", "3.1.1"), (CONNACK_4,), "the message cannot be published: "),
        (SUB, (CONNACK, b"\x90\x04\0\x01\0\x8f"), "subscription to 'a' refused"),
        ((*SUB, "-V", "3.1.1"), (CONNACK_4, b"\x90\x03\0\x01\x80"), "subscription to 'a' refused"),
    ],
)
def test_disconnect_follows_a_refusal(
    arguments: tuple[str, ...], answers: tuple[bytes, ...], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is as before: without DISCONNECT the server would publish the will."""
    last = b""

    def serve(peer: socket.socket) -> None:
        nonlocal last
        for answer in answers:
            peer.recv(65536)
            peer.sendall(answer)
        while data := peer.recv(65536):
            last = data
            if data.endswith(DISCONNECT):
                return

    def refuse(*_: object) -> bytes:
        raise EncodeError("on purpose")

    if answers == (CONNACK_4,):
        monkeypatch.setattr(publisher, "encode_publish", refuse)
    with server(serve) as port:
        done = CliRunner().invoke(COMMANDS[arguments[0]], [*arguments[1:], "-p", str(port)])
    assert (done.exit_code, text in done.stderr, last[-2:]) == (1, True, DISCONNECT)


def test_messages_together_with_connack() -> None:
    """A server may send what waited for a session right behind CONNACK, before SUBSCRIBE has arrived."""
    with server(answering(CONNACK + b"\x32\x08\0\x01a\0\x07\0on", b"\x90\x04\0\x01\0\x01")) as port:
        arguments = ["-t", "a", "-q", "1", "-i", "x", "-c", "-C", "1", "-p", str(port)]
        done = CliRunner().invoke(COMMANDS["sub"], arguments)
    assert (done.exit_code, done.output) == (0, "on\n")


def test_a_server_that_leaves() -> None:
    """Before CONNACK, as a listener for TLS does that gets a CONNECT without TLS, or later."""

    def leave(peer: socket.socket) -> None:
        peer.recv(65536)

    def leave_later(peer: socket.socket) -> None:
        leave(peer)
        peer.sendall(CONNACK)
        leave(peer)

    with server(leave) as port:
        early = "the server has ended the connection before CONNACK; a listener for TLS needs --cafile or --tls"
        assert failed(*PUB, "-p", str(port)) == early
    with server(leave_later) as port:
        assert failed(*PUB, "-q", "1", "-p", str(port)) == "the server has ended the connection"


def test_a_server_that_does_not_answer_pings() -> None:
    with server(answering(CONNACK, b"\x90\x04\0\x01\0\0")) as port:
        assert failed(*SUB, "-p", str(port), "-k", "1") == "connection lost: no answer to PINGREQ within 1 s"


def test_acknowledgements_that_do_not_come() -> None:
    with server(answering(CONNACK)) as port:
        done = CliRunner().invoke(COMMANDS["pub"], [*PUB[1:], "-q", "1", "-W", "0.2", "-p", str(port)])
        assert (done.exit_code, done.stderr) == (27, "mqtt-nats: 1 messages are not acknowledged in time\n")


@pytest.mark.processes
@pytest.mark.parametrize(("receive_maximum", "window"), [(None, 20), (3, 3), (1000, 20)])
def test_at_most_a_window_is_unacknowledged(receive_maximum: int | None, window: int) -> None:
    """The server acknowledges only when no more comes."""
    connack = CONNACK
    if receive_maximum is not None:
        connack = b"\x20\x06\0\0\x03\x21" + receive_maximum.to_bytes(2, "big")
    seen: list[int] = []

    def serve(peer: socket.socket) -> None:
        peer.recv(65536)
        peer.sendall(connack)
        peer.settimeout(0.3)
        data, count = b"", 0
        while count < 45:
            with contextlib.suppress(TimeoutError):
                more = peer.recv(65536)
                if not more:
                    return
                data += more
                continue
            found = [int.from_bytes(data[at + 5 : at + 7], "big") for at in range(0, len(data) - 8, 9)]
            seen.append(len(found))
            peer.sendall(b"".join(b"\x40\x02" + number.to_bytes(2, "big") for number in found))
            data, count = b"", count + len(found)

    with server(serve) as port:
        done = run("pub", "-t", "a", "-q", "1", "-l", "-p", str(port), given=b"x\n" * 45)
    assert done.returncode == 0, done.stderr
    assert max(seen) == window
    assert sum(seen) == 45


@pytest.mark.processes
@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("pub -t a -l <&-", "standard input is closed"),
        ("pub -t a -s <&-", "standard input is closed"),
        ("sub -t a >&-", "standard output is closed"),
    ],
)
def test_closed_streams(command: str, text: str) -> None:
    with server(answering(CONNACK)) if " -l" in command else contextlib.nullcontext(free_port()) as port:
        line = f"{sys.executable} -m mqtt_nats {command.replace(' -t', f' -p {port} -t')}"
        done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stderr) == (1, f"mqtt-nats: {text}\n")


def test_unusable_files_of_tls(tmp_path: Path) -> None:
    with server(lambda peer: None) as port:
        assert failed(*PUB, "-p", str(port), "--cafile", __file__).startswith("a file of --cafile")


@pytest.mark.processes
def test_they_start_without_the_gateway() -> None:
    """A client is a short-lived process: loading these takes longer than its work."""
    slow = ("pydantic", "asyncio", "anyio", "nats", "ssl", "wsproto", "mqtt_nats.cli", "mqtt_nats.config")
    code = (
        "import sys; sys.argv = ['mqtt-nats', *sys.argv[1:]]\n"
        "from mqtt_nats.__main__ import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        f"print([name for name in {slow!r} if name in sys.modules], file=sys.stderr)"
    )
    arguments = ["pub", "-t", "a", "-m", "x", "-p", str(free_port())]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "streams"), str(ROOT / "spark")])}
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=env, timeout=60)
    assert done.stderr.splitlines()[-1] == "[]", done.stderr


def test_they_are_the_same_commands_everywhere() -> None:
    assert set(CLIENTS) == COMMANDS.keys()
