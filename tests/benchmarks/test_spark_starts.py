# SPDX-License-Identifier: Apache-2.0
"""The table of starts of Spark."""

from benchmarks.spark_starts import Spent, table


def test_the_table_has_the_medians_of_each_stage() -> None:
    reads = [{"session": Spent(wall, 5.0), "rows": Spent(wall + 2, 9.0)} for wall in (3.0, 1.0, 4.0)]
    assert table({"first read": reads, "archive": [{"commit": Spent(7.25, 12.0)}]}).splitlines() == [
        "| start | stage | wall s | CPU s |",
        "|---|---|---|---|",
        "| first read | session | 3.00 | 5.00 |",
        "| first read | rows | 2.00 | 4.00 |",
        "| first read | all | 5.00 | 9.00 |",
        "| archive | commit | 7.25 | 12.00 |",
    ]
