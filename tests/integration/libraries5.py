# SPDX-License-Identifier: Apache-2.0
"""The MQTT 5.0 clients of paho-mqtt, aiomqtt and gmqtt."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

import aiomqtt
import gmqtt
import paho.mqtt.client as paho
from gmqtt.storage import PersistentStorage
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from mqtt_nats import codec
from tests.harness.gateway import Gateway
from tests.harness.paho import stop
from tests.harness.waiting import aeventually
from tests.integration.library5 import DEADLINE, Library, Received, RefusedError


def _camel(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_")).replace("Qos", "QoS")


_PAHO_NAMES = {_camel(name): name for name in get_type_hints(codec.Properties)}


def _to_paho(kind: int, properties: Mapping[str, Any]) -> Properties:
    converted = Properties(kind)  # type: ignore[no-untyped-call]
    for name, value in properties.items():
        setattr(converted, _camel(name), value)
    return converted


def _from_paho(properties: Properties | None) -> dict[str, Any]:
    found = {ours: getattr(properties, theirs) for theirs, ours in _PAHO_NAMES.items() if hasattr(properties, theirs)}
    return {name: list(value) if isinstance(value, list) else value for name, value in found.items()}


def _options(qos: int, no_local: bool, as_published: bool, handling: int, identifier: int) -> dict[str, Any]:
    properties = {"subscription_identifier": identifier} if identifier else {}
    return {
        "options": SubscribeOptions(qos, no_local, as_published, handling),
        "properties": _to_paho(PacketTypes.SUBSCRIBE, properties),
    }


class Paho(Library):
    """paho-mqtt, with its network thread and its callbacks of version 2."""

    def __init__(self, gateway: Gateway, client_id: str, **options: Any) -> None:
        super().__init__(gateway, client_id, **options)
        self._client = paho.Client(
            CallbackAPIVersion.VERSION2,
            client_id,
            protocol=paho.MQTTv5,
            reconnect_on_failure=False,
            manual_ack=True,
        )
        if self.will is not None:
            will = self.will
            properties = _to_paho(PacketTypes.WILLMESSAGE, will.properties)
            self._client.will_set(will.topic, will.payload, will.qos, will.retain, properties)
        self._client.on_connect = self._on_connect
        self._client.on_disconnect = self._on_disconnect
        self._client.on_message = self._on_message
        self._client.on_subscribe = self._on_subscribe
        self._client.on_publish = self._on_publish
        self._reason: int | None = None
        self._granted: dict[int, list[int]] = {}
        self._unacknowledged: list[tuple[int, int]] = []
        self.published: dict[int, int] = {}
        """Packet id → reason code of PUBACK, PUBREC or PUBCOMP."""

    def _on_connect(
        self,
        client: object,
        data: object,
        flags: paho.ConnectFlags,
        reason: ReasonCode,
        properties: Properties | None,
    ) -> None:
        self.present, self.connack = flags.session_present, _from_paho(properties)
        self._reason = reason.value

    def _on_disconnect(
        self,
        client: object,
        data: object,
        flags: paho.DisconnectFlags,
        reason: ReasonCode,
        properties: Properties | None,
    ) -> None:
        if flags.is_disconnect_packet_from_server:
            self.farewells.append(reason.value)

    def _on_message(self, client: object, data: object, message: paho.MQTTMessage) -> None:
        properties = _from_paho(message.properties)
        self.got.append(Received(message.topic, bytes(message.payload), message.qos, message.retain, properties))
        if self.holding:
            self._unacknowledged.append((message.mid, message.qos))
        else:
            self._client.ack(message.mid, message.qos)

    def _on_subscribe(self, client: object, data: object, mid: int, codes: list[ReasonCode], _: object) -> None:
        self._granted[mid] = [code.value for code in codes]

    def _on_publish(self, client: object, data: object, mid: int, reason: ReasonCode, _: object) -> None:
        self.published[mid] = reason.value

    async def connect(self) -> None:
        self._client.connect(
            self.gateway.host,
            self.gateway.port,
            clean_start=self.clean,
            properties=_to_paho(PacketTypes.CONNECT, self.properties),
        )
        self._client.loop_start()
        await aeventually(lambda: self._reason is not None, DEADLINE, what="CONNACK")
        if self._reason:
            stop(self._client)
            raise RefusedError(self._reason)

    async def subscribe(
        self,
        topic_filter: str,
        qos: int = 0,
        *,
        no_local: bool = False,
        as_published: bool = False,
        handling: int = 0,
        identifier: int = 0,
    ) -> int:
        options = _options(qos, no_local, as_published, handling, identifier)
        _, mid = self._client.subscribe(topic_filter, **options)
        assert mid is not None
        (code,) = await aeventually(lambda: self._granted.pop(mid, None), DEADLINE, what="SUBACK")
        return code

    async def publish(
        self, topic: str, payload: bytes, qos: int = 0, *, retain: bool = False, **properties: Any
    ) -> None:
        await self.outcome(topic, payload, qos, retain=retain, **properties)

    async def outcome(
        self, topic: str, payload: bytes, qos: int = 0, *, retain: bool = False, **properties: Any
    ) -> int:
        """Publish, and tell the reason code of what has ended the exchange."""
        converted = _to_paho(PacketTypes.PUBLISH, properties)
        info = self._client.publish(topic, payload, qos, retain, converted)
        await aeventually(lambda: info.mid in self.published, DEADLINE, what="the end of the exchange")
        return self.published.pop(info.mid)

    async def go_on(self) -> None:
        self.holding = False
        for mid, qos in self._unacknowledged:
            self._client.ack(mid, qos)
        self._unacknowledged.clear()

    async def disconnect(self, reason: int = 0, **properties: Any) -> None:
        code = ReasonCode(PacketTypes.DISCONNECT, identifier=reason)
        self._client.disconnect(code, _to_paho(PacketTypes.DISCONNECT, properties))
        await asyncio.to_thread(stop, self._client)

    async def drop(self) -> None:
        sock = self._client.socket()
        assert isinstance(sock, socket.socket)
        sock.shutdown(socket.SHUT_RDWR)
        await asyncio.to_thread(stop, self._client)


_LOST = 0x80
"""What paho says of a connection that ended without a DISCONNECT."""


def _value(reason: int | ReasonCode | None) -> int:
    assert isinstance(reason, ReasonCode)
    return int(reason.value)


class Aiomqtt(Library):
    """aiomqtt, with a task that reads its messages."""

    def __init__(self, gateway: Gateway, client_id: str, **options: Any) -> None:
        super().__init__(gateway, client_id, **options)
        assert not self.holding, "aiomqtt acknowledges by itself"
        will = None
        if self.will is not None:
            properties = _to_paho(PacketTypes.WILLMESSAGE, self.will.properties)
            will = aiomqtt.Will(self.will.topic, self.will.payload, self.will.qos, self.will.retain, properties)
        self._client = aiomqtt.Client(
            gateway.host,
            gateway.port,
            identifier=client_id,
            protocol=aiomqtt.ProtocolVersion.V5,
            clean_start=self.clean,
            will=will,
            properties=_to_paho(PacketTypes.CONNECT, self.properties),
        )
        self._inner: paho.Client = self._client._client
        self._inner.on_connect = self._see_connack(self._inner.on_connect)
        self._reading: asyncio.Task[None] | None = None

    def _see_connack(self, inner: Any) -> Callable[..., None]:
        """aiomqtt does not show what is in CONNACK."""

        def on_connect(
            client: object, data: object, flags: paho.ConnectFlags, reason: ReasonCode, properties: Properties | None
        ) -> None:
            self.present, self.connack = flags.session_present, _from_paho(properties)
            inner(client, data, flags, reason, properties)

        return on_connect

    async def _read(self) -> None:
        try:
            async for message in self._client.messages:
                assert isinstance(message.payload, bytes)
                properties = _from_paho(message.properties)
                topic = str(message.topic)
                self.got.append(Received(topic, message.payload, message.qos, message.retain, properties))
        except aiomqtt.MqttError as error:
            cause = error.__cause__
            if isinstance(cause, aiomqtt.MqttCodeError) and (reason := _value(cause.rc)) != _LOST:
                self.farewells.append(reason)

    async def connect(self) -> None:
        try:
            await self._client.__aenter__()
        except aiomqtt.MqttCodeError as error:
            raise RefusedError(_value(error.rc)) from None
        self._reading = asyncio.create_task(self._read())

    async def subscribe(
        self,
        topic_filter: str,
        qos: int = 0,
        *,
        no_local: bool = False,
        as_published: bool = False,
        handling: int = 0,
        identifier: int = 0,
    ) -> int:
        options = _options(qos, no_local, as_published, handling, identifier)
        (code,) = await self._client.subscribe(topic_filter, **options)
        return _value(code)

    async def publish(
        self, topic: str, payload: bytes, qos: int = 0, *, retain: bool = False, **properties: Any
    ) -> None:
        converted = _to_paho(PacketTypes.PUBLISH, properties)
        await self._client.publish(topic, payload, qos, retain, converted)

    async def go_on(self) -> None:
        raise NotImplementedError

    async def disconnect(self, reason: int = 0, **properties: Any) -> None:
        assert (reason, properties) == (0, {}), "aiomqtt says nothing in DISCONNECT"
        await self._client.__aexit__(None, None, None)
        await self._end_reading()

    async def drop(self) -> None:
        sock = self._inner.socket()
        assert isinstance(sock, socket.socket)
        sock.shutdown(socket.SHUT_RDWR)
        await self._end_reading()

    async def _end_reading(self) -> None:
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=1)
            self._reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reading


_GMQTT_NAMES = {
    "payload_format_indicator": "payload_format_id",
    "request_problem_information": "request_problem_info",
    "request_response_information": "request_response_info",
    "response_information": "response_info",
    "maximum_qos": "max_qos",
    "authentication_method": "auth_method",
    "subscription_identifier_available": "sub_id_available",
}
_FROM_GMQTT_NAMES = {theirs: ours for ours, theirs in _GMQTT_NAMES.items()}
_REPEATED = {"user_property", "subscription_identifier"}


def _to_gmqtt(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {_GMQTT_NAMES.get(name, name): value for name, value in properties.items()}


def _from_gmqtt(properties: Mapping[str, Any]) -> dict[str, Any]:
    """Every property is a list there, and flags of the packet are among them."""
    named = {_FROM_GMQTT_NAMES.get(name, name): value for name, value in properties.items()}
    return {name: value if name in _REPEATED else value[0] for name, value in named.items() if isinstance(value, list)}


class Gmqtt(Library):
    """gmqtt, which shares no code with the others."""

    def __init__(self, gateway: Gateway, client_id: str, **options: Any) -> None:
        super().__init__(gateway, client_id, **options)
        self._storage = PersistentStorage()
        will = None
        if self.will is not None:
            properties = _to_gmqtt(self.will.properties)
            will = gmqtt.Message(self.will.topic, self.will.payload, self.will.qos, self.will.retain, **properties)
        self._client = gmqtt.Client(
            client_id,
            clean_session=self.clean,
            will_message=will,
            persistent_storage=self._storage,
            optimistic_acknowledgement=not self.holding,
            **_to_gmqtt(self.properties),
        )
        self._client.set_config({"reconnect_retries": -2})  # 0 would still be one
        self._client.on_connect = self._on_connect
        self._client.on_disconnect = self._on_disconnect
        self._client.on_message = self._on_held_message if self.holding else self._on_message
        self._client.on_subscribe = self._on_subscribe
        self._granted: dict[int, tuple[int, ...]] = {}
        self._may_go_on = asyncio.Event()

    def _on_connect(self, client: object, flags: int, reason: int, properties: dict[str, Any]) -> None:
        self.present = bool(flags)
        # What it hands out as properties has those of CONNECT in the place of the same ones of CONNACK.
        self.connack = _from_gmqtt(self._client._package_handler._connack_properties)

    def _on_disconnect(self, client: object, packet: bytes, error: object = None) -> None:
        self.farewells += packet[:1]  # nothing when the connection just ends

    def _on_message(self, client: object, topic: str, payload: bytes, qos: int, properties: dict[str, Any]) -> None:
        retain = bool(properties["retain"])
        self.got.append(Received(topic, bytes(payload), qos, retain, _from_gmqtt(properties)))

    async def _on_held_message(
        self, client: object, topic: str, payload: bytes, qos: int, properties: dict[str, Any]
    ) -> int:
        self._on_message(client, topic, payload, qos, properties)
        await self._may_go_on.wait()
        return 0

    def _on_subscribe(self, client: object, mid: int, codes: tuple[int, ...], properties: object) -> None:
        self._granted[mid] = codes

    async def connect(self) -> None:
        try:
            async with asyncio.timeout(DEADLINE):
                await self._client.connect(self.gateway.host, self.gateway.port)
        except gmqtt.mqtt.handler.MQTTConnectError as error:
            raise RefusedError(error._code) from None

    async def subscribe(
        self,
        topic_filter: str,
        qos: int = 0,
        *,
        no_local: bool = False,
        as_published: bool = False,
        handling: int = 0,
        identifier: int = 0,
    ) -> int:
        mid = self._client.subscribe(
            gmqtt.Subscription(topic_filter, qos, no_local, as_published, handling, identifier or None)
        )
        (code,) = await aeventually(lambda: self._granted.pop(mid, None), DEADLINE, what="SUBACK")
        return code

    async def publish(
        self, topic: str, payload: bytes, qos: int = 0, *, retain: bool = False, **properties: Any
    ) -> None:
        self._client.publish(topic, payload, qos, retain, **_to_gmqtt(properties))
        async with asyncio.timeout(DEADLINE):
            await self._storage.wait_empty()

    async def go_on(self) -> None:
        self._may_go_on.set()

    async def disconnect(self, reason: int = 0, **properties: Any) -> None:
        await self._client.disconnect(reason, **_to_gmqtt(properties))

    async def drop(self) -> None:
        self._client._connection._transport.abort()


LIBRARIES: dict[str, type[Library]] = {"paho": Paho, "aiomqtt": Aiomqtt, "gmqtt": Gmqtt}
