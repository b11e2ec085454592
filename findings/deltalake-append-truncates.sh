#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# deltalake 1.6.6: `write_deltalake(..., mode="append")` casts columns to the types of the table, and what that loses is no
# error: 1.75 becomes 1 in an integer column, nanoseconds become microseconds, "12" becomes 12, and True becomes 1. Only values
# that do not fit at all (2**40 for 32 bits, "x" for an integer) fail.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check deltalake==1.6.6 pyarrow==26.0.1
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import pathlib, sys

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

FOLDER = pathlib.Path(sys.argv[1])


def appended(name, kind, values):
    """What an append of these values to a column of a type leaves there, or the name of the error."""
    write_deltalake(FOLDER / name, pa.table({"value": pa.array([], kind)}))
    try:
        write_deltalake(FOLDER / name, pa.table({"value": values}), mode="append")
    except Exception:
        return "refused"
    return DeltaTable(FOLDER / name).to_pyarrow_table()["value"].cast(pa.int64()).to_pylist()


found = [
    appended("double", pa.int32(), pa.array([1.75])),
    appended("time", pa.timestamp("us", "UTC"), pa.array([1_999], pa.timestamp("ns", "UTC"))),
    appended("text", pa.int32(), pa.array(["12"])),
    appended("boolean", pa.int32(), pa.array([True])),
    appended("large", pa.int32(), pa.array([2**40])),
    appended("word", pa.int32(), pa.array(["x"])),
]
print(f"deltalake 1.6.6: 1.75, 1,999 ns, '12', True, 2**40 and 'x' become {found}")
if found != [[1], [1], [12], [1], "refused", "refused"]:
    sys.exit("the behaviour has changed")
PYTHON
