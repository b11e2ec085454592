#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# deltalake 1.6.6: `mode="overwrite"` and `delete()` through a DeltaTable object remove what the object has seen, not what is
# in the table. Rows that another writer has appended since stay, and the commit succeeds. An append through such an object is
# what fails, when others have deleted something, although it reads nothing. With a path in place of the object everything is
# replaced.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check deltalake==1.6.6 pyarrow==26.0.1
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import pathlib, sys

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError

FOLDER = pathlib.Path(sys.argv[1])


def prepare(name):
    """A table of one row, and an object that has seen it."""
    write_deltalake(FOLDER / name, row("first"))
    return DeltaTable(FOLDER / name)


def row(value):
    return pa.table({"writer": [value]})


def rows(name):
    return sorted(DeltaTable(FOLDER / name).to_pyarrow_table()["writer"].to_pylist())


seen = prepare("overwritten")
write_deltalake(FOLDER / "overwritten", row("other"), mode="append")
write_deltalake(seen, row("new"), mode="overwrite")

seen = prepare("deleted")
write_deltalake(FOLDER / "deleted", row("other"), mode="append")
seen.delete()

seen = prepare("appended")
DeltaTable(FOLDER / "appended").delete()
try:
    write_deltalake(seen, row("new"), mode="append")
    refused = False
except CommitFailedError:
    refused = True

prepare("by path")
write_deltalake(FOLDER / "by path", row("other"), mode="append")
write_deltalake(FOLDER / "by path", row("new"), mode="overwrite")

found = rows("overwritten"), rows("deleted"), refused, rows("by path")
print(
    f"deltalake 1.6.6: left after overwrite {found[0]}, after delete {found[1]}; append refused: {found[2]}; by path {found[3]}"
)
if found != (["new", "other"], ["other"], True, ["new"]):
    sys.exit("the behaviour has changed")
PYTHON
