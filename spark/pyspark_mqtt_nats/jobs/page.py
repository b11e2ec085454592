# SPDX-License-Identifier: Apache-2.0
"""HTML pages of jobs, and the page of a report: they load nothing, have no scripts, and fit light and dark displays.

Topics and client ids come from strangers: everything is escaped, and the page's policy forbids to load anything.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from typing import Final

from pyspark_mqtt_nats.jobs import charts
from pyspark_mqtt_nats.jobs.figures import Figures, Ranked, moment, per_second, printable, span
from pyspark_mqtt_nats.jobs.progress import count, duration, size

_STYLE: Final = """
:root{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--text:#1b1f24;--soft:#5b6570;--line:#e1e5ea;--bar:#2a6fb8;
--track:#edf0f4;--hole:#f3c9b4}
@media(prefers-color-scheme:dark){:root{--page:#14171b;--card:#1d2127;--text:#e6e9ed;--soft:#9aa4af;--line:#323942;
--bar:#5fa3e6;--track:#2a3038;--hole:#6d3b26}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--text);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1080px;margin:0 auto;padding:32px 20px 48px}
h1{font-size:24px;line-height:1.25;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:16px;margin:0 0 12px}
p{margin:0}
.soft,footer{color:var(--soft)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin:24px 0 12px}
.tile,section{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:16px}
.tile b{display:block;font-size:22px;font-weight:600;font-variant-numeric:tabular-nums}
section{margin-top:12px}
.pair{display:grid;align-items:start;grid-template-columns:repeat(auto-fit,minmax(min(440px,100%),1fr));gap:0 12px}
.wide{overflow-x:auto}
.wide>svg{display:block;width:100%;min-width:640px;height:auto}
table{border-collapse:collapse;width:100%;table-layout:fixed;font-variant-numeric:tabular-nums}
th{font-weight:400;color:var(--soft);text-align:left;padding:0 0 6px}
td{padding:5px 0;border-top:1px solid var(--line);vertical-align:middle}
th.number,td.number{text-align:right;white-space:nowrap}
.name{overflow:hidden;text-overflow:ellipsis;white-space:nowrap;unicode-bidi:isolate}
col.count{width:92px}col.part{width:64px}col.size{width:92px}
svg.share{display:block;width:100%;height:6px;margin:2px 0 3px}
.strip rect{shape-rendering:crispEdges}
.note{margin:4px 0 16px}
@media(max-width:520px){.size{display:none}}
.bar{fill:var(--bar)}.track{fill:var(--track)}.hole{fill:var(--hole)}.clear{fill:transparent}
.grid{stroke:var(--line)}.axis{stroke:var(--soft)}
.tick{fill:var(--soft);font-size:12px}.end{text-anchor:end}.middle{text-anchor:middle}
footer{margin-top:24px;font-size:13px}
"""

_HEAD: Final = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
"""

_QOS: Final = {None: "not published by MQTT"}


def render(figures: Figures) -> str:
    """Return the page of a report."""
    title = f"Messages of {printable(figures.source)}"
    parts: list[str] = []
    if not figures.messages or figures.first_time is None or figures.last_time is None:
        parts.append("<p>There are no messages.</p>\n")
    else:
        period = f"{moment(figures.first_time)} to {moment(figures.last_time)} ({duration(figures.seconds)})"
        parts.append(f'<p class="soft">{period}</p>\n')
        parts.append(_tiles(figures))
        chart = charts.over_time(figures.bars, figures.width)
        parts.append(
            section("Messages over time", f'<div class="wide">{chart}</div>', f"one bar is {span(figures.width)}")
        )
        parts.append('<div class="pair">')
        parts.append(section("Busiest topics", _ranking(figures.busiest, figures, "topic"), _more(figures.topics)))
        parts.append(section("Publishers", _ranking(figures.senders, figures, "client id"), _more(figures.publishers)))
        parts.append("</div>\n")
        parts.append('<div class="pair">')
        named = [Ranked(f"QoS {one.name}" if one.name else _QOS[None], one.messages, one.bytes) for one in figures.qos]
        parts.append(section("Quality of service", _ranking(named, figures, "")))
        parts.append(section("Payloads", _payloads(figures)))
        parts.append("</div>\n")
        parts.append(section("Gaps", _gaps(figures), figures.gap_text() if figures.missing else ""))
    return document(title, "".join(parts), figures.made)


def document(title: str, body: str, made: datetime | None = None) -> str:
    """Return a whole page; `body` is HTML, `title` is not. `made`: when, None for now."""
    head = _HEAD.format(title=escape(title), style=_STYLE)
    foot = f"<footer>Made {moment(made or datetime.now(UTC))} by mqtt-nats.</footer>\n</main>\n</body>\n</html>\n"
    return f"{head}<h1>{escape(title)}</h1>\n{body}{foot}"


def section(title: str, content: str, note: str = "") -> str:
    """Return a part of a page with a heading; `content` is HTML, `title` and `note` are not."""
    note = f' <span class="soft" style="font-weight:400">{escape(note)}</span>' if note else ""
    return f"<section><h2>{escape(title)}{note}</h2>{content}</section>\n"


def _tiles(figures: Figures) -> str:
    tiles = [
        ("messages", count(figures.messages)),
        ("of payload", size(figures.bytes)),
        ("on average", per_second(figures.per_second)),
        ("topics", count(figures.topics)),
        ("publishers", count(figures.publishers)),
        ("sequences missing", count(figures.missing) if figures.whole else "unknown"),
    ]
    return '<div class="tiles">' + "".join(
        f'<div class="tile"><b>{escape(value)}</b><span class="soft">{name}</span></div>' for name, value in tiles
    ) + "</div>\n"  # fmt: skip


def _more(number: int) -> str:
    return f"of {count(number)}"


def _ranking(ranking: Sequence[Ranked], figures: Figures, heading: str) -> str:
    """A table with bars; the longest bar is that of the first."""
    most = max((one.messages for one in ranking), default=0)
    rows = [
        '<table><colgroup><col><col class="count"><col class="part"><col class="size"></colgroup>'
        f'<tr><th>{heading}</th><th class="number">messages</th>'
        '<th class="number">share</th><th class="number size">payload</th></tr>'
    ]
    for one in ranking:
        name = escape(printable(one.name))
        rows.append(
            f'<tr><td><div class="name" title="{name}">{name}</div>{charts.share(one.messages, most)}</td>'
            f'<td class="number">{count(one.messages)}</td>'
            f'<td class="number">{100 * one.messages / figures.messages:.1f}%</td>'
            f'<td class="number size">{size(one.bytes)}</td></tr>'
        )
    return "".join([*rows, "</table>"])


def _payloads(figures: Figures) -> str:
    rows = [
        ("smallest", size(figures.smallest)),
        ("median, about", size(figures.median)),
        ("largest", size(figures.largest)),
        ("with RETAIN", f"{count(figures.retained)} messages"),
    ]
    return "<table>" + "".join(
        f'<tr><td>{name}</td><td class="number">{value}</td></tr>' for name, value in rows
    ) + "</table>"  # fmt: skip


def _gaps(figures: Figures) -> str:
    if not figures.whole:
        return '<p class="soft">Read all topics to see which sequences have no message.</p>'
    first, last = figures.first_sequence, figures.last_sequence
    if not figures.gaps:
        return f'<p class="soft">Every sequence from {count(first)} to {count(last)} has a message.</p>'
    rows = "".join(
        f'<tr><td>{count(gap.first)} to {count(gap.first + gap.missing - 1)}</td>'
        f'<td class="number">{count(gap.missing)}</td></tr>'
        for gap in figures.gaps
    )  # fmt: skip
    note = "Messages that expired or were deleted leave gaps; so does what was lost."
    if figures.gap_count > len(figures.gaps):
        note += f" These are the largest {len(figures.gaps)} of {count(figures.gap_count)}."
    return (
        f'<div class="wide">{charts.coverage(figures.coverage, first, last)}</div><p class="soft note">{note}</p>'
        f'<table><tr><th>sequences</th><th class="number">missing</th></tr>{rows}</table>'
    )
