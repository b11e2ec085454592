# SPDX-License-Identifier: Apache-2.0
"""The log of Spark's file sink, `_spark_metadata`, as what names the files that count.

The log has a file for each batch, and every tenth names all files up to there (`19.compact`). Only files that the
newest of these names are compacted, so that one file changes, by a rename that replaces it.
"""

from collections import defaultdict
from typing import Any, Final
from urllib.parse import unquote

import orjson

from pyspark_mqtt_nats.jobs import JobError
from pyspark_mqtt_nats.jobs.storage import Place
from pyspark_mqtt_nats.lakehouse.compaction import Group, parquet_names
from pyspark_mqtt_nats.lakehouse.tables import PARTITIONS

LOG: Final = "_spark_metadata"
_VERSION: Final = b"v1"
_SUFFIX: Final = ".compact"


class SinkLog:
    """Log of an archive of Parquet files; raises JobError for what is none."""

    of_directories: tuple[str, ...] = PARTITIONS

    def __init__(self, place: Place) -> None:
        if not place.has(LOG):
            raise JobError(f"--input {place.path} is no archive of files: it has no {LOG}")
        names = [name.removesuffix(_SUFFIX) for name in place.names(LOG) if name.endswith(_SUFFIX)]
        numbers = [int(name) for name in names if name.isascii() and name.isdecimal()]
        self._name = f"{LOG}/{max(numbers)}{_SUFFIX}" if numbers else ""
        self._entries: list[dict[str, Any]] = []
        if self._name:
            first, *lines = (place.read(self._name) or b"").splitlines()
            try:
                if first != _VERSION:
                    raise ValueError(first)
                self._entries = [orjson.loads(line) for line in lines]
            except ValueError:
                raise JobError(f"--input {place.path}: {self._name} is of another version of Spark") from None

    def columns(self) -> None:
        """Return None: all files have a column in one type."""

    def groups(self, before: str) -> list[Group]:
        """Return the files of days before a date (ISO 8601)."""
        found: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for entry in self._entries:
            if f"date={before}" > _directory(entry) >= "date=":
                found[_directory(entry)].append(entry)
        return [
            Group(tuple(unquote(one["path"]) for one in entries), sum(one["size"] for one in entries))
            for _, entries in sorted(found.items())
        ]

    def replace(self, group: Group, place: Place, directory: str) -> int:
        """Have the files of a directory count in place of a group, at once; return how many there are."""
        gone = set(group.paths)
        old = next(entry for entry in self._entries if unquote(entry["path"]) in gone)
        parent = old["path"].rpartition("/")[0]
        made = []
        for name, size, time in parquet_names(place, directory):
            place.rename(f"{directory}/{name}", f"{_directory(old)}/{name}")
            made.append({**old, "path": f"{parent}/{name}", "size": size, "modificationTime": time})
        kept = [entry for entry in self._entries if unquote(entry["path"]) not in gone]
        content = b"\n".join([_VERSION, *map(orjson.dumps, [*kept, *made])])
        place.write(self._name, content)
        self._entries = [*kept, *made]
        return len(made)


def _directory(entry: dict[str, Any]) -> str:
    """Return the directories of date and root of a file."""
    return "/".join(unquote(part) for part in entry["path"].split("/")[-3:-1])
