# SPDX-License-Identifier: Apache-2.0
"""Routing table: the subscribers on this gateway of each topic.

One :class:`Filter` per distinct topic filter has its members and its NATS subscriptions. One
:class:`Route` per topic, cached, has everything that does not change between two messages on that
topic: the encoded subject, the beginnings of the NATS frames, and the members that get the message.

A member with several matching filters is served through the filter that it confirmed first, at the highest
granted QoS. So a message that NATS delivers once for each filter reaches the member once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Final

from mqtt_nats.access.acl import of_presence
from mqtt_nats.backbone.link import Handler, NatsConnection
from mqtt_nats.base.bucket import MemoryBudget, Share
from mqtt_nats.codec import MqttError, NotAuthorized, TopicNameInvalid, validate_topic_name
from mqtt_nats.codec.wire import put_string
from mqtt_nats.pubsub.backlog import Gate as Gate
from mqtt_nats.pubsub.filter_index import FilterIndex
from mqtt_nats.pubsub.granted_options import PLAIN as PLAIN
from mqtt_nats.pubsub.granted_options import Choice as Choice
from mqtt_nats.pubsub.granted_options import Options as Options
from mqtt_nats.pubsub.granted_options import place
from mqtt_nats.pubsub.subject_mapping import Transform, mapped
from mqtt_nats.pubsub.subscribers import NOBODY as NOBODY
from mqtt_nats.pubsub.subscribers import Carrier, cover
from mqtt_nats.pubsub.subscribers import Filter as Filter
from mqtt_nats.pubsub.subscribers import Group as Group
from mqtt_nats.pubsub.subscribers import Member as Member
from mqtt_streams.subjects import (
    ReservedSubject,
    SubjectTooLong,
    is_reserved,
    system_subject,
    topic_to_subject,
    visible_to_wildcard,
    wire_topic,
)

if TYPE_CHECKING:
    from mqtt_nats.pubsub.filter_handover import Parting

# The cache of routes is emptied at this number of topics, or at this many bytes (roughly): topics may be long, and
# each route lists its members. A gateway passes its own memory budget.
MAX_ROUTES = 100_000
MAX_ROUTE_BYTES = 64 * 1024 * 1024
ROUTE_BYTES: Final = 768
KEY_COPIES: Final = 6
MEMBER_BYTES: Final = 80


class Route:
    """Route of one topic: everything that the message path needs."""

    __slots__ = (
        "asked",
        "groups",
        "hpub",
        "key",
        "local",
        "msgs",
        "origin",
        "pub",
        "size",
        "stated",
        "subject",
        "topic",
        "version",
    )

    def __init__(self, key: bytes, topic: str, subject: str, asked: bytes = b"", origin: str = "") -> None:
        self.key = key
        self.topic = topic
        self.subject = subject
        self.asked = asked or key
        """Topic key on which clients publish; subject mappings map it to `key`. Equal to `key` without a mapping."""
        self.origin = origin or subject
        """Subject of `asked`, before the mapping."""
        self.version = -1
        published = self.origin.encode()
        self.pub = b"PUB %b " % published
        self.hpub = b"HPUB %b " % published
        self.msgs = b"HPUB $MQTT.msgs.%b " % subject.encode()
        self.stated = b"Nmqtt-Subject:%b\r\n" % subject.encode()
        """Header line of bare copies that names the subject under which the message is stored."""
        self.local = NOBODY
        """Members that are served locally, not through NATS."""
        self.groups: dict[Filter, Group] = {}
        self.size = 0
        """Estimated memory of the route in bytes."""

    def outdate(self) -> None:
        """Mark the route as outdated: it is resolved again before its next use."""
        self.version = -1

    def resolve(self, version: int, groups: dict[Filter, Group], local: Group) -> None:
        """Set the members that get the message, as of a version of the table."""
        self.version = version
        self.groups, self.local = groups, local

    def release(self) -> None:
        """Remove the members from an outdated route."""
        self.groups, self.local = {}, NOBODY

    def measure(self, size: int) -> int:
        """Set the estimated memory in bytes; return by how much it has grown."""
        grown, self.size = size - self.size, size
        return grown


class Table:
    """Table of the subscriptions of all clients of this gateway."""

    def __init__(
        self,
        local_dispatch: bool = True,
        max_levels: int = 128,
        max_bytes: int = 65_535,
        mappings: tuple[Transform, ...] = (),
        budget: MemoryBudget | None = None,
    ) -> None:
        self.version = 0
        """Version, raised when a change may concern any topic; routes of another version are resolved again."""
        self.routes: dict[bytes, Route] = {}
        """Routes of topics on which clients publish, by topic key as in a packet."""
        self.by_subject: dict[bytes, Route] = {}
        """Routes of arriving messages, by subject; without mappings the objects of `routes` if clients may publish."""
        self._mappings = mappings
        self._apart: dict[bytes, list[Route]] = {}
        """Routes by topic key: with mappings, all routes; without, only the routes that are not in `routes`."""
        budget = budget or MemoryBudget(MAX_ROUTE_BYTES, MAX_ROUTE_BYTES)
        self._memory = Share(budget, self._start_over, budget.limit)
        self._spellings: dict[bytes, list[bytes]] = {}
        """Further subjects that lead to a route of `routes`, by its key."""
        self.filters: dict[str, Filter] = {}
        self.subscriptions = 0
        """Number of subscriptions of all members."""
        self.carriers: dict[str, Carrier] = {}
        """Carriers by filter: each brings the messages of filters that overlap many other filters of a session."""
        self.partings: dict[Member, Parting] = {}
        """Filter handovers in progress, by member."""
        self.on_joined: Callable[[Filter, Member, int], None] = lambda found, member, qos: None
        """``on_joined(found, member, qos)``: core NATS serves a member through a filter from now on."""
        self._index: FilterIndex[Filter] = FilterIndex()
        self._local_dispatch = local_dispatch
        self._most = max_levels, max_bytes

    def call_on_joined(self, joined: Callable[[Filter, Member, int], None]) -> None:
        """Set whom to tell of new subscriptions; see :attr:`on_joined`."""
        self.on_joined = joined

    # -- subscriptions --------------------------------------------------------------------------

    def subscribe(
        self,
        member: Member,
        text: str,
        qos: int,
        subjects: tuple[str, ...],
        link: NatsConnection,
        arrived: Callable[[Filter], Handler],
        options: Options = PLAIN,
    ) -> Filter:
        """Add ``member`` to a filter, or change its QoS and options there; subscribe a new filter in NATS.

        Args:
            subjects: the NATS subjects of the filter.
            link: the connection that carries them.
            arrived: makes the handler of the filter's NATS messages.
        """
        found = self.filters.get(text)
        if found is None:
            # A filter with a wildcard at the start is on a connection of its own, which also gets this
            # gateway's own messages: to serve such a filter locally would deliver them twice.
            local = self._local_dispatch and text[0] not in "#+"
            carrier = self._carrier(member, text, link)
            found = Filter(text, tuple(s.encode() for s in subjects), link, local, carrier)
            self.filters[text] = found
            self._index.add(text, found)
            handler = arrived(found)
            if carrier is None:
                found.carry([link.subscribe_raw(subject, handler) for subject in found.subjects])
            else:
                carrier.carried[found] = handler
        elif found.denied:
            found.renew()
            if found.carrier is not None:
                found.carrier.renew()
        present = PLAIN if member.options is None else member.options.get(found, PLAIN)
        if found.members.get(member) != qos or present != options:
            self.changed(found)
        if member not in found.members:
            self.subscriptions += 1
            self.on_joined(found, member, qos)
        elif member.durable and not qos:  # until now readers have brought what is stored
            self.on_joined(found, member, qos)
        found.members[member] = qos
        member.filters[found] = qos
        member.joined(found)
        member.choose_options(found, None if options == PLAIN else options)
        return found

    def _carrier(self, member: Member, text: str, link: NatsConnection) -> Carrier | None:
        """Return the carrier for a new filter that overlaps many filters of its member; None: the filter needs none."""
        if not ("+" in text or "#" in text) or not member.overlapped(text):
            return None
        above = cover(text.split("/"))
        carrier = self.carriers.get(above)
        if carrier is None:
            carrier = self.carriers[above] = Carrier(above, link, self._takers)
        return carrier

    def _takers(self, subject: bytes) -> Collection[Filter]:
        """Return the filters through which messages of a subject are delivered."""
        route = self.route_of_subject(subject)
        return () if route is None else route.groups

    def unsubscribe(self, member: Member, text: str) -> bool:
        """Remove ``member`` from a filter; False when the member was not there."""
        found = self.filters.get(text)
        if found is None or member not in found.members:
            return False
        self.changed(found)
        self.subscriptions -= 1
        found.remove_member(member)
        del member.filters[found]
        member.parted(found)
        member.choose_options(found, None)
        if not found.members:
            self._drop(found)
        return True

    def change_all(self) -> None:
        """Outdate all routes."""
        self.version += 1

    def changed(self, found: Filter) -> None:
        """Outdate the routes that a filter matches: all routes for a filter with wildcards, else one topic's.

        So clients that come and go with topics of their own do not have the subscribers of every other topic looked up.
        """
        text = found.text
        if "+" in text or "#" in text:
            self.version += 1
            return
        key = put_string(text)
        for route in self._apart.get(key, ()):
            route.outdate()
        if (known := self.routes.get(key)) is not None:
            known.outdate()

    def leave(self, member: Member) -> None:
        """Remove ``member`` from every filter."""
        self.subscriptions -= len(member.filters)
        for found in member.filters:
            self.changed(found)
            found.remove_member(member)
            if not found.members:
                self._drop(found)
        member.forget_filters()
        self.partings.pop(member, None)

    def _drop(self, found: Filter) -> None:
        for sid in found.sids:
            found.link.unsubscribe_raw(sid)
        if found.carrier is not None:
            self._put_down(found.carrier, found)
        del self.filters[found.text]
        self._index.remove(found.text)

    def _put_down(self, carrier: Carrier, found: Filter) -> None:
        del carrier.carried[found]
        if not carrier.carried:
            carrier.unsubscribe()
            self.carriers = {text: one for text, one in self.carriers.items() if one is not carrier}

    def renew(self, link: NatsConnection) -> None:
        """Subscribe all filters and carriers of ``link`` again after a reconnect."""
        for carrier in self.carriers.values():
            if carrier.link is link:
                carrier.renew()
        for found in self.filters.values():
            if found.link is link:
                found.renew()

    def deny(self, link: NatsConnection, subject: bytes) -> None:
        """Mark the filters of ``subject`` as denied: NATS does not allow ``link`` to subscribe it."""
        for found in self.filters.values():
            subjects = found.subjects if found.carrier is None else found.carrier.subjects
            if found.link is link and subject in subjects:
                found.deny()

    # -- routes ---------------------------------------------------------------------------------

    def route(self, key: bytes) -> Route:
        """Return the route of a topic as it stands in a PUBLISH packet (with its two length bytes).

        Raises:
            MqttError: the topic is not a legal name, is reserved [MQTT-3.3.5-2], or too long for NATS.
        """
        found = self.routes.get(key)
        if found is None:
            found = self._make(key)
        if found.version != self.version:
            self._resolve(found)
        return found

    def system_route(self, key: bytes) -> Route:
        """Return the route of a `$SYS` topic, unchecked for permission; raises MqttError if the topic is not legal."""
        topic = validate_topic_name(key, *self._most)
        try:
            found = self.route_of_subject(system_subject(topic).encode())
        except SubjectTooLong as long:
            raise TopicNameInvalid(str(long)) from None
        assert found is not None  # the subject of a legal topic always names a legal topic
        return found

    def wanted(self, topic: str) -> bool:
        """Return whether any filter matches a topic."""
        return bool(self._index.match(topic))

    def _make(self, key: bytes) -> Route:
        topic = validate_topic_name(key, *self._most)
        try:
            subject = topic_to_subject(topic)
        except ReservedSubject as error:
            raise NotAuthorized(str(error)) from None
        except SubjectTooLong as long:
            raise TopicNameInvalid(str(long)) from None
        if not self._mappings:
            return self._keep(Route(key, topic, subject))
        if len(self.routes) >= MAX_ROUTES:
            self._memory.forget()
        found = mapped(self._mappings, subject)
        target = topic if found == subject else wire_topic(found.encode())
        if target is None:
            raise TopicNameInvalid("the topic is mapped to a subject that is none for MQTT")
        route = self.routes[key] = self._note(Route(put_string(target), target, found, key, subject))
        return route

    def _keep(self, route: Route) -> Route:
        if len(self.routes) >= MAX_ROUTES:
            self._memory.forget()
        self._measure(route, 0)
        self.routes[route.key] = route
        self.by_subject[route.subject.encode()] = route
        return route

    def _note(self, route: Route) -> Route:
        """Keep a route apart from `routes`: publish and arrival routes of its topic may differ."""
        self._measure(route, 0)
        self._apart.setdefault(route.key, []).append(route)
        return route

    def _start_over(self) -> None:
        self.version += 1
        self.routes.clear()
        self.by_subject.clear()
        self._apart.clear()
        self._spellings.clear()

    def forget(self, keys: Sequence[bytes]) -> None:
        """Drop the routes of topics on which clients publish, given as they stand in packets."""
        gone = [route for route in [self.routes.pop(key, None) for key in keys] if route is not None]
        for route in gone:
            route.outdate()
            self._memory.add(-route.size)
            if not self._mappings:
                for subject in (route.subject.encode(), *self._spellings.pop(route.key, ())):
                    self.by_subject.pop(subject, None)
        for key in {route.key for route in gone} & self._apart.keys():
            left = [
                one
                for one in self._apart.pop(key)
                if self.routes.get(one.asked) is one or self.by_subject.get(one.subject.encode()) is one
            ]
            if left:
                self._apart[key] = left

    def _measure(self, route: Route, members: int) -> None:
        size = ROUTE_BYTES + KEY_COPIES * len(route.key) + MEMBER_BYTES * members
        self._memory.add(route.measure(size))

    def release(self) -> None:
        """Remove the members from routes that were not used since the last change of the table."""
        for routes in (self.routes, self.by_subject) if self._mappings else (self.by_subject,):
            for route in routes.values():
                if route.version != self.version and route.groups:
                    route.release()

    def _resolve(self, route: Route) -> None:
        """Determine the members that get a message on this route's topic."""
        filters = self._index.match(route.topic)
        if route.subject[:1] == "_" and not visible_to_wildcard(route.subject):
            filters = [found for found in filters if found.text[0] not in "#+"]
        groups: dict[Filter, Group] = {}
        apart = route.asked != route.key or of_presence(route.key)
        if len(filters) == 1 and not self.partings:
            only = filters[0]
            group = groups[only] = Group()
            for member, qos in only.members.items():
                place(group, member, qos, only, (only,), apart)
        elif filters:
            owned: dict[Member, list[Filter]] = {}
            others: set[Filter] = set()
            for found in filters:
                for member in found.members:
                    owned.setdefault(member, []).append(found)
            for member, mine in owned.items():
                mine = member.in_order(mine)
                others.update(one for one in mine[1:] if member.filters[one] and not member.durable)
                first, granted = mine[0], max([member.filters[one] for one in mine])
                parting = self.partings.get(member)
                if parting is None or not parting.place(groups, first, granted, mine):
                    place(groups.setdefault(first, Group()), member, granted, first, mine, apart)
            for found in others:  # they note what has come: they may be the first ones later
                groups.setdefault(found, NOBODY)
        local = [group for found, group in groups.items() if found.local]
        only_local = local[0] if local else NOBODY
        if len(local) > 1:
            only_local = Group()
            for group in local:
                only_local.merge(group)
        route.resolve(self.version, groups, only_local)
        members = sum(map(len, groups.values()))
        if MEMBER_BYTES * members > ROUTE_BYTES or route.size > ROUTE_BYTES + KEY_COPIES * len(route.key):
            self._measure(route, members)

    def route_of_subject(self, subject: bytes) -> Route | None:
        """Return the route of a NATS subject; None when the subject names no legal MQTT topic."""
        found = self.by_subject.get(subject)
        if found is None:
            topic = wire_topic(subject)
            if topic is None:
                return None
            if len(self.by_subject) >= (MAX_ROUTES if self._mappings else 2 * MAX_ROUTES):
                self._memory.forget()
            found = self._arriving(topic, subject)
            if self.routes.get(found.key) is found and subject != found.subject.encode():
                self._spellings.setdefault(found.key, []).append(subject)
            self.by_subject[subject] = found
        if found.version != self.version:
            self._resolve(found)
        return found

    def _arriving(self, topic: str, subject: bytes) -> Route:
        """Return the route of arriving messages of a topic.

        Without mappings it is the route of published messages if clients may publish there. A subject that this gateway
        would not make (with a lone slash) leads to the same topic; messages published on it have its own subject.
        """
        key = put_string(topic)
        if not self._mappings:
            try:
                return self.routes.get(key) or self._make(key)
            except MqttError:
                pass  # no client may publish on it
        return self._note(Route(key, topic, subject.decode()))

    def route_to(self, subject: bytes) -> Route | None:
        """Return the route for publishing on a NATS subject; None when the subject names no legal MQTT topic."""
        found = self.route_of_subject(subject)
        if found is not None and self._mappings and not is_reserved(found.subject):
            return self.route(found.key)
        return found
