# SPDX-License-Identifier: Apache-2.0
"""The budget of each kind of log records, the summaries, and what is shortened."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from mqtt_nats.base.logs import (
    FAILURES,
    KINDS_MOST,
    LOGGER,
    NAME_LENGTH,
    RECORDS_BURST,
    REPEAT_S,
    SUMMARY_S,
    TEXT_LENGTH,
    TRACEBACK_LENGTH,
    Budgeted,
    Json,
    Text,
    about,
    admits,
    frequent,
    levels,
    log_failure,
    once,
    set_level,
    spoken,
)

BURST = int(RECORDS_BURST)


class Written:
    """A logger with a handler whose clock the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.stream = io.StringIO()
        self.handler = Budgeted(self.stream, lambda: self.now)
        self.handler.setFormatter(Text())
        self.log = logging.Logger("test")
        self.log.addHandler(self.handler)

    @property
    def lines(self) -> list[str]:
        """What was written."""
        return self.stream.getvalue().splitlines()


class Named:
    """What a record can be about."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return "somebody"

    def log_fields(self) -> dict[str, Any]:
        """Its name."""
        return {"name": self.name}


@pytest.fixture
def written() -> Iterator[Written]:
    found = Written()
    yield found
    found.handler.close()


def test_records_of_one_kind_have_a_budget_and_those_left_out_are_counted(written: Written) -> None:
    for number in range(1000):
        written.log.warning("refused: %s", number)
    written.log.warning("something else")
    assert len(written.lines) == BURST + 1
    assert "something else" in written.lines[-1]
    assert written.handler.left_out == 1000 - BURST
    written.now += SUMMARY_S
    written.handler.tick()
    assert written.lines[-1].endswith(
        f"WARNING test: {1000 - BURST} more records of this kind were omitted, such as: refused: {BURST}"
    )
    written.handler.tick()
    written.now += SUMMARY_S
    written.handler.tick()
    assert len(written.lines) == BURST + 2, "a number is told once"
    written.log.warning("refused: %s", "again")
    assert written.lines[-1].endswith("refused: again"), "the budget fills again"


def test_a_summary_says_what_a_reader_can_understand(written: Written) -> None:
    """It has a whole record of its kind, shortened, and what somebody has chosen is no template."""
    for number in range(30):
        written.log.warning("%s is refused: %s", f"100 %s {number} " + "x" * 2 * NAME_LENGTH, "n" * TEXT_LENGTH * 2)
    written.handler.summarize()
    told = written.lines[-1].split("test: ")[1]
    assert told.startswith("10 more records of this kind were omitted, such as: 100 %s 20 xxx")
    assert " is refused: nnn" in told
    assert len(told) < TEXT_LENGTH


def test_what_goes_on_for_ever_is_written_at_the_rate(written: Written) -> None:
    for _ in range(100):
        for number in range(100):
            written.log.info("refused: %s", number)
        written.now += 1.0
    refused = [line for line in written.lines if "more records of this kind" not in line]
    told = [line for line in written.lines if "more records of this kind" in line]
    assert BURST + 98 <= len(refused) <= BURST + 101
    assert len(told) in (9, 10)
    written.handler.summarize()
    told = [line for line in written.lines if "more records of this kind" in line]
    assert sum(int(line.split("test: ")[1].split()[0]) for line in told) + len(refused) == 10_000


def test_a_kind_may_have_a_budget_of_its_own(written: Written) -> None:
    for number in range(300):
        written.log.info("connected: %d", number, extra=frequent("connected", 100.0))
    assert len(written.lines) == 100
    written.now += 1.0
    for number in range(300):
        written.log.info("connected: %d", number, extra=frequent("connected", 100.0))
    assert len(written.lines) == 200


def test_a_record_beyond_its_budget_is_not_made(written: Written) -> None:
    """A record beyond the budget is counted, and the summary is written."""
    logging.getLogger().addHandler(written.handler)
    try:
        made = 0
        for number in range(300):
            if admits(written.log, logging.INFO, "connected"):
                made += 1
                written.log.info("connected: %d", number, extra=frequent("connected", 100.0))
        assert made == len(written.lines) == 100
        assert written.handler.left_out == 200
        written.now += SUMMARY_S
        assert admits(written.log, logging.INFO, "connected"), "the budget fills again"
        written.handler.tick()
        assert "200 more records of this kind were omitted, such as: connected: 99" in written.lines[-1]
        assert not admits(logging.Logger("test", logging.WARNING), logging.INFO, "connected")
        assert written.handler.left_out == 200, "a level that is not logged is no omission"
    finally:
        logging.getLogger().removeHandler(written.handler)


def test_without_a_budget_every_record_is_made(written: Written) -> None:
    assert all(admits(written.log, logging.INFO, "connected") for _ in range(300))


def test_levels_of_loggers() -> None:
    name = "mqtt_nats.test_levels"
    log = logging.getLogger(name)
    before = levels()
    assert before[name] == before[LOGGER]
    try:
        set_level(name, "debug")
        assert log.isEnabledFor(logging.DEBUG)
        assert levels() == {**before, name: "debug"}
        set_level(name, "default")
        assert levels() == before
        for logger, level, wrong in (
            ("mqtt_nats.nothing", "debug", "no logger"),
            ("", "debug", "no logger"),
            ("asyncio", "debug", "no logger"),
            (name, "loud", "is not a level: expected debug, info"),
        ):
            with pytest.raises(ValueError, match=wrong):
                set_level(logger, level)
        assert levels() == before
    finally:
        log.setLevel(logging.NOTSET)


def test_one_kind_may_have_several_texts(written: Written) -> None:
    before = FAILURES["kind"]
    for number in range(BURST):
        log_failure(written.log, logging.WARNING, "kind", "one text: %d", number)
        log_failure(written.log, logging.WARNING, "kind", "another: %d", number)
    log_failure(written.log, logging.WARNING, "other kind", "one text: %d", 0)
    assert len(written.lines) == BURST + 1
    assert FAILURES["kind"] - before == 2 * BURST


def test_a_failure_counts_where_its_level_is_not_logged(written: Written) -> None:
    before = FAILURES["quiet"]
    written.log.setLevel(logging.ERROR)
    log_failure(written.log, logging.INFO, "quiet", "%s", "x")
    assert not written.lines
    assert FAILURES["quiet"] == before + 1


def test_the_same_text_once_in_a_while(written: Written) -> None:
    written.log.warning("begins: %s", "disk full", extra=spoken("disk full"))
    for _ in range(5):
        written.log.warning("goes on: %s", "disk full", extra=once("disk full"))
    written.log.warning("goes on: %s", "no quorum", extra=once("no quorum"))
    assert [line.split("test: ")[1] for line in written.lines] == ["begins: disk full", "goes on: no quorum"]
    written.now += REPEAT_S
    written.log.warning("goes on: %s", "disk full", extra=once("disk full"))
    assert written.lines[-2].endswith("goes on: disk full")
    assert written.lines[-1].endswith("5 more records of this kind were omitted, such as: goes on: disk full")


def test_texts_that_are_all_different_have_the_budget_of_their_kind(written: Written) -> None:
    for number in range(2 * KINDS_MOST):
        written.log.warning("goes on: %s", number, extra=once(str(number)))
    assert len(written.lines) == BURST
    assert len(written.handler._written) <= KINDS_MOST


def test_kinds_are_bounded(written: Written) -> None:
    for number in range(3 * KINDS_MOST):
        log_failure(written.log, logging.WARNING, f"kind {number}", "text")
    assert len(written.handler._kinds) <= KINDS_MOST


def test_debug_has_no_budget(written: Written) -> None:
    for number in range(1000):
        written.log.debug("%d", number)
    assert len(written.lines) == 1000


@pytest.mark.parametrize("formatter", [Text(), Json()], ids=["text", "json"])
def test_names_are_shortened(written: Written, formatter: logging.Formatter) -> None:
    written.handler.setFormatter(formatter)
    name = "\x01" * 65_535
    for text, arguments in (
        ("%s", (name,)),
        ("%r", (name,)),
        ("%r", (name.encode(),)),
        ("%s", (ValueError(name),)),
        ("%s", (Named(name),)),
        ("%r %r %r %r %r %r %r %r", (name,) * 8),
        ("%s", ([name],)),
    ):
        written.log.warning(text, *arguments, extra=about(client=name))
    assert len(written.lines) == 7
    assert max(map(len, written.lines)) < 8 * TEXT_LENGTH  # six characters for each in JSON
    if isinstance(formatter, Json):
        assert json.loads(written.lines[4])["name"].endswith("(65535 characters)")


@pytest.mark.parametrize("formatter", [Text(), Json()])
def test_a_record_is_one_line_without_controls(written: Written, formatter: logging.Formatter) -> None:
    written.handler.setFormatter(formatter)
    written.log.warning(
        "client %s is banned: %s", Named("a\x1b[2Jb\n"), "x\r\nERROR forged\x9b\u2028", extra=about(peer="\n")
    )
    (line,) = written.stream.getvalue().split("\n")[:-1]
    assert line.isprintable()
    assert "ERROR forged" in line


def test_the_text_of_an_error_has_no_controls(written: Written) -> None:
    try:
        raise ValueError("a\x1b[2Jb")
    except ValueError:
        written.log.exception("failed")
    text = written.stream.getvalue()
    assert "\x1b" not in text
    assert text.count("\n") > 3


def test_what_is_short_stays_as_it_is(written: Written) -> None:
    written.log.warning("%s %r %d %s", "x" * NAME_LENGTH, b"y", 7, Named("lamp"))
    assert written.lines[0].endswith(f"{'x' * NAME_LENGTH} b'y' 7 somebody [name=lamp]")


def test_tracebacks_are_shortened(written: Written) -> None:
    try:
        raise ValueError("x" * 100_000)
    except ValueError:
        written.log.exception("failed")
    assert "Traceback" in written.stream.getvalue()
    assert len(written.stream.getvalue()) < 2 * TRACEBACK_LENGTH


def test_arguments_that_do_not_fit_harm_nobody(written: Written, capsys: pytest.CaptureFixture[str]) -> None:
    written.log.warning("%d", "x")
    assert "not all" in capsys.readouterr().err or not written.lines
    written.log.warning("%d", 7)
    assert written.lines[-1].endswith("WARNING test: 7")


def test_what_was_left_out_is_told_at_the_end(written: Written) -> None:
    for number in range(100):
        written.log.warning("%d", number)
    written.handler.close()
    assert written.lines[-1].endswith("80 more records of this kind were omitted, such as: 20")
