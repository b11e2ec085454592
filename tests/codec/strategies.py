# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies for every packet that is legal in a version; properties come from the table."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import strategies as st

from mqtt_nats.codec import (
    Ack,
    AckRun,
    Auth,
    Connack,
    Connect,
    Disconnect,
    Packet,
    PingReq,
    PingResp,
    Properties,
    Publish,
    Suback,
    Subscribe,
    Subscription,
    Unsuback,
    Unsubscribe,
    Will,
)
from mqtt_nats.codec.properties import PROPERTIES, WILL, Property, Wire, place
from mqtt_nats.codec.wire import PacketKind
from tests.codec.support import key

text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
topics = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0+#"), min_size=1, max_size=20)
packet_ids = st.integers(1, 0xFFFF)
payloads = st.binary(max_size=300)
qos = st.integers(0, 2)


def _values(row: Property) -> st.SearchStrategy[Any]:
    if row.name == "response_topic":
        return topics
    if row.wire is Wire.STRING:
        return text
    if row.wire is Wire.BINARY:
        return st.binary(max_size=20)
    if row.wire is Wire.PAIR:
        return st.tuples(text, text)
    top = {Wire.BYTE: 0xFF, Wire.TWO: 0xFFFF, Wire.FOUR: 0xFFFF_FFFF, Wire.VARINT: 268_435_455}[row.wire]
    return st.integers(row.low, min(row.high, top))


def properties(where: int, *absent: str) -> st.SearchStrategy[Properties | None]:
    """Property lists for one place, without the named ones; authentication data only with its method."""
    optional = {
        row.name: st.lists(_values(row), min_size=1, max_size=3 if row.repeats & where else 1)
        if row.repeats
        else _values(row)
        for row in PROPERTIES
        if row.places & where and row.name not in absent
    }

    def tidy(found: dict[str, Any]) -> Properties | None:
        if "authentication_method" not in found:
            found.pop("authentication_data", None)
        return cast("Properties", found) or None

    return st.fixed_dictionaries({}, optional=optional).map(tidy)


def _for(version: int, where: int, *absent: str) -> st.SearchStrategy[Properties | None]:
    return properties(where, *absent) if version == 5 else st.none()


@st.composite
def connects(draw: st.DrawFn, version: int) -> Connect:
    will = None
    if draw(st.booleans()):
        will = Will(draw(topics), draw(payloads), draw(qos), draw(st.booleans()), draw(_for(version, WILL)))
    clean = draw(st.booleans())
    username = draw(st.none() | text)
    return Connect(
        version,
        draw(text if clean or version == 5 else topics),
        clean,
        draw(st.integers(0, 0xFFFF)),
        username,
        draw(st.none() | st.binary(max_size=20)) if version == 5 or username is not None else None,
        will,
        draw(_for(version, place(PacketKind.CONNECT))),
        version == 4 and draw(st.booleans()),
    )


@st.composite
def publishes(draw: st.DrawFn, version: int, side: str) -> Publish:
    level = draw(qos)
    absent = ("subscription_identifier",) if side == "client" else ()
    found = draw(_for(version, place(PacketKind.PUBLISH), *absent))
    topic = "" if found and "topic_alias" in found and draw(st.booleans()) else draw(topics)
    return Publish(
        level,
        draw(st.booleans()),
        bool(level) and draw(st.booleans()),
        key(topic),
        draw(packet_ids) if level else 0,
        draw(payloads),
        found,
    )


@st.composite
def acks(draw: st.DrawFn, version: int) -> Packet:
    kind = draw(st.integers(4, 7))
    if version == 5:
        reason = draw(st.sampled_from((0, 0x10, 0x80, 0x97) if kind < 6 else (0, 0x92)))
        found = draw(properties(place(PacketKind(kind))))
        if reason or found:
            return Ack(kind, draw(packet_ids), reason, found)
    return AckRun(kind, [draw(packet_ids)])


# "x" in front: no shared subscription, where No Local is not allowed
filters = st.builds("x{}{}".format, topics, st.sampled_from(("", "/", "/+", "/#", "/+/x", "/+/+/#")))


def subscribes(version: int) -> st.SearchStrategy[Packet]:
    if version == 5:
        one = st.builds(Subscription, filters, qos, st.booleans(), st.booleans(), qos)
    else:
        one = st.builds(Subscription, filters, qos)
    many = st.lists(one, min_size=1, max_size=5).map(tuple)
    return st.builds(Subscribe, packet_ids, many, _for(version, place(PacketKind.SUBSCRIBE)))


def _codes(*codes: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.sampled_from(codes), min_size=1, max_size=5).map(tuple)


def from_client(version: int) -> st.SearchStrategy[Packet]:
    """Any packet but CONNECT that a client may send."""
    several: list[st.SearchStrategy[Packet]] = [
        publishes(version, "client"),
        acks(version),
        subscribes(version),
        st.builds(
            Unsubscribe,
            packet_ids,
            st.lists(filters | filters.map("$share/g/{}".format), min_size=1, max_size=5).map(tuple),
            _for(version, place(PacketKind.UNSUBSCRIBE)),
        ),
        st.just(PingReq()),
    ]
    if version == 4:
        several.append(st.just(Disconnect()))
    else:
        found = properties(place(PacketKind.DISCONNECT), "server_reference")
        several.append(st.builds(Disconnect, st.sampled_from((0, 4, 0x80, 0x99)), found))
        several.append(
            st.builds(
                Auth,
                st.sampled_from((0x18, 0x19)),
                properties(place(PacketKind.AUTH), "authentication_method").map(
                    lambda found: cast("Properties", {**(found or {}), "authentication_method": "m"})
                ),
            )
        )
    return st.one_of(several)


def from_server(version: int) -> st.SearchStrategy[Packet]:
    """Any packet that a server may send."""
    several: list[st.SearchStrategy[Packet]] = [
        publishes(version, "server"),
        acks(version),
        st.just(PingResp()),
    ]
    connack = _for(version, place(PacketKind.CONNACK))
    several.append(st.builds(Connack, st.booleans(), st.just(0), connack))
    several.append(
        st.builds(Connack, st.just(False), st.sampled_from((1, 5) if version == 4 else (0x80, 0x9F)), connack)
    )
    granted = _codes(0, 1, 2, 0x80) if version == 4 else _codes(0, 1, 2, 0x80, 0x8F, 0xA2)
    several.append(st.builds(Suback, packet_ids, granted, _for(version, place(PacketKind.SUBACK))))
    ended = st.just(()) if version == 4 else _codes(0, 0x11, 0x8F)
    several.append(st.builds(Unsuback, packet_ids, ended, _for(version, place(PacketKind.UNSUBACK))))
    if version == 5:
        found = properties(place(PacketKind.DISCONNECT), "session_expiry_interval")
        several.append(st.builds(Disconnect, st.sampled_from((0, 0x8E, 0x9D)), found))
        several.append(st.builds(Auth, st.just(0), properties(place(PacketKind.AUTH))))
    return st.one_of(several)


def sent_by(side: str, version: int) -> st.SearchStrategy[Packet]:
    """Any packet but CONNECT that a side may send in a version."""
    return from_server(version) if side == "server" else from_client(version)
