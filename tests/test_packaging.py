# SPDX-License-Identifier: Apache-2.0
"""The three packages are the same from a checkout, an editable install and a wheel."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest

from mqtt_nats import __version__
from tests.harness.nats import ROOT

PACKAGES = {
    "mqtt_nats": ROOT / "mqtt_nats",
    "mqtt_streams": ROOT / "streams" / "mqtt_streams",
    "pyspark_mqtt_nats": ROOT / "spark" / "pyspark_mqtt_nats",
}

REPORT = """
import importlib, json, pathlib
from importlib.resources import files
from mqtt_nats.embedded import find_configuration
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


class Environment:
    """A fresh virtual environment that borrows the dependencies of ours, but not our editable install."""

    def __init__(self, directory: Path) -> None:
        venv.create(directory, with_pip=False, symlinks=True)
        self.python = directory / "bin" / "python"
        self.command = directory / "bin" / "mqtt-nats"
        version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        self.packages = directory / "lib" / version / "site-packages"
        borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        (self.packages / "borrowed.pth").write_text("\n".join(borrowed), encoding="utf-8")

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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(directory)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=80)
    (built,) = directory.glob("*.whl")
    return built


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
    assert shown.stdout == f"mqtt-nats {__version__} (pure Python)\n"
    licence = environment.packages / f"mqtt_nats-{__version__}.dist-info" / "licenses" / "LICENSE"
    assert "Apache License" in licence.read_text(encoding="utf-8")
