# SPDX-License-Identifier: Apache-2.0
"""The three packages are the same from a checkout, an editable install and a wheel."""

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from mqtt_nats import __version__
from tests.harness.nats import ROOT

pytestmark = pytest.mark.processes

METADATA = [
    Requirement(one)
    for one in tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
METADATA += [
    Requirement(f"{one} ; extra == '{extra}'" if ";" not in one else f"{one} and extra == '{extra}'")
    for extra, needs in EXTRAS.items()
    for one in needs
]

PACKAGES = {
    "mqtt_nats": ROOT / "mqtt_nats",
    "mqtt_streams": ROOT / "streams" / "mqtt_streams",
    "pyspark_mqtt_nats": ROOT / "spark" / "pyspark_mqtt_nats",
}

REPORT = """
import importlib, json, pathlib
from importlib.resources import files
from mqtt_nats.gateway.embedded import find_configuration
from mqtt_streams.definitions import load_definition

modules = {name: importlib.import_module(name) for name in ("mqtt_nats", "mqtt_streams", "pyspark_mqtt_nats")}
print(json.dumps({
    "where": {name: str(pathlib.Path(module.__file__).parent) for name, module in modules.items()},
    "typed": [name for name in modules if files(name).joinpath("py.typed").is_file()],
    "definitions": sorted(file.name for file in files("mqtt_streams").joinpath("definitions").iterdir()),
    "messages": load_definition("$MQTT_msgs")["subjects"],
    "configuration": find_configuration().read_text(encoding="utf-8"),
    "version": modules["mqtt_nats"].__version__,
}))
"""


def closure(extra: str = "") -> set[str]:
    """The installed packages that an extra needs, with what those need; without ours.

    Fails where one is not there, or not in a version that is asked for.
    """
    found: set[str] = set()
    waiting = [(one, extra) for one in METADATA]
    while waiting:
        requirement, chosen = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": chosen}):
            continue
        name = canonicalize_name(requirement.name)
        if name == "mqtt-nats":  # an extra of ours that has others
            waiting += [(one, each) for each in requirement.extras for one in METADATA]
            continue
        distribution = metadata.distribution(name)
        assert distribution.version in requirement.specifier, f"{requirement}: {distribution.version} is installed"
        if name not in found:
            found.add(name)
            needs = [Requirement(one) for one in distribution.requires or ()]
            waiting += [(one, each) for one in needs for each in (requirement.extras or {""})]
    return found


class Environment:
    """A fresh virtual environment that borrows the dependencies of ours, but not our editable install.

    Args:
        only: not all of them, but these packages.
    """

    def __init__(self, directory: Path, only: set[str] | None = None) -> None:
        venv.create(directory, with_pip=False, symlinks=True)
        self.python = directory / "bin" / "python"
        self.command = directory / "bin" / "mqtt-nats"
        version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        self.packages = directory / "lib" / version / "site-packages"
        borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        if only is None:
            (self.packages / "borrowed.pth").write_text("\n".join(borrowed), encoding="utf-8")
            return
        for name in only:
            distribution = metadata.distribution(name)
            for top in {
                path.parts[0] for path in distribution.files or () if path.parts[0] not in ("..", "__pycache__")
            }:
                (self.packages / top).symlink_to(Path(str(distribution.locate_file(top))))

    def install(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--no-deps", "--no-index"]
        subprocess.run([*command, "--no-build-isolation", "--quiet", *arguments], check=True, timeout=80)

    def report(self, directory: Path, **env: str) -> dict[str, Any]:
        """What a program that runs in ``directory`` finds of our packages."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        done = subprocess.run(
            [self.python, "-c", REPORT],
            cwd=directory,
            env={**clean, **env},
            stdout=subprocess.PIPE,
            check=True,
            timeout=60,
        )
        report: dict[str, Any] = json.loads(done.stdout)
        return report

    def landed(self) -> set[str]:
        """The names in site-packages."""
        return {path.name for path in self.packages.iterdir()}


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "venv")


def build(kind: str, directory: Path, source: Path = ROOT) -> Path:
    """Build a wheel or an sdist from a source tree."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", str(directory)]
    environment = os.environ | {"MQTT_NATS_BUILD": "pure"}
    subprocess.run(command, cwd=source, env=environment, check=True, capture_output=True, timeout=80)
    (built,) = directory.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tmp_path_factory.mktemp("wheel"))


def check(report: dict[str, Any], where: dict[str, Path]) -> None:
    assert report["where"] == {name: str(path) for name, path in where.items()}
    assert sorted(report["typed"]) == sorted(PACKAGES)
    definitions = sorted(path.name for path in (PACKAGES["mqtt_streams"] / "definitions").iterdir())
    assert report["definitions"] == definitions
    assert report["messages"] == ["$MQTT.msgs.>"]
    assert report["configuration"] == (ROOT / "nats-server.conf").read_text(encoding="utf-8")
    assert report["version"] == __version__


def test_checkout(environment: Environment) -> None:
    roots = os.pathsep.join(str(ROOT / root) for root in (".", "streams", "spark"))
    check(environment.report(environment.packages, PYTHONPATH=roots), PACKAGES)


def test_editable_install(environment: Environment) -> None:
    environment.install("--editable", str(ROOT))
    check(environment.report(environment.packages.parent), PACKAGES)
    assert not environment.landed() & {"streams", "spark", "tests", "benchmarks", "docs", "mqtt_streams"}


def test_wheel(environment: Environment, wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    environment.install(str(wheel))
    check(environment.report(environment.packages.parent), {name: environment.packages / name for name in PACKAGES})
    ours = environment.landed() - {"borrowed.pth", "__pycache__"}
    assert ours == {*PACKAGES, f"mqtt_nats-{__version__}.dist-info"}
    shown = subprocess.run([environment.command, "--version"], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout == f"mqtt-nats {__version__} (pure Python: built with MQTT_NATS_BUILD=pure)\n"
    licence = environment.packages / f"mqtt_nats-{__version__}.dist-info" / "licenses" / "LICENSE"
    assert "Apache License" in licence.read_text(encoding="utf-8")


EVERY_MODULE = """
import importlib, pkgutil, mqtt_nats, mqtt_streams
of_extras = ("mqtt_nats.__main__", "mqtt_nats.admin.", "mqtt_nats.plugins.spans")
for package in (mqtt_nats, mqtt_streams):
    for one in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not one.name.startswith(of_extras):
            importlib.import_module(one.name)
"""


def test_the_wheel_needs_nothing_but_what_it_says(tmp_path: Path, wheel: Path) -> None:
    """Alone with what it requires: every module is imported, the command runs."""
    environment = Environment(tmp_path / "venv", closure())
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(environment.packages)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MQTT_NATS_"))}
    for arguments in (["-c", EVERY_MODULE], ["-m", "mqtt_nats", "check-config"]):
        command = [str(environment.python), *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=80)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("extra", sorted(set(EXTRAS) - {"bench", "wheels"}))
def test_what_an_extra_needs_is_to_be_had(extra: str) -> None:
    """In versions that go together. What `bench` and `wheels` bring is not installed for tests."""
    assert closure(extra) >= closure()


def test_spark_comes_with_what_its_functions_on_batches_need() -> None:
    """PySpark needs pandas for mapInArrow, of which `mqtt-nats spark replay` makes use, and does not say so itself."""
    assert closure("spark") >= {"pandas", "pyarrow", "pyspark"}


def test_the_sdist_makes_the_same_wheel(tmp_path: Path, wheel: Path) -> None:
    with tarfile.open(build("sdist", tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path, filter="data")
    again = build("wheel", tmp_path / "wheel", tmp_path / f"mqtt_nats-{__version__}")
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as two:
        assert {(each.filename, each.CRC) for each in one.infolist()} == {
            (each.filename, each.CRC) for each in two.infolist()
        }
