# SPDX-License-Identifier: Apache-2.0
"""Environments with a version of PySpark, in a cache of their own and with a pretended pip."""

import venv
from pathlib import Path
from typing import Any

import pytest

from tests.harness import shell

PIP = """\
#!/bin/sh
site={place}/lib/python3.11/site-packages
mkdir -p "$site/pyspark-4.2.1.dist-info"
touch "$site/pyspark-4.2.1.dist-info/RECORD"
"""


@pytest.mark.processes
def test_an_environment_whose_installation_was_interrupted_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "pyspark-4.2"
    interpreter = place / "bin" / "python"
    made = []

    def create(where: Path, **_: Any) -> None:
        made.append(where)
        interpreter.parent.mkdir(parents=True)
        interpreter.write_text(PIP.format(place=where), encoding="utf-8")
        interpreter.chmod(0o755)

    monkeypatch.setattr(shell, "_CACHE", tmp_path)
    monkeypatch.setattr(venv, "create", create)
    half = place / "lib" / "python3.11" / "site-packages" / "pyspark-4.2.1.dist-info" / "METADATA"
    half.parent.mkdir(parents=True)
    half.touch()
    interpreter.parent.mkdir()
    interpreter.touch()
    assert shell.find_pyspark("4.2") == str(interpreter)
    assert made == [place]
    assert not half.exists()
    assert shell.find_pyspark("4.2") == str(interpreter)
    assert made == [place]
