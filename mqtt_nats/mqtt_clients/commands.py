# SPDX-License-Identifier: Apache-2.0
"""The commands ``mqtt-nats pub``, ``mqtt-nats sub`` and ``mqtt-nats request``."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, Final

import click

from mqtt_nats.codec import Connack, Connect, MqttError, Subscription, validate_topic_filter
from mqtt_nats.codec.topics import SHARED, check_filter_syntax
from mqtt_nats.mqtt_clients.connection import ANSWER_WAIT_S, Connection
from mqtt_nats.mqtt_clients.errors import ClientError, Interrupted, Refused, TimeoutReached
from mqtt_nats.mqtt_clients.message_format import FIELDS, FormatError, MessageFormat
from mqtt_nats.mqtt_clients.options import connect_of, connection_options, server_of, topic_name
from mqtt_nats.mqtt_clients.payloads import LineReader, payload_of, payload_options, properties_of, standard_input
from mqtt_nats.mqtt_clients.publisher import Outgoing, Publisher
from mqtt_nats.mqtt_clients.stream import Server, open_stream
from mqtt_nats.mqtt_clients.subscriber import Message, Subscriber

PUBLISH_WAIT_S: Final = 30.0
"""Default seconds in which every message must be acknowledged, and a request answered."""

INTERRUPTED_STATUS: Final = 130
"""Exit status after SIGINT or SIGTERM, where that is not the usual end."""

_SETTINGS: Final[dict[str, Any]] = {"help_option_names": ["--help"], "max_content_width": 110}
_TIMEOUT = click.FloatRange(0, min_open=True)
_LETTERS: Final = "  ".join(f"%{letter} {meaning}" for letter, (meaning, _) in FIELDS.items())


def _reports(command: Callable[..., None]) -> Callable[..., None]:
    """Print a ClientError as one line, and exit with its status."""

    @wraps(command)
    def run(**given: Any) -> None:
        try:
            command(**given)
        except Interrupted:
            sys.exit(INTERRUPTED_STATUS)
        except ClientError as error:
            click.echo(f"mqtt-nats: {error}", err=True)
            sys.exit(error.status)

    return run


@click.command("pub", context_settings=_SETTINGS)
@click.option("-t", "--topic", required=True, callback=topic_name, help="Topic.")
@click.option("-q", "--qos", type=click.IntRange(0, 2), default=0, show_default=True, help="QoS.")
@click.option("-r", "--retain", is_flag=True, help="The message is retained.")
@payload_options(lines=True)
@click.option("--response-topic", callback=topic_name, help="Topic for answers.")
@click.option(
    "-W",
    "--timeout",
    type=_TIMEOUT,
    help=f"Seconds in which everything must be acknowledged. [default: {PUBLISH_WAIT_S:.0f}; with -l: no limit]",
)
@connection_options
@_reports
def pub(**given: Any) -> None:
    """Publish messages to an MQTT server.

    Exit status: 0 when the server has acknowledged every message of QoS 1 and 2, 1 when it has refused, 2 for wrong
    usage, 27 when --timeout is over.
    """
    server, connect = server_of(given), connect_of(given)
    payload = payload_of(given)
    message = Outgoing(given["topic"], given["qos"], given["retain"], properties_of(given, given["response_topic"]))
    seconds = given["timeout"] or (None if payload is None else PUBLISH_WAIT_S)
    with _connected(server, connect) as (connection, connack):
        publisher = Publisher(connection, connack, None if seconds is None else time.monotonic() + seconds)
        if payload is not None:
            publisher.publish(message, payload)
        else:
            _publish_lines(connection, publisher, message)
        publisher.finish()


def _publish_lines(connection: Connection, publisher: Publisher, message: Outgoing) -> None:
    reader = LineReader(standard_input().fileno())
    while not reader.ended:
        arrival = connection.receive(publisher.deadline, reader.descriptor)
        for packet in arrival.packets:
            publisher.handle(packet)
        if arrival.readable:
            for line in reader.lines():
                publisher.publish(message, line)
        elif publisher.overdue:
            raise TimeoutReached("standard input has not ended before the time of --timeout")


def _filter(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> tuple[str, ...]:
    for text in texts:
        try:
            check_filter_syntax(text)
            validate_topic_filter(text)
        except MqttError as error:
            raise click.BadParameter(f"{text!r}: {error}") from None
    return texts


def _format(context: click.Context, parameter: click.Parameter, text: str | None) -> MessageFormat | None:
    try:
        return None if text is None else MessageFormat(text)
    except FormatError as error:
        raise click.BadParameter(str(error)) from None


_FORMAT_OPTIONS: Final = (
    click.option("-v", "--verbose", is_flag=True, help="Print the topic before the payload."),
    click.option("-F", "--format", "shape", callback=_format, help=f"How a message is printed: {_LETTERS}"),
)


def _format_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_FORMAT_OPTIONS):
        command = option(command)
    return command


@click.command("sub", context_settings=_SETTINGS)
@click.option("-t", "--topic", required=True, multiple=True, callback=_filter, help="Topic filter; may be repeated.")
@click.option("-q", "--qos", type=click.IntRange(0, 2), default=0, show_default=True, help="Highest QoS.")
@click.option("-C", "--count", type=click.IntRange(1), help="Exit after so many messages.")
@click.option("-W", "--timeout", type=_TIMEOUT, help="Exit after so many seconds, with status 27.")
@click.option("-E", "--exit-after-suback", "leave", is_flag=True, help="Subscribe and exit; with -c a session waits.")
@_format_options
@click.option("-R", "--no-retained", is_flag=True, help="Do not print messages that were retained before.")
@click.option("--no-local", is_flag=True, help="No messages of this client (MQTT 5.0).")
@click.option("--retain-as-published", is_flag=True, help="Keep RETAIN as it was published (MQTT 5.0).")
@click.option("--retain-handling", type=click.IntRange(0, 2), default=0, help="When retained messages come (MQTT 5.0).")
@connection_options
@_reports
def sub(**given: Any) -> None:
    """Subscribe at an MQTT server and print the messages, one a line.

    Exit status: 0 after --count messages, SIGINT or SIGTERM, 1 when the server has refused or the connection is lost,
    2 for wrong usage, 27 when --timeout is over.
    """
    server, connect = server_of(given), connect_of(given)
    filters = _subscriptions(given)
    seconds: float | None = given["timeout"]
    printer = _printer(given)

    def show(message: Message) -> bool:
        if message.retain and given["no_retained"]:
            return False
        printer(message)
        return True

    with contextlib.suppress(Interrupted), _connected(server, connect) as (connection, _):
        subscriber = Subscriber(connection, show, 0 if given["leave"] else given["count"])
        subscriber.subscribe(filters)
        subscriber.run(None if seconds is None else time.monotonic() + seconds)


def _subscriptions(given: dict[str, Any]) -> list[Subscription]:
    options = (given["no_local"], given["retain_as_published"], given["retain_handling"])
    if any(options) and given["mqtt_version"] == 4:
        raise click.UsageError("--no-local, --retain-as-published and --retain-handling are for MQTT 5.0")
    if given["no_local"] and any(text.startswith(SHARED) for text in given["topic"]):
        raise click.UsageError("--no-local is not for shared subscriptions")  # [MQTT-3.8.3-4] (5.0)
    return [Subscription(text, given["qos"], *options) for text in given["topic"]]


@click.command("request", context_settings=_SETTINGS)
@click.option("-t", "--topic", required=True, callback=topic_name, help="Topic of the request.")
@click.option("-e", "--response-topic", required=True, callback=topic_name, help="Topic of the answer.")
@click.option("-q", "--qos", type=click.IntRange(0, 2), default=0, show_default=True, help="QoS.")
@payload_options(lines=False)
@_format_options
@click.option(
    "-W", "--timeout", type=_TIMEOUT, default=PUBLISH_WAIT_S, show_default=True, help="Seconds to wait for the answer."
)
@connection_options
@_reports
def request(**given: Any) -> None:
    """Publish a request with a response topic, and print the first answer. MQTT 5.0.

    Exit status: as of `sub`; 27 without an answer.
    """
    if given["mqtt_version"] == 4:
        raise click.UsageError("a request needs MQTT 5.0")
    server, connect = server_of(given), connect_of(given)
    payload = payload_of(given)
    assert payload is not None  # there is no --stdin-line
    message = Outgoing(given["topic"], given["qos"], False, properties_of(given, given["response_topic"]))
    printer = _printer(given)
    deadline = time.monotonic() + given["timeout"]

    def show(answer: Message) -> bool:
        printer(answer)
        return True

    with _connected(server, connect) as (connection, connack):
        subscriber = Subscriber(connection, show, 1)
        subscriber.subscribe([Subscription(given["response_topic"], given["qos"], retain_handling=2)])
        publisher = Publisher(connection, connack, deadline)
        publisher.publish(message, payload)
        while not subscriber.done:
            if publisher.overdue:
                raise TimeoutReached(f"no answer within {given['timeout']:g} s")
            packets = connection.receive(deadline).packets
            for packet in packets:
                publisher.handle(packet)
            subscriber.handle_packets(packets)


def _printer(given: dict[str, Any]) -> Callable[[Message], None]:
    """Return a function that prints a message and a line end."""
    if given["verbose"] and given["shape"] is not None:
        raise click.UsageError("--format is instead of --verbose")
    if sys.stdout is None:
        raise ClientError("standard output is closed")
    shape: MessageFormat = given["shape"] or MessageFormat("%t %p" if given["verbose"] else "%p")
    on_terminal = sys.stdout.isatty()

    def show(message: Message) -> None:
        sys.stdout.buffer.write(shape.line(message, on_terminal) + b"\n")
        sys.stdout.buffer.flush()

    return show


@contextlib.contextmanager
def _connected(server: Server, connect: Connect) -> Iterator[tuple[Connection, Connack]]:
    """Connect; at the end DISCONNECT, also after a signal or a refusal. After other errors close the socket only."""
    stream = open_stream(server, time.monotonic() + ANSWER_WAIT_S)
    with _end_signals() as wake:
        connection = Connection(stream, connect.protocol_level, wake)
        try:
            yield connection, connection.open(connect)
        except (Interrupted, Refused, TimeoutReached):
            connection.close()
            raise
        except BaseException:
            connection.abandon()
            raise
        connection.close()


@contextlib.contextmanager
def _end_signals() -> Iterator[int]:
    """Yield a descriptor that is readable after SIGINT or SIGTERM, which then do nothing else."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        handlers = {one: signal.signal(one, lambda *_: None) for one in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield ours.fileno()
        finally:
            signal.set_wakeup_fd(before)
            for number, handler in handlers.items():
                signal.signal(number, handler)


COMMANDS: Final = {one.name: one for one in (pub, sub, request)}
"""Commands of the clients, by name."""
