# SPDX-License-Identifier: Apache-2.0
"""The reference pages say what the models and the code say."""

import re

import pytest

from mqtt_nats.config.settings import env_name
from mqtt_streams.definitions import EVERY
from scripts.reference import TABLES, WHEN, generated, pages, said
from tests.harness.nats import ROOT

PAGES = {path.relative_to(ROOT).as_posix(): path for path in pages()}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_current(page: str) -> None:
    text = PAGES[page].read_text(encoding="utf-8")
    assert text == generated(PAGES[page]), f"{page}: `make reference` writes it anew"


def test_every_table_is_in_a_page() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in PAGES.values())
    assert sorted(re.findall(r"<!-- begin: (\w+) -->", text)) == sorted(TABLES)
    assert text.count("<!-- end -->") == len(TABLES)


@pytest.mark.parametrize("page", ["docs/streams.md", "docs/internals/architecture.md"])
def test_every_stream_is_described(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert [name for name in EVERY if f"`{name}`" not in text] == []


def test_the_page_of_settings_says_how_variables_are_called() -> None:
    assert f"`{env_name('max_inflight')}`" in PAGES["docs/configuration.md"].read_text(encoding="utf-8")


def test_reason_codes_that_are_not_sent() -> None:
    """Nothing that the code says comes with them, and it names them nowhere but where it looks up others' codes."""
    texts, named = said()
    for code, lines in texts.items():
        if WHEN[code.name] == "Not sent.":
            assert code not in named, code
        if WHEN[code.name].startswith("Not sent"):
            assert not lines, code
