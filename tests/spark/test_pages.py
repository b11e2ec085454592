# SPDX-License-Identifier: Apache-2.0
"""Commands and code of docs/spark.md and docs/spark-rules.md, run in their order against a real gateway."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from tests.conftest import GatewayFactory, NatsFactory
from tests.harness.nats import ROOT
from tests.harness.process import LoggedProcess
from tests.harness.raw5 import Raw5
from tests.harness.shell import Shell
from tests.harness.waiting import eventually
from tests.spark.conftest import SOURCE_ROOTS

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

SPARK: Final = (ROOT / "docs" / "spark.md").read_text(encoding="utf-8")
RULES: Final = (ROOT / "docs" / "spark-rules.md").read_text(encoding="utf-8")
LOCAL: Final = "nats://127.0.0.1:4222"
PATIENCE: Final = 300.0  # seconds
RETAIN: Final = 0x01
"""Flag of PUBLISH."""


def blocks(page: str, language: str, title: str = "") -> list[str]:
    """The blocks in a language, of the page or of the section with this title."""
    text = page if not title else re.split(rf"^###? {title}\n", page, flags=re.M)[1].partition("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


class Site:
    """A gateway and what clients have published, and a directory in which commands are run."""

    def __init__(self, url: str, port: int, directory: Path) -> None:
        self.url = url
        self.directory = directory
        self.shell = Shell({1883: port}, url, directory)
        self._port = port

    def publish(self, messages: list[tuple[str, bytes]], flags: int = 0) -> None:
        """Publish at QoS 1."""
        with Raw5.open(self._port, "device") as client:
            for topic, payload in messages:
                client.deliver(topic, payload, flags=flags)

    def environ(self) -> Mapping[str, str]:
        """The environment of commands: nothing is activated."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("MQTT_NATS_", "PYSPARK"))}
        return clean | {"PYTHONPATH": os.pathsep.join(map(str, SOURCE_ROOTS))}

    def python(self, program: str) -> str:
        """Run a program; return what it prints."""
        (self.directory / "program.py").write_text(program.replace(LOCAL, self.url), encoding="utf-8")
        return self._run([sys.executable, "program.py"])

    def job(self, line: str, given: str = "") -> str:
        """Run a command of the page; return what it prints."""
        return self._run(self.command(line), given)

    def command(self, line: str) -> list[str]:
        """The words of a command, with the directory in the place of /data, and the nats-server."""
        words = [word.replace("/data", str(self.directory)) for word in shlex.split(line)]
        assert words[:2] == ["mqtt-nats", "spark"]
        servers = (
            [] if words[2] == "compact" or (words[2] == "report" and "--input" in words) else ["--servers", self.url]
        )
        return [sys.executable, "-m", "mqtt_nats", *words[1:], *servers]

    def _run(self, command: list[str], given: str = "") -> str:
        done = subprocess.run(
            command,
            cwd=self.directory,
            env=self.environ(),
            input=given,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.fixture
def site(nats_factory: NatsFactory, gateway_factory: GatewayFactory, tmp_path: Path) -> Iterator[Site]:
    server = nats_factory()
    made = Site(server.url, gateway_factory(server).port, tmp_path)
    plant = _plant(tmp_path / "plant.desc")
    for number in range(10):
        report = {"celsius": 20 + number, "at": f"2026-11-20T06:0{number}:00Z", "sensor": {"temp": number}}
        made.publish(
            [
                ("site/1/temp", b"%d" % number),
                ("site/1/temperature", b"%d" % (78 + number)),
                ("site/1/report", json.dumps(report).encode()),
                ("plant/a", plant),
            ]
        )
    made.publish([("site/1/temp", b"warm"), ("site/1/report", b'{"state": "off"}'), ("plant/a", b"\xff\xff")])
    made.publish([("home/door", b"shut")], RETAIN)
    yield made
    made.shell.close()


def _plant(path: Path) -> bytes:
    """Write descriptors as protoc does; return a report of a plant."""
    file = descriptor_pb2.FileDescriptorProto(name="plant.proto", package="plant", syntax="proto3")
    kind = file.message_type.add(name="Report")
    field = descriptor_pb2.FieldDescriptorProto
    kind.field.add(name="rpm", number=1, type=field.TYPE_INT64, label=field.LABEL_OPTIONAL)
    path.write_bytes(descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString())
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    report = message_factory.GetMessageClass(pool.FindMessageTypeByName("plant.Report"))(rpm=900)
    return bytes(report.SerializeToString())


def test_the_code_of_the_page(site: Site) -> None:
    """In one script, in the order of the page, with the options that it leaves out."""
    first, *others, job = blocks(SPARK, "python")
    assert first.startswith("from pyspark_mqtt_nats import prepare\n\nprepare()\n")
    assert "import main" in job
    decoders, decode, stream, alerts, averages = (
        one.replace('.format("mqtt_nats")', '.format("mqtt_nats").options(**nats)') for one in others
    )
    (view,) = (block.replace("GROUP BY topic;", "GROUP BY topic ORDER BY topic;") for block in blocks(SPARK, "sql"))
    program = f"""{first}
nats = {{"servers": "{site.url}"}}
{decoders}
sites.selectExpr("count(number)", "count(celsius)", "count(at)", "count(rpm)", "count(decode_error)").show()
sites.select("topic", "payload").write.parquet("archive")
{decode}
{stream}
print("STREAMED", spark.read.parquet("site").count())
{alerts}
{averages.replace("/var/lib/spark", str(site.directory))}
query.processAllAvailable()
query.stop()
for statement in {view!r}.split(";")[:-1]:
    spark.sql(statement).show()
published = spark.read.format("mqtt_nats").options(topics="alerts/#", **nats).load()
published.selectExpr("qos", "content_type", "topic", "string(payload) AS payload").show(1, truncate=False)
"""
    found = site.python(program)
    assert re.search(r"\|home/door *\|\d{4}-.*\|1 *\|device *\|shut *\|", found)
    assert re.search(r"\| +10\| +10\| +10\| +10\| +2\|", found), found
    assert "STREAMED 32" in found
    assert re.search(r"\|site/1/temp\| +4\.5\|", found)
    assert re.search(r'\|2 +\|application/json\|alerts/site/1/temperature\|{"celsius":81\.0,"timestamp":".*"}\|', found)


def test_the_queries_of_the_page(site: Site) -> None:
    mean, retained, hours, follow = blocks(SPARK, "sh", "A query")[0].splitlines()
    found = site.job(mean)
    assert re.match(r"topic +avg\(number\)\n", found)
    assert re.search(r"^site/1/temp +4\.5$", found, re.MULTILINE)
    assert site.job(retained).startswith("1 row in retained.parquet (")
    assert site.job(hours).endswith(" drawn in hours.html\n")
    assert (site.directory / "hours.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    process = LoggedProcess("follow", site.directory / "follow.log")
    try:
        process.start(site.command(follow), site.environ(), site.directory)
        eventually(lambda: " messages, " in process.text or not process.alive, PATIENCE)
        site.publish([("site/2/temp", b"21.5"), ("other", b"1")])
        eventually(lambda: re.search(r"^site/2/temp +21\.5$", process.text, re.M) or not process.alive, PATIENCE)
        process.interrupt()
        assert process.wait(60) == 0
    finally:
        process.discard()
    assert re.search(r"^2 messages in \d batch(es)?$", process.text, re.MULTILINE), process.text
    shell, _ = blocks(SPARK, "sh", "A query")[1].splitlines()
    shown = site.job(shell, "SHOW VIEWS;\nDESCRIBE messages;\nSELECT count(*) AS number FROM messages;\nexit\n")
    assert re.search(r"\bretained\b", shown)
    assert re.search(r"^topic_levels +array<string>", shown, re.MULTILINE)
    assert shown.endswith("number\n    46\n")


def test_the_jobs_of_the_page(site: Site) -> None:
    archive, _ = blocks(SPARK, "sh", "archive")[0].splitlines()
    expected = blocks(SPARK, "text", "archive")[0].replace("/data", str(site.directory))
    assert masked(site.job(archive)) == masked(re.sub(r".*sequences between.*\n", "", expected))
    figures, _ = blocks(SPARK, "sh", "aggregate")[0].splitlines()
    heading = blocks(SPARK, "text", "aggregate")[0].splitlines()[0]
    found = site.job(figures)
    assert found.split("\n")[0].split() == heading.split()
    assert "1 message with no number in sensor.temp, such as sequence " in found
    _, replay, _ = blocks(SPARK, "sh", "replay")[0].splitlines()
    assert re.match(r"44 messages of .*/messages published in ", site.job(replay))
    page, of_archive = blocks(SPARK, "sh", "report")[0].splitlines()
    site.job(page)
    assert (site.directory / "report.html").exists()
    assert "44" in site.job(of_archive)


def says(process: LoggedProcess, text: str) -> None:
    """Wait until a process has said this, or has ended."""
    eventually(lambda: text in process.text or not process.alive, PATIENCE)


def masked(text: str) -> str:
    """Without numbers that differ from run to run."""
    return re.sub(r"[\d,.]+", "0", text)


@pytest.fixture
def rules(site: Site) -> Iterator[LoggedProcess]:
    """The first file of the page, which is run."""
    first, *_ = blocks(RULES, "toml")
    (site.directory / "rules.toml").write_text(first, encoding="utf-8")
    (command,) = (block for block in blocks(RULES, "sh") if "spark rule" in block)
    process = LoggedProcess("rules", site.directory / "rules.log")
    try:
        process.start(site.command(command.replace("9464", "0")), site.environ(), site.directory)
        yield process
        process.interrupt()
        assert process.wait(60) == 0
    finally:
        process.discard()


def test_the_first_rule_of_the_page(site: Site, rules: LoggedProcess) -> None:
    started, message = blocks(RULES, "text")
    (sub, pub) = next(block.splitlines() for block in blocks(RULES, "sh") if "mqtt-nats sub" in block)
    says(rules, started.splitlines()[1])
    assert all(masked(line) in masked(rules.text) for line in started.splitlines())
    subscriber = site.shell.start(sub)

    def heard() -> bool:
        site.publish([("alerts/ready", b"x")])
        return "alerts/ready x" in subscriber.text

    eventually(heard, PATIENCE)
    site.shell.run(pub)
    expected = re.sub(r"\d{4}-\d.*Z", "TIME", message)
    eventually(lambda: expected in re.sub(r"\d{4}-\d.*Z", "TIME", subscriber.text) or not rules.alive, PATIENCE)
    more = "".join(blocks(RULES, "toml"))
    site.publish([("limits/site/7/temp", b"20")], RETAIN)
    (site.directory / "rules.toml").write_text(more, encoding="utf-8")
    for name in ("above-limit", "unreadable"):
        says(rules, f"rule: rule {name}: it runs")
    site.publish([("site/7/temp", b"25"), ("site/7/temp", b"hot")])
    eventually(lambda: '"number":25.0,"most":20.0' in subscriber.text or not rules.alive, PATIENCE)
    assert rules.alive, rules.text
