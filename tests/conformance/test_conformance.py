# SPDX-License-Identifier: Apache-2.0
"""The coverage of the standards is complete, and the check finds what it has to find."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.__main__ import main
from tests.conformance.citations import Citation, Found, citations, scan
from tests.conformance.coverage import Standard, Statement, problems, standards, summary, table

# Assembled, so that these are no citations of this file.
A, B, C = ("[" + "MQTT-" + one + "]" for one in ("3.1.2-4", "3.1.2-5", "3-8.3-4"))


def test_the_coverage_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    status = main()
    printed = capsys.readouterr()
    assert (status, printed.err) == (0, "")
    assert "MQTT 3.1.1: 141 statements" in printed.out
    assert "MQTT 5.0: 251 statements" in printed.out


SECTIONS = {
    "3.1.1": {"1.5.3": 3, "2.3.1": 7, "3.1.2": 24, "3.1.3": 11, "3.3.1": 12, "3.8.4": 6, "3.10.4": 6, "4.6.0": 6},
    "5.0": {"3.1.2": 30, "3.1.3": 12, "3.2.2": 22, "3.3.1": 13, "3.3.2": 20, "3.3.4": 10, "4.3.3": 13, "4.12.0": 7},
}


def test_the_lists_are_those_of_the_standards() -> None:
    everything = standards()
    assert [(one.name, len(one.statements)) for one in everything] == [("3.1.1", 141), ("5.0", 251)]
    for standard in everything:
        for section, last in SECTIONS[standard.name].items():
            assert {one for one in standard.ids if one.startswith(f"{section}-")} == {
                f"{section}-{number}" for number in range(1, last + 1)
            }


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (A, [("3.1.1", "3.1.2-4")]),
        (C, [("3.1.1", "3-8.3-4")]),
        (f"{A} (5.0)", [("5.0", "3.1.2-4")]),
        (f"{A}, {B} (5.0): why", [("5.0", "3.1.2-4"), ("5.0", "3.1.2-5")]),
        (f"{A} (3.1.1), {B} (5.0)", [("3.1.1", "3.1.2-4"), ("5.0", "3.1.2-5")]),
        (f"{A} (3.1.1, 5.0)", [("3.1.1", "3.1.2-4"), ("5.0", "3.1.2-4")]),
        (f"{A} and so {B} (5.0)", [("3.1.1", "3.1.2-4"), ("5.0", "3.1.2-5")]),
        (f"{A} (of 5.0)", [("3.1.1", "3.1.2-4")]),
    ],
)
def test_marks(line: str, expected: list[tuple[str, str]]) -> None:
    found, malformed = citations("x.py", f"\n# {line}\n")
    assert [(one.standard, one.id) for one in found] == expected
    assert {one.line for one in found} == {2}
    assert malformed == []


@pytest.mark.parametrize("text", [A.replace("-4", ""), A.replace("]", ", -5]"), A.replace("-4", ".4"), A[1:-1]])
def test_what_is_no_id_is_found(text: str) -> None:
    found, malformed = citations("x.py", text)
    assert found == []
    assert len(malformed) == 1


TEST = f'''
"""{A}: a remark."""
from tests.rows import ROWS

OWN = [
    1,  # {A}
    2,  # {A}
]
LATER = pytest.mark.parametrize("one", [*OWN])

def helper():
    """{A}: a remark."""

@pytest.mark.parametrize("one", ROWS)
def test_rows(one):
    pass

@LATER
def test_own(one):
    """{B}"""
    helper(ROWS)
'''


def test_which_tests_prove(tmp_path: Path) -> None:
    """The function around a citation, or those that are run for the table around it, also one of another module."""
    for folder in ("mqtt_nats", "streams", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "mqtt_nats" / "code.py").write_text(f"# {A}\n")
    (tmp_path / "tests" / "rows.py").write_text(f"FIRST = [\n    1,\n    2,  # {C}\n]\nROWS = FIRST + [3]\n")
    (tmp_path / "tests" / "test_it.py").write_text(TEST)
    found = scan(tmp_path)
    assert found.code == {("3.1.1", "3.1.2-4"): ["mqtt_nats/code.py:1"]}
    assert found.tests == {
        ("3.1.1", "3.1.2-4"): ["tests/test_it.py::test_own (OWN, lines 6, 7)"],
        ("3.1.1", "3.1.2-5"): ["tests/test_it.py::test_own"],
        ("3.1.1", "3-8.3-4"): ["tests/test_it.py::test_rows (FIRST, line 3)"],
    }


def test_problems() -> None:
    statements = (
        Statement("1.1.1-1", "server", "covered"),
        Statement("1.1.1-2", "both", "not covered"),
        Statement("1.1.1-3", "client", "need not be"),
        Statement("1.1.1-4", "server", "void", void="never so"),
        Statement("1.1.1-5", "server", "void, and yet cited", void="never so"),
    )
    standard = Standard("3.1.1", statements)
    found = Found(tests={("3.1.1", "1.1.1-1"): ["t.py::test_a"], ("3.1.1", "1.1.1-5"): ["t.py::test_b"]})
    found.all.append(Citation("3.1.1", "1.1.1-6", "t.py", 7))
    found.malformed.append("t.py:8: something")
    wrong = "\n".join(problems(found, [standard]))
    assert wrong.count("\n") == 3
    for part in ("t.py:8", "t.py:7", "no test proves 1.1.1-2", "1.1.1-5 is void"):
        assert part in wrong
    assert summary(found, standard).endswith("5 statements, 1 bind only clients, 2 void; 1 of the other 2 have a test")
    assert [line.split() for line in table(found, standard)][1] == ["1.1.1-1", "server", "-", "t.py::test_a"]
