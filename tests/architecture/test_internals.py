# SPDX-License-Identifier: Apache-2.0
"""The pages of docs/internals: one per package, rules with code and tests, walks with their modules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from scripts.packages import PACKAGES
from tests.harness.nats import ROOT

INTERNALS = ROOT / "docs" / "internals"
PAGES = sorted(INTERNALS.glob("*.md"))
SOURCES = {**{name: f"mqtt_nats/{name}/" for name in PACKAGES}, "streams": "streams/mqtt_streams/"}
"""Where the source of each page with rules is."""

QOS2_ASIDE = {
    "ingress/interceptors",
    "ingress/publish_properties",
    "ingress/retained/ops",
    "ingress/retained/store",
    "ingress/scheduled",
}
"""Modules for some publishes only: with hooks, with properties (5.0), retained, delayed."""


class Rule(NamedTuple):
    """A rule of the corners: a heading of the third level with a line of code and one of tests."""

    page: str
    title: str
    code: list[str]
    tests: list[str]

    @property
    def anchor(self) -> str:
        return re.sub(r"[^\w -]", "", self.title).strip().lower().replace(" ", "-")


def text_of(page: str) -> str:
    return (INTERNALS / f"{page}.md").read_text(encoding="utf-8")


def rules() -> Iterator[Rule]:
    for page in SOURCES:
        for section in re.split(r"^### ", text_of(page).partition("\n## Rules\n")[2], flags=re.MULTILINE)[1:]:
            title = section.partition("\n")[0]
            lines = [re.findall(rf"^{kind}: (.+)$", section, re.MULTILINE) for kind in ("Code", "Test")]
            assert [len(one) for one in lines] == [1, 1], f"{page}: {title}"
            yield Rule(page, title, *(re.findall(r"`([^`]+)`", one[0]) for one in lines))


RULES = list(rules())


@pytest.mark.parametrize("page", [*SOURCES, "spark"])
def test_each_package_has_a_page_that_begins_with_state_and_neighbours(page: str) -> None:
    text = text_of(page)
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert headings[:2] == ["State", "Neighbours"]
    assert page == "spark" or headings[2:] in ([], ["Rules"])
    if page in PACKAGES:
        assert f"<!-- begin: neighbours_{page} -->" in text


def test_every_rule_has_code_and_a_test() -> None:
    assert RULES
    for rule in RULES:
        assert rule.tests, rule.title
        assert any(path.startswith(SOURCES[rule.page]) for path in rule.code), f"{rule.title}: no code of its package"
        for path in (*rule.code, *rule.tests):
            assert (ROOT / path).is_file(), f"{rule.title}: {path}"


def test_every_rule_has_an_anchor_of_its_own() -> None:
    anchors = [rule.anchor for rule in RULES]
    assert sorted(set(anchors)) == sorted(anchors)


def test_references_in_the_source_lead_to_a_rule() -> None:
    known = {f"{rule.page}.md#{rule.anchor}" for rule in RULES}
    sources = [path for folder in ("mqtt_nats", "streams", "tests") for path in (ROOT / folder).rglob("*.py")]
    for path in sources:
        for name in re.findall(r"docs/internals/([a-z_]+\.md#[\w-]+)", path.read_text(encoding="utf-8")):
            assert name in known, f"{path.name}: {name}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_a_page_names_only_files_that_exist(page: Path) -> None:
    for name in re.findall(r"`((?:mqtt_nats|streams|tests|spark)/[\w/.]+)`", page.read_text(encoding="utf-8")):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_only_modules_and_classes_that_exist(page: Path) -> None:
    """As `package/module`, with a class or a function behind it or without; or `module.Class` of the page's package."""
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`([a-z_]+)/([a-z0-9_]+)(?:\.py)?(?:\.(\w+))?`", text)
    named += [(page.stem, module, name) for module, name in re.findall(r"`([a-z0-9_]+)\.([A-Z]\w+)(?:\.\w+)?`", text)]
    for package, module, name in named:
        if package not in PACKAGES or (ROOT / "mqtt_nats" / package / module).is_dir():
            continue
        source = ROOT / "mqtt_nats" / package / f"{module}.py"
        assert source.is_file(), f"{package}/{module}"
        assert re.search(rf"\b{name}\b", source.read_text(encoding="utf-8")), f"{package}/{module}: {name}"


def walks() -> Iterator[tuple[str, list[str]]]:
    """Each walk of the overview: its title, and the modules that it names."""
    text = text_of("architecture").partition("\n## Walks\n")[2].partition("\n## ")[0]
    for section in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        title, _, steps = section.partition("\n")
        yield title, re.findall(r"`([a-z_]+(?:/[a-z0-9_]+)+)`", steps)


@pytest.mark.parametrize(("title", "modules"), list(walks()), ids=[title for title, _ in walks()])
def test_a_walk_names_modules_that_exist(title: str, modules: list[str]) -> None:
    assert modules, title
    assert [one for one in modules if not (ROOT / "mqtt_nats" / f"{one}.py").is_file()] == []


def test_the_walk_at_qos_2_names_every_module_of_the_exchange() -> None:
    """It leaves out no module that `ingress/publish` or `ingress/qos2` imports, unless only some publishes need it."""
    named = next(set(modules) for title, modules in walks() if title == "PUBLISH at QoS 2")
    called: set[str] = set()
    for name in ("publish", "qos2"):
        source = (ROOT / "mqtt_nats" / "ingress" / f"{name}.py").read_text(encoding="utf-8")
        imports = re.findall(r"^from mqtt_nats\.((?:ingress|protocol)\.[\w.]+) import", source, re.MULTILINE)
        called |= {module.replace(".", "/") for module in imports}
    assert called - named == QOS2_ASIDE
