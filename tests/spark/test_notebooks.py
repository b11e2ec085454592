# SPDX-License-Identifier: Apache-2.0
"""The page of notebooks and schedulers: its notebook is run, the commands of its recipes are understood."""

import ast
import os
import re
import shlex
from pathlib import Path
from typing import Any

import nbformat
import pytest
from click.testing import CliRunner
from nbclient import NotebookClient

from mqtt_streams.definitions import load_definition
from pyspark_mqtt_nats.jobs import commands
from pyspark_mqtt_nats.nats.jetstream import Publish, api, publish_all
from tests.conftest import NatsFactory
from tests.harness.nats import ROOT
from tests.spark.conftest import SOURCE_ROOTS
from tests.spark.servers import connect
from tests.spark.storing import QOS1

PAGE = (ROOT / "docs" / "spark-notebooks.md").read_text(encoding="utf-8")
NOTEBOOK = ROOT / "examples" / "spark.ipynb"


def code(section: str) -> list[str]:
    """The examples of a section of the page."""
    found = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", found, re.DOTALL)


def notebook_of_the_page() -> Any:
    return nbformat.reads(NOTEBOOK.read_text(encoding="utf-8"), as_version=4)  # type: ignore[no-untyped-call]


def test_the_notebook_has_the_cells_of_the_page() -> None:
    notebook = notebook_of_the_page()
    nbformat.validate(notebook)
    assert [f"{cell.source}\n" for cell in notebook.cells if cell.cell_type == "code"] == code("Notebooks")
    assert not any(cell.get("outputs") for cell in notebook.cells)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """The environment of a kernel: nothing is activated, and no file is left in the home directory."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, SOURCE_ROOTS)))
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    return monkeypatch


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_the_notebook_is_run(kernel: pytest.MonkeyPatch, nats_factory: NatsFactory) -> None:
    server = nats_factory()
    kernel.setenv("NATS_URL", server.url)
    with connect(server.url) as connection:
        api(connection, "STREAM.CREATE.$MQTT_msgs", load_definition("$MQTT_msgs"))
        payloads = [(b"site.%d.temp" % (number % 2), b"%d" % number) for number in range(10)]
        payloads.append((b"site.0.temp", b"x"))
        stored = [Publish(b"$MQTT.msgs." + subject, QOS1, payload) for subject, payload in payloads]
        assert len(list(publish_all(connection, stored))) == 11
    notebook = notebook_of_the_page()
    NotebookClient(notebook, timeout=200, kernel_name="python3").execute()
    shown = [str(cell.outputs) for cell in notebook.cells if cell.cell_type == "code"]
    assert "site/0/temp" in shown[1]
    assert "4.0" in shown[1]
    assert re.search(r"\|site/0/temp\| *6\| *1\|", shown[2])
    assert re.search(r"\|site/0/temp\| *6\|", shown[3])


@pytest.mark.parametrize("section", ["Airflow", "Dagster"])
def test_recipes_are_python_with_commands_that_are_understood(section: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (recipe,) = code(section)
    texts = [node for node in ast.walk(ast.parse(recipe)) if isinstance(node, (ast.Constant, ast.List))]
    words = [node.value for node in texts if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    lines = [shlex.split(text) for text in words if text.startswith("mqtt-nats spark ")]
    lines += [ast.literal_eval(node) for node in texts if isinstance(node, ast.List) and "mqtt-nats" in ast.dump(node)]
    assert lines
    ran: list[str] = []
    monkeypatch.setattr(commands, "run_job", lambda name, *_: ran.append(name))
    for line in lines:
        assert line[:2] == ["mqtt-nats", "spark"]
        done = CliRunner().invoke(commands.jobs, line[2:])
        if "/var/www" not in " ".join(line):  # a directory of a web server
            assert done.exit_code == 0, done.output
    assert "archive" in ran
