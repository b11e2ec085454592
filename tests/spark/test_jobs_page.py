# SPDX-License-Identifier: Apache-2.0
"""The page of a report, and what it says in a terminal, made of plain numbers."""

import re
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_mqtt_nats.jobs import charts
from pyspark_mqtt_nats.jobs.figures import Bar, Figures, Gap, Ranked, per_second, printable, span, width_of_bars
from pyspark_mqtt_nats.jobs.page import render

BEGIN = datetime(2026, 11, 20, 6, tzinfo=UTC)
VOID = {"meta", "col", "link", "img", "br", "input", "base", "embed", "source"}
LOADING = {"script", "link", "img", "iframe", "object", "embed", "base", "source", "form", "image", "use", "a"}
NASTY = "<script>alert(1)</script>\"'&\u202e\x00/+"


class Page(HTMLParser):
    """Elements and texts of a page, whose tags must match each other."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def figures(**changes: object) -> Figures:
    values: dict[str, object] = {
        "source": "stream $MQTT_msgs",
        "made": BEGIN + timedelta(days=2),
        "messages": 1500,
        "bytes": 3 << 20,
        "topics": 31,
        "publishers": 2,
        "retained": 7,
        "first_sequence": 1,
        "last_sequence": 2000,
        "first_time": BEGIN,
        "last_time": BEGIN + timedelta(minutes=29),
        "median": 41,
        "largest": 70_000,
        "width": 60,
        "bars": [Bar(BEGIN, 1000), Bar(BEGIN + timedelta(minutes=28), 500)],
        "busiest": [Ranked("home/kitchen", 900, 2 << 20), Ranked(NASTY, 300, 9), Ranked("", 300, 10)],
        "senders": [Ranked("lamp", 1490, 10), Ranked(None, 10, 5)],
        "qos": [Ranked(None, 10, 5), Ranked("1", 1490, 9)],
        "gaps": [Gap(101, 499), Gap(1000, 1)],
        "gap_count": 2,
        "missing": 500,
        "coverage": [1.0, 0.001, 0.999, 1.0],
    }
    return Figures(**{**values, **changes})  # type: ignore[arg-type]


def test_the_page_is_whole_and_loads_nothing() -> None:
    text = render(figures())
    page = Page(text)
    tags = {tag for tag, _ in page.elements}
    assert not tags & LOADING
    assert {"svg", "rect", "title", "table"} <= tags
    for _, attributes in page.elements:
        assert not {"src", "href", "srcset", "data", "action"} & set(attributes)
        assert not [name for name in attributes if name.startswith("on")]
    assert not re.search(r"https?:|//|url\(|@import", text)
    policy = {"http-equiv": "Content-Security-Policy", "content": "default-src 'none'; style-src 'unsafe-inline'"}
    assert ("meta", policy) in page.elements
    assert "@media(prefers-color-scheme:dark)" in text


def test_the_page_says_what_the_figures_are() -> None:
    page = Page(render(figures()))
    said = " ".join(" ".join(page.texts).split())
    for text in ("1,500", "3.0 MiB", "31", "home/kitchen", "60.0%", "500 missing in 2 gaps", "101 to 599", "499"):
        assert text in said, text
    assert "2026-11-20 06:28:00 UTC to 2026-11-20 06:29:00 UTC: 500 messages" in said
    assert "one bar is 1 min" in said
    assert "(unknown)" in said
    assert "(empty)" in said
    assert "not published by MQTT" in said


def test_names_are_shown_as_text_whatever_they_are() -> None:
    page = Page(render(figures(source=NASTY)))
    shown = NASTY.replace("\u202e", "�").replace("\x00", "�")
    assert page.texts.count(shown) == 1
    assert page.texts.count(f"Messages of {shown}") == 2
    assert {"title": shown, "class": "name"} in [attributes for tag, attributes in page.elements if tag == "div"]


def test_without_messages_without_gaps_without_all_topics() -> None:
    empty = Figures(source="x", made=BEGIN)
    assert "There are no messages" in " ".join(Page(render(empty)).texts)
    assert empty.text() == "x: no messages"
    full = figures(gaps=[], gap_count=0, missing=0, coverage=())
    assert "Every sequence from 1 to 2,000 has a message." in Page(render(full)).texts
    assert "no gaps" in full.text()
    some = figures(whole=False, gaps=[], coverage=())
    assert "unknown" in Page(render(some)).texts
    assert "gaps unknown: not all topics were read" in some.text()


def test_the_summary() -> None:
    lines = figures(source="archive").text().splitlines()
    assert lines[0] == "archive: 1,500 messages, 3.0 MiB of payload"
    assert lines[1] == "  2026-11-20 06:00:00 UTC to 2026-11-20 06:29:00 UTC, 1 in 1.2 s"
    assert lines[2] == "  31 topics, 2 publishers, 7 with RETAIN"
    assert lines[3] == "  sequences 1 to 2,000, 500 missing in 2 gaps"
    assert lines[5].split() == ["home/kitchen", "900", "60.0%"]
    assert "  and 28 more" in lines
    assert "\x00" not in "".join(lines)


def bars(chart: str, kind: str = "bar") -> list[dict[str, float]]:
    """The rectangles of a chart."""
    found = [dict(attributes) for tag, attributes in Page(chart).elements if tag == "rect"]
    return [
        {name: float(value or 0) for name, value in one.items() if name != "class"}
        for one in found
        if one["class"] == kind
    ]


@given(
    st.dictionaries(st.integers(0, 70), st.integers(1, 10**9), min_size=1, max_size=72),
    st.sampled_from([1, 60, 1800, 86_400]),
)
def test_columns_are_as_high_as_their_numbers_and_stand_where_their_time_is(counts: dict[int, int], width: int) -> None:
    times = [Bar(BEGIN + timedelta(seconds=slot * width), counts[slot]) for slot in sorted(counts)]
    found = bars(charts.over_time(times, width))
    assert len(found) == len(times)
    for before, after in pairwise(found):
        assert before["x"] + before["width"] <= after["x"] + 0.11
    tallest = max(counts.values())
    most = max(one["height"] for one in found)
    for bar, one in zip(times, found, strict=True):
        assert one["height"] == pytest.approx(max(1.0, most * bar.messages / tallest), abs=0.2)
        assert one["x"] >= 64
        assert one["x"] + one["width"] <= 948.1


@given(st.integers(1, 10**12))
def test_an_axis_has_few_round_lines_and_room_for_everything(most: int) -> None:
    top, step = charts.axis(most)
    assert most <= top < most + step
    assert top % step == 0
    assert 1 <= top // step <= 5
    assert int(str(step).rstrip("0")) in (1, 2, 5)


@given(st.floats(0, 3e9))
def test_a_chart_over_time_has_at_most_72_columns(seconds: float) -> None:
    width = width_of_bars(seconds)
    assert seconds / width + 1 < 72 or width == 2_592_000
    assert width == 1 or seconds / width >= 6


def test_a_piece_that_is_not_full_looks_like_it() -> None:
    strip = charts.coverage([1.0, 0.001, 0.9999, 0.0], 1, 4000)
    assert [one["height"] for one in bars(strip)] == [36, 0, 33, 0]
    texts = Page(strip).texts
    assert texts[:4] == [
        "sequences 1 to 1,000: 100% have a message",
        "sequences 1,001 to 2,000: 0.1% have a message",
        "sequences 2,001 to 3,000: 99.9% have a message",
        "sequences 3,001 to 4,000: 0.0% have a message",
    ]


def test_small_words() -> None:
    assert [charts.short(number) for number in (0, 999, 1500, 2_000_000, 5 * 10**9)] == ["0", "999", "1.5k", "2M", "5G"]
    assert [span(seconds) for seconds in (1, 60, 1800, 7200, 86_400, 604_800)] == [
        "1 s", "1 min", "30 min", "2 h", "1 day", "7 days"
    ]  # fmt: skip
    assert [per_second(rate) for rate in (0, 0.1, 1.234, 1234.5)] == ["all at once", "1 in 10.0 s", "1.23/s", "1,234/s"]
    assert printable("a\tb\ud800") == "a�b�"
    day = timedelta(days=1)
    assert charts.label_form(BEGIN, BEGIN + day, 3600) == "%b %d %H:%M"
    assert charts.label_form(BEGIN, BEGIN + timedelta(minutes=1), 1) == "%H:%M:%S"
    assert charts.label_form(BEGIN, BEGIN + 60 * day, 86_400) == "%Y-%m-%d"
    assert charts.label_form(BEGIN, BEGIN + 9 * day, 86_400) == "%b %d"
