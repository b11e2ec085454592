# SPDX-License-Identifier: Apache-2.0
"""Authentication of CONNECT, the permissions that follow, and AUTH packets: enhanced authentication (section 4.12).

What a client may do before it is authenticated: docs/internals/client.md#enhanced-authentication.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from time import time
from typing import TYPE_CHECKING, Any, Final, TypeVar

from mqtt_nats.access.acl import EVERYTHING, Both, Identity
from mqtt_nats.access.authenticator import ADMINISTRATOR, IGNORE, Allow, Credentials, Denied, Ignore, Success
from mqtt_nats.authenticators.admission_queue import CONNECT_WAIT_MOST_S
from mqtt_nats.base.errors import describe, ends_task
from mqtt_nats.base.logs import about, log_failure
from mqtt_nats.codec import (
    Auth,
    Connect,
    Disconnect,
    MqttError,
    NotAuthorized,
    Packet,
    PacketTooLarge,
    Properties,
    ProtocolError,
    ReasonCode,
    encode,
)
from mqtt_nats.hooks.points import CLIENT_AUTHORIZE
from mqtt_nats.lifecycle.connection_hooks import ask_hooks_about_connect, verdict_of_hooks
from mqtt_nats.sessions.guard import AskingGuard, Guard
from mqtt_nats.transport.client_trust import end_of
from mqtt_nats.transport.connection import Hold

if TYPE_CHECKING:
    from mqtt_nats.client.client import Client

log = logging.getLogger("mqtt_nats.broker")

# Seconds; an authenticator that has not answered by then denies access.
AUTHENTICATION_MOST_S: Final = 10.0

# Seconds for the authenticators of a listener, in which a CONNECT may also wait in their queue.
AUTHENTICATION_TURN_MOST_S: Final = CONNECT_WAIT_MOST_S + AUTHENTICATION_MOST_S

# Largest number of messages of a client in one exchange. SCRAM needs two, Kerberos three.
ROUNDS_MOST: Final = 8

UNSERVED: Final = "the client's tenant is not served at present"

T = TypeVar("T")


async def authenticate(client: Client, connect: Connect, client_id: str) -> Properties | None:
    """Authenticate the client of a CONNECT, move it to the account of its user, and set its permissions.

    Returns:
        Properties for CONNACK; None: there are none.

    Raises:
        MqttError: access is denied, or the client is banned.
    """
    if not client.account.banning.quiet:
        await client.account.banning.admit(client, client_id, known=False)
    if client.services.hooks.in_use:
        await ask_hooks_about_connect(client, connect, client_id)
    granted = await _prove(client, connect, client_id)
    if client.granted.tenant is not None:
        await hand_over(client, client_id)
    if not client.account.banning.quiet:
        await client.account.banning.admit(client, client_id, known=True)
    client.name(client_id)  # [MQTT-3.1.3-2] (3.1.1, 5.0)
    identify(client)
    return granted


async def _prove(client: Client, connect: Connect, client_id: str) -> Properties | None:
    """Have hooks or authenticators decide about the client of a CONNECT; returns the properties for CONNACK, or None.

    Raises:
        MqttError: access is denied.
    """
    immediate = client.access.immediate
    waits = client.authentication is not None or client.services.hooks.in_use or not immediate
    if waits:
        client.begin_waiting()
    try:
        if client.authentication is not None:
            return await client.authentication.open(connect, client_id)
        credentials = Credentials(client_id, connect.username, connect.password, client.connection)
        verdict = await verdict_of_hooks(client, credentials) if client.services.hooks.in_use else IGNORE
        if isinstance(verdict, Ignore):
            verdict = await _decision(
                client.access.authenticate(credentials), AUTHENTICATION_TURN_MOST_S, immediate=immediate
            )
        if isinstance(verdict, Denied):
            _log_denial(client, client_id, verdict)
            raise MqttError("access denied", verdict.reason)
        admit(client, verdict)
        return None
    finally:
        client.end_waiting()


def _log_denial(client: Client, client_id: str, verdict: Denied) -> None:
    ids = about(client=client_id, connection=client.connection.number)
    text = "client %r from %s: %s"
    log_failure(log, logging.INFO, "authentication", text, client_id, client.connection.peer, verdict.why, extra=ids)


def admit(client: Client, granted: Allow) -> None:
    """Let an authenticated client in; its connection ends when its credentials or its certificate expire.

    Raises:
        NotAuthorized: the client has gone, or its credentials are already invalid or expired.
    """
    if not client.alive:
        raise NotAuthorized("the client has disconnected")
    if not granted.valid():  # the access files were reloaded during the authentication
        raise NotAuthorized("the credentials are no longer valid")
    client.admit(granted)
    ends = [one for one in (granted.expires, end_of(client.connection.transport)) if one is not None]
    if ends:
        left = min(ends) - time()
        if left <= 0:
            raise NotAuthorized("the credentials have expired")
        expired = MqttError("the credentials have expired", ReasonCode.MAXIMUM_CONNECT_TIME)
        client.end_by(asyncio.get_running_loop().call_later(left, client.end_connection, expired))


async def _decision(work: Coroutine[Any, Any, T], seconds: float, *, immediate: bool = False) -> T:
    try:
        if immediate:
            return await work
        async with asyncio.timeout(seconds):
            return await work
    except (Exception, asyncio.CancelledError) as error:
        if ends_task(error):
            raise
        text = "the authenticator failed, so access is denied: %s"
        log_failure(log, logging.ERROR, "authenticator", text, describe(error))
        raise NotAuthorized("the authenticator failed") from None


def begin(client: Client, connect: Connect) -> Authentication | None:
    """Return the enhanced authentication of a CONNECT; None: it names no authentication method."""
    method = (connect.properties or {}).get("authentication_method")
    return None if method is None else Authentication(client, method)


class Authentication:
    """Enhanced authentication of a client: the method that CONNECT names, and the running exchange."""

    __slots__ = ("_answer", "_busy", "_client", "_method", "_user")

    def __init__(self, client: Client, method: str) -> None:
        self._client = client
        self._method = method
        self._user = ""
        self._busy = False
        self._answer: asyncio.Future[bytes | None] | None = None
        """Gets the authentication data of the client's next AUTH; None = no challenge is unanswered."""

    # -- from the client ------------------------------------------------------------------------

    def early(self, packets: list[Packet]) -> None:
        """Handle packets before CONNACK: one AUTH per challenge, or DISCONNECT [MQTT-3.1.2-30] (5.0)."""
        client = self._client
        if not client.alive:
            return
        answer: Auth | None = None
        for packet in packets:
            if isinstance(packet, Disconnect):
                client.close()
                client.lost()
                return
            if not isinstance(packet, Auth) or self._answer is None or answer is not None:
                raise ProtocolError(f"{type(packet).__name__} before CONNACK")
            answer = packet
        if answer is not None:
            self.received(answer)
            client.connection.hold(Hold.HANDSHAKE)

    def received(self, packet: Auth) -> None:
        """Handle an AUTH packet.

        Raises:
            MqttError: AUTH names another method [MQTT-4.12.0-5] [MQTT-4.12.1-1] (5.0), or is not expected now.
        """
        properties = packet.properties or {}
        if properties.get("authentication_method") != self._method:
            raise MqttError(
                "AUTH with another authentication method than CONNECT", ReasonCode.BAD_AUTHENTICATION_METHOD
            )
        data = properties.get("authentication_data")
        if packet.reason == ReasonCode.REAUTHENTICATE and not self._busy:
            self._client.services.tasks.spawn(self._again(data), "re-authentication")
            self._busy = True
        elif packet.reason == ReasonCode.CONTINUE_AUTHENTICATION and self._answer is not None:
            answer, self._answer = self._answer, None
            answer.set_result(data)
        else:
            raise ProtocolError("AUTH is not expected")  # [MQTT-4.12.0-3] (5.0)

    def lost(self) -> None:
        """End the exchange that waits for the client's answer: the client has gone."""
        if self._answer is not None:
            answer, self._answer = self._answer, None
            answer.set_exception(NotAuthorized("the client has disconnected"))

    # -- exchanges ------------------------------------------------------------------------------

    async def open(self, connect: Connect, client_id: str) -> Properties:
        """Run the exchange that begins with CONNECT; returns its properties for CONNACK.

        Raises:
            MqttError: access is denied [MQTT-4.12.0-4] (5.0).
        """
        client = self._client
        if self._method not in client.access.methods:  # [MQTT-4.12.0-1] (5.0)
            raise MqttError("the authentication method is not supported", ReasonCode.BAD_AUTHENTICATION_METHOD)
        data = (connect.properties or {}).get("authentication_data")
        done = await self._exchange(client_id, data, client.connection.opened)
        self._user = done.user
        admit(client, Allow(done.user, valid=done.valid))
        client.connection.decoder.trust()
        return self._properties(done.data)

    async def _again(self, data: bytes | None) -> None:
        """Re-authenticate the client; its other packets are handled meanwhile."""
        client = self._client
        try:
            done = await self._exchange(client.client_id, data, asyncio.get_running_loop().time())
            if done.user != self._user:
                raise NotAuthorized("re-authentication as another user")
            admit(client, Allow(done.user, valid=done.valid))
            self._send(ReasonCode.SUCCESS, done.data)
        except MqttError as error:
            client.end_connection(error)  # [MQTT-4.12.1-2] (5.0)

    async def _exchange(self, client_id: str, data: bytes | None, since: float) -> Success:
        """Run an exchange, which must end within `connect_timeout` of ``since`` (loop time in seconds)."""
        client = self._client
        access = client.access
        self._busy = True
        try:
            exchange = await _decision(access.begin(self._method, client_id, client.connection), AUTHENTICATION_MOST_S)
            async with asyncio.timeout_at(since + client.connection.settings.connect_timeout):
                for left in reversed(range(ROUNDS_MOST)):
                    verdict = await _decision(exchange.step(data), AUTHENTICATION_MOST_S)
                    if not client.alive:
                        raise NotAuthorized("the client has disconnected")
                    if isinstance(verdict, Success):
                        return verdict
                    if isinstance(verdict, Denied):
                        _log_denial(client, client_id, verdict)
                        raise NotAuthorized("access denied")
                    if left:
                        data = await self._ask(verdict.data)
        except TimeoutError:
            raise NotAuthorized("authentication takes too long") from None
        finally:
            self._busy = False
            self._answer = None
        raise NotAuthorized("authentication takes too many steps")

    async def _ask(self, data: bytes) -> bytes | None:
        """Send a challenge [MQTT-4.12.0-2] (5.0); returns the client's answer."""
        self._send(ReasonCode.CONTINUE_AUTHENTICATION, data)
        self._answer = asyncio.get_running_loop().create_future()
        self._client.connection.release(Hold.HANDSHAKE)
        return await self._answer

    def _send(self, reason: ReasonCode, data: bytes) -> None:
        client = self._client
        packet = encode(Auth(reason, self._properties(data)), 5)
        if len(packet) > client.terms.maximum_packet_size:  # [MQTT-3.1.2-24] (5.0)
            raise PacketTooLarge("the client's Maximum Packet Size is too small for the authentication")
        client.write_buffer.write(packet)

    def _properties(self, data: bytes) -> Properties:
        # No reason string, no user properties [MQTT-3.15.2-2] [MQTT-3.15.2-3] (5.0)
        found: Properties = {"authentication_method": self._method}  # [MQTT-4.12.0-5] (5.0)
        if data:
            found["authentication_data"] = data
        return found


def identify(client: Client) -> None:
    """Set the permissions of an identified client by the present rules and hooks."""
    client.forget_decisions()
    rules, own = client.account.rules.present, client.granted.rules
    hooks = client.services.hooks
    asking = hooks.in_use and hooks.deciding(CLIENT_AUTHORIZE) is not None
    if client.granted is ADMINISTRATOR or (rules is None and own is None and not asking):
        client.guard_by(None)
        return
    identity = Identity(client.user, client.client_id, client.connection.host, client.granted.groups)
    found = [one.permissions(identity) for one in (rules, own) if one is not None] or [EVERYTHING]
    permissions = found[0] if len(found) == 1 else Both(found[0], found[1])
    client.guard_by((AskingGuard if asking else Guard)(client, identity, permissions))


async def hand_over(client: Client, client_id: str) -> None:
    """Move an authenticated client to the account of its tenant and wait until that account is connected to NATS.

    Until then the client belongs to the account of its listener, of which only the CONNECT hooks and the bans of
    addresses concern the client. See docs/internals/gateway.md#tenants.

    Raises:
        NotAuthorized: the listener is for another tenant, or the client's tenant does not exist.
        MqttError: the client's tenant is not served at present.
    """
    former, tenant = client.account, client.granted.tenant
    if tenant is None or tenant == former.tenant:
        return
    account = former.accounts.get(tenant)
    if tenant in former.refused and account is None:
        raise MqttError(UNSERVED, ReasonCode.SERVER_UNAVAILABLE)
    if former.tenant or not tenant or account is None:
        here = f"this listener is for tenant {former.tenant!r}" if former.tenant else "there is no such tenant"
        text = "client %r from %s is of tenant %r: %s"
        log_failure(log, logging.ERROR, "tenant", text, client_id, client.connection.peer, tenant, here)
        raise NotAuthorized("access denied")
    former.registry.leave(client)
    client.move(account)
    account.registry.enter(client)
    client.connection.move(client.path.round, client.services.clock)
    if client.services.nats.standing:  # the end of an account's standstill concerns the clients of that account only
        client.connection.hold(Hold.STANDSTILL)
    else:
        client.connection.release(Hold.STANDSTILL)
    account.fit(client)
    await client.connected()
