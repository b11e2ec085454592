# SPDX-License-Identifier: Apache-2.0
"""The README: links, figures, and commands that exist. Its ten commands are run by `test_tour`."""

import re
from pathlib import Path

import pytest

from mqtt_nats.config.admin_settings import DASHBOARD_PORTS
from scripts.comparison import cells
from tests.harness.nats import ROOT

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
IMAGE = ROOT / "docs" / "images" / "dashboard.png"
IMAGE_BYTES_MAX = 150 * 1024


def test_its_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", TEXT):
        assert (ROOT / target).exists(), target


def test_the_picture_is_small() -> None:
    assert 10_000 < IMAGE.stat().st_size <= IMAGE_BYTES_MAX


def test_its_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`make ([\w-]+)", TEXT):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_make_run_installs_what_the_dashboard_needs() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (extras,) = re.findall(r"^\$\(VENV\)/\.run: EXTRAS = (.*)$", makefile, re.MULTILINE)
    assert "run: $(VENV)/.run\n" in makefile
    assert extras == "embedded,admin,compile"
    assert "pip install '.[embedded,admin]'" in TEXT
    assert f"http://127.0.0.1:{DASHBOARD_PORTS[0]}/#token=" in TEXT


def test_a_figure_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="no row"):
        cells("benchmarks.md", "no such scenario", "msg/s")


def test_docs_are_all_listed() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index, page.name


def test_every_page_begins_with_what_its_reader_can_do_after_it() -> None:
    later = {"spark.md", "spark-notebooks.md"}
    for page in sorted((ROOT / "docs").glob("*.md")):
        heading, _, rest = page.read_text(encoding="utf-8").partition("\n")
        assert heading.startswith("# "), page
        if page.name not in later:
            assert re.match(r"\n(After|On|With) this (page|tour) ", rest), f"{page} begins with {rest[:40]!r}"


def test_pages_need_no_other_clients() -> None:
    """Programs of mosquitto are named where it is about mosquitto."""
    about = {"migrating.md", "bridges.md", "clients.md", "compatibility.md", "federation.md", "spark.md"}
    for page in (Path("README.md"), *(one.relative_to(ROOT) for one in sorted((ROOT / "docs").glob("*.md")))):
        if page.name not in about:
            assert not re.search(r"mosquitto_(pub|sub|rr)\b", (ROOT / page).read_text(encoding="utf-8")), page
