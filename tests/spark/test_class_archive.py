# SPDX-License-Identifier: Apache-2.0
"""The archive of Spark's classes: how it is made, who uses it, and that a session starts with and without it."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pyspark_mqtt_nats import prepare
from pyspark_mqtt_nats.class_archive import make_archive, use_archive
from pyspark_mqtt_nats.java import Java, JavaError, packaged_java
from pyspark_mqtt_nats.jobs import JobError
from pyspark_mqtt_nats.jobs.prepare import end
from tests.spark.conftest import SOURCE_ROOTS

FILES = ("base.jsa", "spark.jsa")

# A Java that writes the archive of its own classes, or fails.
JAVA = """\
#!/bin/sh
for argument; do
  case $argument in -XX:SharedArchiveFile=*) echo base > "${{argument#*=}}";; esac
done
echo "said at last" >&2
exit {status}
"""

SESSION = """
import os
from pyspark_mqtt_nats import prepare
prepare()
from pyspark.sql import SparkSession
builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
spark = builder.config("spark.driver.extraJavaOptions", "-Dmqtt.nats=given").getOrCreate()
assert spark.range(10).selectExpr("sum(id)").first()[0] == 45
assert spark._jvm.java.lang.System.getProperty("mqtt.nats") == "given"
print(open(f"/proc/{spark._jvm.java.lang.ProcessHandle.current().pid()}/maps").read())
spark.stop()
"""


def a_java(directory: Path, status: int = 0) -> Java:
    program = directory / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(JAVA.format(status=status), encoding="utf-8")
    program.chmod(0o755)
    return Java(directory, 21)


def spark_with(environ: dict[str, str], text: str) -> Callable[[], None]:
    """Return a function that does what Spark's JVM does when it ends."""

    def use_spark() -> None:
        (top,) = re.findall(r'"-XX:ArchiveClassesAtExit=(.+?)"', environ["SPARK_SUBMIT_OPTS"])
        Path(top).write_text(text, encoding="utf-8")

    return use_spark


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """A user whose cache directory has a blank in its name."""
    return {"XDG_CACHE_HOME": str(tmp_path / "my cache")}


@pytest.mark.processes
def test_an_archive_is_used_when_it_was_made(tmp_path: Path, environ: dict[str, str]) -> None:
    user = dict(environ)
    use_archive(user)
    assert user == environ
    java = a_java(tmp_path / "jdk")
    place = make_archive(java, environ, spark_with(environ, "classes"))
    assert place == tmp_path / "my cache" / "mqtt-nats" / "classes"
    assert place.stat().st_mode & 0o777 == 0o700
    assert [(place / name).read_text().strip() for name in FILES] == ["base", "classes"]
    use_archive(user)
    pair = f"-XX:SharedArchiveFile={place / 'base.jsa'}{os.pathsep}{place / 'spark.jsa'}"
    assert shlex.split(user["SPARK_SUBMIT_OPTS"]) == ["-Xlog:cds*=off", pair]


@pytest.mark.processes
def test_there_is_one_archive_the_newest(tmp_path: Path, environ: dict[str, str]) -> None:
    place = make_archive(a_java(tmp_path / "old"), environ, spark_with(environ, "old"))
    assert make_archive(a_java(tmp_path / "new"), environ, spark_with(environ, "new")) == place
    assert (place / "spark.jsa").read_text() == "new"
    assert sorted(os.listdir(place)) == list(FILES)
    assert os.listdir(place.parent) == ["classes"]


@pytest.mark.processes
def test_prepare_leaves_options_of_the_user_alone(
    tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyspark_mqtt_nats.java.ensure", lambda environ: None)
    make_archive(a_java(tmp_path / "jdk"), environ, spark_with(environ, "classes"))
    for chosen in ("-Xmx1g", ""):
        user = {**environ, "SPARK_SUBMIT_OPTS": chosen}
        prepare(user)
        assert user["SPARK_SUBMIT_OPTS"] == chosen
    del environ["SPARK_SUBMIT_OPTS"]
    prepare(environ)
    assert "-XX:SharedArchiveFile" in environ["SPARK_SUBMIT_OPTS"]


@pytest.mark.processes
def test_an_archive_that_cannot_be_made_is_not_used(tmp_path: Path, environ: dict[str, str]) -> None:
    java, broken = a_java(tmp_path / "jdk"), a_java(tmp_path / "broken", status=1)
    user = dict(environ)
    place = make_archive(java, environ, spark_with(environ, "classes"))
    with pytest.raises(JavaError, match="Java 21 has written no archive"):
        make_archive(java, environ, lambda: None)
    assert os.listdir(place) == ["base.jsa"]
    with pytest.raises(JavaError, match="broken/bin/java cannot make an archive: said at last"):
        make_archive(broken, environ, spark_with(environ, "new"))
    assert os.listdir(place) == ["base.jsa"]
    use_archive(user)
    assert "SPARK_SUBMIT_OPTS" not in user


@pytest.mark.processes
def test_the_base_has_its_place_before_spark_starts(tmp_path: Path, environ: dict[str, str]) -> None:
    """Java 25 looks for it where it was when the other file was written."""
    options: list[str] = []
    spark = spark_with(environ, "classes")

    def use_spark() -> None:
        options.extend(shlex.split(environ["SPARK_SUBMIT_OPTS"]))
        spark()

    place = make_archive(a_java(tmp_path / "jdk"), environ, use_spark)
    assert f"-XX:SharedArchiveFile={place / 'base.jsa'}" in options


def test_an_archive_needs_a_directory(tmp_path: Path) -> None:
    with pytest.raises(JavaError, match="XDG_CACHE_HOME"):
        make_archive(Java(None, 21), {}, lambda: None)
    (tmp_path / "mqtt-nats").write_text("a file")
    with pytest.raises(JavaError, match=f"{tmp_path}.*: Not a directory"):
        make_archive(Java(None, 21), {"XDG_CACHE_HOME": str(tmp_path)}, lambda: None)


@pytest.mark.processes
@pytest.mark.parametrize(("program", "error"), [("cat", ""), ("cat; exit 3", "exit status 3; is there space")])
def test_the_jvm_has_to_end_in_good_order(program: str, error: str) -> None:
    with subprocess.Popen(["/bin/sh", "-c", program], stdin=subprocess.PIPE) as jvm:
        with pytest.raises(JobError, match=error) if error else contextlib.nullcontext():
            end(jvm)
        assert jvm.poll() is not None


@pytest.mark.processes
def test_a_jvm_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyspark_mqtt_nats.jobs.prepare._EXIT_WAIT_S", 0.1)
    with subprocess.Popen(["/bin/sh", "-c", "exec sleep 300"], stdin=subprocess.PIPE) as jvm:
        with pytest.raises(JobError, match="has not ended"):
            end(jvm)
        assert jvm.wait() == -signal.SIGKILL


def session(environ: dict[str, str]) -> str:
    """Run a session, and return the files that its JVM maps; it has to say nothing of an archive."""
    command = [sys.executable, "-c", SESSION]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "[cds" not in done.stdout + done.stderr
    return done.stdout


@pytest.mark.soak
@pytest.mark.processes
@pytest.mark.timeout(2400)
def test_a_session_uses_the_archive_of_the_command_unless_java_is_another(tmp_path: Path) -> None:
    packaged = packaged_java()
    assert packaged is not None
    kept = {name: value for name, value in os.environ.items() if name not in ("SPARK_SUBMIT_OPTS", "JAVA_HOME")}
    kept |= {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(map(str, SOURCE_ROOTS))}
    environ = {**kept, "JAVA_HOME": str(packaged.parent.parent)}
    command = [sys.executable, "-m", "pyspark_mqtt_nats.jobs", "prepare"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    place = tmp_path / "mqtt-nats" / "classes"
    assert f"classes in {place}, " in done.stdout
    assert str(place / "spark.jsa") in session(environ)

    (place / "base.jsa").unlink()  # another Java's would be no better
    assert str(place) not in session(environ)
