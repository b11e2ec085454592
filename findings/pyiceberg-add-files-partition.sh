#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# PyIceberg 0.12.0: `add_files` takes the value of an identity partition from the statistics of the Parquet file and looks
# neither at the path nor at the rows. A file without the column (`state=on/part.parquet`, as Spark and Hive write it) or
# without statistics counts as null, and one with "on" and null counts as "on". Nothing fails; a scan finds all rows, and a
# scan with a filter on that column leaves some out. Only two different values in a file are an error.
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

FOLDER = pathlib.Path(sys.argv[1])
warnings.simplefilter("ignore")
CATALOG = SqlCatalog("local", uri=f"sqlite:///{FOLDER}/catalog.db", warehouse=str(FOLDER))
CATALOG.create_namespace("n")
SCHEMA = pa.schema([("state", pa.string()), ("number", pa.int64())])


def added(name, path, rows, **options):
    """Values of a file's rows in a scan, the file's partition, and the numbers of rows that filters find."""
    table = CATALOG.create_table(f"n.{name}", schema=SCHEMA)
    with table.update_spec() as spec:
        spec.add_identity("state")
    file = FOLDER / path
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(rows, file, **options)
    table.add_files([str(file)])
    states = table.scan().to_arrow()["state"].to_pylist()
    partition = table.inspect.partitions().to_pylist()[0]["partition"]["state"]
    on, null = (table.scan(row_filter=one).to_arrow().num_rows for one in ("state = 'on'", "state is null"))
    return states, partition, on, null


results = {
    "column in the path only": added("a", "state=on/part.parquet", pa.table({"number": [1]})),
    "no statistics": added("b", "b.parquet", pa.table({"state": ["on"], "number": [1]}), write_statistics=False),
    "'on' and null": added("c", "c.parquet", pa.table({"state": ["on", None], "number": [1, 2]})),
}
for name, (states, partition, on, null) in results.items():
    print(f"pyiceberg 0.12.0, {name}: rows {states}, partition {partition}, state = 'on' finds {on}, state is null {null}")
if list(results.values()) != [([None], None, 0, 1), (["on"], None, 0, 0), (["on", None], "on", 1, 0)]:
    sys.exit("the behaviour has changed")
PYTHON
