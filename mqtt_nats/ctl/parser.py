# SPDX-License-Identifier: Apache-2.0
"""Commands of ``mqtt-nats ctl``, made from the table of verbs."""

from __future__ import annotations

import asyncio
import sys
from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext
from importlib import import_module
from shutil import get_terminal_size
from typing import Any, Literal, get_args, get_origin

import click
import orjson
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from mqtt_nats.base.errors import StartupError, worded
from mqtt_nats.config.process_limits import say
from mqtt_nats.ctl.gateway_requests import run_verb
from mqtt_nats.ctl.nats_connection import run_connected
from mqtt_nats.ctl.progress_bar import bar
from mqtt_nats.ctl.tables import WIDTH
from mqtt_nats.ctl.verb import Arguments, Parts, Verb, collected

GROUPS = {
    "acl": "What the rules allow.",
    "bans": "Client ids, user names and addresses that may not connect.",
    "clients": "Clients that are connected.",
    "cluster": "Gateways and nats-servers.",
    "log": "Levels of the log.",
    "plugins": "Plugins of gateways.",
    "retained": "Retained messages.",
    "sessions": "Sessions, of clients that are connected or not.",
    "streams": "The streams that keep everything.",
}
"""Help texts of command groups, by the first word of their commands."""

DEFAULT = "list"
"""Default of the second word of a command."""


class Noun(click.Group):
    """Group of commands about one kind of object; without a second word, the command `list` runs."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert an omitted second word."""
        bare = not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names)
        if bare and DEFAULT in self.commands and not ctx.resilient_parsing:
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)


def made(name: str, module: str) -> click.Command:
    """Return the command with a name, from a module of ``ctl/commands``."""
    found = import_module(f"mqtt_nats.ctl.commands.{module}")
    if not hasattr(found, "VERBS"):
        group: click.Command = found.group
        return group
    verbs: dict[str, Verb] = {verb.name: verb for verb in found.VERBS if verb.name.partition(".")[0] == name}
    if name in verbs:
        return command_of(verbs[name], name)
    noun = Noun(name, help=GROUPS[name])
    for full, verb in verbs.items():
        noun.add_command(command_of(verb, full.partition(".")[2]))
    return noun


def command_of(verb: Verb, name: str) -> click.Command:
    """Return the command of a verb."""
    fields = verb.arguments.model_fields
    ordered = [one for one in fields if one in verb.in_path or one in verb.positional]
    parameters: list[click.Parameter] = [_positional(one, fields[one]) for one in ordered]
    parameters += [_option(one, field) for one, field in fields.items() if one not in ordered]
    parameters.append(click.Option(["--json", "as_json"], is_flag=True, help="For programs."))
    parameters.append(click.Option(["--wide"], is_flag=True, help="All columns, also on a narrow terminal."))

    @click.pass_context
    def run(context: click.Context, /, **given: Any) -> None:
        as_json, wide = given.pop("as_json"), given.pop("wide")
        if sys.stdout.isatty() and not wide:
            WIDTH.set(get_terminal_size().columns)
        if given.get("payload") == "-":
            given |= {"payload": b64encode(sys.stdin.buffer.read()).decode(), "base64": True}
        arguments = checked(verb.arguments, given, context)
        if isinstance(parts := verb.show, Parts):
            printed = print_json_parts if as_json else print_text_parts
            run_connected(context.obj, lambda inbox: printed(parts, parts.run(inbox, arguments)))
            return
        watched: AbstractContextManager[None] = nullcontext() if as_json else bar(verb.name)
        with watched:
            result = run_connected(context.obj, lambda inbox: run_verb(verb, inbox, arguments))
        say(orjson.dumps(result, option=orjson.OPT_INDENT_2).decode() if as_json else parts(result))
        if lacking := verb.lacking(arguments, result):
            raise StartupError(lacking)

    return click.Command(name, params=parameters, callback=run, help=verb.summary)


async def print_text_parts(parts: Parts, every: AsyncGenerator[dict[str, Any], None]) -> None:
    """Print a result part by part. It is written by a thread: whoever reads it may wait, and NATS may not."""
    text = parts.text()

    async def lines() -> AsyncIterator[dict[str, Any]]:
        async for one in every:
            if some := text.part(one):
                await asyncio.to_thread(say, "\n".join(some))
            yield one | {parts.name: []}

    async with aclosing(every):
        end = text.footer(await collected(lines()))
    if end:
        say("\n".join(end))


async def print_json_parts(parts: Parts, every: AsyncGenerator[dict[str, Any], None]) -> None:
    """Print a result part by part as one JSON object, whose first key is the list; as `print_text_parts` does."""
    lead = f'{{\n  "{parts.name}": ['

    async def entries() -> AsyncIterator[dict[str, Any]]:
        nonlocal lead
        async for one in every:
            some = ",".join(_indented(entry, "    ") for entry in one[parts.name])
            if some:
                await asyncio.to_thread(say, lead + some, newline=False)
                lead = ","
            yield one | {parts.name: []}

    async with aclosing(every):
        others = await collected(entries())
    del others[parts.name]
    end = "\n  ]" if lead == "," else lead + "]"
    say(end + "".join(f',\n  "{key}": {_indented(value, "  ").lstrip()}' for key, value in others.items()) + "\n}")


def _indented(value: Any, indent: str) -> str:
    """Return a value as JSON on lines of its own."""
    return f"\n{indent}" + orjson.dumps(value, option=orjson.OPT_INDENT_2).decode().replace("\n", f"\n{indent}")


def checked(model: type[Arguments], given: dict[str, Any], context: click.Context) -> Arguments:
    """Return the validated arguments; arguments that were not given keep their defaults.

    Raises:
        click.UsageError: an argument is wrong.
    """
    try:
        return model(**{name: value for name, value in given.items() if value is not None and value != ()})
    except ValidationError as error:
        raise click.UsageError(complaint(error, model), context) from None


def complaint(error: ValidationError, model: type[Arguments]) -> str:
    """Return the errors of arguments in one line."""
    problems = []
    for detail in error.errors(include_url=False, include_context=False, include_input=False):
        name = str(detail["loc"][0]) if detail["loc"] else ""
        field = model.model_fields.get(name)
        where = f"{name if field is None else _flag(name, field).lstrip('-')}: " if name else ""
        problems.append(f"{where}{worded(detail)}")
    return "; ".join(dict.fromkeys(problems))


def _extra(field: FieldInfo, name: str) -> Any:
    return field.json_schema_extra.get(name) if isinstance(field.json_schema_extra, dict) else None


def _flag(name: str, field: FieldInfo) -> str:
    return "--" + (_extra(field, "flag") or name.replace("_", "-"))


def _choices(field: FieldInfo) -> Sequence[str]:
    """Return the allowed values of a field of a literal type; empty for any other type."""
    inner = [field.annotation, *get_args(field.annotation)]
    return next((get_args(one) for one in inner if get_origin(one) is Literal), ())


def _type(field: FieldInfo) -> click.Choice[str] | None:
    choices = _choices(field)
    return click.Choice([str(one) for one in choices]) if choices else None


def _positional(name: str, field: FieldInfo) -> click.Argument:
    many = get_origin(field.annotation) is tuple
    return click.Argument([name], required=field.is_required(), type=_type(field), nargs=-1 if many else 1)


def _option(name: str, field: FieldInfo) -> click.Option:
    words = [_flag(name, field), name]
    if field.annotation is bool:
        return click.Option(words, is_flag=True, default=None, help=field.description)
    many = get_origin(field.annotation) is tuple
    shown = "" if field.default in (None, "", ()) or field.is_required() else f"  [default: {_said(name, field)}]"
    return click.Option(
        words,
        required=field.is_required(),
        multiple=many,
        type=_type(field),
        metavar=_extra(field, "metavar"),
        help=f"{field.description}{shown}",
    )


def _said(name: str, field: FieldInfo) -> str:
    return str(_extra(field, "default") or field.default)
