# SPDX-License-Identifier: Apache-2.0
"""MQTT over WebSocket (RFC 6455): the layer between a socket and the connection that reads MQTT.

Frames are independent of packets: a frame may carry several packets, or a part of one [MQTT-6.0.0-2] (3.1.1, 5.0).
The payload of a frame is passed on as it arrives. So a frame takes no memory, whatever its length, and the limits are
the limits of MQTT.
"""

from __future__ import annotations

import asyncio
import logging
import re
from base64 import b64decode
from collections.abc import Callable, Collection, Sequence
from time import monotonic
from typing import Any, Final, cast

from wsproto import ConnectionType, WSConnection
from wsproto.connection import ConnectionState
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Ping,
    Pong,
    RejectConnection,
    RejectData,
    Request,
    TextMessage,
)
from wsproto.frame_protocol import CloseReason
from wsproto.utilities import ProtocolError, RemoteProtocolError

from mqtt_nats.base.admission import ADMITTED, Admission
from mqtt_nats.base.bucket import Bucket
from mqtt_nats.base.logs import log_failure
from mqtt_nats.transport.connection import CLOSE_LINGER_S, Connection
from mqtt_nats.transport.listener_settings import ANY_PATH, ANYBODY, PATHS, is_own_origin, normal_origin

log = logging.getLogger("mqtt_nats.listeners")

SUBPROTOCOLS: Final = ("mqtt", "mqttv3.1")
"""Subprotocols that a client may offer, the preferred one first; MQTT 3.1 clients offer the second."""

REQUEST_SHOWN_CHARACTERS: Final = 100
"""Maximum number of characters of a client's request in logs and answers."""

HEAD_MOST: Final = 8 * 1024
"""Maximum bytes of the upgrade request."""

HOST_BYTES_MAX: Final = 255
"""Maximum bytes of the field Host: decoding an internationalized name of 15 KB takes 90 ms."""

_BAD_FIELDS: Final = re.compile(rb"(?<!\r)\n|\n[ \t]|\nhost:[^\r\n]{%d}" % (HOST_BYTES_MAX + 1), re.IGNORECASE)
"""Lines without CR, continued lines (RFC 9112, sections 2.2 and 5.2), and a Host that is too long."""

KEY_BYTES: Final = 16
"""Bytes of the nonce in Sec-WebSocket-Key."""

FRAMES: Final = 128
"""Maximum number of frames handled in one turn of the event loop: frames can be tiny, and many."""

PONGS_MOST: Final = 64 * 1024
"""Unread bytes above which a client's pings are not answered."""


BARREN_RATE: Final = 10.0
BARREN_MOST: Final = 1000
"""Frames without MQTT data (pings, empty frames): maximum per second, and at once. `byte_rate` counts only payload."""


class Refused(Exception):
    """Error: the request is not a request for MQTT over WebSocket.

    Args:
        status: status of the HTTP response.
        text: reason, for the response body and the log.
        level: level of the log record.
    """

    def __init__(
        self,
        status: int,
        text: str,
        headers: list[tuple[bytes, bytes]] | None = None,
        level: int = logging.DEBUG,
    ) -> None:
        super().__init__(text)
        self.level = level
        self._status = status
        self._fields = [*(headers or []), (b"Connection", b"close")]
        self._body = f"{text}\n".encode(errors="replace")

    def encode(self, frames: WSConnection, head: bytes | bytearray) -> bytes:
        """Return the HTTP response to a request that begins with ``head``; a response to HEAD has no body."""
        if head.startswith(b"HEAD "):
            return frames.send(RejectConnection(self._status, self._fields))
        fields = [
            *self._fields,
            (b"Content-Type", b"text/plain; charset=utf-8"),
            (b"X-Content-Type-Options", b"nosniff"),
            (b"Content-Length", b"%d" % len(self._body)),
        ]
        return frames.send(RejectConnection(self._status, fields, True)) + frames.send(RejectData(self._body))


class WebSocket(asyncio.Protocol, asyncio.Transport):
    """WebSocket: the protocol of a socket, and the transport of ``connection``.

    Args:
        enter: counts the connection if it is not counted yet; False when there are too many.
        timeout: seconds in which the upgrade must be complete.
        origins: allowed origins of browser pages, `*` for any; empty: the listener's own host.
        paths: allowed paths of the request, with or without a slash at the end; `*` for any.
    """

    def __init__(
        self,
        connection: Connection,
        enter: Callable[[WebSocket], bool],
        timeout: float,
        origins: Collection[str] = (),
        paths: Collection[str] = PATHS,
    ) -> None:
        super().__init__()
        self.on_end: Callable[[], None] | None = None
        self.source: tuple[str, int] | None = None
        self.admission = ADMITTED
        self._paths = paths
        self._origins = frozenset(map(_origin, origins))
        self._connection = connection
        self._enter = enter
        self._timeout = timeout
        self._frames = WSConnection(ConnectionType.SERVER)
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._head = bytearray()
        """Received part of the upgrade request."""
        self._open = False
        """Whether the upgrade is complete."""
        self._ended = False
        """Whether nothing is sent any more, and received data is not MQTT."""
        self._done = False
        """Whether received data is ignored."""
        self._more = False
        """Whether received frames may still have to be handled."""
        self._held = False
        """Whether the connection has paused reading."""
        self._busy = False
        """Whether a turn to handle frames is scheduled."""
        self._paused = False
        self._eof = False
        self._barren: Bucket | None = None
        """Budget for frames without MQTT data; None = no such frame yet."""

    # -- called by the socket ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the new connection and start the deadline of the upgrade."""
        self._transport = transport = cast(asyncio.Transport, transport)
        if self.on_end is None and not self._enter(self):
            transport.abort()
            return
        self._deadline = asyncio.get_running_loop().call_later(self._timeout, transport.abort)

    def data_received(self, data: bytes) -> None:
        """Handle received data, in several turns if there is much."""
        if not self._open:
            if self.on_end is not None and not self._ended:  # else the connection is one too many, or refused
                self._head += data
                self._upgrade()
        elif not self._done:
            self._frames.receive_data(data)
            self._more = True
            if not self._busy:
                self._turn()

    def eof_received(self) -> bool:
        """Close after the received frames are handled: the client sends no more. True when the close has to wait."""
        self._eof = True
        while self._more and not self._held and not self._done:
            self._turn()
        # TLS has no half-closed connections.
        return self._more and not self._done and self.get_extra_info("ssl_object") is None

    def pause_writing(self) -> None:
        """Tell the connection that the client does not read."""
        if self._open:
            self._connection.pause_writing()

    def resume_writing(self) -> None:
        """Tell the connection that the client reads again."""
        if self._open:
            self._connection.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the connection that the socket is closed."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._transport = None
        self._done = True
        if self._open:
            self._connection.connection_lost(exc)
        self.uncount()

    def count(self, on_end: Callable[[], None] | None, admission: Admission) -> None:
        """Note that a listener counts the connection; see :class:`mqtt_nats.transport.listener.Counted`."""
        self.on_end, self.admission = on_end, admission

    def uncount(self) -> None:
        """Tell the listener, once, that the connection is gone."""
        on_end, self.on_end = self.on_end, None
        if on_end is not None:
            on_end()

    def name_source(self, source: tuple[str, int]) -> None:
        """Note the address and port of the client that a proxy has named."""
        self.source = source

    def _upgrade(self) -> None:
        """Answer the upgrade request once the request is complete."""
        transport = self._transport
        if transport is None:
            return
        end = self._head.find(b"\r\n\r\n", 0, HEAD_MOST)
        try:
            if end < 0:
                if len(self._head) < HEAD_MOST:
                    return
                raise Refused(431, "the request is too long")
            transport.write(self._frames.send(self._answer(bytes(self._head[: end + 4]))))
        except Refused as refused:
            peer = self.get_extra_info("peername")
            log_failure(log, refused.level, "handshake", "WebSocket: %s is refused: %s", peer, refused)
            self._ended = True
            transport.write(refused.encode(self._frames, self._head))
            self._head.clear()
            transport.close()
            return
        if self._deadline is not None:
            self._deadline.cancel()
        self._open = True
        rest = bytes(self._head[end + 4 :])
        self._head.clear()
        self._connection.count(self.on_end, self.admission)
        self.on_end = None
        self._connection.connection_made(self)
        if rest:
            self.data_received(rest)

    def _answer(self, head: bytes) -> AcceptConnection:
        if _BAD_FIELDS.search(head):
            raise Refused(400, "a field is too long, goes on in the next line, or ends without CR")
        try:
            self._frames.receive_data(head)
            request = next(self._frames.events(), None)
        except RemoteProtocolError as error:
            hint = error.event_hint
            if not isinstance(hint, RejectConnection):
                raise Refused(400, str(error)) from None
            raise Refused(hint.status_code, str(error), [*hint.headers]) from None
        except ValueError:  # header fields that are no text
            raise Refused(400, "bad header fields") from None
        if not isinstance(request, Request):
            raise Refused(400, "no request")
        if not head.partition(b"\r\n")[0].endswith(b" HTTP/1.1"):
            raise Refused(505, "another version of HTTP")
        path = request.target.partition("?")[0]
        if _plain(path) not in map(_plain, self._paths) and ANY_PATH not in self._paths:
            served = ", ".join(self._paths)
            asked = path[:REQUEST_SHOWN_CHARACTERS]
            text = f"the path of the request is {asked!r}; the listener serves MQTT at {served} (setting `paths`)"
            raise Refused(404, text, level=logging.INFO)
        if not _is_nonce([value for name, value in request.extra_headers if name == b"sec-websocket-key"]):
            raise Refused(400, "no key of 16 bytes")  # RFC 6455, section 4.2.1
        # Browsers always send the page's origin; a client without an origin is no page to which a user was lured.
        pages = [value.decode("latin-1") for name, value in request.extra_headers if name == b"origin"]
        if not all(self._welcomes(page, request.host) for page in pages):
            raise Refused(403, f"origin {', '.join(pages)!r}")
        for one in SUBPROTOCOLS:
            if one in request.subprotocols:
                return AcceptConnection(subprotocol=one)  # [MQTT-6.0.0-4] (3.1.1, 5.0)
        # [MQTT-6.0.0-3] (3.1.1, 5.0)
        offered = (
            f"is {', '.join(request.subprotocols)[:REQUEST_SHOWN_CHARACTERS]!r}"
            if request.subprotocols
            else "is missing"
        )
        text = f"the header Sec-WebSocket-Protocol {offered}; a client of MQTT offers the subprotocol `mqtt`"
        raise Refused(400, text, level=logging.INFO)

    def _welcomes(self, page: str, host: str) -> bool:
        """Return whether a page, named by its origin, may open a WebSocket here."""
        if self._origins:
            return ANYBODY in self._origins or _origin(page) in self._origins
        return is_own_origin(page, host, self.get_extra_info("ssl_object") is not None)

    def _turn(self) -> None:
        """Handle some frames; further frames are handled in the next turn, so that other connections have theirs."""
        self._busy = False
        if self._held or self._done:
            return
        self._more = False
        frames = self._frames
        payload: list[bytes] = []
        farewell: CloseConnection | None = None
        barren = 0
        try:
            for number, event in enumerate(frames.events(), 1):
                if isinstance(event, BytesMessage):
                    if event.data:
                        payload.append(bytes(event.data))
                    else:
                        barren += 1
                elif isinstance(event, Ping):
                    barren += 1
                    self._pong(event)
                elif isinstance(event, Pong):
                    barren += 1
                elif isinstance(event, CloseConnection):
                    farewell = CloseConnection(code=event.code, reason=event.reason)
                    break
                elif isinstance(event, TextMessage):
                    farewell = CloseConnection(code=CloseReason.UNSUPPORTED_DATA)  # [MQTT-6.0.0-1] (3.1.1, 5.0)
                    break
                if number == FRAMES:
                    self._more = True
                    break
        except RemoteProtocolError as error:
            hint = error.event_hint
            code = hint.code if isinstance(hint, CloseConnection) else CloseReason.PROTOCOL_ERROR
            farewell = CloseConnection(code=code)
        if barren and farewell is None and self._flooded(barren):
            farewell = CloseConnection(code=CloseReason.POLICY_VIOLATION)
        if payload and not self._ended:
            self._connection.data_received(payload[0] if len(payload) == 1 else b"".join(payload))
        if farewell is not None:
            self._finish(farewell)
        elif self._more:
            self._again()
        elif self._eof and self._transport is not None:
            self._transport.close()
        self._flow()

    def _again(self) -> None:
        if not self._busy and not self._held:
            self._busy = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _flooded(self, count: int) -> bool:
        """Count frames without MQTT data; return whether there are too many."""
        now = monotonic()
        if self._barren is None:
            self._barren = Bucket(BARREN_RATE, BARREN_MOST, now)
        if not self._barren.pour(count, now):
            return False
        if not self._ended:
            text = "WebSocket: %s sends too many pings or empty frames"
            log_failure(log, logging.INFO, "websocket_frames", text, self.get_extra_info("peername"))
        return True

    def _pong(self, ping: Ping) -> None:
        transport = self._transport
        if not self._ended and transport is not None and transport.get_write_buffer_size() < PONGS_MOST:
            transport.write(self._frames.send(ping.response()))

    def _finish(self, farewell: CloseConnection) -> None:
        """Close: both sides have ended the WebSocket."""
        self._done = True
        self._say(farewell)
        if self._transport is not None:
            self._transport.close()

    def _say(self, farewell: CloseConnection) -> None:
        if self._ended or self._transport is None:
            return
        self._ended = True
        try:
            self._transport.write(self._frames.send(farewell))
        except ProtocolError:
            pass  # the client has sent its close frame already, or a code that must not be sent

    def _flow(self) -> None:
        """Pause or resume reading from the socket."""
        pause = (self._held or self._busy) and not self._ended
        transport = self._transport
        if pause == self._paused or transport is None or transport.is_closing():
            return
        self._paused = pause
        if pause:
            transport.pause_reading()
        else:
            transport.resume_reading()

    # -- called by the connection -----------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send bytes as one frame, unless the client has sent its close frame."""
        if not self._ended and self._transport is not None and self._frames.state is ConnectionState.OPEN:
            self._transport.write(self._frames.send(BytesMessage(data=bytes(data))))

    def close(self) -> None:
        """Send a close frame; the socket is closed when the client agrees, or after `CLOSE_LINGER_S`."""
        transport = self._transport
        if self._ended or transport is None:
            return
        self._say(CloseConnection(code=CloseReason.NORMAL_CLOSURE))
        asyncio.get_running_loop().call_later(CLOSE_LINGER_S, transport.abort)
        self.resume_reading()  # for the client's close frame

    def abort(self) -> None:
        """Close the socket at once."""
        self._ended = True
        if self._transport is not None:
            self._transport.abort()

    def is_closing(self) -> bool:
        """Return whether nothing can be sent any more."""
        return self._ended or self._transport is None or self._transport.is_closing()

    def pause_reading(self) -> None:
        """Pass no data on for now."""
        self._held = True
        self._flow()

    def resume_reading(self) -> None:
        """Pass on new data, and data received meanwhile."""
        self._held = False
        if self._more:
            self._again()
        self._flow()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set the write buffer limits of the socket."""
        if self._transport is not None:
            self._transport.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        """Return the number of bytes that the socket has not taken."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return information on the socket; a proxy's client address takes the place of the peer name."""
        if name == "peername" and self.source is not None:
            return self.source
        return default if self._transport is None else self._transport.get_extra_info(name, default)


def _is_nonce(keys: Sequence[bytes]) -> bool:
    """Return whether these values of Sec-WebSocket-Key are a single nonce of 16 bytes in base64."""
    try:
        return len(keys) == 1 and len(b64decode(keys[0], validate=True)) == KEY_BYTES
    except ValueError:
        return False


def _plain(path: str) -> str:
    """Return a path without a slash at its end."""
    return path[:-1] if len(path) > len("/x") and path.endswith("/") else path


def _origin(value: str) -> str:
    """Return an origin in normal form for comparison; an illegal origin unchanged, so that it matches no setting."""
    try:
        return normal_origin(value)
    except ValueError:
        return value
