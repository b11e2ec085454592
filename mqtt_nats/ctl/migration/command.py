# SPDX-License-Identifier: Apache-2.0
"""Commands of ``mqtt-nats migrate``."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import click

from mqtt_nats.base.errors import StartupError
from mqtt_nats.config.process_limits import say
from mqtt_nats.ctl.migration.findings import Kind, Migration, shown, write_files
from mqtt_nats.ctl.migration.transfer.carry import (
    carry_sessions,
    credentials,
    key_settings,
    make_key,
    read_key,
)
from mqtt_nats.ctl.migration.transfer.mosquitto_db import read_sessions
from mqtt_nats.ctl.migration.transfer.mqtt_client import parse_broker
from mqtt_nats.ctl.migration.transfer.publisher import Carried
from mqtt_nats.ctl.migration.transfer.retained import carry_retained
from mqtt_nats.ctl.progress_bar import Bar

_FILE = click.Path(path_type=Path)


def _writing(command: Callable[..., None]) -> Callable[..., None]:
    for option in (
        click.option("--all", "everything", is_flag=True, help="Show also what moves without a change."),
        click.option("--force", is_flag=True, help="Replace files that are there."),
        click.option("--output", type=_FILE, required=True, metavar="DIR", help="Directory for the files."),
    ):
        command = option(command)
    return command


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def migrate() -> None:
    """Move from another broker: read its configuration, and carry over what it stores."""


@migrate.command()
@click.argument("file", type=_FILE)
@_writing
def mosquitto(file: Path, output: Path, force: bool, everything: bool) -> None:
    """Read the mosquitto.conf FILE, with the files of users and rules that it names.

    Writes gateway.toml, acl.toml and passwords. Says by file and line what changes, and what has no counterpart.
    """
    from mqtt_nats.ctl.migration.mosquitto import migrate as read

    _write(read(file), output, force, everything)


@migrate.command()
@click.argument("files", type=_FILE, nargs=-1, required=True)
@click.option(
    "--password-hash",
    default="sha256,prefix",
    metavar="NAME,PLACE",
    help="Algorithm of the passwords, and the place of the salt: password_hash_algorithm. [default: sha256,prefix]",
)
@click.option(
    "--no-match", type=click.Choice(("allow", "deny")), default="allow", help="authorization.no_match of EMQX."
)
@_writing
def emqx(files: tuple[Path, ...], password_hash: str, no_match: str, **writing: Any) -> None:
    """Read FILES that EMQX has exported: users, rules and bans, in the order in which EMQX asks its sources.

    Users: CSV or JSON of `import_users`. Rules: acl.conf, or JSON of the REST API. Bans: CSV or JSON. EMQX 4: the JSON
    of `emqx_ctl data export`. Writes gateway.toml, acl.toml, passwords and bans.sh.
    """
    from mqtt_nats.ctl.migration.emqx import migrate as read

    _write(read(files, password_hash, no_match), **writing)


@migrate.command()
@click.argument("file", type=_FILE)
@click.option("--all", "everything", is_flag=True, help="Show also what moves without a change.")
def nats(file: Path, everything: bool) -> None:
    """Check the configuration FILE of a nats-server that has `mqtt {}`, and say what changes with gateways."""
    from mqtt_nats.ctl.migration.nats import check

    _report(check(file), everything)


def _broker_options(name: str, what: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        for option, text in (("ca", "Authorities of the certificate"), ("password-file", "File with the password")):
            command = click.option(f"--{name}-{option}", type=_FILE, metavar="FILE", help=f"{text} {what}.")(command)
        return command

    return decorate


@migrate.command()
@click.argument("old")
@click.argument("new")
@click.option("--filter", "filters", multiple=True, metavar="FILTER", help="Filter; may be repeated. [default: #]")
@click.option("--replace", is_flag=True, help="Replace retained messages that the gateway has already.")
@_broker_options("old", "at OLD")
@_broker_options("new", "at NEW")
def retained(
    old: str,
    new: str,
    filters: tuple[str, ...],
    replace: bool,
    old_password_file: Path | None,
    old_ca: Path | None,
    new_password_file: Path | None,
    new_ca: Path | None,
) -> None:
    """Carry retained messages from the running broker OLD to the gateway NEW: mqtt://[USER@]HOST[:PORT], or mqtts://."""
    brokers = parse_broker(old, old_password_file, old_ca), parse_broker(new, new_password_file, new_ca)
    with _progress("retained messages") as carried:
        asyncio.run(carry_retained(*brokers, filters or ("#",), replace_all=replace, carried=carried))
    _say_carried(carried, "retained messages")
    _all_carried(carried)


@migrate.command()
@click.argument("sessions", type=_FILE)
@click.argument("new")
@click.option("--key", type=_FILE, metavar="FILE", help="Key of `migrate key`; sessions then belong to their users.")
@_broker_options("new", "at NEW")
def sessions(sessions: Path, new: str, key: Path | None, new_password_file: Path | None, new_ca: Path | None) -> None:
    """Make the durable sessions of SESSIONS at the gateway NEW, with their subscriptions and waiting messages.

    SESSIONS is the mosquitto.db of a mosquitto, or a text with lines of client id, user (- for none), QoS and filter,
    with tabs between them, and without messages.
    """
    broker = parse_broker(new, new_password_file, new_ca)
    secret = None if key is None else read_key(key)
    database = read_sessions(sessions)
    made = Carried()
    with _progress("waiting messages") as messages:
        asyncio.run(carry_sessions(database, credentials(secret, broker), made, messages))
    _say_carried(made, "sessions")
    if database.messages or database.lost or database.expired:
        expired = f"; {database.expired} have expired" if database.expired else ""
        _say_carried(messages, "waiting messages", expired, there="wait for sessions that were there already")
    _all_carried(made, messages)


@migrate.command()
@click.argument("file", type=_FILE)
def key(file: Path) -> None:
    """Write a new key to FILE, and print the settings with which a gateway accepts sessions of all users by it."""
    try:
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as written:
            written.write(make_key(secrets.token_bytes(32)))
    except OSError as error:
        raise StartupError(f"cannot write {file}: {error.strerror}") from None
    say(key_settings(file.resolve()).rstrip("\n"))


@contextmanager
def _progress(name: str) -> Iterator[Carried]:
    """Yield an empty result that shows its progress if standard error is a terminal."""
    if not sys.stderr.isatty():
        yield Carried()
        return
    shown = Bar(name)
    try:
        yield Carried(progress=shown)
    finally:
        shown.close()


def _write(migration: Migration, output: Path, force: bool, everything: bool) -> None:
    files = migration.files()
    write_files(output, files, force)
    _report(migration, everything)
    say("\n".join(f"written: {output / name}" for name in sorted(files)))


def _report(migration: Migration, everything: bool) -> None:
    for line in shown(migration.findings, everything):
        say(line.encode("utf-8", "replace").decode("utf-8"))
    kinds = Counter(one.kind for one in migration.findings)
    say(", ".join(f"{kind} {kinds[kind]}" for kind in get_args(Kind)) + ("" if everything else "; --all shows all"))


def _say_carried(carried: Carried, what: str, more: str = "", *, there: str = "were there already and stay") -> None:
    for line in carried.lost:
        say(f"not carried over: {line}")
    kept = f"; {carried.there} {there}" if carried.there else ""
    gone = f"; {carried.gone} have been cleared at the old broker meanwhile" if carried.gone else ""
    say(f"{carried.count} {what} carried over{kept}{gone}{more}")


def _all_carried(*results: Carried) -> None:
    if any(one.lost for one in results):
        raise StartupError("not everything was carried over: each loss has a line above")
