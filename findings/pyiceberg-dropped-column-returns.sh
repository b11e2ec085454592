#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# PyIceberg 0.12.0: a column that is deleted and added again under its name has its former values back in files that came by
# `add_files`: these have no field ids, and the name mapping of the table gives the new column the old name. In files that
# `append` has written the new column is null, as Iceberg's field ids promise.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check 'pyiceberg[pyarrow,sql-sqlite]==0.12.0' pyarrow==26.0.1
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import pathlib, sys, warnings

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.types import LongType

FOLDER = pathlib.Path(sys.argv[1])
warnings.simplefilter("ignore")
CATALOG = SqlCatalog("local", uri=f"sqlite:///{FOLDER}/catalog.db", warehouse=str(FOLDER))
CATALOG.create_namespace("n")
ROWS = pa.table({"topic": ["a"], "level": [7]})


def renewed(name, fill):
    """The column after it was deleted and added again."""
    table = CATALOG.create_table(f"n.{name}", schema=ROWS.schema)
    fill(table)
    with table.update_schema() as change:
        change.delete_column("level")
    assert table.scan().to_arrow().column_names == ["topic"]
    with table.update_schema() as change:
        change.add_column("level", LongType())
    return table.scan().to_arrow()["level"].to_pylist()


file = FOLDER / "file.parquet"
pq.write_table(ROWS, file)
added, appended = renewed("a", lambda table: table.add_files([str(file)])), renewed("b", lambda table: table.append(ROWS))
print(f"pyiceberg 0.12.0: deleted and added again, the column is {added} in an added file and {appended} in an appended one")
if (added, appended) != ([7], [None]):
    sys.exit("the behaviour has changed")
PYTHON
