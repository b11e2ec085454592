# SPDX-License-Identifier: Apache-2.0
"""The table of the worst cases of finding filters, in small."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import matching
from mqtt_nats.codec import validate_topic_filter
from mqtt_nats.codec.topics import matches


def test_every_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    matching.main(["--levels", "4", "--filters", "50", "--seconds", "0.001", "--docs", str(tmp_path)])
    said = capsys.readouterr().out
    written = (tmp_path / "growth.md").read_text()
    assert len(matching.CASES) == 20
    for case in matching.CASES:
        assert f"| {case.name} " in said
        assert f"| {case.name} " in written


@pytest.mark.parametrize("case", matching.CASES, ids=[case.name for case in matching.CASES])
@pytest.mark.parametrize("levels", [3, 16, 17])
def test_filters_and_topics_are_legal(case: matching.Case, levels: int) -> None:
    filters = matching.distinct(case.filters(levels), 200)
    for text in filters:
        validate_topic_filter(text)
    for topic in case.topics(levels):
        assert topic.count("/") < levels
    assert len(set(filters)) == len(filters)


def test_the_times_are_of_topics_that_match() -> None:
    for case in matching.CASES[:4]:
        filters = matching.distinct(case.filters(16), 100)
        assert sum(matches(text, case.topics(16)[0]) for text in filters) == 100 or case.name == "`a`, `b` or `+`"


@pytest.mark.parametrize("arguments", [["--levels", "2"], ["--filters", "0"], ["--seconds", "0"]])
def test_what_it_cannot_measure(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        matching.main(arguments)
    assert "three levels at least" in capsys.readouterr().err
