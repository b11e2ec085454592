# SPDX-License-Identifier: Apache-2.0
"""`make report`: figures of a source tree."""

from pathlib import Path

import pytest

from scripts.report import pieces, source_figures
from scripts.walks import traced
from tests.harness.nats import ROOT


def test_bullets_and_paragraphs_are_counted_without_headings_tables_and_examples() -> None:
    text = """\
# A heading is no paragraph

One two
three – `four five`, [six](seven.md "eight").

- one
  two
- three
1. four

| a | table |
|---|---|

```sh
nor an example
```
last"""
    assert list(pieces(text)) == [(False, 6), (True, 2), (True, 1), (True, 1), (False, 1)]


def test_figures_of_a_small_tree(tmp_path: Path) -> None:
    package = tmp_path / "mqtt_nats" / "codec"
    package.mkdir(parents=True)
    (package / "wire.py").write_text("def read() -> int:\n" + "    print()\n" * 50 + "    return 1\n", encoding="utf-8")
    (tmp_path / "docs" / "internals").mkdir(parents=True)
    (tmp_path / "docs" / "internals" / "codec.md").write_text("### A rule\n\nCode: `x`\n", encoding="utf-8")
    (tmp_path / "README.md").write_text("two words\n", encoding="utf-8")
    found = source_figures(tmp_path)
    assert found["lines of mqtt_nats"] == "52"
    assert found["modules of the largest folder"] == "1 (mqtt_nats/codec)"
    assert found["functions of more than 50 lines"] == "1"
    assert found["rules in docs/internals"] == "1"
    assert found["words of README.md"] == "2"


@pytest.mark.long
@pytest.mark.sources  # compiled functions are not reported
@pytest.mark.processes
def test_a_traced_gateway_enters_modules_at_each_event(tmp_path: Path) -> None:
    found = traced(ROOT, tmp_path)
    assert min(found.values()) > 5, found
    assert found["PUBLISH at QoS 0, clean subscriber"] < found["CONNECT with resume, 3 missed messages"]
