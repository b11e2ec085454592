# SPDX-License-Identifier: Apache-2.0
"""The compiled build: the modules that cost most per message, through mypyc and a C compiler.

As a build hook of hatchling it puts an extension module beside the source of each module that pyproject.toml lists
into the wheel, which Python prefers when it imports. Where there is no C compiler, or it fails, the wheel has the
sources alone, and a file that says why. ``MQTT_NATS_BUILD=pure`` asks for that, ``MQTT_NATS_BUILD=compiled`` forbids
it.

As a command, for a checkout:

    python hatch_build.py copy DIR          compile a copy of the checkout in DIR, unless it has these sources
    python hatch_build.py run DIR ARGS ...  run ``mqtt-nats ARGS``: the copy if it has these sources, else the
                                            checkout, while the copy is made for the next start
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOTS = ("", "streams")
"""Where packages are, below the root of the checkout."""

PACKAGES: Final = ("mqtt_nats", "streams/mqtt_streams", "spark/pyspark_mqtt_nats")
"""The packages, from the root of the checkout."""

STAMP: Final = "build.sha256"
"""File of a compiled copy: the digest of the sources that it was made from."""

BUILD: Final = "MQTT_NATS_BUILD"
"""Environment variable: ``pure``, ``compiled``, or not set."""

REASON: Final = "MQTT_NATS_PURE_REASON"
"""Environment variable that tells a gateway why it runs the sources."""

REASON_FILE: Final = "mqtt_nats/pure-reason.txt"
"""The same in a wheel."""

COMPILERS_MOST: Final = 8
"""Compilers at a time, of which each takes up to 130 MB."""

OPTIONS = """\
[mypy]
python_version = 3.11
mypy_path = {path}
explicit_package_bases = True
namespace_packages = True
follow_imports = silent
ignore_missing_imports = True
"""


class CompiledModules(BuildHookInterface[Any]):
    """Adds the extension modules to a wheel, which then is for one version of Python and one platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the files of the wheel are collected."""
        if version == "editable":
            return  # the sources are edited: what is compiled would be out of date
        # The wheel is written after this method has returned; `finalize` is called then.
        self.scratch = tempfile.TemporaryDirectory(prefix="mqtt-nats-")
        made = Path(self.scratch.name)
        if reason := self._reason_for_none(made):
            file = made / Path(REASON_FILE).name
            file.write_text(f"{reason}\n", encoding="utf-8")
            build_data["force_include"][str(file)] = REASON_FILE
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        for path in extensions(made):
            build_data["force_include"][str(path)] = str(path.relative_to(made))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what the wheel has by now."""
        if version != "editable":
            self.scratch.cleanup()

    def _reason_for_none(self, to: Path) -> str:
        """Put the extension modules below ``to``, or return why there are none.

        Raises:
            subprocess.CalledProcessError: they cannot be compiled, and `BUILD` asks for them.
        """
        if (wanted := build_wanted()) == "pure":
            return f"built with {BUILD}=pure"
        reason = "" if wanted else missing_for_compiler()
        if not reason:
            try:
                compile_modules(Path(self.root), self.config["modules"], to)
            except subprocess.CalledProcessError:
                if wanted:
                    raise
                reason = "the modules could not be compiled"
        if reason:
            self.app.display_warning(f"pure Python: {reason}; see docs/compiled.md")
        return reason


def build_wanted() -> str:
    """Return the value of `BUILD`, empty where it is not set; raises ValueError for one that is not known."""
    wanted = os.environ.get(BUILD, "")
    if wanted not in ("", "pure", "compiled"):
        raise ValueError(f"{BUILD} is pure or compiled, not {wanted!r}")
    return wanted


def missing_for_compiler() -> str:
    """Say what compiling needs and this machine has not; empty when nothing is missing."""
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        return f"there is no C compiler ({compiler})"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "the headers of Python are not installed (python3-dev)"
    return ""


def extensions(directory: Path) -> list[Path]:
    """The extension modules below a directory."""
    return sorted(path for pattern in ("*.so", "*.pyd") for path in directory.rglob(pattern))


def listed(root: Path) -> list[str]:
    """Paths of the modules that are compiled, from the root of the checkout."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    modules: list[str] = project["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]["modules"]
    return modules


def compile_modules(root: Path, modules: list[str], to: Path) -> None:
    """Put the extension modules of ``modules``, as they are imported, below ``to``.

    In a process of its own: mypyc reports what it cannot compile and ends the process.
    """
    command = [sys.executable, __file__, "--compile", str(to.resolve()), *modules]
    subprocess.run(command, cwd=root, check=True)


def _compile(to: Path, modules: list[str]) -> None:
    # Here, since whoever does not compile has neither.
    from mypyc.build import mypycify
    from setuptools import Distribution

    root = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="mqtt-nats-") as name:
        scratch = Path(name)
        options = scratch / "mypy.ini"
        options.write_text(OPTIONS.format(path=":".join(str(root / each) for each in ROOTS)), encoding="utf-8")
        found = mypycify(
            [f"--config-file={options}", f"--cache-dir={scratch / 'cache'}", *modules],
            group_name="mqtt_nats",
            target_dir=str(scratch / "c"),
            opt_level="1",  # as fast as 2 within the spread, with a third less to compile: docs/compiled.md
            debug_level="0",
            multi_file=True,
        )
        command: Any = Distribution({"name": "mqtt-nats", "ext_modules": found}).get_command_obj("build_ext")
        command.build_lib, command.build_temp = str(to), str(scratch / "objects")
        command.ensure_finalized()
        build_extensions = command.build_extensions

        def build_together() -> None:
            command.compiler.compile = partial(compile_together, command.compiler.compile)
            build_extensions()

        command.build_extensions = build_together
        command.run()


def compile_together(compile_files: Callable[..., list[str]], files: list[str], **options: Any) -> list[str]:
    """Compile as many files at a time as this process has processors, and return the names of the objects.

    mypyc writes a file for each module. `compile_files` is the method of a compiler of setuptools, which compiles one
    file after the other.
    """
    largest = sorted(files, key=lambda name: -Path(name).stat().st_size)
    usable = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    with ThreadPoolExecutor(min(usable, COMPILERS_MOST)) as pool:
        objects = pool.map(lambda name: compile_files([name], **options), largest)
        return [name for names in objects for name in names]


def sources(root: Path) -> Iterator[Path]:
    """Paths of the sources of the packages, from the root of the checkout, in order."""
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            yield path.relative_to(root)


def digest(root: Path) -> str:
    """Return the digest of the sources of a checkout, of what they are compiled with, and of this Python."""
    found = hashlib.sha256(f"{sys.version}\n{sysconfig.get_platform()}\n".encode())
    for path in (Path("hatch_build.py"), Path("pyproject.toml"), *sources(root)):
        data = (root / path).read_bytes()
        found.update(f"{path.as_posix()} {len(data)}\n".encode() + data)
    return found.hexdigest()


def is_fresh(root: Path, copy: Path) -> bool:
    """Return whether a compiled copy was made from the sources that the checkout has."""
    stamp = copy / STAMP
    return stamp.exists() and stamp.read_text(encoding="utf-8") == digest(root)


def files_of(root: Path) -> set[Path]:
    """Paths of the files of a checkout, from its root, without what git does not know.

    Of sources that are no repository: those of the packages, and what they are built with.
    """
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listing = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        found = {path.relative_to(root) for package in PACKAGES for path in (root / package).rglob("*")}
        found |= {Path("hatch_build.py"), Path("nats-server.conf"), Path("pyproject.toml")}
        found = {path for path in found if path.suffix != ".pyc"}
    else:
        found = {Path(name) for name in listing.split("\0") if name}
    return {path for path in found if (root / path).is_file()}


def update_files(root: Path, copy: Path) -> None:
    """Make the files of a copy those of the checkout: one that differs is copied, a source that is gone is removed."""
    wanted = files_of(root)
    for path in wanted:
        theirs, ours = (root / path).stat(), copy / path
        if not ours.exists() or (ours.stat().st_size, ours.stat().st_mtime_ns) != (theirs.st_size, theirs.st_mtime_ns):
            ours.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / path, ours)
    for ours in copy.rglob("*.py"):
        if ours.relative_to(copy) not in wanted:
            ours.unlink()


def compiled_copy(root: Path, to: Path) -> None:
    """Copy the checkout without what git does not know, and compile it in place, unless that has been done.

    The copy is made beside ``to`` and takes its place when it is whole. One process at a time does that.
    """

    to.parent.mkdir(parents=True, exist_ok=True)
    with Path(f"{to}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_fresh(root, to):
            update_files(root, to)
        else:
            _compile_copy(root, to)


def _compile_copy(root: Path, to: Path) -> None:
    for left_over in to.parent.glob(f"{to.name}-*"):  # of a process that was killed
        shutil.rmtree(left_over)
    stamp = digest(root)
    with tempfile.TemporaryDirectory(prefix=f"{to.name}-", dir=to.parent) as name_of_scratch:
        copy, built = Path(name_of_scratch, "copy"), Path(name_of_scratch, "built")
        update_files(root, copy)
        compile_modules(copy, listed(copy), built)
        for path in extensions(built):
            where = path.relative_to(built)
            base = next(each for each in reversed(ROOTS) if (copy / each / where.parts[0]).exists() or not each)
            shutil.copy2(path, copy / base / where)
        (copy / STAMP).write_text(stamp, encoding="utf-8")
        shutil.rmtree(to, ignore_errors=True)
        copy.rename(to)


def run(root: Path, copy: Path, arguments: list[str]) -> None:
    """Become ``mqtt-nats`` of the compiled copy, or of the checkout while the copy is made for the next start."""
    command = [sys.executable, "-P", "-m", "mqtt_nats", *arguments]
    if build_wanted() == "pure":
        reason = f"{BUILD}=pure"
    elif is_fresh(root, copy):
        update_files(root, copy)
        path = os.pathsep.join(str(copy / Path(package).parent) for package in PACKAGES)
        os.execve(command[0], command, os.environ | {"PYTHONPATH": path})
    elif missing := missing_for_compiler():
        print(f"Pure Python: {missing}. With one it has up to twice the speed: docs/compiled.md.", flush=True)
        reason = missing
    else:
        changed = (copy / STAMP).exists()
        reason = "the compiled modules are of other sources" if changed else "the modules are not compiled yet"
        print(f"Pure Python: {reason}. They are compiled meanwhile, for the next start: {copy}.log", flush=True)
        compile_meanwhile(root, copy)
    os.execve(command[0], command, os.environ | {REASON: reason})


def compile_meanwhile(root: Path, copy: Path) -> None:
    """Start the making of a compiled copy, below all other work; Ctrl-C of the gateway does not end it."""
    copy.parent.mkdir(parents=True, exist_ok=True)
    command = ["nice", "-n", "19", sys.executable, __file__, "copy", str(copy)]
    with Path(f"{copy}.log").open("w") as log:
        subprocess.Popen(command, cwd=root, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)


if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    match sys.argv[1:]:
        case ["--compile", to, *modules]:
            _compile(Path(to), modules)
        case ["copy", to]:
            compiled_copy(here, Path(to).resolve())
        case ["run", to, *arguments]:
            run(here, Path(to).resolve(), arguments)
        case _:
            sys.exit("usage: python hatch_build.py copy DIRECTORY | run DIRECTORY ARGUMENTS")
