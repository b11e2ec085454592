# SPDX-License-Identifier: Apache-2.0
"""Options of `mqtt-nats ctl trace start` that are refused before anything is asked."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from mqtt_nats.ctl.commands.trace_output import group


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["client", ""], "the client id is empty"),
        (["client", "c", "--for", "2h"], "for: a trace lasts an hour at most"),
        (["topic", "a/#", "--for", "0s"], "for: "),
        (["topic", "a/#", "--for", "soon"], "for: "),
    ],
)
def test_a_wrong_option_is_one_line(words: list[str], error: str) -> None:
    result = CliRunner().invoke(group, ["start", *words])
    assert result.exit_code == 2
    assert error in result.output.splitlines()[-1]
