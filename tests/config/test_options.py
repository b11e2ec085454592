# SPDX-License-Identifier: Apache-2.0
"""Help of `serve`: each setting with a flag is in one group, with its default and its environment variable."""

from __future__ import annotations

from collections import Counter

import click
import pytest
from click.testing import CliRunner

from mqtt_nats.config.options import GROUPS, SettingsCommand, default_text, setting_options
from mqtt_nats.config.settings import Settings


def test_each_setting_is_in_one_group() -> None:
    counts = Counter(name for members in GROUPS.values() for name in members)
    assert counts.keys() == set(Settings.model_fields)
    assert set(counts.values()) == {1}


def test_headings_of_the_help_are_in_their_order() -> None:
    output = CliRunner().invoke(SettingsCommand("serve", callback=lambda: None), ["--help"]).output
    places = [output.index(f"\n{heading}:\n") for heading in GROUPS]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("value", "text"), [(True, "true"), (False, "false"), ((), "none"), (("a", "b"), "a,b"), (None, "none"), (0, "0")]
)
def test_a_default_as_a_user_writes_it(value: object, text: str) -> None:
    assert default_text(value) == text


def test_a_switch_has_both_flags() -> None:
    (option,) = setting_options("embedded")
    assert isinstance(option, click.Option)
    assert (option.opts, option.secondary_opts) == (["--embedded"], ["--no-embedded"])
    assert option.default is None, "what is not given does not hide the environment and the file"
