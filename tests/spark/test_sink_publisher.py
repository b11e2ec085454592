# SPDX-License-Identifier: Apache-2.0
"""Publishing to a server that does what the test says: what is sent again, when, and in which order."""

import socket
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import pytest

from pyspark_mqtt_nats.errors import ApiError, ConnectError, RequestTimeout
from pyspark_mqtt_nats.options import Options
from pyspark_mqtt_nats.publishing.encoding import Encoder, Identities
from pyspark_mqtt_nats.publishing.publisher import RETRY_TIMEOUTS, Publisher
from tests.harness.waiting import eventually
from tests.spark.servers import listener, says_hello


class Sent(NamedTuple):
    """A frame that the server got; `what` is `<letter of the copy>:<payload>`, or PING."""

    what: str
    reply: bytes = b""


Behaviour = Callable[["Script", Sent], bytes | None]
"""What the server answers to a frame; None ends the connection."""

NO_LEADER: Final = b'{"error":{"code":503,"err_code":10008,"description":"JetStream system temporarily unavailable"}}'
TOO_MANY: Final = b'{"error":{"code":429,"err_code":10167,"description":"too many requests"}}'


def acked(sent: Sent, sequence: int = 7) -> bytes:
    body = b'{"stream":"$MQTT_msgs","seq":%d}' % sequence
    return b"MSG %b sink %d\r\n%b\r\n" % (sent.reply, len(body), body)


def unheard(sent: Sent) -> bytes:
    return b"HMSG %b sink 16 16\r\nNATS/1.0 503\r\n\r\n\r\n" % sent.reply


def refused(sent: Sent, body: bytes) -> bytes:
    head = b"NATS/1.0 429 Too Many Requests\r\n\r\n" if body is TOO_MANY else b""
    if not head:
        return b"MSG %b sink %d\r\n%b\r\n" % (sent.reply, len(body), body)
    return b"HMSG %b sink %d %d\r\n%b%b\r\n" % (sent.reply, len(head), len(head) + len(body), head, body)


class Script:
    """For `listener`: notes what comes on each connection, and answers as `behave` says."""

    def __init__(self, behave: Behaviour) -> None:
        self.behave = behave
        self.connections: list[list[Sent]] = []

    def until(self, connections: int) -> None:
        """Wait for so many connections."""
        eventually(lambda: len(self.connections) >= connections)

    def end(self) -> None:
        """End the latest connection, whatever came on it."""
        self.client.shutdown(socket.SHUT_RDWR)

    def __call__(self, client: socket.socket) -> None:
        says_hello(client)
        self.client = client
        self.connections.append([])
        buffer = b""
        while data := client.recv(65_536):
            buffer += data
            while (frame := self._next(buffer)) is not None:
                sent, buffer = frame
                if sent is None:
                    continue
                self.connections[-1].append(sent)
                answer = self.behave(self, sent)
                if answer is None:
                    return
                client.sendall(answer)

    @staticmethod
    def _next(buffer: bytes) -> tuple[Sent | None, bytes] | None:
        line, end, rest = buffer.partition(b"\r\n")
        if not end:
            return None
        verb, *fields = line.split(b" ")
        if verb not in (b"PUB", b"HPUB"):
            return Sent(line.decode()) if verb == b"PING" else None, rest
        size = int(fields[-1])
        if len(rest) < size + 2:
            return None
        head = int(fields[-2]) if verb == b"HPUB" else 0
        subject = fields[0]
        letter = "s" if subject.startswith(b"$MQTT.msgs.") else "r" if subject.startswith(b"$MQTT.rmsgs.") else "b"
        if subject.startswith(b"$JS.API."):
            letter = "d"
        reply = fields[1] if len(fields) > 2 + bool(head) - 1 else b""
        return Sent(f"{letter}:{rest[head:size].decode()}", reply if letter != "b" else b""), rest[size + 2 :]

    def seen(self, connection: int = -1) -> list[str]:
        """What has come on a connection, without PING."""
        return [sent.what for sent in self.connections[connection] if sent.what != "PING"]


class Session:
    """A publisher, and rows for it."""

    def __init__(self, url: str, window: int = 100, timeout: float = 0.3) -> None:
        options = Options.parse({"servers": url, "requestTimeout": timeout, "connectTimeout": 2})
        self.publisher = Publisher(options.access, window)
        self.encoder = Encoder("$MQTT.msgs.", self.publisher.inbox, self.publisher.max_payload)
        self.identities = Identities("q", "", 0)
        self.rows = 0

    def publish(self, *payloads: str, qos: int = 1, retain: bool = False, push: bool = True) -> None:
        for payload in payloads:
            message = self.encoder.message(("t", payload, qos, retain, *[None] * 6))
            self.publisher.publish(self.encoder, message, self.identities.next(message), self.rows)
            self.rows += 1
        if push:
            self.publisher.push()

    def finish(self) -> None:
        self.publisher.finish()


def both(*payloads: str) -> list[str]:
    return [f"{copy}:{payload}" for payload in payloads for copy in "bs"]


def test_what_was_not_confirmed_is_sent_again_on_the_next_connection() -> None:
    """In its order, with its bare copies, and nothing that was confirmed."""

    def behave(script: Script, sent: Sent) -> bytes | None:
        if sent.what == "PING":
            return b"PONG\r\n" if len(script.connections) > 1 else b""
        if len(script.connections) == 1 and sent.what[2:] not in ("A", "C"):
            return None if sent.what == "s:F" else b""
        return acked(sent) if sent.reply else b""

    script = Script(behave)
    with listener(script) as url:
        session = Session(url)
        with session.publisher:
            session.publish("A", "B", "C", push=False)
            session.publish("D", qos=0, push=False)
            session.publish("E", retain=True, push=False)
            session.publish("F")
            session.finish()
    assert script.seen(0) == [*both("A", "B", "C"), "b:D", "r:E", *both("E", "F")]
    assert script.seen(1) == [*both("B"), "b:D", "r:E", *both("E", "F")]
    assert len(script.connections) == 2


def test_pong_confirms_what_was_sent_before_ping() -> None:
    def behave(script: Script, sent: Sent) -> bytes | None:
        if len(script.connections) > 1:
            return b"PONG\r\n" if sent.what == "PING" else b""
        if sent.what == "b:2":
            return b"PONG\r\n"
        return None if sent.what == "PING" and len(script.seen()) == 2 else b""

    script = Script(behave)
    with listener(script) as url:
        session = Session(url, timeout=5)
        with session.publisher:
            session.publish("1", qos=0)
            session.publish("2", qos=0)
            session.finish()
    assert script.seen(0) == ["b:1", "b:2"]
    assert script.seen(1) == ["b:2"]


@pytest.mark.parametrize("kind", ["unheard", "no leader", "too many", "silence"])
def test_until_jetstream_stores_again_only_the_oldest_is_tried(kind: str) -> None:
    """Then all that is not confirmed is sent again in order; bare copies have arrived already."""

    def behave(script: Script, sent: Sent) -> bytes | None:
        if not sent.reply:
            return b""
        tries = script.seen().count("s:B")
        if sent.what == "s:A" or tries >= 3:
            return acked(sent)
        if kind == "silence":
            return b""
        return unheard(sent) if kind == "unheard" else refused(sent, NO_LEADER if kind == "no leader" else TOO_MANY)

    script = Script(behave)
    with listener(script) as url:
        session = Session(url, timeout=2 if kind == "silence" else 5)
        with session.publisher:
            session.publish("A", "B", "C", "D")
            session.finish()
            session.publish("E")
            session.finish()
    tries = ["s:B"] * 2
    assert script.seen() == [*both("A", "B", "C", "D"), *tries, "s:C", "s:D", *both("E")]


@pytest.mark.parametrize("qos", [0, 1])
def test_silence_for_too_long(qos: int) -> None:
    script = Script(lambda _script, _sent: b"")
    started = time.monotonic()
    with listener(script) as url:
        session = Session(url, timeout=0.1)
        with session.publisher:
            session.publish("A", qos=qos)
            expected = RequestTimeout if qos else ConnectError
            text = "row 0 is not stored: nothing is acknowledged for 0.1 s" if qos else "does not answer"
            with pytest.raises(expected, match=rf"{text} \(option \S+"):
                session.finish()
    assert time.monotonic() - started < 10


def test_connections_that_end_again_and_again() -> None:
    """As when what is sent ends them: not for ever."""
    script = Script(lambda _script, sent: None if sent.reply else b"")
    with listener(script) as url:
        session = Session(url, timeout=0.1)
        with session.publisher:
            session.publish("A")
            with pytest.raises(ConnectError, match="was lost"):
                session.finish()
    assert len(script.connections) > 2
    assert all(script.seen(number) == ["b:A", "s:A"] for number in range(len(script.connections)))


def test_connections_that_end_while_nothing_waits() -> None:
    """As often as they like, as long as there is another one each time."""
    script = Script(lambda _script, sent: acked(sent) if sent.reply else b"")
    with listener(script) as url:
        session = Session(url, timeout=0.1)
        with session.publisher:
            for number in range(3):
                if number != 1:
                    session.publish("A")
                    session.finish()
                script.until(number + 1)
                script.end()
                session.publisher._exchange(1.0)
                time.sleep(0.1 * RETRY_TIMEOUTS + 0.05)
            session.publish("B")
            session.finish()
    assert [script.seen(number) for number in range(4)] == [both("A"), [], both("A"), both("B")]


def test_what_waits_is_sent_at_once_on_the_next_connection() -> None:
    """The next message may be long in coming."""
    script = Script(lambda script, sent: acked(sent) if sent.reply and len(script.connections) > 1 else b"")
    with listener(script) as url:
        session = Session(url, timeout=5)
        with session.publisher:
            session.publish("A")
            script.until(1)
            eventually(lambda: script.seen() == both("A"))
            script.end()
            session.publisher._exchange(1.0)
            script.until(2)
            eventually(lambda: script.seen() == both("A"))
            session.finish()


def test_patience_begins_anew_once_something_was_confirmed() -> None:
    def behave(script: Script, sent: Sent) -> bytes | None:
        if sent.what == "s:A" and script.seen().count("s:A") == 1:
            return unheard(sent)
        if sent.what == "s:B" and len(script.connections) == 1:
            return None
        return acked(sent) if sent.reply else b""

    script = Script(behave)
    with listener(script) as url:
        session = Session(url, timeout=0.1)
        with session.publisher:
            for row in ("A", "B"):
                session.publish(row)
                session.finish()
                time.sleep(0.1 * RETRY_TIMEOUTS + 0.05)
    assert [script.seen(number) for number in range(2)] == [[*both("A"), "s:A", *both("B")], both("B")]


def test_no_more_than_the_window_wait() -> None:
    script = Script(lambda _script, sent: acked(sent) if sent.reply else b"")
    with listener(script) as url:
        session = Session(url, window=10, timeout=5)
        with session.publisher:
            for number in range(100):
                session.publish(str(number), push=False)
                assert len(session.publisher._waiting) < 10
            session.finish()
    assert script.seen() == both(*map(str, range(100)))


@pytest.mark.parametrize("again", [False, True])
def test_tombstones_are_removed_by_their_sequence(again: bool) -> None:
    """Also where JetStream could not at first, and where the record is gone already."""

    def behave(script: Script, sent: Sent) -> bytes | None:
        if sent.what.startswith("d:"):
            if again and script.seen().count(sent.what) == 1:
                return refused(sent, NO_LEADER)
            return refused(sent, b'{"error":{"code":404,"err_code":10043,"description":"message not found"}}')
        return acked(sent, 42) if sent.reply else b"PONG\r\n" * (sent.what == "PING")

    script = Script(behave)
    with listener(script) as url:
        session = Session(url, timeout=5)
        with session.publisher:
            session.publish("", qos=0, retain=True)
            session.finish()
    removals = ['d:{"seq":42,"no_erase":true}'] * (2 if again else 1)
    assert script.seen() == ["r:", "b:", *removals]


def test_an_answer_of_somebody_else() -> None:
    def behave(_script: Script, sent: Sent) -> bytes | None:
        return b"MSG %b sink 2\r\nhi\r\n" % sent.reply if sent.reply else b""

    with listener(Script(behave)) as url:
        session = Session(url)
        with session.publisher:
            session.publish("A", push=False)
            text = r"^row 0: the answer is not a JetStream acknowledgement \(option subjectPrefix\)$"
            with pytest.raises(ApiError, match=text):
                session.finish()


def test_answers_in_pieces_and_pings_between_them() -> None:
    pieces: list[bytes] = []

    class Slow(Script):
        def __call__(self, client: socket.socket) -> None:
            says_hello(client)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            buffer = b""
            found: Sequence[Sent] = ()
            while len(found) < 3:
                buffer += client.recv(65_536)
                rest, every = buffer, []
                while (frame := self._next(rest)) is not None:
                    every.append(frame[0])
                    rest = frame[1]
                found = [sent for sent in every if sent is not None and sent.reply]
            for byte in b"PING\r\n".join(acked(sent) for sent in found):
                client.sendall(bytes([byte]))
            while piece := client.recv(65_536):
                pieces.append(piece)

    with listener(Slow(lambda _script, _sent: b"")) as url:
        session = Session(url, timeout=5)
        with session.publisher:
            session.publish("A", "B", "C")
            session.finish()
    assert b"".join(pieces) == b"PONG\r\n" * 2
