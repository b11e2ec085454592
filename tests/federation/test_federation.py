# SPDX-License-Identifier: Apache-2.0
"""docs/federation.md with real nats-servers: topics cross, sessions and client ids do not."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from examples.federation.share import main, share
from mqtt_nats.config.settings import Settings
from mqtt_nats.gateway.embedded import find_binary
from tests.harness import raw
from tests.harness.inprocess import InProcess, running
from tests.harness.nats import ROOT
from tests.harness.process import LoggedProcess, wait_ready
from tests.harness.proxy import Proxy
from tests.harness.raw import Raw
from tests.harness.waiting import eventually, free_port

pytestmark = pytest.mark.processes

PATIENCE = 30.0
EXAMPLES = ROOT / "examples" / "federation"


class Core(NamedTuple):
    """One nats-server, with a gateway."""

    name: str
    url: str
    gateway: InProcess
    leaf: Proxy
    """Between the two."""

    @property
    def port(self) -> int:
        """Where MQTT clients connect."""
        return self.gateway.port


def configuration(name: str, directory: Path, port: int, leaf: int) -> list[str]:
    """The command line of a nats-server with an example's configuration, on other ports."""
    text = (EXAMPLES / f"{name}.conf").read_text(encoding="utf-8")
    (included,) = re.findall(r'^include "(.+)"$', text, re.MULTILINE)
    assert (EXAMPLES / included).samefile(ROOT / "nats-server.conf")
    (directory / "base.conf").write_text((ROOT / "nats-server.conf").read_text(encoding="utf-8"), encoding="utf-8")
    text = text.replace(included, "base.conf").replace("127.0.0.1:7422", f"127.0.0.1:{leaf}")
    file = directory / f"{name}.conf"
    file.write_text(text, encoding="utf-8")
    return [str(find_binary()), "-c", str(file), "-a", "127.0.0.1", "-p", str(port), "-sd", str(directory / name)]


@pytest.fixture(scope="module")
def cores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Core, Core]]:
    """Two cores, with topics that are shared as the page says."""
    directory = tmp_path_factory.mktemp("federation")
    leaf = free_port()
    link = Proxy(leaf)
    processes: list[LoggedProcess] = []
    urls: list[str] = []
    try:
        for name in ("north", "south"):
            port = free_port()
            urls.append(f"nats://127.0.0.1:{port}")
            processes.append(process := LoggedProcess(name, directory / f"{name}.log"))
            process.start(configuration(name, directory, port, leaf if name == "north" else link.port))
            wait_ready(process, "(Server is ready)", PATIENCE)
        eventually(lambda: "JetStream using domains" in processes[1].text, PATIENCE)
        north_settings, south_settings = (Settings(listen="127.0.0.1:0", nats=(url,)) for url in urls)
        with running(north_settings) as one, running(south_settings) as two:
            asyncio.run(share(urls[1], "north", ["plants/#"]))
            asyncio.run(share(urls[0], "south", ["orders/#"]))
            yield Core("north", urls[0], one, link), Core("south", urls[1], two, link)
    finally:
        for process in processes:
            process.discard()
        link.close()


def publish(core: Core, topic: str, payload: bytes, qos: int = 1) -> None:
    """Publish and wait for what acknowledges it."""
    with Raw.connected(core.port) as client:
        client.send(raw.publish(topic, payload, qos=qos, id=1))
        if qos == 1:
            client.expect(raw.PUBACK, PATIENCE)
        client.ping()


def flows(source: Core, target: Core, topic: str) -> None:
    """Wait until what is published at one core arrives at the other: leafnodes tell each other of subscriptions."""
    with Raw.connected(target.port) as client:
        assert client.subscribe((topic, 0)) == [0]

        def arrives() -> bool:
            publish(source, topic, b"?", 0)
            return any(one.payload == b"?" for one in client.ping() if one.kind == raw.PUBLISH)

        eventually(arrives, PATIENCE)


def received(client: Raw, count: int) -> list[bytes]:
    """So many messages, each acknowledged."""
    found: list[bytes] = []
    while len(found) < count:
        one = client.expect(raw.PUBLISH, PATIENCE)
        if one.qos:
            client.send(raw.packet(0x40, one.id.to_bytes(2, "big")))
        found.append(one.payload)
    return found


def test_who_is_connected_gets_what_is_published_at_the_other_core(cores: tuple[Core, Core]) -> None:
    """Both ways, on every topic that stays not at home."""
    north, south = cores
    for source, target in ((north, south), (south, north)):
        with Raw.connected(target.port) as client:
            assert client.subscribe((f"live/{source.name}", 1)) == [1]
            flows(source, target, f"live/{source.name}/now")
            publish(source, f"live/{source.name}", b"one")
            assert received(client, 1) == [b"one"]


def test_durable_sessions_get_shared_topics_once_and_in_order(cores: tuple[Core, Core]) -> None:
    """Connected or not; and what comes back from where it was sent is not sent again."""
    for (source, target), topic in (((cores[0], cores[1]), "plants/a"), ((cores[1], cores[0]), "orders/a")):
        for core in cores:
            with Raw.connected(core.port, f"keeper-{topic[:6]}", clean=False) as client:
                assert client.subscribe((topic, 1)) == [1]
        payloads = [b"%d" % number for number in range(20)]
        for payload in payloads[:10]:
            publish(source, topic, payload)
        with Raw.connected(target.port, f"keeper-{topic[:6]}", clean=False) as client:
            assert received(client, 10) == payloads[:10]
            for payload in payloads[10:]:
                publish(source, topic, payload)
            assert received(client, 10) == payloads[10:]
            assert client.ping() == []
        with Raw.connected(source.port, f"keeper-{topic[:6]}", clean=False) as client:
            assert received(client, 20) == payloads
            assert client.ping() == []


def test_durable_sessions_do_not_get_what_is_not_shared(cores: tuple[Core, Core]) -> None:
    north, south = cores
    with Raw.connected(south.port, "absent", clean=False) as client:
        assert client.subscribe(("other/a", 1), ("plants/b", 1)) == [1, 1]
    publish(north, "other/a", b"not stored there")
    publish(north, "plants/b", b"stored")
    with Raw.connected(south.port, "absent", clean=False) as client:
        assert received(client, 1) == [b"stored"]
        assert client.ping() == []


def test_client_ids_are_local(cores: tuple[Core, Core]) -> None:
    """The same one at both cores is two clients, with a session each."""
    north, south = cores
    with Raw.connected(north.port, "twin", clean=False) as one, Raw.connected(south.port, "twin", clean=False) as two:
        assert one.subscribe(("twins/north", 1)) == [1]
        assert two.subscribe(("twins/south", 1)) == [1]
        assert one.ping() == two.ping() == []
    publish(north, "twins/south", b"x")
    publish(north, "twins/north", b"y")
    with Raw.connected(north.port, "twin", clean=False) as one:
        assert received(one, 1) == [b"y"]
        assert one.ping() == []


def test_retained_messages_stay_where_they_are(cores: tuple[Core, Core]) -> None:
    north, south = cores
    with Raw.connected(north.port) as client:
        client.send(raw.publish("plants/retained", b"kept", qos=1, flags=1))
        client.expect(raw.PUBACK, PATIENCE)
    with Raw.connected(north.port) as client:
        client.subscribe(("plants/retained", 0))
        assert received(client, 1) == [b"kept"]
    with Raw.connected(south.port) as client:
        client.subscribe(("plants/retained", 0))
        assert client.ping() == []


def test_what_is_stored_while_the_link_is_down_comes_later(cores: tuple[Core, Core]) -> None:
    """For durable sessions; and each core goes on by itself meanwhile."""
    north, south = cores
    with Raw.connected(south.port, "patient", clean=False) as client:
        assert client.subscribe(("plants/c", 1)) == [1]
        south.leaf.cut()
        try:
            eventually(lambda: south.leaf.open == 0, PATIENCE)
            publish(north, "plants/c", b"while away")
            publish(south, "plants/c", b"at home")
            assert received(client, 1) == [b"at home"]
        finally:
            south.leaf.restore()
        assert received(client, 1) == [b"while away"]
    flows(north, south, "plants/d")
    flows(south, north, "orders/d")


def test_a_gateway_that_starts_later_leaves_the_sources_alone(cores: tuple[Core, Core]) -> None:
    _, south = cores
    with running(Settings(listen="127.0.0.1:0", nats=(south.url,))) as inside:
        sources = inside.gateway.own._configs["$MQTT_msgs"]["sources"]
    assert [one["external"]["api"] for one in sources] == ["$JS.north.API"]
    assert asyncio.run(share(south.url, "nowhere", [])) == sources


def test_what_would_go_round_for_ever_is_refused(cores: tuple[Core, Core]) -> None:
    north, south = cores
    for url, domain, topics in (
        (north.url, "south", "plants/+/temp"),
        (north.url, "south", "#"),
        (south.url, "north", "orders"),
    ):
        with pytest.raises(SystemExit, match=f"{domain} takes .* from here"):
            asyncio.run(share(url, domain, [topics]))
    with pytest.raises(SystemExit, match="no JetStream of the domain east"):
        asyncio.run(share(north.url, "east", ["x"]))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--filter", "a/#/b"], "--filter a/#/b: a wildcard must be a whole level, and # the last one"),
        (["--filter", "$JS/x"], "--filter $JS/x: topics under '$JS' are reserved"),
        (["--nats", "nats://127.0.0.1:1"], "no nats-server at nats://127.0.0.1:1: "),
    ],
)
def test_what_cannot_be_is_said_in_one_line(
    arguments: list[str], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["share", "--domain", "north", *arguments])
    with pytest.raises(SystemExit) as told:
        main()
    assert text in f"{told.value} {capsys.readouterr().err}"
