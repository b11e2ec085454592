# SPDX-License-Identifier: Apache-2.0
"""`mqtt-nats spark`: what it understands, how it fails, and a job from its start to its end by a signal."""

import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import pyarrow.parquet
import pytest
from click.testing import CliRunner

from pyspark_mqtt_nats.jobs import archive, commands, flags, session
from pyspark_mqtt_nats.jobs.session import Log, Setup
from pyspark_mqtt_nats.options import OPTIONS
from pyspark_mqtt_nats.rules import query_plan
from tests.conftest import NatsFactory
from tests.harness.nats import ROOT, NatsServer
from tests.harness.process import LoggedProcess, wait_ready
from tests.harness.waiting import eventually
from tests.spark.conftest import SOURCE_ROOTS
from tests.spark.storing import Store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JOBS = ("aggregate", "archive", "compact", "replay", "report", "rule", "shell", "sql")
SERVERS = {"servers": "nats://127.0.0.1:4222"}
NOWHERE = ("--servers", "nats://127.0.0.1:1", "--connect-timeout", "1")


def run(*arguments: str, before: Callable[[], None] | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mqtt_nats", "spark", *arguments]
    given = {**environment(), **env}
    return subprocess.run(
        command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=180, check=False, preexec_fn=before
    )


def environment() -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MQTT_NATS_")}
    return {**clean, "PYTHONPATH": os.pathsep.join(map(str, SOURCE_ROOTS))}


class Ran:
    """What a command line would run: `job` and the settings of its session."""

    job: Any = None
    setup: Any = None


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Ran:
    """Jobs are not run, but noted."""
    found = Ran()

    def note(name: str, context: click.Context, run: Any) -> None:
        found.setup = {key: context.params[key] for key in ("master", "conf", "log")}
        module = import_module(f"pyspark_mqtt_nats.jobs.{name}")
        monkeypatch.setattr(module, "run", lambda spark, job, progress: setattr(found, "job", job))
        run(None, None)

    monkeypatch.setattr(commands, "run_job", note)
    return found


def invoke(*arguments: str, **env: str) -> Any:
    return CliRunner().invoke(commands.jobs, list(arguments), env=env)


@pytest.mark.processes
def test_it_is_part_of_the_command() -> None:
    done = run()
    assert done.returncode == 2
    assert re.findall(r"^  ([a-z]+)  ", done.stderr, re.MULTILINE) == sorted((*JOBS, "prepare"))
    assert "Usage: mqtt-nats spark " in done.stderr


@pytest.mark.processes
@pytest.mark.parametrize("job", ["prepare", "report"])
@pytest.mark.parametrize("package", ["pyspark", "pyarrow"])
def test_without_spark_it_says_what_to_install(package: str, job: str) -> None:
    code = f"""
import sys
sys.modules[{package!r}] = None
sys.argv = ["mqtt-nats", "spark", {job!r}]
from mqtt_nats.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"mqtt-nats spark: {package} is not installed: pip install 'mqtt-nats[spark]'\n"


def test_prepare_starts_a_spark_of_its_own() -> None:
    done = invoke("prepare", PYSPARK_GATEWAY_PORT="1")
    assert done.exit_code == 1
    assert "run it without spark-submit" in str(done.exception)


@pytest.mark.parametrize("job", JOBS)
def test_help_names_every_option_of_the_connection_but_no_flag_for_a_secret(job: str) -> None:
    text = invoke(job, "--help").output
    for option in OPTIONS:
        if option.use == "all" and option.name != "mode" and job != "compact":
            there = re.search(rf"^  {flags.flag_name(option.name)}\b", text, re.MULTILINE)
            of_views = job in ("rule", "shell", "sql") and option.name == "subjectPrefix"
            assert bool(there) is (option.name not in ("password", "token") and not of_views), option.name
    for flag in ("--option KEY=VALUE", "--conf KEY=VALUE", "--master URL", "--log FILE"):
        assert flag in text
    assert "MQTT_NATS_SPARK_PASSWORD" in text


@pytest.mark.parametrize(
    ("job", "flag", "default"),
    [
        ("rule", "--num-partitions", "1"),
        ("rule", "--max-messages-per-trigger", str(query_plan.BATCH)),
        ("archive", "--max-messages-per-trigger", str(archive.BATCH)),
    ],
)
def test_help_shows_the_default_of_the_job(job: str, flag: str, default: str) -> None:
    text = " ".join(invoke(job, "--help").output.split())
    assert text.partition(f" {flag} VALUE ")[2].partition("[default: ")[2].partition("]")[0] == default


def test_options_reach_the_source(ran: Ran, tmp_path: Path) -> None:
    nkey = tmp_path / "seed"
    nkey.write_text("SUAGMJH5XLGZKQQWAWKRZJIGMOU4HPFUYLXJMXOO5NLFEO2OOQJ5LPRDPM", encoding="utf-8")
    words = ["--servers", "nats://a,nats://b", "--nkey", str(nkey), "--topics", "a/+", "--no-fail-on-data-loss"]
    words += ["--max-messages-per-trigger", "7", "--option", "readMode=direct", "--option", "subjectPrefix=a=b."]
    spark = [
        "--master",
        "spark://h:7077",
        "--conf",
        "spark.x=1=2",
        "--conf",
        "spark.y=",
        "--log",
        str(tmp_path / "log"),
    ]
    assert (
        invoke("archive", "--output", "o", "--every", "2.5", "--roots", "9", "--files", "3", *words, *spark).exit_code
        == 0
    )
    assert dict(ran.job.source) == {
        "servers": "nats://a,nats://b",
        "nkey": str(nkey),
        "topics": "a/+",
        "failOnDataLoss": "false",
        "maxMessagesPerTrigger": "7",
        "readMode": "direct",
        "subjectPrefix": "a=b.",
    }
    assert (ran.job.output, ran.job.every, ran.job.roots, ran.job.files, ran.job.format) == ("o", 2.5, 9, 3, "parquet")
    assert ran.setup == {"master": "spark://h:7077", "conf": {"spark.x": "1=2", "spark.y": ""}, "log": tmp_path / "log"}


def test_secrets_come_from_the_environment_and_options_win(ran: Ran) -> None:
    secret = {"MQTT_NATS_SPARK_PASSWORD": "hush", "MQTT_NATS_SPARK_TOKEN": ""}
    assert invoke("report", "--user", "me", **secret).exit_code == 0
    assert dict(ran.job.source) == {"user": "me", "password": "hush"} | SERVERS
    assert invoke("report", "--user", "me", "--option", "PASSWORD=other", **secret).exit_code == 0
    assert dict(ran.job.source) == {"user": "me", "PASSWORD": "other"} | SERVERS


def test_options_of_the_jobs(ran: Ran) -> None:
    words = [
        "--window",
        "2 hours",
        "--slide",
        "30 min",
        "--level",
        "2",
        "--level",
        "1",
        "--level",
        "2",
        "--field",
        "a.b",
    ]
    words += ["--time-field", "t", "--watermark", "1 day", "--output", "o", "--checkpoint", "c", "--every", "60"]
    assert invoke("aggregate", *words).exit_code == 0
    job = ran.job
    assert (job.window, job.slide, job.levels, job.watermark, job.every) == (7200, 1800, (2, 1), 86_400, 60)
    assert (job.field, job.time_field, job.output, job.checkpoint, job.rows) == ("a.b", "t", "o", "c", 50)
    words = ["--input", "i", "--speed", "max", "--prefix", "old/", "--no-retain", "--topics", "a/#,b"]
    words += ["--starting-sequence", "5", "--ending-timestamp", "1970-01-01T00:00:01Z", "--request-timeout", "3"]
    assert invoke("replay", *words).exit_code == 0
    job = ran.job
    assert (job.input, job.speed, job.rate, job.prefix, job.retain, job.filters) == (
        "i",
        0,
        None,
        "old/",
        False,
        ("a/#", "b"),
    )
    assert (job.start, job.end, job.since, job.until) == (5, None, None, 1_000_000_000)
    assert dict(job.sink) == {"requestTimeout": "3"} | SERVERS
    assert invoke("report", "--input", "i", "--most", "5").exit_code == 0
    assert (ran.job.input, ran.job.most, ran.job.output) == ("i", 5, None)


def test_formats_of_tables_in_capitals(ran: Ran) -> None:
    assert invoke("archive", "--output", "o", "--format", "Delta").exit_code == 0
    assert ran.job.format == "delta"
    assert invoke("archive", "--output", "o", "--format", "org.example.Source").exit_code == 0
    assert ran.job.format == "org.example.Source"


def test_options_of_rules(ran: Ran) -> None:
    file = ROOT / "examples" / "rules" / "weather.toml"
    assert invoke("rule", str(file), "--metrics-port", "0", "--stream", "plant=plant.").exit_code == 0
    job = ran.job
    assert (job.file, job.metrics_port) == (file, 0)
    assert (dict(job.reads.source), dict(job.reads.streams)) == (SERVERS, {"plant": "plant."})


def test_options_of_a_query(ran: Ran) -> None:
    words = ["--stream", "archive", "--stream", "plant=plant.", "--rows", "7", "--topics", "a/#"]
    assert invoke("sql", "SELECT 1;", *words, "--output", "o.csv", "--overwrite", "--plot", "p.html").exit_code == 0
    job = ran.job
    assert (job.query, job.rows, job.output, job.overwrite, job.plot) == ("SELECT 1", 7, "o.csv", True, Path("p.html"))
    assert (dict(job.streams), job.follow) == ({"archive": "", "plant": "plant."}, False)
    assert dict(job.source) == {"topics": "a/#"} | SERVERS
    assert invoke("sql", "SELECT 1", "--follow", "--max-messages-per-trigger", "5").exit_code == 0
    assert ran.job.follow
    # Spark takes some seconds to start: what is published meanwhile is shown too.
    assert 0 <= time.time() * 1000 - int(ran.job.source["startingTimestamp"]) < 60_000
    for given in (["--starting-sequence", "5"], ["--option", "startingOffsets=latest"], ["--starting-timestamp", "0"]):
        assert invoke("sql", "SELECT 1", "--follow", *given).exit_code == 0
        assert ran.job.source.get("startingTimestamp", "0") == "0"
    assert CliRunner().invoke(commands.jobs, ["sql", "-"], input="SELECT\n 2;\n").exit_code == 0
    assert ran.job.query == "SELECT\n 2"
    assert invoke("shell", "--python", *words).exit_code == 0
    assert (ran.job.python, ran.job.rows, dict(ran.job.streams)) == (True, 7, {"archive": "", "plant": "plant."})


def test_commands_of_the_pages_are_understood(ran: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rules = (ROOT / "docs" / "spark-rules.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```toml\n(.*?)^```", rules, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    Path("rules.toml").write_text("\n".join(blocks), encoding="utf-8")
    pages = (ROOT / "docs" / f"{name}.md" for name in ("spark", "spark-lakehouse"))
    page = rules + "".join(one.read_text(encoding="utf-8") for one in pages)
    commands_shown = re.findall(r"^(?:mqtt-nats spark|spark-submit .* \S*job\.py) (.*)$", page, re.MULTILINE)
    commands_shown.remove("prepare")  # it has no options, and no job that `ran` replaces
    assert {line.split()[0] for line in commands_shown} == set(JOBS)
    for line in commands_shown:
        done = invoke(*shlex.split(line))
        assert done.exit_code == 0, (line, done.output)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("archive", "--output"),
        ("archive --output o --every 0", "--every"),
        ("archive --output o --option servers", "--option"),
        ("archive --output o --conf x", "--conf"),
        ("archive --output o --ending-sequence 5", "--ending-sequence"),
        ("archive --output o --catalog c", "--catalog is for --format iceberg"),
        ("archive --output o --format iceberg --table messages", "--table"),
        ("archive --output o --format delta --table a.b", "--table is for --format iceberg"),
        ("archive --output ''", "'--output': it is empty"),
        ("archive --output o --checkpoint ''", "'--checkpoint': it is empty"),
        ("archive --output o --format ''", "'--format': it is empty"),
        ("compact", "--input"),
        ("compact --input i --format orc", "--format"),
        ("compact --input i --target-size big", "--target-size"),
        ("compact --input i --before soon", "a day such as 2026-11-20"),
        ("compact --input i --catalog c", "--catalog is for --format iceberg"),
        ("compact --input i --option topics=a", "--option has no effect"),
        ("aggregate", "--window"),
        ("aggregate --window 5", "'10 minutes'"),
        ("aggregate --window 0s", "--window"),
        ("aggregate --window 1s --slide x", "--slide"),
        ("aggregate --window 1h --slide 2h", "--slide is longer than --window"),
        ("aggregate --window 1h --every 5", "--every needs --checkpoint"),
        ("aggregate --window 1h --checkpoint c", "--checkpoint needs --output"),
        ("aggregate --window 1h --checkpoint c --output o --overwrite", "--overwrite and --checkpoint"),
        ("aggregate --window 1h --output o --watermark 5min", "--watermark needs --checkpoint"),
        ("aggregate --window 1h --overwrite", "--overwrite needs --output"),
        ("aggregate --window 1h --level 0", "--level"),
        ("replay --input i --speed 0", "--speed"),
        ("replay --input i --speed nan", "--speed"),
        ("replay --input i --rate -1", "--rate"),
        ("replay --input i --prefix a/#", "--prefix"),
        ("replay --input i --topics a/#/b", "--topics"),
        ("replay --input i --starting-timestamp soon", "--starting-timestamp"),
        ("replay --input i --speed 2 --rate 3", "--speed and --rate exclude each other"),
        ("replay --input i --starting-sequence 5 --ending-sequence 3", "--ending-sequence is before"),
        (
            "replay --input i --starting-timestamp 2026-01-02 --ending-timestamp 2026-01-01",
            "--ending-timestamp is before",
        ),
        ("report --format delta", "--format needs --input"),
        ("report --input ''", "'--input': it is empty"),
        ("report --input i --topics a", "topics: no effect with --input"),
        ("sql", "QUERY"),
        ("sql ;", "QUERY is empty"),
        ("sql q --follow --output x.csv", "--follow prints rows"),
        ("sql q --output x.txt", "a name that ends in .parquet, .csv or .json"),
        ("sql q --overwrite", "--overwrite needs --output"),
        ("sql q --plot page.txt", "--plot page.txt: expected a name that ends in .html"),
        ("sql q --stream a --stream A=b", "there is a view A already"),
        ("sql q --rows 0", "--rows"),
        ("sql q --stream a.b", "--stream"),
        ("sql q --stream sessions", "there is a view sessions already"),
        ("rule", "FILE"),
        ("rule r --metrics-port 70000", "--metrics-port"),
        ("rule r --option topics=a", "--option topics: FILE has it"),
        ("rule r --option stream=a", "--option stream: each view has its own"),
        ("shell --option stream=x", "--option stream: each view has its own"),
        ("shell --option pushdown=true", "--option pushdown: each view has its own"),
    ],
)
def test_wrong_usage_names_the_option(words: str, named: str) -> None:
    done = invoke(*shlex.split(words))
    assert done.exit_code == 2
    assert named in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("archive --output o --servers http://x", "servers = 'http://x': expected URLs"),
        ("archive --output o --option nonsense=1", "there is no option 'nonsense'"),
        ("archive --output o --option endingSequence=5", "endingSequence has no effect for a streaming read"),
        ("aggregate --window 1h --max-messages-per-trigger 5", "maxMessagesPerTrigger has no effect for a batch read"),
        ("replay --input i --user me", "--user needs a password, in the environment variable MQTT_NATS_SPARK_PASSWORD"),
        ("report --option password=x", "the option password, or MQTT_NATS_SPARK_PASSWORD, needs --user"),
        ("replay --input i --option topics=a", "topics has no effect for a write"),
        ("report --output /nowhere/at/all.html", "--output /nowhere/at/all.html: there is no directory /nowhere/at"),
        ("report --starting-sequence 5 --ending-sequence 4", "endingSequence is before startingSequence"),
        ("sql q --plot /nowhere/at/all.html", "--plot /nowhere/at/all.html: there is no directory /nowhere/at"),
        ("sql q --follow --ending-sequence 4", "endingSequence has no effect for a streaming read"),
        ("sql q --max-messages-per-trigger 4", "maxMessagesPerTrigger has no effect for a batch read"),
        ("rule /nowhere.toml", "/nowhere.toml: No such file or directory"),
        ("rule /dev/null", "/dev/null: checkpoint: it is missing"),
        ('sql q --decoders {"a":"xml"}', "'a' has the format 'xml'"),
    ],
)
def test_bad_options_are_one_line_before_spark_is_started(
    words: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "run_job", lambda *_: pytest.fail("Spark would have been started"))
    with pytest.raises(SystemExit) as ended:
        commands.main(words.split(), "mqtt-nats spark")
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("mqtt-nats spark: ")
    assert text in line


@pytest.mark.processes
def test_no_java_is_one_line(tmp_path: Path) -> None:
    done = run("report", *NOWHERE, JAVA_HOME=str(tmp_path))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"mqtt-nats spark: JAVA_HOME is {tmp_path}, which has no bin/java; ")


@pytest.mark.processes
def test_too_few_files_are_one_line_that_says_what_to_allow() -> None:
    files = 256

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    done = run("report", *NOWHERE, before=limit)
    assert (done.returncode, done.stdout) == (1, "")
    *_, line = done.stderr.splitlines()
    assert line.startswith("mqtt-nats spark: Spark did not start: ")
    assert line.endswith(f"; it may open {files} files: allow 1,024 by ulimit -n 1024")


@pytest.mark.timeout(360)
def test_errors_of_the_source_are_one_line(
    spark: "SparkSession",
    nats_server: NatsServer,
    nats_factory: NatsFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """In batch and in streaming, when planning and when reading; whatever Spark makes of them."""
    closed = nats_factory(config='authorization { user: me, password: "secret" }')

    @contextmanager
    def shared(setup: Setup) -> Iterator[tuple["SparkSession", Log]]:
        with (setup.log or tmp_path / "none").open("ab+") as file:
            yield spark, Log(file)

    def fails(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            commands.main(list(words), "mqtt-nats spark")
        assert ended.value.code == 1
        output = capsys.readouterr()
        assert output.out == ""
        *progress, line = output.err.splitlines()
        assert all(re.match("[a-z]+: [a-z0-9]", one) for one in progress), output.err
        return line.removeprefix("mqtt-nats spark: ")

    monkeypatch.setattr(session, "session", shared)
    nowhere = "cannot connect to nats://127.0.0.1:1: connection refused (option servers)"
    log = tmp_path / "log"
    assert fails("report", *NOWHERE, "--log", str(log)) == nowhere
    assert "Traceback (most recent call last)" in log.read_text(encoding="utf-8")
    assert fails("archive", *NOWHERE, "--output", str(tmp_path / "a")) == nowhere
    assert "(option user)" in fails("report", "--servers", closed.url)
    assert (
        fails("report", "--servers", nats_server.url, "--stream", "none") == "there is no stream none (option stream)"
    )
    with Store(nats_server.url) as store:
        store.put(range(50))
        store.purge_before(20)
        given = ["--servers", store.url, "--stream", store.stream, "--subject-prefix", store.prefix]
        line = fails("report", *given, "--starting-sequence", "5")
        assert "set failOnDataLoss to false" in line
        aggregate = [
            "aggregate",
            *given,
            "--window",
            "1h",
            "--output",
            str(tmp_path),
            "--checkpoint",
            str(tmp_path / "c"),
        ]
        assert "set failOnDataLoss to false" in fails(*aggregate, "--starting-sequence", "5")
        line = fails("aggregate", *given, "--window", "1h", "--output", str(tmp_path))
        assert line.startswith(f"Path file:{tmp_path} already exists")
        assert line.endswith("; change --output, or give --overwrite")
        assert "change --format" in fails("archive", *given, "--output", str(tmp_path / "b"), "--format", "nothing")
        missing = fails("replay", *given[:2], "--input", str(tmp_path / "missing"))
        assert missing == f"Path does not exist: file:{tmp_path}/missing; change --input"


@pytest.mark.timeout(360)
def test_an_archive_that_goes_on_until_a_signal(nats_server: NatsServer, tmp_path: Path) -> None:
    """The real command line."""
    output = tmp_path / "archive"
    with Store(nats_server.url) as store:
        store.put(range(500))
        words = ["--output", str(output), "--every", "0.5", "--master", "local[2]", "--topics", "a/0,a/1"]
        words += ["--servers", nats_server.url, "--stream", store.stream, "--subject-prefix", store.prefix]
        words += ["--log", str(tmp_path / "spark.log")]
        process = LoggedProcess("archive", tmp_path / "archive.log")
        try:
            process.start([sys.executable, "-m", "mqtt_nats", "spark", "archive", *words], environment(), ROOT)
            eventually(lambda: numbers(output) == wanted(500) or not process.alive, 180)
            store.put(range(500, 600))
            eventually(lambda: numbers(output) == wanted(600) or not process.alive, 120)
            # Spark tells of a batch a little after it is in the log; a line says what was told every ten seconds.
            eventually(lambda: "archive: 400 messages, " in process.text or not process.alive, 60)
            assert process.alive, process.text
            os.kill(process.pid, signal.SIGTERM)
            wait_ready(process, "(messages archived in)", 60)
            assert process.wait(30) == 0
        finally:
            process.discard()
    *before, first, second, third, fourth = process.text.splitlines()
    assert re.fullmatch(r"400 messages archived in .*/s, in \d+ batches", first)
    assert second == "  sequences 1 to 600"
    assert third == "  200 sequences between them: other topics, expired or deleted"
    assert fourth == f"  in {output}: parquet, by date and root"
    assert all(line.startswith("archive: ") for line in before)
    assert "Setting default log level" in (tmp_path / "spark.log").read_text(encoding="utf-8")


def wanted(number: int) -> list[int]:
    return [one for one in range(number) if one % 3 < 2]


def numbers(output: Path) -> list[int]:
    """The payloads in the files that Spark's log of them has."""
    found: list[int] = []
    for entry in output.glob("_spark_metadata/[0-9]*"):
        for path in re.findall(r'"path":"file://([^"]+)"', entry.read_text(encoding="utf-8")):
            found += map(int, pyarrow.parquet.ParquetFile(path).read(["payload"]).column("payload").to_pylist())
    return sorted(found)
