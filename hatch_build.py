# SPDX-License-Identifier: Apache-2.0
"""The compiled build: the modules that cost most per message, through mypyc and a C compiler.

A build hook of hatchling, off unless the environment has ``HATCH_BUILD_HOOK_ENABLE_CUSTOM=true``: then the wheel also
has an extension module beside the source of each module that pyproject.toml lists, which Python prefers when it
imports. ``python hatch_build.py DIR`` puts a copy of the checkout, compiled in place, into DIR.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOTS = ("", "streams")
"""Where packages are, below the root of the checkout."""

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
        # Gone when this process ends: the wheel is written after this method has returned.
        self.directory_of_extensions = tempfile.TemporaryDirectory(prefix="mqtt-nats-")
        built = Path(self.directory_of_extensions.name)
        compile_modules(Path(self.root), self.config["modules"], built)
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        for path in extensions(built):
            build_data["force_include"][str(path)] = str(path.relative_to(built))


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
            opt_level="2",
            debug_level="0",
        )
        command: Any = Distribution({"name": "mqtt-nats", "ext_modules": found}).get_command_obj("build_ext")
        command.build_lib, command.build_temp = str(to), str(scratch / "objects")
        command.ensure_finalized()
        command.run()


def compiled_copy(root: Path, to: Path) -> None:
    """Copy the checkout without what git does not know, and compile it in place."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root, check=True, capture_output=True, text=True,
    ).stdout.split("\0")  # fmt: skip
    shutil.rmtree(to, ignore_errors=True)
    for name in filter(None, names):
        if (root / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, to / name)
    with tempfile.TemporaryDirectory(prefix="mqtt-nats-") as built:
        compile_modules(to, listed(to), Path(built))
        for path in extensions(Path(built)):
            where = path.relative_to(built)
            base = next(each for each in reversed(ROOTS) if (to / each / where.parts[0]).exists() or not each)
            shutil.copy2(path, to / base / where)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--compile", to, *modules]:
            _compile(Path(to), modules)
        case [to]:
            compiled_copy(Path(__file__).resolve().parent, Path(to).resolve())
        case _:
            sys.exit("usage: python hatch_build.py DIRECTORY")
