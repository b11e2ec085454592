# SPDX-License-Identifier: Apache-2.0
"""The command ``mqtt-nats``.

Exit status: 0 after SIGINT or SIGTERM, 1 when the gateway cannot start or go on or a command fails (one line
on stderr), 2 for wrong usage, 128 + number of the signal when a second signal cuts the shutdown short.
"""

import contextlib
import json
import logging
import os
import secrets
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
from pydantic import SecretStr

from mqtt_nats import __version__
from mqtt_nats.access.settings import DEVICE_COST, PEOPLE_COST, Cost, parse_cost
from mqtt_nats.base.errors import StartupError, first_error
from mqtt_nats.base.logs import configure
from mqtt_nats.config import systemd
from mqtt_nats.config.accounts import AccountSettings
from mqtt_nats.config.admin_settings import free_dashboard_address, is_free
from mqtt_nats.config.build_info import build_and_reason
from mqtt_nats.config.embedded_login import CONTEXT, WAYS, find_login, find_server, logged_in, seed_for
from mqtt_nats.config.options import SettingsCommand, setting_options
from mqtt_nats.config.process_limits import complete, raise_open_files, say, warn_of_few
from mqtt_nats.config.settings import ENV_PREFIX, Settings, env_name
from mqtt_nats.ctl.group import Ctl
from mqtt_nats.transport.listener_settings import Bound, join_address, parse_address

log = logging.getLogger("mqtt_nats.gateway")

CLIENTS = ("pub", "request", "sub")
"""Commands that are MQTT clients."""

LABELS = {
    "tcp": ("MQTT", ""),
    "tls": ("MQTTS", "; TLS"),
    "ws": ("WS", "; WebSocket"),
    "wss": ("WSS", "; WebSocket over TLS"),
}
"""Name of a listener, and the text that follows its address, by the type of the listener."""

TOKEN_BYTES = 24
"""Random bytes of the token of a dashboard that the settings do not ask for."""


def _version(context: click.Context, option: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        say(f"mqtt-nats {__version__} ({build_and_reason()})")
        context.exit()


class Commands(click.Group):
    """Commands of `mqtt-nats`; the MQTT clients are imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands."""
        return sorted([*super().list_commands(ctx), *CLIENTS])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command by its name."""
        if cmd_name not in CLIENTS:
            return super().get_command(ctx, cmd_name)
        from mqtt_nats.mqtt_clients.commands import COMMANDS

        return COMMANDS[cmd_name]


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--version", is_flag=True, expose_value=False, is_eager=True, callback=_version, help="Show the version.")
def command() -> None:
    """MQTT clients on NATS: a gateway that keeps every durable fact in JetStream."""


_config_option = click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help=f"TOML file with settings, by the names of the flags with underscores. [{ENV_PREFIX}CONFIG]",
)


@command.command(cls=SettingsCommand)
@_config_option
def serve(config: Path | None, **flags: Any) -> None:
    """Serve MQTT clients until SIGINT or SIGTERM. On SIGHUP certificates, users and rules are read again.

    A flag wins over the environment variable in brackets, which wins over the file. Secrets have no flag:
    MQTT_NATS_NATS_PASSWORD and MQTT_NATS_NATS_TOKEN, or the file. Nor have authenticators, or more listeners.
    """
    from mqtt_nats.gateway.shutdown import run_to_end  # what a gateway needs is not imported for other commands

    settings = Settings.load(flags, config)
    configure(settings.log_level, settings.log_format)
    raise_open_files()
    warn_of_few(settings)
    run_to_end(run, settings)
    log.info("stopped")


@command.command("check-config", cls=SettingsCommand)
@_config_option
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.option("--quiet", is_flag=True, help="Print errors and warnings only.")
def check_config(config: Path | None, as_json: bool, quiet: bool, **flags: Any) -> None:
    """Show what `serve` would start with, and where each value comes from; secrets are hidden.

    Flags, environment and file are those of `serve`. Every error has a line with the setting or the file: values,
    unknown keys, variables and options of plugins, and the files of users, rules, keys and certificates. What is valid
    and not safe is a warning. NATS is not asked.
    """
    from mqtt_nats.gateway.check_config import check, shown

    rows, warnings = check(flags, config)
    for line in warnings:
        click.echo(f"warning: {line}", err=True)
    if not quiet:
        say(json.dumps([row._asdict() for row in rows], indent=2) if as_json else shown(rows))
    if not quiet and not as_json:
        click.echo(f"no errors; warnings: {len(warnings) or 'none'}", err=True)


def _cost(text: str | None) -> Cost | None:
    try:
        return None if text is None else parse_cost(text)
    except ValueError as error:
        raise click.UsageError(f"--cost: {error}") from None


@command.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("user")
@click.option("--stdin", is_flag=True, help="Read the password from standard input, one line, instead of asking.")
@click.option("--delete", is_flag=True, help="Remove the user.")
@click.option("--scram", is_flag=True, help="FILE is a `scram_file`, for clients that authenticate by SCRAM-SHA-256.")
@click.option("--tenant", metavar="NAME", help="The tenant that USER belongs to; a user that has one keeps it.")
@click.option(
    "--cost",
    metavar="m=KIB,t=PASSES,p=LANES",
    help=f"Cost of Argon2id, for passwords that people choose {PEOPLE_COST}. [default: {DEVICE_COST}]",
)
def passwd(file: Path, user: str, stdin: bool, delete: bool, scram: bool, tenant: str | None, cost: str | None) -> None:
    """Set the password of USER in FILE, which is the gateway's `password_file`.

    FILE is created where there is none, and only its owner may read it. It has no password, only what is needed to
    check one. A running gateway reads it again on SIGHUP.
    """
    for option, value in (("--tenant", tenant), ("--cost", cost)):
        if value is not None and (scram or delete):
            raise click.UsageError(f"{option} is for users with a password, not for --scram or --delete")
    if scram:  # not needed for --help and --version
        from mqtt_nats.access.verifiers import delete_user, set_password
    else:
        from mqtt_nats.access.passwords import delete_user
        from mqtt_nats.access.passwords import set_password as set_password_of

        set_password = partial(set_password_of, tenant=tenant, cost=_cost(cost))

    try:
        if delete:
            if not delete_user(file, user):
                raise ValueError(f"no user {user!r} in {file}")
            say(f"{user} removed")
            return
        if stdin:
            password = sys.stdin.readline().removesuffix("\n")
        else:
            password = click.prompt("Password", hide_input=True, confirmation_prompt=True)
        new = set_password(file, user, password)
    except UnicodeError:
        raise StartupError("the user name or the password is not UTF-8 text") from None
    except ValueError as error:
        raise StartupError(str(error)) from None
    say(f"{user} {'added' if new else 'changed'}")


_NATS = (
    "nats",
    *(name for name in AccountSettings.model_fields if name.startswith("nats_")),
    "jetstream_domain",
    "data",
)


@command.group(cls=Ctl, params=setting_options(*_NATS))
@click.option("--config", type=click.Path(path_type=Path), metavar="FILE", help=f"TOML file. [{ENV_PREFIX}CONFIG]")
@click.pass_context
def ctl(context: click.Context, /, config: Path | None, **flags: Any) -> None:
    """Look at running gateways and what they have stored, and change it, from any machine that reaches NATS."""
    context.obj = _offline(config, flags)


@command.command(params=setting_options(*_NATS))
@_config_option
@click.argument("directory", type=click.Path(path_type=Path), metavar="DIR")
@click.option("--pause", is_flag=True, help="Have all gateways disconnect their clients until the backup is complete.")
def backup(config: Path | None, directory: Path, pause: bool, **flags: Any) -> None:
    """Save sessions, messages and all else that gateways have stored into the empty directory DIR.

    Gateways serve clients meanwhile. Messages that subscribers acknowledge during the backup may come once more after
    a restore, also at QoS 2; with --pause none does.
    """
    from mqtt_nats.ctl.backup.command import run_backup  # not needed by gateways

    run_backup(_offline(config, flags), directory, pause=pause)


@command.command(params=setting_options(*_NATS))
@_config_option
@click.argument("directory", type=click.Path(path_type=Path), metavar="DIR")
@click.option("--replicas", type=click.IntRange(1, 5), metavar="N", help="Replicas of each stream. [default: as saved]")
@click.option("--stream", "streams", multiple=True, metavar="NAME", help="Only this stream; may be repeated.")
@click.option("--replace", is_flag=True, help="Remove what is stored now.")
@click.option("--account", metavar="NAME", help="Take the backup of account NAME, though this is another account.")
def restore(
    config: Path | None,
    directory: Path,
    replicas: int | None,
    streams: tuple[str, ...],
    replace: bool,
    account: str | None,
    **flags: Any,
) -> None:
    """Put the streams of a backup in DIR in the place of those of the account.

    Gateways that run disconnect their clients, and serve them again when all is restored. If the command is
    interrupted, they wait until it has been run again.
    """
    from mqtt_nats.ctl.backup.command import run_restore  # not needed by gateways
    from mqtt_nats.ctl.backup.restore import Wanted

    run_restore(_offline(config, flags), Wanted(directory, replicas, streams, replace, account))


def _offline(config: Path | None, flags: dict[str, Any]) -> Settings:
    """Return the settings of a command that talks to NATS itself."""
    logging.basicConfig(level=logging.ERROR, format="%(message)s", stream=sys.stderr)
    return find_server(Settings.load_nats(flags, config))


@command.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="FROM [OPTIONS]")
def migrate(arguments: tuple[str, ...]) -> None:
    """Move from mosquitto, EMQX or the MQTT listener of nats-server; `migrate --help` says more."""
    from mqtt_nats.ctl.migration.command import migrate as run_migrate  # not needed by gateways

    run_migrate.main(list(arguments), prog_name="mqtt-nats migrate")


@command.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="JOB [OPTIONS]")
def spark(arguments: tuple[str, ...]) -> None:
    """Run a job of Spark over stored messages: sql, shell, rule, archive and others; `spark --help` lists them."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # until a job handles both
    try:
        from pyspark_mqtt_nats.jobs.commands import main as run_job  # not needed by gateways

        run_job(list(arguments), "mqtt-nats spark", partial(seed_for, Path(os.environ.get(env_name("data"), "data"))))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


@command.command()
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def completion(shell: str) -> None:
    """Print what makes SHELL complete the commands and options of mqtt-nats.

    bash: `mqtt-nats completion bash > /etc/bash_completion.d/mqtt-nats`, or in ~/.bashrc
    `eval "$(mqtt-nats completion bash)"`; zsh: the same in ~/.zshrc, with zsh; fish:
    `mqtt-nats completion fish > ~/.config/fish/completions/mqtt-nats.fish`.
    """
    from click.shell_completion import get_completion_class  # needed by nothing else

    kind = get_completion_class(shell)
    assert kind is not None
    made = kind(command, {}, "mqtt-nats", "_MQTT_NATS_COMPLETE")
    say(made.source_template % made.source_vars())


def main() -> None:
    """Entry point: run the command line and exit."""
    complete()
    error: BaseException | None = None
    try:
        command.main(prog_name="mqtt-nats")
    except* StartupError as group:
        error = group
    # Not from within the clause: Python 3.11.2, Debian's, would wrap SystemExit in a group.
    if error is not None:
        first = first_error(error)
        assert isinstance(first, StartupError)
        logging.shutdown()  # what the log still has to say comes before the reason, which is the last line
        for line in first.problems:
            click.echo(f"mqtt-nats: {line}", err=True)
        sys.exit(1)


async def run(settings: Settings) -> None:
    """Run the gateway, with its nats-server where it is embedded, until a signal stops it."""
    import anyio
    from anyio.abc import TaskStatus

    from mqtt_nats.gateway.gateway import serve as serve_gateway
    from mqtt_nats.gateway.sighup import ReloadSignal
    from mqtt_nats.gateway.supervisor import supervise

    stop = anyio.Event()
    starting = anyio.CancelScope()
    hangup = ReloadSignal()
    ready = False

    def on_ready(addresses: list[Bound]) -> None:
        nonlocal ready
        ready = True
        _announce(served, addresses, token)
        systemd.notify("READY=1")

    async def stop_on_signal(*, task_status: TaskStatus[None]) -> None:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
            task_status.started()
            async for number in signals:
                if number == signal.SIGHUP and not hangup.serious:
                    hangup.act()
                    continue
                if stop.is_set():
                    # The kernel (Linux) passes SIGTERM on to nats-server, and its files have what it acknowledged.
                    os._exit(128 + number)
                stop.set()
                systemd.notify("STOPPING=1")
                if not ready:  # no client to drain
                    starting.cancel()

    async with anyio.create_task_group() as group:
        await group.start(stop_on_signal)
        group.start_soon(systemd.keep_alive)
        with starting:
            async with _with_server(settings) as settings:
                serve = supervise if settings.workers > 1 else serve_gateway
                served, token = _with_dashboard(settings)
                try:
                    await serve(served, on_ready=on_ready, stop=stop, hangup=hangup)
                except StartupError:
                    if ready or not _has_lost_dashboard(served, token):
                        raise
                    served, token = _with_dashboard(settings)
                    await serve(served, on_ready=on_ready, stop=stop, hangup=hangup)
        group.cancel_scope.cancel()


@contextlib.asynccontextmanager
async def _with_server(settings: Settings) -> AsyncIterator[Settings]:
    """Run the embedded nats-server where it is asked for; yields settings with the URLs to use."""
    if not settings.embedded:
        yield find_login(settings)
        return
    import anyio

    from mqtt_nats.gateway.embedded import run_server
    from mqtt_nats.gateway.payload_limits import wanted_payload

    async with (
        run_server(settings.data, settings.embedded_port, wanted_payload(settings)) as server,
        anyio.create_task_group() as group,
    ):
        group.start_soon(server.watch)
        yield settings.model_copy(update=logged_in(server.url, server.login))
        group.cancel_scope.cancel()


def _is_interactive(settings: Settings) -> bool:
    """Whether there are lines for people besides the log."""
    return settings.log_format != "json" and sys.stdout.isatty()


def _may_have_dashboard(settings: Settings) -> bool:
    """Whether there is to be a dashboard without a setting. Its token is printed, so a terminal is needed."""
    return settings.embedded and "admin_listen" not in settings.model_fields_set and _is_interactive(settings)


def _with_dashboard(settings: Settings) -> tuple[Settings, str]:
    """Return the settings with a dashboard where there is to be one, and its token.

    Where there is to be none, or the extra `admin` is not installed, they are unchanged, and the token is empty.
    """
    if not _may_have_dashboard(settings):
        return settings, ""
    from mqtt_nats.admin import check as check_admin

    token = secrets.token_urlsafe(TOKEN_BYTES)
    taken = {settings.embedded_port, *(parse_address(one.listen)[1] for one in settings.all_listeners)}
    found = settings.model_copy(update={"admin_listen": free_dashboard_address(taken), "admin_token": SecretStr(token)})
    try:
        check_admin(found)
    except StartupError:
        return settings, ""
    return found, token


def _has_lost_dashboard(settings: Settings, token: str) -> bool:
    """Whether another process has taken the port of the dashboard since it was chosen."""
    return bool(token) and settings.admin_listen is not None and not is_free(parse_address(settings.admin_listen)[1])


def _hints(settings: Settings, addresses: list[Bound]) -> list[str]:
    """Return commands that work with these settings, on this machine and without credentials of their own."""
    found: list[str] = []
    plain = [bound for bound in addresses if bound.type == "tcp"]
    open_to_all = [one for one in settings.all_listeners if one.type == "tcp" and settings.is_open(one)]
    if settings.acl_file is None and len(plain) == len(open_to_all) == 1:
        (bound,) = plain
        client = f"-h {'127.0.0.1' if bound.host in ('0.0.0.0', '::') else bound.host} -p {bound.port}"
        found += [f"mqtt-nats sub {client} -t 'home/#' -v", f"mqtt-nats pub {client} -t home/kitchen -q 1 -m 21.5"]
    if settings.nats_nkey is not None and seed_for(settings.data, settings.nats) == settings.nats_nkey:
        context = shlex.quote(str((settings.data / CONTEXT).resolve()))
        return [*found, f"export NATS_CONTEXT={context}", "nats stream ls -a"]
    login = any(getattr(settings, way) is not None for way in WAYS) or any("@" in url for url in settings.nats)
    if not login and not settings.requires_tls(settings.nats):
        found.append(f"nats --server {settings.nats_display} stream ls -a")
    return found


def _served(settings: Settings, addresses: list[Bound], token: str = "") -> Iterator[str]:
    """Yield a line for each address and for NATS; a browser does not send the fragment, in which the token is."""
    for bound in addresses:
        if bound.type == "admin":
            scheme = "http" if settings.admin_tls_cert is None else "https"
            fragment = f"#token={token}" if token else ""
            yield f"ADMIN {scheme}://{join_address(bound.host, bound.port)}/{fragment}  (dashboard, metrics, API)"
            continue
        name, over = LABELS[bound.type]
        yield f"{name:5} {join_address(bound.host, bound.port)}  (MQTT 3.1.1, 5.0{over})"
    if _may_have_dashboard(settings):
        yield "ADMIN none: the dashboard needs the extra `admin`: pip install 'mqtt-nats[admin]'"
    where = f"embedded, data in {settings.data}" if settings.embedded else "running already"
    yield f"NATS  {settings.nats_display}  ({where})"


def _announce(settings: Settings, addresses: list[Bound], token: str = "") -> None:
    """Print the addresses and commands to try on a terminal; elsewhere, and with JSON, log the addresses."""
    if not _is_interactive(settings):
        log.info("mqtt-nats %s (%s)", __version__, build_and_reason())
        for line in _served(settings, addresses):
            if log.isEnabledFor(logging.INFO) or settings.log_format == "json":
                log.info("serving: %s", line)
            else:  # whoever starts a gateway has to find out on which ports it listens
                say(f"serving: {line}")
        return
    hints = _hints(settings, addresses)
    lines = [f"mqtt-nats {__version__} ({build_and_reason()})", *_served(settings, addresses, token)]
    lines += ["", "Try in other terminals:", *(f"  {hint}" for hint in hints)] if hints else []
    say("\n".join(lines))
