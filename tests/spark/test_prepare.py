# SPDX-License-Identifier: Apache-2.0
"""`prepare`, and the first script of the page as a user runs it: by an interpreter that is not first on PATH."""

import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from pyspark_mqtt_nats import java, prepare
from pyspark_mqtt_nats.worker_python import PROGRAM, main, without_archives, worker_python
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness.nats import ROOT
from tests.harness.raw5 import Raw5
from tests.spark.conftest import SOURCE_ROOTS


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What was looked for a Java with."""
    calls: list[object] = []
    monkeypatch.setattr(java, "ensure", calls.append)
    return calls


def test_workers_are_run_by_the_interpreter_of_the_script_unless_somebody_has_chosen(found: list[object]) -> None:
    environ: dict[str, str] = {}
    prepare(environ)
    assert environ == {"PYSPARK_PYTHON": worker_python()}
    chosen = {"PYSPARK_PYTHON": "./env/bin/python"}
    prepare(chosen)
    assert chosen == {"PYSPARK_PYTHON": "./env/bin/python"}
    assert found == [environ, chosen]


def test_what_spark_submit_has_started_is_left_alone(found: list[object]) -> None:
    environ = {"PYSPARK_GATEWAY_PORT": "1"}
    prepare(environ)
    assert environ == {"PYSPARK_GATEWAY_PORT": "1"}
    assert not found


@pytest.mark.parametrize("installed", [True, False])
def test_the_program_of_workers_is_used_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python3"))
    if installed:
        (tmp_path / PROGRAM).touch()
    assert worker_python() == str(tmp_path / (PROGRAM if installed else "python3"))


def test_workers_take_the_pyspark_that_is_installed_and_not_its_archive(tmp_path: Path) -> None:
    """An archive of another PySpark, as of a distribution of Spark, stays: its JVM needs the same version."""
    packages, other = tmp_path / "packages", tmp_path / "spark"
    lib = packages / "pyspark" / "python" / "lib"
    lib.mkdir(parents=True)
    (packages / "pyspark" / "__init__.py").touch()
    own = [str(lib / "pyspark.zip"), str(lib / "py4j-0.10.9.9-src.zip")]
    others = [str(other / "python" / "lib" / "pyspark.zip"), str(tmp_path / "jars.zip"), str(tmp_path / "sources")]
    path = os.pathsep.join([*own, *others])
    assert without_archives(path, [*own, *others, str(packages)]) == os.pathsep.join(others)
    assert without_archives(path, [*own, *others]) == path


def test_the_program_of_workers_becomes_python(monkeypatch: pytest.MonkeyPatch) -> None:
    lib = Path(pyspark.__file__).parent / "python" / "lib"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(lib / "pyspark.zip"), "sources"]))
    monkeypatch.setattr(sys, "argv", [PROGRAM, "-m", "pyspark.daemon"])
    run: list[object] = []
    monkeypatch.setattr(os, "execv", lambda *arguments: run.append(arguments))
    main()
    assert run == [(sys.executable, [sys.executable, "-m", "pyspark.daemon"])]
    assert os.environ["PYTHONPATH"] == "sources"


@pytest.mark.processes
def test_a_worker_loads_no_modules_that_few_reads_need() -> None:
    """Spark starts a worker for each step of a first read, and each of them loads the source."""
    script = """
import sys
from pyspark.sql.types import StructType
from pyspark_mqtt_nats.reading.ranges import Snapshot
from pyspark_mqtt_nats.source import MqttNatsSource
source = MqttNatsSource({"servers": "nats://127.0.0.1"})
source._pinned = Snapshot("s", "", 1, 2, 1, 3, "limits", ())
source.reader(StructType().add("sequence", "long"))
print(*sys.modules)
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    rare = {"urllib.request", "nkeys", "pyspark_mqtt_nats.sessions", "pyspark_mqtt_nats.retained"}
    assert not rare & set(found.stdout.split())


def first_script(url: str) -> str:
    page = (ROOT / "docs" / "spark.md").read_text(encoding="utf-8")
    code = page.partition("```python\n")[2].partition("```")[0]
    assert code.startswith("from pyspark_mqtt_nats import prepare\n\nprepare()\n")
    assert "nats://127.0.0.1:4222" in code
    return code.replace("nats://127.0.0.1:4222", url)


def outside() -> dict[str, str]:
    """The environment of an IDE, cron or a service: `python3` is another interpreter, nothing is activated."""
    kept = {"HOME", "LANG", "TMPDIR", "JAVA_HOME", "JDK_JAVA_OPTIONS", "XDG_CACHE_HOME"}
    found = {name: value for name, value in os.environ.items() if name in kept}
    return found | {"PATH": "/usr/bin:/bin", "PYTHONPATH": os.pathsep.join(map(str, SOURCE_ROOTS))}


@pytest.mark.timeout(720)
def test_the_script_of_the_page_outside_an_activated_environment(
    nats_factory: NatsFactory, gateway_factory: GatewayFactory, tmp_path: Path
) -> None:
    nats_server = nats_factory()
    with Raw5.open(gateway_factory(nats_server).port, "lamp") as client:
        client.deliver("home/lamp", b"on")
    script = tmp_path / "script.py"
    script.write_text(first_script(nats_server.url), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=outside(), capture_output=True, text=True, timeout=340
    )
    assert done.returncode == 0, done.stderr
    assert "|home/lamp" in done.stdout

    # Without prepare() it fails as the page's troubleshooting says.
    own = f"import sys\n\nsys.path[:0] = {list(map(str, SOURCE_ROOTS))}\n"
    script.write_text(own + first_script(nats_server.url).replace("\nprepare()\n", "\n"), encoding="utf-8")
    environ = outside()
    del environ["PYTHONPATH"]  # the source is installed where the script's interpreter is, and nowhere else
    java.ensure(environ)
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=340
    )
    assert done.returncode != 0
    assert "[DATA_SOURCE_NOT_FOUND]" in done.stderr
    assert "DATA_SOURCE_NOT_FOUND" in (ROOT / "docs" / "spark.md").read_text(encoding="utf-8")
