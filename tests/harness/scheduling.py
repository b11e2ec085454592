# SPDX-License-Identifier: Apache-2.0
"""Which tests one process runs, where several do (pytest-xdist)."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

from tests.harness.nats import ROOT


def one_spark(config: pytest.Config, log: Any) -> Any:
    """Each file is one process's, and so are all that share a Spark session: it takes long to begin and to get fast."""
    scheduler = LoadFileScheduling(config, log)
    scheduler._split_scope = _scope
    return scheduler


def _scope(test: str) -> str:
    file = test.partition("::")[0]
    return "spark" if _shares(file) else file


@cache
def _shares(file: str) -> bool:
    if "/spark/" not in file:
        return False
    return re.search(r'spark: "?SparkSession', (ROOT / file).read_text(encoding="utf-8")) is not None
