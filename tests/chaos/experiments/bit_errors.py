# SPDX-License-Identifier: Apache-2.0
"""R24: the block of messages of one nats-server is damaged while it is down, as by a disk that returns other bits.

Nothing is promised then. The experiment says what is lost when the damaged server leads everything afterwards, how many
messages the others have, and who has said anything in a log.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import nats
import nats.errors
import orjson
from nats.aio.client import Client

from mqtt_streams.generations import SUBJECT
from mqtt_streams.hashing import name_hash
from tests.chaos.client import ChaosClient
from tests.chaos.experiment import Experiment, Result, Setting
from tests.chaos.history import History
from tests.chaos.looking import looking
from tests.harness.cluster import Cluster, lead
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.waiting import aeventually

MESSAGES: Final = "$MQTT_msgs"
TOPIC: Final = "bits/x"
SIZE: Final = 500
"""Bytes of a payload."""

RECOVERY: Final = 90.0
"""Seconds in which everything that comes has come."""

LEADS_S: Final = 40.0
"""Seconds in which a server leads that is told to."""

QUIET_S: Final = 8.0
"""Seconds without a message after which the rest counts as lost."""

_SAYS: Final = re.compile(
    r"\[(?:WRN|ERR)\] (.*(?:checksum|corrupt|bad msg|truncat|recover|lost|damaged|catchup).*)", re.I
)


def flip(block: Path) -> None:
    """Change one bit in the middle of a block."""
    data = bytearray(block.read_bytes())
    data[len(data) // 2] ^= 1
    block.write_bytes(data)


def truncate(block: Path) -> None:
    """Cut off the last third of a block."""
    data = block.read_bytes()
    block.write_bytes(data[: len(data) * 2 // 3])


DAMAGES: Final[dict[str, Callable[[Path], None]]] = {"a bit flipped": flip, "a third cut off": truncate}


@dataclass(frozen=True)
class Round:
    """A round: the damage, and the end of the damaged server."""

    servers: int
    damage: str
    killed: bool

    @property
    def name(self) -> str:
        """The row in the report."""
        many = "1 server" if self.servers == 1 else f"one of {self.servers} servers"
        return f"{many}, {'killed' if self.killed else 'stopped'}, {self.damage}"


LONG: Final = [Round(*one) for one in itertools.product((1, 3), DAMAGES, (True, False))]
SHORT: Final = [Round(1, "a bit flipped", True)]


class Scene:
    """Servers, a gateway, a session that is away, and the messages for it."""

    def __init__(self, setting: Setting, one: Round) -> None:
        self.setting = setting
        self.round = one
        self.directory = setting.fresh("histories")
        self.most = 4000 if setting.long else 500
        self.servers: Sequence[NatsServer] = ()
        self.cluster: Cluster | None = None

    def _client(self, name: str, gateway: Gateway) -> ChaosClient:
        history = History(self.directory / f"{name}.jsonl")
        return ChaosClient(name, [gateway.port], history, size=SIZE)

    async def begin(self) -> Gateway:
        """Start everything, and publish; the session is away."""
        if self.round.servers == 1:
            self.servers = [await asyncio.to_thread(self.setting.nats)]
        else:
            self.cluster = await asyncio.to_thread(self.setting.cluster)
            self.servers = self.cluster.servers
        url = ",".join(server.url for server in self.servers)
        arguments = ("--stream-replicas", str(self.round.servers), "--gateway-lease", "2")
        gateway = await asyncio.to_thread(self.setting.gateway, url, *arguments)
        away = self._client("away", gateway)
        await away.connect()
        await away.subscribe(TOPIC, 1)
        await away.close()
        publisher = self._client("publisher", gateway)
        await publisher.connect()
        for number in range(1, self.most + 1):
            await publisher.publish(TOPIC, number, 1)
        assert await publisher.settled(RECOVERY)
        await publisher.close()
        await aeventually(self._marked, RECOVERY, what="a mark of all messages")
        return gateway

    async def _marked(self) -> bool:
        """Whether the mark by which gateways know the stream has its last sequence: damage is older in general."""
        async with looking(self.servers[0].url) as look:
            marks = await look.messages(SUBJECT, "$MQTT_shared")
            return bool(marks) and bool(orjson.loads(marks[-1].payload)["last"] >= self.most)

    async def damage(self) -> tuple[NatsServer, str]:
        """Damage the largest block of a server, a follower if there are several; the server, and what it says then."""
        victim = self.servers[0]
        if self.cluster is not None:
            await self.cluster.settled(MESSAGES)
            leader = await self.cluster.leader(MESSAGES)
            victim = next(server for server in self.servers if server is not leader)
        await asyncio.to_thread(victim.kill if self.round.killed else victim.stop)
        blocks = (victim.directory / "store").glob(f"jetstream/*/streams/{MESSAGES}/msgs/*.blk")
        DAMAGES[self.round.damage](max(blocks, key=lambda path: path.stat().st_size))
        before = len(victim.log)
        await asyncio.to_thread(victim.start)
        if self.cluster is not None:
            with contextlib.suppress(AssertionError):
                await self.cluster.settled(MESSAGES)
        return victim, victim.log[before:]

    async def stored(self, victim: NatsServer, *, leads: bool) -> int | str:
        """How many messages the stream has when the damaged server leads it, and the session's consumer, or another.

        Whether that server can lead at all is a result, too.
        """
        client = await nats.connect(victim.url)
        try:
            if self.cluster is not None:
                number = self.servers.index(victim)
                name = f"n{number if leads else (number + 1) % 3}"
                answer = await _ask(client, f"$JS.API.CONSUMER.NAMES.{MESSAGES}")
                consumers = [one for one in answer["consumers"] if one.startswith(name_hash("away"))]
                for what in (f"STREAM.{MESSAGES}", *(f"CONSUMER.{MESSAGES}.{one}" for one in consumers)):
                    await lead(client, what, name, LEADS_S)
            body = orjson.dumps({"subjects_filter": f"$MQTT.msgs.{TOPIC.replace('/', '.')}"})
            info = await _ask(client, f"$JS.API.STREAM.INFO.{MESSAGES}", body)
            return int(sum((info["state"].get("subjects") or {}).values()))
        except AssertionError:
            return "does not lead"
        finally:
            await client.close()

    async def resume(self, gateway: Gateway) -> tuple[bool, int]:
        """Whether the session is there, and how many messages it gets."""
        away = self._client("away", gateway)
        present = await away.connect(RECOVERY)
        had = -1
        while had < len(away.delivered) < self.most:
            had = len(away.delivered)
            with contextlib.suppress(AssertionError):
                await aeventually(lambda most=had: len(away.delivered) > most, QUIET_S)  # type: ignore[misc]
        await away.close()
        return present, len(away.delivered)


async def _ask(client: Client, subject: str, body: bytes = b"") -> dict[str, Any]:
    """The answer of JetStream, which may have a leader only after a while."""

    async def answer() -> dict[str, Any] | None:
        with contextlib.suppress(nats.errors.Error):
            found: dict[str, Any] = orjson.loads((await client.request(subject, body, timeout=5)).data)
            return None if "error" in found else found
        return None

    found: dict[str, Any] = await aeventually(answer, RECOVERY, what=f"an answer on {subject}")
    return found


async def run_round(setting: Setting, one: Round) -> Result:
    """Run the round of one damage, which is a row of its own in the report."""
    scene = Scene(setting, one)
    gateway = await scene.begin()
    before = len(gateway.log)
    victim, said = await scene.damage()
    others = await scene.stored(victim, leads=False)
    own = await scene.stored(victim, leads=True)
    present, found = await scene.resume(gateway)
    said = said + victim.log[len(said) :]
    says = _SAYS.search(said)
    tells = re.search(r" ERROR \S+: (.*)", gateway.log[before:])
    figures: dict[str, int | float | str] = {
        "messages": scene.most,
        "kills": 1,
        "lost": scene.most - found,
        "session": "kept" if present else "lost",
        "stored, the damaged server leads": own,
        "nats-server says": says[1].partition(" in /")[0][:90].strip() if says else "nothing",
        "gateway says": tells[1].partition(" [")[0][:90] if tells else "nothing",
    }
    if one.servers > 1:
        figures["stored, another one leads"] = others
    return Result(figures)


async def run(setting: Setting) -> Result:
    """Damage a block in each round."""
    result = Result()
    rounds = LONG if setting.long else SHORT
    for one in rounds:
        result.peers[one.name] = await run_round(setting, one)
    result.figures["rounds"] = len(rounds)
    result.remarks.append("nothing is promised")
    return result


EXPERIMENTS = [
    Experiment(
        "R24",
        "one server's block of messages is damaged while the server is down; then that server leads",
        "what is lost, and who says so, is known",
        run,
    )
]
