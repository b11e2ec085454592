# SPDX-License-Identifier: Apache-2.0
"""What jobs share: progress, what is told about batches, errors as one line, settings of a session. Without Spark."""

import io
import logging
import os
import signal
import sys
import termios
import time
from pathlib import Path
from typing import Any

import orjson
import pytest
from pyspark.errors import StreamingQueryException

from pyspark_mqtt_nats.errors import DataLossError, OptionError
from pyspark_mqtt_nats.java import JavaError
from pyspark_mqtt_nats.jobs import JobError, progress
from pyspark_mqtt_nats.jobs.failures import explain
from pyspark_mqtt_nats.jobs.progress import Progress, count, duration, plural, rate, size
from pyspark_mqtt_nats.jobs.queries import ATTEMPTS, Tally, rounds, run_round
from pyspark_mqtt_nats.jobs.session import Log, Setup, settings, told

PYTHON = """An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "/x/read.py", line 19, in read
    raise DataLossError("no")
{line}
"""
PLANNING = (
    "[PYTHON_DATA_SOURCE_ERROR] Failed to generate Python data source read partitions: Traceback (most recent call "
    'last):\n  File "/x/batch.py", line 14, in partitions\n    raise OptionError("...")\n'
    "pyspark_mqtt_nats.errors.OptionError: there is no stream x (option stream)\n SQLSTATE: 38000"
)
CALLED = (
    "An error occurred while calling o99.save.\n: org.apache.spark.SparkClassNotFoundException: "
    "[DATA_SOURCE_NOT_FOUND] Failed to find the data source: iceberg. Make sure. SQLSTATE: 42K02\n"
    "\tat org.apache.spark.sql.errors.QueryExecutionErrors$.dataSourceNotFoundError(QueryExecutionErrors.scala:770)\n"
)
UNRESOLVED = (
    "[UNRESOLVED_COLUMN.WITH_SUGGESTION] A column with name `x` cannot be resolved. Did you mean [`y`]. "
    "SQLSTATE: 42703; line 1 pos 7;\n'Project ['x]\n"
)
MKDIRS = (
    "An error occurred while calling o83.parquet.\n: org.apache.spark.SparkException: Job aborted due to stage "
    "failure: Task 1 in stage 1.0 failed 1 times, most recent failure: Lost task 1.0 in stage 1.0 (TID 2) (localhost "
    "executor driver): java.io.IOException: Mkdirs failed to create file:/proc/x (exists=false)\n"
    "\tat org.apache.hadoop.fs.X(Y:1)\n"
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Py4JNetworkError(Exception):
    pass


class Captured(Exception):
    """As pyspark has it: the cause is an attribute."""

    cause: BaseException | None = None


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OptionError("qos: expected 1 or less", "qos"), "qos: expected 1 or less"),
        (JobError("change --output"), "change --output"),
        (JavaError("Spark needs Java"), "Spark needs Java"),
        (Exception(PLANNING), "there is no stream x (option stream)"),
        (Exception(UNRESOLVED), "A column with name `x` cannot be resolved. Did you mean [`y`]"),
        (
            Exception(PYTHON.format(line="pyspark_mqtt_nats.errors.DataLossError: 5 messages: are gone")),
            "5 messages: are gone",
        ),
        (
            Exception(PYTHON.format(line="ValueError: a bug")),
            "ValueError: a bug; --log FILE has the whole story",
        ),
        (
            Exception(CALLED),
            "Failed to find the data source: iceberg. Make sure; "
            "change --format, or add its package by --conf spark.jars.packages=...",
        ),
        (
            Exception("[PATH_ALREADY_EXISTS] Path file:/tmp/w already exists. SQLSTATE: 42K04"),
            "Path file:/tmp/w already exists; change --output, or give --overwrite",
        ),
        (
            Exception(MKDIRS),
            "IOException: Mkdirs failed to create file:/proc/x (exists=false); change --output or --checkpoint; "
            "--log FILE has the whole story",
        ),
        (
            Exception(
                "[STREAM_FAILED] Query [id = 1] terminated with exception: Multiple streaming queries are "
                "concurrently using file:/a/_spark_metadata. SQLSTATE: XXKST"
            ),
            "another run writes there at the same time; wait for it, or change --output and --checkpoint",
        ),
        (
            Exception(
                "[INSERT_COLUMN_ARITY_MISMATCH.NOT_ENOUGH_DATA_COLUMNS] Cannot write to `v`, the reason is not enough "
                "data columns:\nTable columns: `topic`, `payload`.\nData columns: `col1`. SQLSTATE: 21S01"
            ),
            "Cannot write to `v`, the reason is not enough data columns: Table columns: `topic`, `payload`. "
            "Data columns: `col1`",
        ),
        (
            Exception(
                "\n[PARSE_SYNTAX_ERROR] Syntax error at or near 'SELEC'. SQLSTATE: 42601 (line 1, pos 0)\n\n"
                "== SQL ==\nSELEC 1\n^^^\n"
            ),
            "Syntax error at or near 'SELEC' (line 1, pos 0)",
        ),
        (
            Exception(
                "py4j: o1.sql.\n: org.apache.spark.sql.catalyst.parser.ParseException: "
                "Options are not supported here.. "
                "== SQL (line 1, position 1) == CREATE STREAMING TABLE st ^^^^^^"
            ),
            "ParseException: Options are not supported here; --log FILE has the whole story",
        ),
        (
            Exception("[TABLE_OR_VIEW_NOT_FOUND] There is no view `x`. SQLSTATE: 42P01; line 1 pos 14"),
            "There is no view `x`; the views are messages, retained and sessions, and those of --stream",
        ),
        (
            Exception("x\n: java.io.IOException: No space left on device\n\tat java.io.X(Y:1)\n"),
            "IOException: No space left on device; make room, or change --output, --checkpoint or "
            "--conf spark.local.dir=DIR; --log FILE has the whole story",
        ),
        (
            Exception("[INTERNAL_ERROR] Found the unresolved operator: 'InsertIntoStatement LogicalRDD [sequence#1L]"),
            "INSERT INTO needs a view with the columns that are written: use CREATE TEMPORARY VIEW name (topic STRING, "
            "payload STRING) USING mqtt_nats OPTIONS (servers '...'), in `mqtt-nats spark shell`",
        ),
        (
            Exception("[STREAM_FAILED] Query terminated: Python worker failed to connect back. SQLSTATE: XXKST"),
            "Python worker failed to connect back: the machine is busy; run it again later, or with fewer tasks by "
            "--master local[2]",
        ),
        (KeyError("what"), "KeyError: 'what'; --log FILE has the whole story"),
        (
            Py4JNetworkError("Answer from Java side is empty"),
            "Spark's JVM has ended; give it more memory by --conf spark.driver.memory=4g, or look into its --log",
        ),
    ],
)
def test_an_exception_is_one_line(error: Exception, text: str) -> None:
    assert explain(error) == text


def test_the_message_is_found_in_the_causes() -> None:
    outer, middle = (
        Captured("[STREAM_FAILED] Query [id = 1] terminated with exception: Job aborted"),
        Captured("aborted"),
    )
    outer.cause = middle
    middle.__cause__ = Exception(PYTHON.format(line="pyspark_mqtt_nats.errors.ConnectError: no connection"))
    assert explain(outer) == "no connection"
    assert "\n" not in explain(Exception("x\n" * 5000))
    assert len(explain(Exception("x" * 5000))) < 500
    assert explain(DataLossError("gone")) == "gone"


def update(batch: int, rows: int, start: Any, end: Any, **more: Any) -> dict[str, Any]:
    source = {"startOffset": start and orjson.dumps(start).decode(), "endOffset": orjson.dumps(end).decode()}
    return {"batchId": batch, "numInputRows": rows, "sources": [source], **more}


def at(sequence: int) -> dict[str, Any]:
    return {"created": "2026", "first": 3, "next": sequence}


def test_batches_are_added_up_once_over_the_rounds() -> None:
    tally = Tally()
    nothing = {"created": "", "first": 0, "next": 0}
    first = update(0, 5, nothing, at(10))
    tally.add(first)
    tally.add(first)
    assert (tally.messages, tally.batches, tally.sequences()) == (5, 1, (3, 9))
    tally.add(update(1, 0, at(10), at(10)))  # an idle look, whose number comes again
    tally.add(update(1, 7, at(10), at(20)))
    tally.add(update(2, 1, at(20), at(21)))
    assert (tally.messages, tally.batches, tally.sequences()) == (13, 3, (3, 20))
    assert tally.line().startswith("13 messages, ")
    assert tally.line().endswith("batch 4")
    later = Tally()
    later.add(update(8, 0, None, at(11)))
    assert later.sequences() == (0, 0)
    later.add(update(9, 1, at(11), at(15)))
    assert later.sequences() == (11, 14)


def test_the_state_of_windows_is_added_up() -> None:
    tally = Tally()
    operator = {"numRowsTotal": 4, "numRowsRemoved": 0, "numRowsDroppedByWatermark": 0}
    tally.add(update(0, 9, at(1), at(10), stateOperators=[operator], observedMetrics={"checks": {"messages": 9}}))
    # A batch without messages, which only closes windows.
    closing = {"numRowsTotal": 1, "numRowsRemoved": 3, "numRowsDroppedByWatermark": 2}
    tally.add(update(1, 0, at(10), at(10), stateOperators=[closing]))
    assert (tally.messages, tally.batches, tally.open, tally.removed, tally.late) == (9, 2, 1, 3, 2)
    assert tally.observed == [{"messages": 9}]


def test_rounds_begin_at_their_time_until_the_user_stops() -> None:
    quiet = Progress("x", io.StringIO())
    assert len(list(rounds(quiet, None))) == 1
    begun = time.monotonic()
    number = 0
    for _ in rounds(quiet, 0.05):
        number += 1
        quiet.stopping = number == 3
    assert number == 3
    assert 0.1 <= time.monotonic() - begun < 5


def test_progress_is_one_line_on_a_terminal_and_rare_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])  # type: ignore[attr-defined]
    terminal, file = Terminal(), io.StringIO()
    shown, logged = Progress("archive", terminal), Progress("archive", file)
    for second in range(21):
        clock[0] = float(second)
        for one in (shown, logged):
            one.show(f"{second} messages")
    assert file.getvalue() == "archive: 2 messages\narchive: 12 messages\n"
    assert "\n" not in terminal.getvalue()
    assert terminal.getvalue().endswith("\rarchive: 20 messages")
    shown.say("a warning")
    assert terminal.getvalue().endswith(f"\r{' ' * 20}\rarchive: a warning\n")


def test_progress_stays_on_one_line_of_the_terminal() -> None:
    """A longer one would go over the edge, and the next one would leave its first part behind."""
    master, slave = os.openpty()
    with open(master, "rb", buffering=0) as screen, open(slave, "w", encoding="utf-8") as output:
        termios.tcsetwinsize(output, (24, 80))
        one = Progress("archive", output)
        one.show("x" * 100)
        one.clear()
        shown, expected = b"", b"\r" + b"archive: ".ljust(79, b"x") + b"\r" + b" " * 79 + b"\r"
        while len(shown) < len(expected):  # a terminal may give what was written in pieces
            shown += screen.read(1000)
        assert shown == expected


def test_the_first_signal_asks_and_the_second_one_ends(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    asked = Progress("x", io.StringIO())
    with asked.signals():
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked.stopping
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


def test_numbers_as_people_read_them() -> None:
    assert [count(1234567), plural(1, "message"), plural(2000, "batch")] == ["1,234,567", "1 message", "2,000 batches"]
    assert [size(n) for n in (0, 1023, 1024, 5 << 20, 3 << 40)] == [
        "0 bytes", "1,023 bytes", "1.0 KiB", "5.0 MiB", "3.0 TiB"
    ]  # fmt: skip
    assert [duration(n) for n in (0.04, 59.9, 60, 3599.6, 90_000)] == [
        "0.0 s", "59.9 s", "1 min 0 s", "1 h 0 min", "25 h 0 min"
    ]  # fmt: skip
    assert rate(5000, 2) == "2,500/s"


def test_settings_of_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)
    local = settings(Setup("report"))
    assert local["spark.master"] == "local[*]"
    assert local["spark.driver.bindAddress"] == local["spark.driver.host"] == "127.0.0.1"
    assert local["spark.ui.enabled"] == "false"
    assert local["spark.sql.session.timeZone"] == "UTC"
    assert local["spark.app.name"] == "mqtt-nats report"
    cluster = settings(Setup("report", "spark://host:7077", {"spark.sql.session.timeZone": "Europe/Berlin"}))
    assert cluster["spark.master"] == "spark://host:7077"
    assert "spark.driver.host" not in cluster
    assert "spark.ui.enabled" not in cluster
    assert cluster["spark.sql.session.timeZone"] == "Europe/Berlin"
    assert settings(Setup("report", None, {"spark.master": "yarn"}))["spark.master"] == "yarn"
    assert settings(Setup("report", "local[2]", {"spark.ui.enabled": "true"}))["spark.ui.enabled"] == "true"
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    assert "spark.master" not in settings(Setup("report"))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "26/11/21 07:19:46 WARN NativeCodeLoader: Unable\nInvalid maximum heap size: -Xmx1x\n"
            "Error: Could not create the Java Virtual Machine.\n",
            "Invalid maximum heap size: -Xmx1x",
        ),
        (
            'Exception in thread "main" org.apache.spark.SparkException: Master must either be yarn\n\tat x.Error(1)\n',
            "Master must either be yarn",
        ),
        ("all is well\n", ""),
    ],
)
def test_why_the_jvm_has_ended(tmp_path: Path, text: str, why: str) -> None:
    with (tmp_path / "log").open("ab+") as file:
        file.write(b"Exception of an earlier run\n")
        log = Log(file)
        file.write(text.encode())
        assert log.why() == why


def test_what_the_source_warns_of_is_told_once(tmp_path: Path) -> None:
    with (tmp_path / "log").open("ab+") as file:
        log = Log(file)
        lost = "stream x begins with 5: up to 4 messages are missing (failOnDataLoss is false)"
        removed = "7 messages were removed by the retention of the stream before they were read"
        file.write(f"{lost}\nsomething else\n{lost}\n{removed}\n".encode())
        assert log.warnings() == [lost, removed]


def test_warnings_are_worded_as_the_source_words_them(caplog: pytest.LogCaptureFixture) -> None:
    from pyspark_mqtt_nats.jobs.session import _WARNING
    from pyspark_mqtt_nats.options import Options
    from pyspark_mqtt_nats.reading.ranges import loss

    loss(Options.parse({"failOnDataLoss": "false"}), "stream x begins with 5", 4)
    assert _WARNING.search(caplog.text)
    source = Path(sys.modules["pyspark_mqtt_nats"].__file__ or "").parent / "reading" / "read.py"
    assert _WARNING.search(source.read_text(encoding="utf-8"))


class Query:
    """Ends as it is told to; in two rounds there is a batch before that."""

    lastProgress = None

    def __init__(self, number: int, end: str) -> None:
        self.end = end
        self.recentProgress = [Update(number)] if number < 2 else []

    def awaitTermination(self, seconds: float) -> bool:
        if self.end:
            raise StreamingQueryException(self.end)
        return True

    def stop(self) -> None:
        pass


class Update:
    def __init__(self, number: int) -> None:
        source = {"startOffset": {"next": 1 + 5 * number}, "endOffset": {"next": 6 + 5 * number}}
        self.json = orjson.dumps({"batchId": number, "numInputRows": 5, "sources": [source]})


class Writer:
    def __init__(self, *ends: str) -> None:
        self.ends = iter(ends)
        self.started = 0

    def trigger(self, *, availableNow: bool) -> "Writer":
        assert availableNow
        return self

    def start(self) -> Query:
        self.started += 1
        return Query(self.started - 1, next(self.ends))


NOT_UP = "[STREAM_FAILED] Query terminated with exception: Python worker failed to connect back. SQLSTATE: XXKST"


def test_a_query_goes_on_whose_worker_has_not_come_up() -> None:
    spark, tally, told = Any, Tally(), io.StringIO()
    writer: Any = Writer(NOT_UP, NOT_UP, "")
    run_round(spark, writer, Progress("archive", told), tally)  # type: ignore[arg-type]
    assert writer.started == 3
    assert (tally.messages, tally.batches) == (10, 2)
    assert told.getvalue().count("has not come up in time; once more\n") == 2


@pytest.mark.parametrize(("ends", "started"), [([NOT_UP] * 9, ATTEMPTS), (["[STREAM_FAILED] something else"], 1)])
def test_a_query_that_cannot_run_fails(ends: list[str], started: int) -> None:
    writer: Any = Writer(*ends)
    with pytest.raises(StreamingQueryException):
        run_round(Any, writer, Progress("archive", io.StringIO()), Tally())  # type: ignore[arg-type]
    assert writer.started == started


@pytest.mark.parametrize(("path", "shown"), [("/venv/py4j/java_gateway.py", False), ("/venv/mqtt/read.py", True)])
def test_no_stack_trace_of_py4j_is_logged_when_the_jvm_has_ended(path: str, shown: bool) -> None:
    """It logs one without the name of a logger, so by a logger that is everybody's."""
    record = logging.LogRecord("root", logging.ERROR, path, 1, "Exception while sending command.", None, None)
    assert told(record) == shown
