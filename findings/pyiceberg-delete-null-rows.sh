#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# PyIceberg 0.12.0: which rows `delete` removes depends on the files they are in. With `state != 'on'` a row whose state is
# null stays where it shares a file with an "on", and goes where no row of its file is "on"; a scan with the same filter finds
# it in neither. With `state not in ('on', 'x')` a scan finds such a row, and the delete is the same as above. `... or state is
# null` says what is meant and does it.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check 'pyiceberg[pyarrow,sql-sqlite]==0.12.0' pyarrow==26.0.1
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import pathlib, sys, warnings

import pyarrow as pa
from pyiceberg.catalog.sql import SqlCatalog

FOLDER = pathlib.Path(sys.argv[1])
warnings.simplefilter("ignore")
CATALOG = SqlCatalog("local", uri=f"sqlite:///{FOLDER}/catalog.db", warehouse=str(FOLDER))
CATALOG.create_namespace("n")
SCHEMA = pa.schema([("state", pa.string())])


def deleted(name, files, condition):
    """What a scan finds by a condition, and what is left when those rows are deleted."""
    table = CATALOG.create_table(f"n.{name}", schema=SCHEMA)
    for values in files:
        table.append(pa.table({"state": values}, schema=SCHEMA))
    found = table.scan(row_filter=condition).to_arrow()["state"].to_pylist()
    table.delete(condition)
    left = table.scan().to_arrow()["state"].to_pylist()
    return sorted(found, key=str), sorted(left, key=str)


ONE, MANY = [["on", None, "off"]], [["on"], [None], ["off"]]
results = [
    deleted("a", ONE, "state != 'on'"),
    deleted("b", MANY, "state != 'on'"),
    deleted("c", ONE, "state not in ('on', 'x')"),
    deleted("d", MANY, "state not in ('on', 'x')"),
    deleted("e", ONE, "state != 'on' or state is null"),
    deleted("f", MANY, "state != 'on' or state is null"),
]
for (found, left), where in zip(results, ("one file", "three files") * 3, strict=True):
    print(f"pyiceberg 0.12.0, {where}: a scan finds {found}, left after the delete are {left}")
both = ([None, "off"], ["on"])
expected = [(["off"], [None, "on"]), (["off"], ["on"]), (both[0], [None, "on"]), both, both, both]
if results != expected:
    sys.exit("the behaviour has changed")
PYTHON
