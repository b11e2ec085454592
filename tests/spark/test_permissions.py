# SPDX-License-Identifier: Apache-2.0
"""The permissions that docs/spark.md lists suffice, and no line of it has one too many."""

import json
import re
from typing import Any, NamedTuple

from mqtt_streams.definitions import load_definition
from pyspark_mqtt_nats.errors import SourceError
from pyspark_mqtt_nats.nats.jetstream import Publish, api, publish_all, stream_info
from pyspark_mqtt_nats.options import Options
from pyspark_mqtt_nats.reading.ranges import snapshot, split
from pyspark_mqtt_nats.reading.read import read_range
from tests.conftest import NatsFactory
from tests.harness.nats import ROOT, NatsServer
from tests.spark.servers import connect
from tests.spark.sinking import Sinker
from tests.spark.storing import QOS1, sequences

ROWS = [{"topic": f"site/{number}", "payload": b"x", "qos": number, "retain": number == 1} for number in range(3)]


class Line(NamedTuple):
    """A line of the table."""

    what: str
    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def lines() -> list[Line]:
    page = (ROOT / "docs" / "spark.md").read_text(encoding="utf-8")
    table = page.partition("| for | publish | subscribe |\n")[2].partition("\n\n")[0].splitlines()[1:]
    found = []
    for line in table:
        what, publish, subscribe = (cell.strip() for cell in line.strip("|").split("|"))
        found.append(Line(what, tuple(re.findall("`(.+?)`", publish)), tuple(re.findall("`(.+?)`", subscribe))))
    return found


def act(what: str, url: str, **login: str) -> None:
    """Do what a line of the table is for."""
    if what.startswith("writes"):
        assert Sinker(url, ROWS, **login).write() == (3, 0)
        return
    # A timestamp has to be looked up.
    options = {
        "startingTimestamp": "1970-01-01",
        "topics": "site/#",
        "readMode": "direct" if "direct" in what else "auto",
    }
    parsed = Options.parse({"servers": url, **options, **login})
    with connect(url, **login) as connection:
        found = snapshot(parsed, connection)
    read = [number for part in split(found, 2) for number in sequences(read_range(parsed, found, part, ["sequence"]))]
    assert read[:2] == [1, 2]


def fill(server: NatsServer) -> None:
    with connect(server.url, user="admin", password="p") as connection:
        for stream in ("$MQTT_msgs", "$MQTT_rmsgs"):
            api(connection, f"STREAM.CREATE.{stream}", load_definition(stream))
        list(publish_all(connection, [Publish(b"$MQTT.msgs.site.a", QOS1, b"1")] * 2))
        assert stream_info(connection, "$MQTT_msgs")["state"]["messages"] == 2


def test_every_line_suffices_and_has_nothing_too_much(nats_factory: NatsFactory) -> None:
    users: list[dict[str, Any]] = [{"user": "admin", "password": "p"}]
    cases: list[tuple[Line, str | None]] = []
    for line in lines():
        for missing in (None, *line.publish, *line.subscribe):
            permissions = {
                "publish": {"allow": [subject for subject in line.publish if subject != missing]},
                "subscribe": {"allow": [subject for subject in line.subscribe if subject != missing] or ["nothing"]},
            }
            users.append({"user": f"u{len(cases)}", "password": "p", "permissions": permissions})
            cases.append((line, missing))
    server = nats_factory(config=f"authorization {{ users: {json.dumps(users)} }}")
    fill(server)
    too_much = []
    for number, (line, missing) in enumerate(cases):
        try:
            act(line.what, server.url, user=f"u{number}", password="p")
        except SourceError:
            assert missing is not None, f"{line.what} needs more"
        else:
            too_much += [(line.what, missing)] if missing else []
    assert too_much == [("reads", "$JS.API.CONSUMER.DELETE.$MQTT_msgs.>")]
