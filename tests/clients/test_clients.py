# SPDX-License-Identifier: Apache-2.0
"""The cheap clients of the kit, and its table."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients import build
from tests.clients.build import PROGRAMS, MissingError
from tests.clients.kit import CHEAP, CLIENTS, Client
from tests.clients.place import Place, place
from tests.clients.report import BEGIN, END, Row, rows_in, write
from tests.clients.scenarios import MQTT, NAMES
from tests.harness.nats import ROOT

PAGE = ROOT / "docs" / "compatibility.md"
ORDER = [(client.name, MQTT[version]) for client in CLIENTS for version in client.versions]


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A gateway for all cheap clients."""
    with place(tmp_path_factory.mktemp("clients")) as found:
        yield found
    assert "Traceback" not in found.gateway.process.log.read_text(encoding="utf-8")


@pytest.mark.processes
@pytest.mark.parametrize("scenario", NAMES)
@pytest.mark.parametrize("version", MQTT)
@pytest.mark.parametrize("client", CHEAP, ids=lambda client: client.name)
def test_a_cheap_client(where: Place, client: Client, version: str, scenario: str) -> None:
    client.scenarios(client.prepare(), where, version)[scenario]()


def test_the_page_has_a_row_of_every_client() -> None:
    assert list(rows_in(PAGE.read_text(encoding="utf-8"))) == ORDER, "`make clients` writes the table"


def test_no_client_on_the_page_has_failed() -> None:
    wrong = [row for row in rows_in(PAGE.read_text(encoding="utf-8")).values() if "| no |" in row]
    assert wrong == []


def test_the_names_of_clients_differ() -> None:
    assert len({client.name for client in CLIENTS}) == len(CLIENTS)


def row(client: str, mqtt: str, version: str = "1.0", **wrong: str) -> Row:
    return Row(client, version, mqtt, dict.fromkeys(NAMES, "") | wrong, 2.4)


def test_rows_are_replaced_kept_and_removed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\n{END}\nafter\n", encoding="utf-8")
    write(page, [row("a", "5.0"), row("old", "5.0"), row("b", "3.1.1")], [("a", "5.0"), ("old", "5.0"), ("b", "3.1.1")])
    order = [("a", "3.1.1"), ("a", "5.0"), ("b", "3.1.1")]
    write(page, [row("a", "5.0", "2.0", will="lost"), row("a", "3.1.1", "2.0")], order)
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    found = rows_in(text)
    assert list(found) == order
    assert "| 2.0 |" in found["a", "5.0"]
    assert found["a", "5.0"].count("| no |") == 1
    assert found["b", "3.1.1"] == "| b | 1.0 | 3.1.1 | yes | yes | yes | yes | yes | yes | yes | 2 |"


def test_a_page_without_a_place_for_the_table(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("text\n", encoding="utf-8")
    with pytest.raises(ValueError, match="has no line"):
        write(page, [], [])


def test_what_a_client_does_not_do_is_no_failure() -> None:
    one = Row("relay", "1", "5.0", {"connect": ""}, 1)
    assert one.passed
    assert one.cells() == ["relay", "1", "5.0", "yes", "–", "–", "–", "–", "–", "–", "1"]


def test_a_program_that_is_not_installed() -> None:
    with pytest.raises(MissingError, match="`no-such-program` is not installed"):
        build.find("no-such-program")


@pytest.mark.processes
def test_a_step_that_fails_says_so_and_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "CACHE", tmp_path)
    for _ in range(2):
        with pytest.raises(MissingError, match=r"`ls no-such-file` failed"):
            build.made("failing", [], [["touch", "first"], ["ls", "no-such-file"]])
    assert [path.name for path in (tmp_path / "failing").iterdir()] == ["first"]


@pytest.mark.processes
def test_what_is_made_is_kept_until_its_source_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "programs"
    source = programs / "copied" / "source"
    source.parent.mkdir(parents=True)
    monkeypatch.setattr(build, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(build, "PROGRAMS", programs)
    for text in ("one", "one", "two"):
        source.write_text(text, encoding="utf-8")
        directory = build.made("copied", [source], [["sh", "-c", "cat source >>all"]])
    assert (directory / "all").read_text(encoding="utf-8") == "onetwo"


def test_every_program_says_whose_it_is() -> None:
    for path in PROGRAMS.rglob("*"):
        if path.is_file() and path.suffix in {".py", ".js", ".c", ".go", ".rs", ".java"}:
            assert "SPDX-License-Identifier: Apache-2.0" in path.read_text(encoding="utf-8").splitlines()[0]
