# SPDX-License-Identifier: Apache-2.0
"""SQL over stored messages: statements of Spark with the source, and the jobs `sql` and `shell`."""

import io
import json
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow.csv
import pyarrow.parquet
import pytest
from pyspark.sql import SparkSession

from pyspark_mqtt_nats.jobs import JobError, shell, sql
from pyspark_mqtt_nats.jobs.progress import Progress
from pyspark_mqtt_nats.jobs.shell import Shell, statements
from pyspark_mqtt_nats.jobs.sql import Sql
from pyspark_mqtt_nats.queries.pruning import needs, planned
from pyspark_mqtt_nats.queries.views import Views, make_views
from tests.harness.nats import NatsServer
from tests.spark.storing import Store, complaint

pytestmark = pytest.mark.timeout(360)

COLUMNS = "(topic STRING, payload BINARY)"
VIEW = "CREATE TEMPORARY VIEW name USING mqtt_nats OPTIONS"


def quiet() -> Progress:
    return Progress("sql", io.StringIO())


@pytest.fixture
def store(nats_server: NatsServer) -> Iterator[Store]:
    """100 messages, whose payloads are their numbers, on the topics a/0, a/1 and a/2."""
    with Store(nats_server.url) as found:
        found.put(range(100))
        yield found


@pytest.fixture
def tables(spark: SparkSession) -> Iterator[Callable[[str], Any]]:
    """Runs a statement of SQL; what it makes is dropped."""
    try:
        yield lambda text: spark.sql(text).collect()
    finally:
        for number in range(5):
            spark.sql(f"DROP TABLE IF EXISTS t{number}")
            spark.sql(f"DROP VIEW IF EXISTS v{number}")


def options(store: Store, **given: str) -> str:
    pairs = {"servers": store.url, "stream": store.stream, "subjectPrefix": store.prefix, **given}
    return "OPTIONS (" + ", ".join(f"{name} '{value}'" for name, value in pairs.items()) + ")"


def test_a_temporary_view_does_what_it_says(store: Store, tables: Callable[[str], Any]) -> None:
    tables(f"CREATE TEMPORARY VIEW v1 USING mqtt_nats {options(store, topics='a/0')}")
    assert tables("SELECT count(*) FROM v1 WHERE topic = 'a/0'")[0][0] == 34
    tables(f"CREATE TEMPORARY VIEW v2 {COLUMNS} USING mqtt_nats {options(store)}")
    tables("INSERT INTO v2 SELECT 'written/1', CAST('x' AS BINARY)")
    assert [tuple(row) for row in tables("SELECT topic, payload FROM v2 WHERE topic LIKE 'written/%'")] == [
        ("written/1", b"x")
    ]


def test_every_way_to_a_table_ends_with_the_way_to_a_view(store: Store, tables: Callable[[str], Any]) -> None:
    """Spark passes no options of a table to the source: nothing is read or written at a default address."""
    for statement in (
        f"CREATE TABLE t1 USING mqtt_nats {options(store)}",
        f"CREATE TABLE t1 USING mqtt_nats {options(store)} AS SELECT 'a/b' topic, CAST('x' AS BINARY) payload",
    ):
        with pytest.raises(Exception, match="CREATE TEMPORARY VIEW") as refused:
            tables(statement)
        assert VIEW in complaint(refused.value)
    # With columns Spark asks the source nothing before the table is used.
    tables(f"CREATE TABLE t2 {COLUMNS} USING mqtt_nats {options(store)}")
    tables(f"CREATE TABLE t3 {COLUMNS} USING mqtt_nats TBLPROPERTIES (servers = '{store.url}')")
    for statement in (
        "SELECT count(*) FROM t2",
        "INSERT INTO t2 SELECT 'a/b', CAST('x' AS BINARY)",
        "INSERT OVERWRITE t2 SELECT 'a/b', CAST('x' AS BINARY)",
        "SELECT * FROM t3",
    ):
        with pytest.raises(Exception, match="CREATE TEMPORARY VIEW") as refused:
            tables(statement)
        assert VIEW in complaint(refused.value)
    assert store.state["messages"] == 100


def needed(spark: SparkSession, store: Store, text: str) -> dict[str, tuple[set[str], int]]:
    views = Views(spark, make_views(store.given(), {}).values())
    views.query("SELECT 1")
    views._needs(text)
    return {name: (need.columns, need.times) for name, need in needs(planned(spark, text)).items()}


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("SELECT count(*) FROM messages", set()),
        ("SELECT count(*) FROM messages WHERE topic LIKE 'a/%'", {"topic"}),
        (
            "SELECT topic, avg(qos) FROM messages WHERE timestamp > '2026-01-01' GROUP BY topic",
            {"topic", "qos", "timestamp"},
        ),
        ("SELECT topic FROM (SELECT * FROM messages ORDER BY sequence LIMIT 5)", {"topic", "sequence"}),
        ("SELECT m.key FROM (SELECT explode(user_properties) m FROM messages)", {"user_properties"}),
        ("WITH m AS (SELECT topic, payload FROM messages) SELECT max(topic) FROM m", {"topic"}),
        ("SELECT sum(qos) OVER (PARTITION BY topic) FROM messages", {"qos", "topic"}),
        ("SELECT (SELECT max(sequence) FROM messages) AS last", {"sequence"}),
        ("SELECT topic FROM messages UNION ALL SELECT publisher FROM messages", {"topic", "publisher"}),
    ],
)
def test_a_query_reads_the_columns_that_it_needs(
    spark: SparkSession, store: Store, text: str, columns: set[str]
) -> None:
    found = needed(spark, store, text)
    assert found["messages"][0] == columns
    assert found["messages"][1] == text.count("FROM messages")


def test_a_query_that_needs_everything(spark: SparkSession, store: Store) -> None:
    whole = set(make_views(store.given(), {})["messages"].schema.names)
    for text in ("SELECT * FROM messages", "SELECT * FROM messages UNION SELECT * FROM messages"):
        assert needed(spark, store, text)["messages"][0] == whole
    assert needed(spark, store, "SELECT 1") == {}


def lines(spark: SparkSession, store: Store, query: str, **settings: Any) -> list[str]:
    return (
        sql.run(spark, Sql(query, {"servers": store.url}, {store.stream: store.prefix}, **settings), quiet())
        .text()
        .split("\n")
    )


def test_a_table(spark: SparkSession, store: Store) -> None:
    """By topic, with a filter; and a named stream joined with itself, where no filter may go to NATS."""
    query = f"SELECT topic, count(*) AS number, max(CAST(CAST(payload AS STRING) AS INT)) AS most FROM {store.stream} "
    found = lines(spark, store, f"{query} WHERE topic LIKE 'a/%' AND topic <> 'a/2' GROUP BY topic ORDER BY topic")
    assert found[:3] == ["topic  number  most", "a/0        34    99", "a/1        33    97"]
    assert re.fullmatch(r"2 rows \(.* s\)", found[3])
    joined = f"SELECT count(*) FROM {store.stream} a JOIN {store.stream} b USING (sequence) WHERE a.topic = 'a/0'"
    assert lines(spark, store, joined)[1].strip() == "34"
    first = lines(spark, store, f"SELECT sequence FROM {store.stream} ORDER BY sequence", rows=2)
    assert first == ["sequence", "       1", "       2", "... and more; --rows N shows more than 2, --output all"]
    assert any("payload" in line and "binary" in line for line in lines(spark, store, f"DESCRIBE {store.stream}"))


def test_typed_columns(spark: SparkSession, store: Store) -> None:
    source = {"servers": store.url, "decoders": '{"a/0": "number", "#": "n INT"}'}
    query = f"SELECT sum(number), count(decode_error) FROM {store.stream}"
    found = sql.run(spark, Sql(query, source, {store.stream: store.prefix}), quiet()).text().split("\n")
    assert found[1].split() == [str(sum(range(0, 100, 3))), "66"]


@pytest.mark.parametrize("extension", ["parquet", "csv", "json"])
def test_one_file(spark: SparkSession, store: Store, tmp_path: Path, extension: str) -> None:
    output = tmp_path / f"result.{extension}"
    query = f"SELECT sequence, topic, payload FROM {store.stream} WHERE sequence <= 3 ORDER BY sequence DESC"
    (line,) = lines(spark, store, query, output=str(output))
    assert line.startswith(f"3 rows in {output} (")
    assert [path.name for path in tmp_path.iterdir() if not path.name.endswith(".crc")] == [output.name]
    texts = [b"2", b"1", b"0"] if extension == "parquet" else ["Mg==", "MQ==", "MA=="]
    expected = [{"sequence": 3 - n, "topic": f"a/{2 - n}", "payload": text} for n, text in enumerate(texts)]
    if extension == "parquet":
        rows = pyarrow.parquet.read_table(output).to_pylist()
    elif extension == "csv":
        rows = pyarrow.csv.read_csv(output).to_pylist()
    else:
        rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert rows == expected
    with pytest.raises(JobError, match="is there already; give another one, or --overwrite"):
        lines(spark, store, query, output=str(output))
    (line,) = lines(spark, store, f"{query} LIMIT 1", output=str(output), overwrite=True)
    assert line.startswith("1 row in ")


class Page(HTMLParser):
    """The elements and texts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())

    def count(self, tag: str) -> int:
        return sum(one == tag for one, _ in self.tags)


def test_a_chart(spark: SparkSession, store: Store, tmp_path: Path) -> None:
    """One line for each topic; the page loads nothing, and what clients have published is not markup."""
    store.put_payloads([("<b>", b"100")] * 2)
    page = tmp_path / "chart.html"
    query = f"SELECT timestamp, topic, CAST(CAST(payload AS STRING) AS DOUBLE) AS value FROM {store.stream}"
    (line,) = lines(spark, store, query, plot=page)
    assert line == f"102 rows drawn in {page}"
    made = Page(page.read_text(encoding="utf-8"))
    assert made.count("polyline") == 4
    assert {"a/0", "a/1", "a/2", "<b>"} <= set(made.texts)
    assert made.count("b") == 0
    assert not {"script", "link", "img"} & {tag for tag, _ in made.tags}
    assert not [value for _, given in made.tags for name, value in given.items() if name in ("src", "href")]

    lines(spark, store, f"SELECT topic, count(*) number FROM {store.stream} GROUP BY topic ORDER BY topic", plot=page)
    assert Page(page.read_text(encoding="utf-8")).texts.count("a/0") == 2  # a bar, and the table
    with pytest.raises(JobError, match=r"--plot: a result of topic STRING, payload BINARY cannot be drawn"):
        lines(spark, store, f"SELECT topic, payload FROM {store.stream}", plot=page)


def test_what_is_wrong_is_said(spark: SparkSession, store: Store) -> None:
    with pytest.raises(Exception, match="UNRESOLVED_COLUMN"):
        lines(spark, store, "SELECT nothing FROM messages")
    with pytest.raises(JobError, match="--follow needs a query over messages"):
        lines(spark, store, "SELECT * FROM sessions", follow=True)


def test_a_query_is_followed(spark: SparkSession, store: Store) -> None:
    """Rows as they come; and an aggregate as it is after each batch."""
    store.put(range(3))
    for query, expected in (
        (f"SELECT sequence, topic FROM {store.stream} WHERE topic = 'a/1'", "102  a/1"),
        (f"SELECT topic, count(*) AS number FROM {store.stream} GROUP BY topic", "a/1         1"),
    ):
        progress = quiet()
        said: list[str] = []

        def say(text: str, said: list[str] = said, progress: Progress = progress, wanted: str = expected) -> None:
            said.append(text)
            if wanted in text:
                progress.stopping = True

        job = Sql(query, {"servers": store.url, "startingSequence": "101"}, {store.stream: store.prefix}, follow=True)
        outcome = sql.run(spark, job, progress, say)
        assert any(expected in text for text in said), said
        assert re.fullmatch(r"\d+ messages in \d+ batch(es)?", outcome.text())


def test_statements_of_a_shell() -> None:
    def read(given: list[str]) -> list[str]:
        prompts: list[str] = []

        def line(prompt: str) -> str:
            prompts.append(prompt)
            if not given:
                raise EOFError
            return given.pop(0)

        return list(statements(line))

    assert read(["SELECT 1;", "", "SELECT", "2", ";", ";", "SELECT 3"]) == ["SELECT 1", "SELECT\n2", "SELECT 3"]
    assert read(["SELECT 1;", "exit", "SELECT 2;"]) == ["SELECT 1"]
    assert read(["QUIT ;", "SELECT 2;"]) == []
    assert read(["SELECT", "exit;", "SELECT 2;"]) == ["SELECT\nexit", "SELECT 2"]


@pytest.mark.parametrize(("terminal", "expected"), [(True, ["sql> ", "...> ", "sql> "]), (False, ["", "", ""])])
def test_prompts_are_for_a_terminal(terminal: bool, expected: list[str]) -> None:
    """In the output of statements that come from a file they would be among the results."""
    given = ["SELECT", "1;", "quit"]
    prompts: list[str] = []

    def line(prompt: str) -> str:
        prompts.append(prompt)
        return given[len(prompts) - 1]

    assert list(statements(line, terminal=terminal)) == ["SELECT\n1"]
    assert prompts == expected


def test_ctrl_c_drops_what_was_typed(capsys: pytest.CaptureFixture[str]) -> None:
    """A person goes on; statements from a file end."""
    given = iter(["SELECT", "", "1", "SELECT 2;", "exit"])

    def line(prompt: str) -> str:
        if found := next(given):
            return found
        raise KeyboardInterrupt

    assert list(statements(line)) == ["1\nSELECT 2"]
    assert capsys.readouterr().out == "\n"
    given = iter(["SELECT", ""])
    with pytest.raises(KeyboardInterrupt):
        list(statements(line, terminal=False))


def test_a_shell(spark: SparkSession, store: Store) -> None:
    """A statement sees what is stored by then; an error does not end the shell."""
    said: list[str] = []

    def ask(*given: str, python: bool = False) -> list[str]:
        said.clear()
        left = list(given)

        def read(prompt: str) -> str:
            if not left:
                raise EOFError
            line = left.pop(0)
            if line == "put":
                store.put(range(10))
                line = ""
            return line

        job = Shell({"servers": store.url}, {store.stream: store.prefix}, python=python)
        assert shell.run(spark, job, quiet(), read, said.append).text() == ""
        return said

    count = f"SELECT count(*) AS number FROM {store.stream};"
    found = ask(count, "put", count, "SELECT wrong;", "SHOW VIEWS;")
    assert found[:2] == ["number\n   100", "number\n   110"]
    assert found[2].startswith("error: ")
    assert "messages" in found[3]
    made = f"CREATE TEMPORARY VIEW v4 AS SELECT * FROM {store.stream} WHERE topic <> 'a/0';"
    try:
        assert ask(made, "SELECT count(*) AS number FROM v4;") == ["number\n    72"]
    finally:
        spark.sql("DROP VIEW IF EXISTS v4")
    names: list[Any] = []
    spark.sparkContext._found = names  # type: ignore[attr-defined]
    ask(f"spark.sparkContext._found += sql('''{count[:-1]}''').first()", python=True)
    assert names == [110]
    ask(
        f"whole = sql('SELECT * FROM {store.stream}')",
        "parts = [whole.where(\"topic <> 'a/0'\").count(), whole.where(\"topic = 'a/0'\").count()]",
        "spark.sparkContext._found += [*parts, whole.count()]",
        python=True,
    )
    assert names[1] + names[2] == names[3] == 110, "a filter of one action is none of the next"
