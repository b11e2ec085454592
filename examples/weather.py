# SPDX-License-Identifier: Apache-2.0
"""From MQTT to daily figures: starts the stack, publishes real weather, has Spark aggregate it.

``make demo`` runs it. The data is in the PyPI package ``vega_datasets``: hourly temperatures of San Francisco
(``sf-temps``, °F) and daily readings of Seattle (``seattle-weather``: °C, mm, m/s). Each reading is one MQTT message
of QoS 1 on a topic such as ``weather/seattle/temp_max``, with the payload ``{"time": ..., "value": ...}``.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

SEATTLE = ("precipitation", "temp_max", "temp_min", "wind")
WINDOW = 500  # messages in flight
PATIENCE = 60.0  # seconds without progress


class Reading(NamedTuple):
    """Reading: one value on one topic; ``time`` is ISO 8601, in UTC."""

    topic: str
    time: str
    value: float


class Daily(NamedTuple):
    """The figures of one topic and one day."""

    topic: str
    day: str
    values: int
    min: float
    max: float
    mean: float


def readings() -> Iterator[Reading]:
    """Both data sets, reading by reading."""
    from vega_datasets import local_data

    with open(local_data.sf_temps.filepath, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            when = row["date"].replace("/", "-").replace(" ", "T") + "Z"
            yield Reading("weather/san-francisco/temperature", when, float(row["temp"]))
    with open(local_data.seattle_weather.filepath, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            when = row["date"].replace("/", "-") + "T12:00:00Z"
            for name in SEATTLE:
                yield Reading(f"weather/seattle/{name}", when, float(row[name]))


class Stack:
    """nats-server and a gateway, started by ``mqtt-nats serve --embedded``; they end with the ``with`` block."""

    def __init__(self, directory: Path) -> None:
        self.nkey = directory / "nats.nk"
        """The login at nats-server, which is made by its first start."""
        command = [sys.executable, "-m", "mqtt_nats", "serve", "--embedded", "--embedded-port", "0"]
        self._process = subprocess.Popen(
            [*command, "--listen", "127.0.0.1:0", "--data", str(directory)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._process.stdout is not None
        self.mqtt, self.nats = "", ""
        seen = []
        for line in self._process.stdout:
            seen.append(line)
            if found := re.search(r"\bMQTT +(\S+)", line):
                self.mqtt = found[1]
            elif found := re.search(r"\bNATS +(\w+://\S+)", line):
                self.nats = found[1]
                break
        else:
            self.close()
            raise SystemExit("the gateway did not start:\n" + "".join(seen))
        threading.Thread(target=self._process.stdout.read, daemon=True).start()

    def __enter__(self) -> Stack:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End both."""
        self._process.terminate()
        self._process.wait()


def publish(address: str, source: Iterator[Reading]) -> int:
    """Publish readings at QoS 1 and wait for every PUBACK; returns how many there were."""
    import paho.mqtt.client as mqtt
    from paho.mqtt.enums import CallbackAPIVersion

    host, _, port = address.rpartition(":")
    acknowledged = 0
    change = threading.Condition()

    def on_publish(*_: Any) -> None:
        nonlocal acknowledged
        with change:
            acknowledged += 1
            change.notify()

    def wait(least: int) -> None:
        with change:
            if not change.wait_for(lambda: acknowledged >= least, PATIENCE):
                raise SystemExit(f"no acknowledgement for {PATIENCE:.0f} s after {acknowledged} messages")

    client = mqtt.Client(CallbackAPIVersion.VERSION2, client_id="weather", protocol=mqtt.MQTTv5)
    client.max_inflight_messages_set(WINDOW)
    client.on_publish = on_publish
    client.connect(host, int(port))
    client.loop_start()
    sent = 0
    for sent, one in enumerate(source, 1):
        client.publish(one.topic, json.dumps({"time": one.time, "value": one.value}), qos=1)
        wait(sent - WINDOW)
    wait(sent)
    client.disconnect()
    client.loop_stop()
    return sent


def aggregate(nats: str, nkey: Path, directory: Path) -> list[Daily]:
    """Run the job ``aggregate`` over the stored messages and read its output."""
    import pyarrow.parquet as parquet

    output = directory / "daily"
    command = [sys.executable, "-m", "mqtt_nats", "spark", "aggregate", "--servers", nats, "--nkey", str(nkey)]
    command += ["--topics", "weather/#", "--field", "value", "--time-field", "time", "--window", "1 day"]
    subprocess.run([*command, "--output", str(output)], check=True)
    rows = parquet.read_table(output).to_pylist()
    return sorted(
        Daily(row["topic"], f"{row['start']:%Y-%m-%d}", row["count"], row["min"], row["max"], row["mean"])
        for row in rows
    )


def write(figures: list[Daily], file: Path) -> None:
    """All figures as CSV."""
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out)
        writer.writerow(Daily._fields)
        writer.writerows(figures)


def show(figures: list[Daily], days: int) -> None:
    """Print the first days of each topic."""
    shown: dict[str, int] = {}
    print(f"{'topic':36} {'day':10} {'values':>6} {'min':>7} {'max':>7} {'mean':>7}")
    for one in figures:
        shown[one.topic] = shown.get(one.topic, 0) + 1
        if shown[one.topic] <= days:
            print(f"{one.topic:36} {one.day} {one.values:6} {one.min:7.1f} {one.max:7.1f} {one.mean:7.2f}")
    print(f"{len(figures):,} days of {len(shown)} topics")


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="weather", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--days", type=int, default=7, metavar="N", help="days of each topic to print (7)")
    parser.add_argument("--output", type=Path, default=Path("weather-daily.csv"), metavar="FILE", help="all figures")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="mqtt-nats-demo-") as name, Stack(Path(name) / "data") as stack:
        print(f"nats-server on {stack.nats}, gateway on {stack.mqtt}", flush=True)
        begun = time.monotonic()
        count = publish(stack.mqtt, readings())
        took = time.monotonic() - begun
        print(f"{count:,} readings published and acknowledged at QoS 1 in {took:.1f} s", flush=True)
        figures = aggregate(stack.nats, stack.nkey, Path(name))
    write(figures, options.output)
    show(figures, options.days)
    print(f"all of them: {options.output}")


if __name__ == "__main__":
    main()
