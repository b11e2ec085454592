# SPDX-License-Identifier: Apache-2.0
"""The documentation: every link leads somewhere, every page is in the site, and the site can be built."""

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.nats import ROOT

DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md"))]
LINK = re.compile(r"(?<!!)\[[^\]\n]*(?:\n[^\]\n]+)?\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")


def prose(path: Path) -> str:
    """A page without its examples."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]+`", "`", text)


def anchors(path: Path) -> set[str]:
    """What can be linked to within a page, as Markdown renderers name headings."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found = set()
    for heading in re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        found.add(re.sub(r"[^\w\- ]", "", plain.lower()).strip().replace(" ", "-"))
    return found


def named(nav: list[dict[str, Any]]) -> Iterator[str]:
    """The pages of the navigation."""
    for entry in nav:
        for value in entry.values():
            if isinstance(value, str):
                yield value
            else:
                yield from named(value)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(prose(page)):
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{target}#{anchor}"


def contributing() -> str:
    return (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_make_targets_of_developers_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"(?:^|`)make ([\w-]+)", contributing(), re.MULTILINE)
    assert {"test-unit", "run", "bench-check", "reference"} <= set(targets)
    assert [one for one in targets if not re.search(rf"^{one}:", makefile, re.MULTILINE)] == []


def test_files_that_developers_change_exist() -> None:
    named = re.findall(r"`((?:mqtt_nats|streams|spark|tests|docs|scripts)/[\w/.-]+)`", contributing())
    assert len(named) > 20
    assert [one for one in named if not (ROOT / one).exists()] == []


def test_the_test_commands_for_developers_select_tests() -> None:
    found = re.findall(r"-m pytest (?:--unit )?(tests/[\w/.]+)(?: -k (\w+))?", contributing())
    assert len(found) > 2
    for path, word in found:
        assert (ROOT / path).exists(), path
        if word:
            assert re.search(rf"def test_\w*{word}", (ROOT / path).read_text(encoding="utf-8")), f"{path} -k {word}"


def test_every_page_is_in_the_site_once() -> None:
    nav = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]["nav"]
    assert sorted(named(nav)) == sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))


@pytest.mark.long
@pytest.mark.processes
def test_the_site_can_be_built(tmp_path: Path) -> None:
    """Strictly: a link to a page or heading of the site that is not there is an error."""
    for name in ("docs", "zensical.toml"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name)
        else:
            shutil.copy(source, tmp_path)
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=80)
    assert built.returncode == 0, built.stdout + built.stderr
    page = (tmp_path / "build" / "site" / "configuration.html").read_text(encoding="utf-8")
    assert "max_inflight" in page
    assert not re.findall(r'(?:src|href)="(?:https?:)?//(?!zensical\.org)[^"]*\.(?:js|css|woff2?)', page)


def test_functions_of_the_profiles_exist() -> None:
    """The tables of docs/profiles.md come from runs of earlier versions; their names follow the source."""
    text = (DOCS / "profiles.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| `([\w.<>]+) \((\w+/\w+\.py)\)`", text, re.MULTILINE)
    assert len(found) > 20
    for name, file in found:
        source = (ROOT / "mqtt_nats" / file).read_text(encoding="utf-8")
        for part in name.replace(".<locals>", "").removesuffix(".<listcomp>").split("."):
            assert re.search(rf"^ *(?:async def|def|class) {part}\b", source, re.MULTILINE), f"{file}: {name}"
