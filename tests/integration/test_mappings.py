# SPDX-License-Identifier: Apache-2.0
"""An account whose subjects are mapped: what is published on one is found under the other, in every way."""

from collections.abc import Iterator
from contextlib import ExitStack

import nats
import pytest
from click.testing import CliRunner

from mqtt_nats.cli import command
from mqtt_nats.pubsub.subject_mapping import mapped, parse_mappings
from tests.conftest import _nats_factory
from tests.harness import raw5
from tests.harness.nats import ROOT, NatsServer
from tests.harness.raw5 import PUBACK, PUBCOMP, PUBREC, PUBREL, SESSION_EXPIRY, Raw5, ack, prop, publish
from tests.integration.inprocess import PATIENCE, Running, running

MAPPINGS = {
    "old.>": "new.>",
    "sensor.*.*": "plant.{{wildcard(2)}}.{{wildcard(1)}}",
    "short.*": "cut.$1",
    "less.*.*": "few.$2",
    "one": "two",
    "left.a": "right.a",
    "right.a": "left.a",
}
KEPT = prop(SESSION_EXPIRY, 600)
ACL = """
[[rules]]
effect = "deny"
access = "publish"
topics = ["new/#", "right/#"]

[[rules]]
effect = "allow"
topics = "#"
"""


@pytest.fixture(scope="module")
def server(nats_backend: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    lines = "\n".join(f'  "{source}": "{target}"' for source, target in MAPPINGS.items())
    with _nats_factory(nats_backend, tmp_path_factory.mktemp("nats")) as start:
        yield start(config=f"mappings {{\n{lines}\n}}\n")


@pytest.fixture(scope="module")
def pair(server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Running]]:
    """Two gateways; on the first one nobody may publish where messages are mapped to."""
    rules = tmp_path_factory.mktemp("rules") / "acl.toml"
    rules.write_text(ACL, encoding="utf-8")
    with (
        running(nats=(server.url,), mappings=MAPPINGS, acl_file=rules) as one,
        running(nats=(server.url,), mappings=MAPPINGS) as two,
    ):
        yield one, two


SUBJECTS = ("old.a", "old.a.b", "old", "sensor.1.x", "sensor.1", "sensor.1.2.3", "short.b", "less.1.2", "one", "left.a")


async def test_it_is_what_nats_server_does(server: NatsServer) -> None:
    client = await nats.connect(server.url)
    transforms = parse_mappings(MAPPINGS)
    for subject in SUBJECTS:
        heard = await client.subscribe(mapped(transforms, subject))
        await client.publish(subject, subject.encode())
        assert (await heard.next_msg(PATIENCE)).data == subject.encode()
        await heard.unsubscribe()
    await client.close()


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_messages(pair: tuple[Running, Running], qos: int) -> None:
    """Clients of both gateways get each of them once, under the mapped topic; sessions that are absent, too."""
    name = f"q{qos}"
    wanted = [("new/#", 0), ("new/#", qos), ("+/" + name, qos), ("new/" + name, qos)]
    with ExitStack() as stack:
        readers = [(stack.enter_context(Raw5.open(one.port)), each) for one in pair for each in wanted]
        for reader, each in readers:
            reader.subscribed(each, ("old/#", 2))
        with Raw5.open(pair[1].port, f"{name}-absent", KEPT) as absent:
            absent.subscribed(("new/" + name, 2), ("old/#", 2))
        with Raw5.open(pair[0].port) as writer:
            writer.deliver(f"old/{name}", b"one", qos=qos)
            if not qos:  # a run of packets
                writer.send(publish(f"old/{name}", b"two") * 3)
                writer.quiet()
        for reader, (_, granted) in readers:
            for body in [b"one"] if qos else [b"one", *[b"two"] * 3]:
                found = reader.receive_message(body)
                assert (found.topic, found.qos) == (f"new/{name}", min(qos, granted))
            reader.quiet()
        with Raw5.open(pair[0].port, f"{name}-absent", clean=False) as absent:
            if qos:
                assert absent.receive_message(b"one").topic == f"new/{name}"
            absent.quiet()


def test_two_that_change_places(pair: tuple[Running, Running]) -> None:
    """Nothing is mapped twice, nor what arrives; a topic without mapping is left alone."""
    with Raw5.open(pair[0].port) as reader, Raw5.open(pair[0].port) as writer:
        reader.subscribed(("left/#", 2), ("right/#", 2), ("one", 2), ("two", 2))
        for topic, found in (("left/a", "right/a"), ("left/b", "left/b"), ("one", "two"), ("two", "two")):
            for qos in (0, 1, 2):
                writer.deliver(topic, topic.encode(), qos=qos)
                assert reader.receive_message(topic.encode()).topic == found
        reader.quiet()
    with Raw5.open(pair[1].port) as reader, Raw5.open(pair[1].port) as writer:
        reader.subscribed(("left/#", 1), ("right/#", 1))
        writer.deliver("right/a", b"back")
        assert reader.receive_message(b"back").topic == "left/a"
        reader.quiet()


def test_subscriptions_that_come_and_go(pair: tuple[Running, Running]) -> None:
    """The topic is known already when its first subscriber comes."""
    with Raw5.open(pair[0].port) as reader, Raw5.open(pair[0].port) as writer:
        writer.deliver("old/late", b"nobody", qos=0)
        for _ in range(2):
            reader.subscribed(("new/late", 0))
            writer.deliver("old/late", b"there", qos=0)
            assert reader.message(b"there").topic == "new/late"
            reader.send(raw5.unsubscribe("new/late"))
            reader.answer(raw5.UNSUBACK)
            writer.deliver("old/late", b"nobody", qos=0)
            reader.quiet()


def test_retained_messages(pair: tuple[Running, Running]) -> None:
    with Raw5.open(pair[0].port) as writer:
        writer.deliver("old/kept", b"kept", flags=1)
        for one in pair:
            with Raw5.open(one.port) as reader:
                reader.subscribed(("new/kept", 1), ("old/kept", 1))
                found = reader.receive_message(b"kept")
                assert (found.topic, found.retain) == ("new/kept", True)
                reader.quiet()
        writer.deliver("old/kept", b"", flags=1)
    with Raw5.open(pair[1].port) as reader:
        reader.subscribed(("new/kept", 1))
        reader.quiet()


def test_a_retained_message_that_an_administrator_removes(server: NatsServer, pair: tuple[Running, Running]) -> None:
    """That of the topic that is named, though what is published there goes elsewhere; subscribers are not misled."""

    def ctl(*arguments: str) -> str:
        done = CliRunner().invoke(command, ["ctl", "--nats", server.url, "retained", *arguments])
        assert done.exit_code == 0, (done.output, done.exception)
        return done.output

    with Raw5.open(pair[0].port) as reader, Raw5.open(pair[1].port) as writer:
        writer.deliver("right/a", b"stored at left", flags=1)
        writer.deliver("left/a", b"stored at right", flags=1)
        reader.subscribed(("left/a", 1))
        reader.receive_message(b"stored at left")
        assert ctl("delete", "right/a") == "1 retained message removed\n"
        assert ctl("get", "left/a").endswith("\nstored at left\n")
        assert "right/a" not in ctl("list", "right/#")
        reader.quiet()
        ctl("delete", "left/a")
        assert ctl("list", "+/a").count("/a") == 0


def test_wills(pair: tuple[Running, Running]) -> None:
    with Raw5.open(pair[0].port) as near, Raw5.open(pair[1].port) as far:
        for reader in (near, far):
            reader.subscribed(("left/+", 1), ("right/+", 1))
        raw5.refused(pair[0].port, raw5.connect("", flags=4, tail=raw5.will("right/a", "no")), 0x87)
        for qos in (0, 1, 2):
            tail = raw5.will("left/a", f"dead {qos}")
            Raw5.open(pair[0].port, f"mortal{qos}", flags=4 | qos << 3, tail=tail).close()
            for reader in (near, far):
                assert reader.receive_message(f"dead {qos}".encode()).topic == "right/a"
                reader.quiet()


def test_held_publishes(pair: tuple[Running, Running]) -> None:
    """PUBLISH at one gateway and PUBREL at the other."""
    with Raw5.open(pair[1].port) as reader:
        reader.subscribed(("left/+", 2), ("right/+", 2))
        with Raw5.open(pair[0].port, "holds", KEPT) as writer:
            writer.send(publish("left/a", b"held", qos=2, id=7))
            assert writer.answer(PUBREC, 7).reason in (0, 0x10)
        with Raw5.open(pair[1].port, "holds", KEPT, clean=False) as writer:
            reader.quiet()
            writer.send(ack(PUBREL, 7))
            writer.answer(PUBCOMP, 7, 0)
        assert reader.receive_message(b"held").topic == "right/a"
        reader.quiet()


def test_what_may_be_published(pair: tuple[Running, Running]) -> None:
    """The rules are about the topic that the client names."""
    with Raw5.open(pair[0].port) as writer:
        for topic, denied in (("old/x", False), ("new/x", True), ("left/a", False), ("right/a", True)):
            writer.send(publish(topic, b"x", qos=1))
            assert (writer.answer(PUBACK, 1).reason == 0x87) is denied


def test_the_page_has_these_forms() -> None:
    page = (ROOT / "docs" / "tenants.md").read_text(encoding="utf-8")
    for source in ("old.>", "sensor.*.*"):
        assert page.count(f'"{source}": "{MAPPINGS[source]}"') == 1
        assert page.count(f'"{source}" = "{MAPPINGS[source]}"') == 1


def test_the_state_of_a_bridge(pair: tuple[Running, Running]) -> None:
    """Nothing is mapped below `$SYS`: the will of a bridge is published, and retained, as without mappings."""
    topic = "$SYS/broker/connection/site-1/state"
    with Raw5.open(pair[1].port) as reader:
        reader.subscribed((topic, 1))
        with Raw5.open(pair[1].port, "site-1", flags=0x2E, tail=raw5.will(topic, b"0")) as bridge:
            bridge.deliver(topic, b"1", flags=1)
            assert reader.receive_message(b"1").topic == topic
        assert reader.receive_message(b"0").topic == topic
        reader.quiet()
