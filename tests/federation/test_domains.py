# SPDX-License-Identifier: Apache-2.0
"""Gateways at a leafnode whose streams are in the JetStream domain of the hub: all is as with one nats-server."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple, cast

import orjson
import pytest
from click.testing import CliRunner

from mqtt_nats.cli import command
from tests.harness import raw, raw5
from tests.harness.gateway import Gateway
from tests.harness.leafnodes import DOMAIN, PATIENCE, Hub, Leaf
from tests.harness.raw5 import Raw5
from tests.harness.waiting import eventually

pytestmark = pytest.mark.processes

EXPIRY, DELAY = 17, 24  # properties of CONNECT and of a will
FOREVER = raw5.prop(EXPIRY, 3600)
LEAVES = ("no JetStream", "a domain of its own")
V2 = "feature_flags { js_ack_fc_v2: true }"
"""Acknowledgement subjects then name domain and account."""

AT_LEAF = ("--jetstream-domain", DOMAIN)


class Site(NamedTuple):
    """A hub with its leafnode, and gateways: two at the leafnode, one at the hub."""

    nats: Hub
    leaf: Gateway
    second: Gateway
    hub: Gateway

    @property
    def ways(self) -> list[tuple[Gateway, Gateway]]:
        """From where to where a message or a session goes."""
        return [(self.leaf, self.hub), (self.hub, self.leaf), (self.leaf, self.second), (self.leaf, self.leaf)]


@pytest.fixture(
    scope="module",
    params=[
        *product(LEAVES, ("consumers", "records"), ("",)),
        (LEAVES[0], "records", V2),
        (LEAVES[0], "consumers", V2),
    ],
    ids=lambda one: "-".join(filter(None, (*one[:2], one[2] and "v2"))).replace(" ", "_"),
)
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    kind, positions, more = request.param
    directory = tmp_path_factory.mktemp("site")
    nats = Hub(directory, cast(Leaf, kind), more=more)
    env = {"MQTT_NATS_SESSION_POSITIONS": positions}
    gateways = [
        Gateway(directory / f"{name}.log", "", env=env | {"MQTT_NATS_NATS": nats.urls[where]}, arguments=arguments)
        for name, where, arguments in (("one", "leaf", AT_LEAF), ("two", "leaf", AT_LEAF), ("three", "hub", ()))
    ]
    try:
        nats.start()
        for one in gateways:
            one.start()
        yield Site(nats, *gateways)
    finally:
        for one in gateways:
            one.process.discard()
        nats.discard()


def ctl(site: Site, *arguments: str) -> str:
    """What a command prints, at the leafnode."""
    done = CliRunner().invoke(command, ["ctl", "--nats", site.nats.urls["leaf"], *AT_LEAF, *arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def away(gateway: Gateway, name: str, *filters: tuple[bytes | str, int]) -> None:
    """A session that outlives its connection, with these subscriptions."""
    with Raw5.open(gateway.port, name, FOREVER) as client:
        assert client.subscribed(*filters) == tuple(qos for _, qos in filters)
        client.send(raw5.disconnect())
        client.expect_closed()


def test_clean_sessions_get_each_qos(site: Site) -> None:
    for number, (source, target) in enumerate(site.ways):
        with Raw5.open(source.port) as one, Raw5.open(target.port) as other, raw.Raw.connected(target.port) as old:
            assert other.subscribed((f"clean/{number}/#", 2)) == (2,)
            assert old.subscribe((f"clean/{number}/#", 2)) == [2]
            for qos in (0, 1, 2):
                one.deliver(f"clean/{number}/{qos}", b"%d" % qos, qos=qos)
                found = other.receive_message(b"%d" % qos)
                assert (found.qos, found.topic) == (qos, f"clean/{number}/{qos}")
                assert old.expect(raw.PUBLISH).payload == b"%d" % qos
            other.quiet()


def test_durable_sessions_get_each_qos_once_here_and_there(site: Site) -> None:
    """Connected or not; a session continues at another gateway."""
    for number, (source, target) in enumerate(site.ways):
        name = f"durable-{number}"
        away(source, name, (f"{name}/#", 2))
        with Raw5.open(source.port) as one:
            for qos in (1, 2):
                one.deliver(f"{name}/x", b"before %d" % qos, qos=qos)
            with Raw5.open(target.port, name, FOREVER, clean=False) as other:
                assert other.present
                for qos in (1, 2):
                    assert other.receive_message(b"before %d" % qos).qos == qos
                for qos in (0, 1, 2):
                    one.deliver(f"{name}/x", b"live %d" % qos, qos=qos)
                    assert other.receive_message(b"live %d" % qos).qos == qos
                other.quiet()
        with Raw5.open(source.port, name, FOREVER, clean=False) as other:
            assert other.present
            assert all(one.kind == raw.PUBREL for one in other.ping())  # of what was completed a moment ago


def test_what_was_not_acknowledged_comes_again_at_the_other_gateway(site: Site) -> None:
    for number, (source, target) in enumerate(site.ways):
        name = f"again-{number}"
        with Raw5.open(source.port, name, FOREVER) as client:
            assert client.subscribed((f"{name}/x", 2)) == (2,)
            with Raw5.open(target.port) as one:
                one.deliver(f"{name}/x", b"1", qos=1)
                one.deliver(f"{name}/x", b"2", qos=2)
            first, second = client.message(b"1"), client.message(b"2")
        with Raw5.open(target.port, name, FOREVER, clean=False) as client:
            assert client.present
            for known in (first, second):
                found = client.receive_message(known.payload)
                assert (found.id, found.dup) == (known.id, True)
            client.quiet()


def test_the_later_connection_takes_the_session_over(site: Site) -> None:
    for number, (source, target) in enumerate(site.ways[:3]):
        with (
            Raw5.open(source.port, f"moved-{number}", FOREVER) as one,
            Raw5.open(target.port, f"moved-{number}", FOREVER, clean=False) as other,
        ):
            assert other.present
            one.ended(0x8E)


def test_retained_messages(site: Site) -> None:
    for number, (source, target) in enumerate(site.ways):
        topic = f"retained/{number}"
        with Raw5.open(source.port) as one:
            one.deliver(topic, b"kept", flags=1)
        with Raw5.open(target.port) as other:
            assert other.subscribed((topic, 1)) == (1,)
            assert other.receive_message(b"kept").retain
            with Raw5.open(source.port) as one:
                one.deliver(topic, b"", flags=1)
            assert not other.receive_message(b"").retain
        with Raw5.open(target.port) as other:
            assert other.subscribed((topic, 1)) == (1,)
            other.quiet()


def test_wills_at_once_and_delayed(site: Site) -> None:
    """A delayed will is a timer in JetStream, which any gateway handles."""
    for number, (source, target) in enumerate(site.ways):
        with Raw5.open(target.port) as other:
            assert other.subscribed((f"wills/{number}/#", 1)) == (1,)
            for delay in (0, 1):
                will = raw5.will(f"wills/{number}/{delay}", b"gone", raw5.prop(DELAY, delay))
                Raw5.open(source.port, f"willed-{number}-{delay}", FOREVER, flags=0x0C, tail=will).close()
                found = raw5.message(other.expect(raw.PUBLISH, PATIENCE))
                assert (found.topic, found.payload) == (f"wills/{number}/{delay}", b"gone")
                other.send(raw5.ack(raw.PUBACK, found.id))


def test_sessions_expire(site: Site) -> None:
    for number, (source, target) in enumerate(site.ways):
        with Raw5.open(source.port, f"short-{number}", raw5.prop(EXPIRY, 1)) as client:
            assert client.subscribed(("short/x", 1)) == (1,)
            client.send(raw5.disconnect())
            client.expect_closed()

        def over(name: str = f"short-{number}", port: int = target.port) -> bool:
            listed = orjson.loads(ctl(site, "sessions", "list", "--json", "--match", name))
            return name not in str(listed) and port > 0

        eventually(over, PATIENCE)
        with Raw5.open(target.port, f"short-{number}", clean=False) as client:
            assert not client.present


def test_shared_subscriptions_over_both(site: Site) -> None:
    for number, (source, target) in enumerate(site.ways):
        shared = f"$share/group{number}/shared/{number}"
        with (
            Raw5.open(source.port, f"one-{number}", FOREVER) as one,
            Raw5.open(target.port, f"two-{number}", FOREVER) as two,
            Raw5.open(target.port) as publisher,
        ):
            assert one.subscribed((shared, 2)) == (2,)
            assert two.subscribed((shared, 2)) == (2,)
            wanted = [b"%d" % each for each in range(6)]
            for each in wanted:
                publisher.deliver(f"shared/{number}", each, qos=1 + int(each) % 2)
            found: list[bytes] = []

            def arrived(members: tuple[Raw5, Raw5] = (one, two), found: list[bytes] = found) -> bool:
                for member in members:
                    for message in member.messages():
                        found.append(message.payload)
                        if message.qos == 1:
                            member.send(raw5.ack(raw.PUBACK, message.id))
                        else:
                            member.send(raw5.ack(raw.PUBREC, message.id))
                            member.released(message.id)
                            member.send(raw5.ack(raw.PUBCOMP, message.id))
                return len(found) >= 6

            eventually(arrived, PATIENCE)
            assert sorted(found) == wanted
            one.quiet()
            two.quiet()


def test_operators_see_and_change_everything_from_the_leafnode(site: Site) -> None:
    with Raw5.open(site.hub.port, "lamp", FOREVER) as lamp, Raw5.open(site.leaf.port, "lamp-2", FOREVER):
        assert lamp.subscribed(("ctl/#", 1)) == (1,)
        with Raw5.open(site.leaf.port) as other:
            other.deliver("ctl/kept", b"on", flags=1)
        lamp.receive_message(b"on")
        status = orjson.loads(ctl(site, "cluster", "status", "--json"))
        assert [one["state"] for one in status["gateways"]] == ["running"] * 3
        assert {"$MQTT_msgs", "KV_MQTT_bans"} <= {one["name"] for one in status["streams"]}
        assert "lamp-2" in ctl(site, "sessions")
        assert "ctl/#" in ctl(site, "sessions", "show", "lamp")
        assert ctl(site, "retained", "get", "ctl/kept").strip().endswith("on")
        for line in ("streams", "clients", "hooks", "plugins", "cluster status", "groups", "topics", "history"):
            ctl(site, *line.split())
        assert ctl(site, "reload").count("read again") == 3
    ctl(site, "sessions", "clean", "lamp")
    assert "lamp-2" in ctl(site, "sessions")
    with Raw5.open(site.leaf.port, "lamp", clean=False) as lamp:
        assert not lamp.present


def test_bans_are_in_force_at_once_at_every_gateway(site: Site) -> None:
    """Told from the leafnode and, with the JetStream of the hub itself, from there."""
    for where, more in (("leaf", AT_LEAF), ("hub", ())):
        names = [f"banned-{where}-{number}" for number in range(3)]
        clients = [
            Raw5.open(gateway.port, name)
            for gateway, name in zip((site.leaf, site.second, site.hub), names, strict=True)
        ]
        for name, client in zip(names, clients, strict=True):
            arguments = ["ctl", "--nats", site.nats.urls[where], *more, "bans", "add", "client", name, "--for", "1h"]
            done = CliRunner().invoke(command, arguments)
            assert done.exit_code == 0, done.output
            client.ended(0x98)  # well before bans are read again, once a minute
            client.close()
            assert name in ctl(site, "bans", "list")


def refusal(site: Site, *arguments: str) -> str:
    """Why a gateway at the leafnode does not start."""
    gateway = Gateway(site.leaf.process.log.with_name("refused.log"), site.nats.urls["leaf"], arguments=arguments)
    try:
        gateway.launch()
        assert gateway.wait() == 1
        return gateway.log
    finally:
        gateway.process.discard()


def test_a_wrong_domain_is_named(site: Site) -> None:
    log = refusal(site, "--jetstream-domain", "elsewhere")
    assert "no JetStream answers to $JS.elsewhere.API.INFO; check the name of the domain in jetstream_domain" in log
    done = CliRunner().invoke(
        command, ["ctl", "--nats", site.nats.urls["leaf"], "--jetstream-domain", "elsewhere", "sessions"]
    )
    assert done.exit_code == 1
    assert "JetStream of the domain 'elsewhere' (jetstream_domain) does not answer" in str(done.exception)


def test_without_the_hub_nothing_is_acknowledged_and_nothing_lost(site: Site) -> None:
    """While the leafnode is cut off, the streams are not there; clients stay connected."""
    away(site.hub, "patient", ("cut/x", 1))
    with Raw5.open(site.leaf.port, "near", FOREVER) as near, Raw5.open(site.leaf.port) as publisher:
        assert near.subscribed(("cut/x", 1)) == (1,)
        site.nats.between.cut()
        try:
            eventually(lambda: site.nats.between.open == 0, PATIENCE)
            publisher.send(raw5.publish("cut/x", b"meanwhile", qos=1))
            eventually(lambda: "not ready: " in site.leaf.log.rpartition("ready again")[2], PATIENCE)
            publisher.quiet()
        finally:
            site.nats.between.restore()
        site.nats.wait()
        assert raw5.answer(publisher.expect(raw.PUBACK, PATIENCE)).id == 1
        assert raw5.message(near.expect(raw.PUBLISH, PATIENCE)).payload == b"meanwhile"
    with Raw5.open(site.hub.port, "patient", FOREVER, clean=False) as client:
        assert client.receive_message(b"meanwhile").qos == 1
        client.quiet()
    eventually(lambda: site.leaf.ready and site.second.ready, PATIENCE)


@pytest.mark.parametrize("leaf", LEAVES)
def test_without_the_setting_the_error_names_it_or_the_own_domain_serves(tmp_path: Path, leaf: Leaf) -> None:
    """Where both have streams of gateways, each message would be stored twice: the second gateway does not start."""
    nats = Hub(tmp_path, leaf)
    plain = Gateway(tmp_path / "plain.log", nats.urls["leaf"])
    there = Gateway(tmp_path / "there.log", nats.urls["leaf"], arguments=AT_LEAF)
    try:
        nats.start()
        if leaf == "no JetStream":
            plain.launch()
            assert plain.wait() == 1
            assert "set jetstream_domain to the domain of the hub if this nats-server is a leafnode" in plain.log
            return
        plain.start()
        there.launch()
        assert there.wait() == 1
        assert "messages would be stored twice: this account has $MQTT_msgs in its own JetStream" in there.log
    finally:
        plain.process.discard()
        there.process.discard()
        nats.discard()
