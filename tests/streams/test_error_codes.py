# SPDX-License-Identifier: Apache-2.0
"""JetStream's error codes are in one table."""

import re

from mqtt_streams import error_codes
from tests.harness.nats import ROOT

TABLE = "streams/mqtt_streams/error_codes.py"
CODE = re.compile(r"(?<![\w.\"'])10[01]\d\d(?![\w.])")


def test_codes_are_named_elsewhere() -> None:
    """In source code; tests may say what nats-server sends."""
    files = [path for folder in ("mqtt_nats", "streams", "spark") for path in (ROOT / folder).rglob("*.py")]
    found = {path.relative_to(ROOT).as_posix() for path in files if CODE.search(path.read_text(encoding="utf-8"))}
    assert found - {"spark/pyspark_mqtt_nats/options.py"} == {TABLE}  # that one speaks of 10000 messages


def test_each_code_has_one_name() -> None:
    names = {name: value for name, value in vars(error_codes).items() if isinstance(value, int)}
    assert len(set(names.values())) == len(names)
