#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# deltalake 1.6.6: the version of an application transaction (`CommitProperties(app_transactions=[Transaction("writer", 7)])`,
# a `txn` action in the log) is written and never compared. A commit with the version that the table has already appends its
# rows again, one with a lower version too, and sets `transaction_version` back. Who wants each batch once has to ask before it
# writes, as the only writer of that name.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check deltalake==1.6.6 pyarrow==26.0.1
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import pathlib, sys

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

TABLE = pathlib.Path(sys.argv[1], "table")


def write(version):
    """Append a row as this version of the writer; return the rows and the version that the table has then."""
    properties = CommitProperties(app_transactions=[Transaction("writer", version)])
    write_deltalake(TABLE, pa.table({"batch": [version]}), mode="append", commit_properties=properties)
    table = DeltaTable(TABLE)
    return sorted(table.to_pyarrow_table()["batch"].to_pylist()), table.transaction_version("writer")


first, again, older = write(7), write(7), write(3)
print(f"deltalake 1.6.6: (rows, version) {first}, after version 7 once more {again}, after version 3 {older}")
if (first, again, older) != (([7], 7), ([7, 7], 7), ([3, 7, 7], 3)):
    sys.exit("the behaviour has changed")
PYTHON
