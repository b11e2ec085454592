# SPDX-License-Identifier: Apache-2.0
"""Who may know whom: the rules of docs/internals, read from the imports."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.nats import ROOT

SOURCES = {
    "mqtt_nats": ROOT / "mqtt_nats",
    "mqtt_streams": ROOT / "streams" / "mqtt_streams",
    "pyspark_mqtt_nats": ROOT / "spark" / "pyspark_mqtt_nats",
}

IO = ("asyncio", "anyio", "uvloop", "socket", "ssl", "selectors", "threading", "time", "random", "secrets", "logging")

# Part -> what it must not import, beside what the order of packages forbids (test_packages). A name covers
# everything below it. "mqtt_nats" alone stands for everything of the gateway that is not allowed by name in ALLOWED.
COUNTING = ("admission", "bans", "bucket", "flapping", "limit_settings", "networks")
FORBIDDEN = {
    "mqtt_nats.codec": (*IO, "mqtt_nats", "mqtt_streams", "pyspark_mqtt_nats", "nats"),
    "mqtt_nats.protocol": (*IO, "mqtt_nats", "pyspark_mqtt_nats", "nats"),
    "mqtt_nats.mqtt_clients": (
        "asyncio",
        "anyio",
        "mqtt_nats",
        "mqtt_streams",
        "pyspark_mqtt_nats",
        "nats",
        "pydantic",
    ),
    "mqtt_nats.pubsub": ("mqtt_nats.protocol", "mqtt_nats.transport.listener", "nats", "socket"),
    "mqtt_nats.backbone": ("mqtt_nats.codec", "mqtt_nats.protocol"),
    "mqtt_nats.access": ("asyncio", "anyio", "nats", "mqtt_streams", "mqtt_nats.protocol", "mqtt_nats.backbone"),
    "mqtt_nats.authenticators": ("mqtt_nats.protocol", "mqtt_nats.pubsub", "mqtt_nats.backbone", "nats"),
    **{f"mqtt_nats.base.{name}": (*IO, "nats", "mqtt_streams") for name in COUNTING},
    "mqtt_nats.transport": ("mqtt_nats.protocol", "mqtt_nats.backbone", "mqtt_streams", "nats"),
    "mqtt_streams": ("mqtt_nats", "pyspark_mqtt_nats", "asyncio", "anyio", "uvloop", "socket", "nats"),
    "pyspark_mqtt_nats": ("mqtt_nats", "asyncio", "anyio", "uvloop", "nats"),
}
ALLOWED = {
    "mqtt_nats.codec": ("mqtt_nats.codec",),
    "mqtt_nats.protocol": ("mqtt_nats.protocol", "mqtt_nats.codec"),
    "mqtt_nats.mqtt_clients": ("mqtt_nats.mqtt_clients", "mqtt_nats.codec", "mqtt_nats.protocol.qos2_receiver"),
}


def within(name: str, part: str) -> bool:
    return name == part or name.startswith(part + ".")


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of the source packages, as (dotted name, path)."""
    for package, root in SOURCES.items():
        for path in sorted(root.rglob("*.py")):
            parts = [package, *path.relative_to(root).with_suffix("").parts]
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports(name: str, path: Path, text: str) -> Iterator[str]:
    """Absolute names that a module imports, wherever in the file; ``from a import b`` gives a and a.b."""
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *([base] if base else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def violations(name: str, path: Path, text: str) -> list[str]:
    """The rules that an import of this module breaks."""
    found = []
    for part, forbidden in FORBIDDEN.items():
        if not within(name, part):
            continue
        for imported in imports(name, path, text):
            if imported == "mqtt_nats" and part in ALLOWED:
                continue  # `from mqtt_nats import codec` is judged by the full name
            if any(within(imported, allowed) for allowed in ALLOWED.get(part, ())):
                continue
            found += [f"{name} imports {imported}" for ban in forbidden if within(imported, ban)]
    return found


def test_no_layer_knows_another_that_it_must_not() -> None:
    checked = list(modules())
    assert {name.split(".")[0] for name, _ in checked} == set(SOURCES)
    broken = [line for name, path in checked for line in violations(name, path, path.read_text(encoding="utf-8"))]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("part", FORBIDDEN)
def test_every_rule_has_something_to_check(part: str) -> None:
    assert any(within(name, part) for name, _ in modules()), part


@pytest.mark.parametrize(
    ("name", "text", "count"),
    [
        ("mqtt_nats.codec.wire", "import asyncio", 1),
        ("mqtt_nats.codec.wire", "from mqtt_nats import protocol", 1),
        ("mqtt_nats.codec.wire", "from mqtt_nats.codec import errors", 0),
        ("mqtt_nats.codec.wire", "def f():\n    import time", 1),
        ("mqtt_nats.codec.wire", "from . import errors\nfrom ..protocol import flow", 2),
        ("mqtt_nats.protocol.flow", "from mqtt_streams.sessions import Record\nfrom mqtt_nats.codec import wire", 0),
        ("mqtt_nats.protocol.flow", "from mqtt_nats.backbone.link import Link", 2),
        ("mqtt_nats.pubsub.routing_table", "from mqtt_nats.backbone import link\nimport asyncio", 0),
        ("mqtt_nats.pubsub.routing_table", "import mqtt_nats.protocol", 1),
        ("mqtt_nats.transport.connection", "import mqtt_streams.subjects", 1),
        ("mqtt_streams.subjects", "import mqtt_nats.base.errors", 1),
        ("pyspark_mqtt_nats.reader", "import mqtt_streams\nimport asyncio.events", 1),
    ],
)
def test_the_check_itself(name: str, text: str, count: int) -> None:
    assert len(violations(name, Path("module.py"), text)) == count


@pytest.mark.processes
@pytest.mark.parametrize("package", ["mqtt_nats.codec", "mqtt_streams"])
def test_importing_a_pure_package_does_not_import_asyncio(package: str) -> None:
    code = f"import sys, {package}; sys.exit('asyncio' in sys.modules)"
    path = [str(ROOT), str(ROOT / "streams"), str(ROOT / "spark")]
    code = f"import sys; sys.path[:0] = {path!r}; {code}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_no_folder_is_called_utils() -> None:
    assert not [path for root in SOURCES.values() for path in root.rglob("util*") if path.is_dir()]


FOLDERS = ("mqtt_nats", "streams", "spark", "tests", "scripts", "benchmarks", "examples")


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_file_has_a_licence_line(folder: str) -> None:
    """Tests, scripts and benchmarks, too."""
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    for path in files:
        lines = path.read_text(encoding="utf-8").splitlines()
        assert lines[:1] == ["# SPDX-License-Identifier: Apache-2.0"], path
