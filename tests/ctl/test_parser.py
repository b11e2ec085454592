# SPDX-License-Identifier: Apache-2.0
"""Command line of `mqtt-nats ctl`: words that may be omitted, and errors that name the option of the user."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner
from pydantic import Field

from mqtt_nats.ctl.parser import Noun, checked
from mqtt_nats.ctl.verb import Arguments


class Listing(Arguments):
    """Arguments of a list."""

    limit: int = Field(10, ge=1, description="Most rows.")
    client_id: str = Field("", max_length=3, description="Client id.", json_schema_extra={"flag": "id"})


def context() -> click.Context:
    return click.Context(click.Command("list"))


def test_what_was_not_given_keeps_its_default() -> None:
    assert checked(Listing, {"limit": None, "client_id": "c"}, context()) == Listing(limit=10, client_id="c")


def test_each_error_names_the_flag() -> None:
    """Also where the flag has another name than the argument of the HTTP API."""
    with pytest.raises(click.UsageError) as found:
        checked(Listing, {"limit": 0, "client_id": "long"}, context())
    first, second = str(found.value).split("; ")
    assert first.startswith("limit: ")
    assert second.startswith("id: ")


@pytest.mark.parametrize(
    ("words", "output"),
    [([], "list None\n"), (["--limit", "3"], "list 3\n"), (["list", "--limit", "3"], "list 3\n"), (["show"], "show\n")],
)
def test_without_a_second_word_it_lists(words: list[str], output: str) -> None:
    noun = Noun("things")

    @noun.command("list")
    @click.option("--limit")
    def listing(limit: str | None) -> None:
        click.echo(f"list {limit}")

    @noun.command()
    def show() -> None:
        click.echo("show")

    assert CliRunner().invoke(noun, words).output == output


def test_help_is_of_the_group() -> None:
    noun = Noun("things", commands=[click.Command("list"), click.Command("show")])
    output = CliRunner().invoke(noun, ["--help"]).output
    assert "show" in output
