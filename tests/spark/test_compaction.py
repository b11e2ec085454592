# SPDX-License-Identifier: Apache-2.0
"""Which files of a finished day are made into fewer ones."""

from typing import Any, cast

import pytest
from pyspark.sql import SparkSession

from pyspark_mqtt_nats.jobs.storage import Place
from pyspark_mqtt_nats.lakehouse.compaction import Group, compact


class Table:
    """Files of one day."""

    of_directories: tuple[str, ...] = ("date",)

    def __init__(self, *groups: Group) -> None:
        self._groups = groups

    def columns(self) -> None:
        """Those that the files have."""

    def groups(self, before: str) -> list[Group]:
        return list(self._groups)

    def replace(self, group: Group, place: Place, directory: str) -> int:
        raise AssertionError


class Session:
    """A session that reads nothing."""

    @property
    def read(self) -> Any:
        raise InterruptedError


@pytest.mark.parametrize(("files", "size", "read"), [(1, 5, False), (2, 200, False), (2, 100, True), (3, 200, True)])
def test_files_are_read_only_where_there_will_be_fewer(files: int, size: int, read: bool) -> None:
    """Else each run would write all finished days once more."""
    table = Table(Group(tuple(f"part-{number}" for number in range(files)), size))
    spark, place = cast(SparkSession, Session()), cast(Place, None)
    if read:
        with pytest.raises(InterruptedError):
            compact(spark, place, table, "2026-11-20", 100)
    else:
        assert compact(spark, place, table, "2026-11-20", 100) == (0, 0)
