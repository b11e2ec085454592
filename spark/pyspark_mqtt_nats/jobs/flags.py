# SPDX-License-Identifier: Apache-2.0
"""Flags of jobs for the options of the source and the sink and for Spark, and the sections of a job's help."""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import click
from click.core import ParameterSource

from pyspark_mqtt_nats import lakehouse, values
from pyspark_mqtt_nats.errors import OptionError
from pyspark_mqtt_nats.options import DEFAULT_SERVERS, OPTIONS, Option, Options

F = TypeVar("F", bound=Callable[..., Any])

SOURCE: Final = "mqtt_nats.source"
"""Key of `Context.meta`: the given options of the source or the sink, by name."""

HIDDEN: Final = ("password", "token")
"""Options with secrets. They have no flag: everybody on a machine can see the arguments of a process."""

READING: Final = ("topics", "startingSequence", "startingTimestamp", "failOnDataLoss", "numPartitions")
ENDING: Final = ("endingSequence", "endingTimestamp")
LIMITS: Final = ("maxMessagesPerTrigger", "maxBytesPerTrigger")
QUERYING: Final = ("decoders", "includeHeaders", "readMode")
CONNECTION: Final = tuple(
    option.name for option in OPTIONS if option.use == "all" and option.name not in HIDDEN and option.name != "mode"
)


FindNkey = Callable[[tuple[str, ...]], Path | None]
"""``find_nkey(servers)`` returns the file with the seed of an nkey for servers, None where none is known."""

OF_A_STREAM: Final = ("stream", "subjectPrefix")
"""Options that `sql` and `shell` give to each view."""

OF_VIEWS: Final = tuple(name for name in CONNECTION if name not in OF_A_STREAM)
"""Options of the connection for jobs that make views."""

LOGINS: Final = frozenset(("user", "token", "creds", "nkey"))
"""Options that are ways to log in."""


class Flag(click.Option):
    """Option that help shows under a heading of its own."""

    def __init__(self, *arguments: Any, section: str = "Options", **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.section = section


class Job(click.Command):
    """Command whose help has sections."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one list of options for each section."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                sections.setdefault(getattr(parameter, "section", "Options"), []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def flag_name(option: str) -> str:
    """Return the flag of an option: `--tls-ca` for `tlsCa`."""
    return "--" + re.sub("([A-Z])", r"-\1", option).lower()


def secret_name(option: str) -> str:
    """Return the environment variable of an option without a flag."""
    return f"MQTT_NATS_SPARK_{option.upper()}"


def source_flags(section: str, *names: str, **defaults: str) -> Callable[[F], F]:
    """Return a decorator that adds flags for options; given values go to `Context.meta[SOURCE]`.

    `defaults`: option -> the default that the help shows, where a job has its own.
    """
    known = {option.name: option for option in OPTIONS}

    def decorate(command: F) -> F:
        for name in reversed(names):
            command = _source_flag(known[name], section, defaults.get(name, ""))(command)
        return command

    return decorate


def _source_flag(option: Option, section: str, of_job: str) -> Callable[[F], F]:
    def keep(context: click.Context, parameter: click.Parameter, value: Any) -> None:
        if value is not None:
            text = str(value).lower() if isinstance(value, bool) else value
            context.meta.setdefault(SOURCE, {})[option.name] = text

    flag = flag_name(option.name)
    switch = option.default in ("true", "false")
    shown = of_job or (DEFAULT_SERVERS if option.name == "servers" else option.default)
    doc = f"User name; {secret_name('password')} has the password" if option.name == "user" else option.doc
    default = f" [default: {shown}]" if shown else ""
    return click.option(
        f"{flag}/--no-{flag[2:]}" if switch else flag,
        cls=Flag,
        section=section,
        default=None,
        expose_value=False,
        callback=keep,
        help=doc.replace("`", "") + default,
        **({} if switch else {"metavar": "VALUE"}),
    )


def _pairs(context: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for value in given:
        key, equals, text = value.partition("=")
        if not equals or not key.strip():
            raise click.BadParameter(f"expected KEY=VALUE, not {key[:80]!r}", context, parameter)
        found[key.strip()] = text
    return found


def _keep_pairs(context: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> None:
    context.meta.setdefault(SOURCE, {}).update(_pairs(context, parameter, given))


def spark_flags(command: F) -> F:
    """Add the flags `--option`, `--master`, `--conf` and `--log` to a command."""
    names = " and ".join(secret_name(name) for name in HIDDEN)
    for decorate in (
        click.option(
            "--log",
            cls=Flag,
            section="Spark",
            metavar="FILE",
            type=click.Path(path_type=Path, dir_okay=False),
            help="Append the log of Spark to FILE; without it nobody sees that log.",
        ),
        click.option(
            "--conf",
            cls=Flag,
            section="Spark",
            multiple=True,
            metavar="KEY=VALUE",
            callback=_pairs,
            help="Spark configuration, such as spark.driver.memory=4g; may be repeated.",
        ),
        click.option(
            "--master",
            cls=Flag,
            section="Spark",
            metavar="URL",
            help="Where Spark runs, such as spark://host:7077 [default: local[*], on this machine].",
        ),
        click.option(
            "--option",
            cls=Flag,
            section="Connection",
            multiple=True,
            metavar="KEY=VALUE",
            callback=_keep_pairs,
            expose_value=False,
            help=f"Any other option of docs/spark.md; may be repeated. Secrets are taken from {names}.",
        ),
    ):
        command = decorate(command)
    return command


def source_options(
    context: click.Context, use: Literal["batch", "stream", "write"], environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the given options of the source or the sink, checked for this use before Spark starts.

    Raises OptionError.
    """
    given: dict[str, str] = dict(context.meta.get(SOURCE, {}))
    names = {name.lower() for name in given}
    for name in HIDDEN:
        if name not in names and (value := environ.get(secret_name(name))):
            given[name] = value
    find: FindNkey | None = context.find_root().obj
    names = {name.lower() for name in given}
    if "servers" not in names:
        given["servers"] = DEFAULT_SERVERS
    if find is not None and not LOGINS & names:
        servers = next(value for name, value in given.items() if name.lower() == "servers")
        if (seed := find(tuple(servers.split(",")))) is not None:
            given["nkey"] = str(seed)
    if "user" in names and "password" not in names:
        raise OptionError(f"--user needs a password, in the environment variable {secret_name('password')}", "password")
    if "password" in names and "user" not in names:
        raise OptionError(f"the option password, or {secret_name('password')}, needs --user", "user")
    Options.parse(given).check_use(use)
    return given


def streams(context: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    """Return streams by name with the prefixes of their subjects: a callback for NAME or NAME=PREFIX."""
    found: dict[str, str] = {}
    for value in given:
        name, _, prefix = value.partition("=")
        try:
            Options.parse({"stream": name, "subjectPrefix": prefix})
        except OptionError as error:
            raise click.BadParameter(str(error), context, parameter) from None
        if name.lower() in ("messages", "retained", "sessions", *map(str.lower, found)):
            raise click.BadParameter(f"there is a view {name} already", context, parameter)
        found[name] = prefix
    return found


def require(context: click.Context, name: str, other: str) -> None:
    """Raise UsageError when the user has given the parameter `name`, and not `other`, without which it has no effect.

    Parameters are named as the function of a command has them.
    """
    given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    if given and context.params[other] in (None, False):
        raise click.UsageError(f"--{name.replace('_', '-')} needs --{other.replace('_', '-')}", context)


def exclude(context: click.Context, name: str, other: str) -> None:
    """Raise UsageError when the user has given both parameters."""
    if all(context.get_parameter_source(one) is ParameterSource.COMMANDLINE for one in (name, other)):
        raise click.UsageError(f"--{name} and --{other} exclude each other", context)


def check_format(context: click.Context) -> None:
    """Check the format of an archive: its package is installed, and flags of Iceberg are given for Iceberg only.

    Raises JobError and UsageError.
    """
    found = context.params["format"]
    lakehouse.require(found)
    for name in ("catalog", "table"):
        if found != "iceberg" and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--{name} is for --format iceberg", context)


def filled(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Return a value that is not empty, as the one of a shell variable that is not set would be: a callback."""
    if value is not None and not value.strip():
        raise click.BadParameter("it is empty", context, parameter)
    return value


def format_name(context: click.Context, parameter: click.Parameter, value: str) -> str:
    """Return the name of a format, those of tables in small letters: a callback."""
    filled(context, parameter, value)
    return value.lower() if value.lower() in lakehouse.PACKAGES else value


archive: Final = click.option("--input", required=True, metavar="DIR", callback=filled, help="The archive.")

archive_format: Final = click.option(
    "--format",
    default="parquet",
    show_default=True,
    metavar="NAME",
    callback=format_name,
    help="Format of Spark, such as parquet or orc; or delta or iceberg, with the extra of this name.",
)


def table_flags(command: F) -> F:
    """Add the flags `--catalog` and `--table` of Iceberg to a command."""
    for decorate in (
        click.option(
            "--table",
            default="mqtt.messages",
            show_default=True,
            metavar="NAME",
            callback=_table,
            help="Iceberg's table.",
        ),
        click.option(
            "--catalog",
            metavar="NAME",
            help="Iceberg's catalog, as PyIceberg is configured for it. [default: catalog.db in --output]",
        ),
    ):
        command = decorate(command)
    return command


def _table(context: click.Context, parameter: click.Parameter, value: str) -> str:
    if not all(value.split(".")) or "." not in value:
        raise click.BadParameter(f"expected NAMESPACE.NAME, not {value[:80]!r}", context, parameter)
    return value


def stream_flag(command: F) -> F:
    """Add the flag `--stream` to a command."""
    return click.option(
        "--stream",
        "streams",
        multiple=True,
        metavar="NAME[=PREFIX]",
        callback=streams,
        help="A view of this stream, of its name; PREFIX is what its subjects begin with. May be repeated.",
    )(command)


def positive(context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    """Return a number that is more than 0 and finite: a callback."""
    if value is not None and not 0 < value < float("inf"):
        raise click.BadParameter("expected more than 0", context, parameter)
    return value


def interval(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """Return the seconds of a time span such as `10 minutes`: a callback."""
    if value is None:
        return None
    try:
        return values.span(value)
    except ValueError as error:
        raise click.BadParameter(str(error), context, parameter) from None
