# SPDX-License-Identifier: Apache-2.0
"""The command line of ``python -m benchmarks.generator``."""

from __future__ import annotations

import gc
import json
import resource
import sys
from dataclasses import asdict

import click

from benchmarks.generator.bench import DeliveryError, LoadError, Outcome, Plan, measure

OPTIONS = {
    "publishers": (click.IntRange(1, 99_999), "Clients that publish."),
    "subscribers": (
        click.IntRange(1, 99_999),
        "Clients that subscribe; as many as publish are pairs, otherwise one of either.",
    ),
    "qos": (click.IntRange(0, 2), "Of publishes and subscriptions."),
    "payload": (click.IntRange(17, 16 * 1024 * 1024), "Bytes of a message."),
    "seconds": (click.FloatRange(0.1, 86_400), "How long is published; on until something has arrived."),
    "window": (click.IntRange(1, 65_535), "Messages that a publisher has unacknowledged (QoS 1 and 2)."),
    "rate": (click.FloatRange(0), "Messages per second of all publishers; 0 for as many as the window allows."),
}


def _address(context: click.Context, parameter: click.Parameter, text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65_536:
        raise click.BadParameter("expected HOST:PORT")
    return host.strip("[]"), int(port)


def _options(command: click.Command) -> click.Command:
    for name, (kind, text) in reversed(OPTIONS.items()):
        default = Plan.__dataclass_fields__[name].default
        option = click.Option([f"--{name}"], type=kind, default=default, show_default=True, help=text, metavar="N")
        command.params.insert(1, option)
    return command


@click.command("bench")
@click.argument("address", default="127.0.0.1:1883", metavar="[HOST:PORT]", callback=_address)
@click.option("--topic", default=Plan.topic, show_default=True, help="Before the topics of the messages.")
@click.option(
    "--durable",
    is_flag=True,
    help="Subscribers have sessions that outlive their connection; they are ended afterwards.",
)
@click.option("--v5", is_flag=True, help="Clients speak MQTT 5.0.")
@click.option("--user", help="User name of all clients.")
@click.option("--password", default="", envvar="GENERATOR_PASSWORD", help="Better in the variable GENERATOR_PASSWORD.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def bench(
    address: tuple[str, int],
    topic: str,
    durable: bool,
    v5: bool,
    user: str | None,
    password: str,
    as_json: bool,
    **numbers: float,
) -> None:
    """Load the broker at HOST:PORT with messages, verify what comes, and say how fast it was.

    Any MQTT broker; plain TCP only. Every subscriber has to get every message of its publishers once and in order:
    otherwise the exit status is 1, and a line says what is wrong.
    """
    try:
        host, port = address
        version = 5 if v5 else 4
        plan = Plan(host, port, durable=durable, version=version, user=user, password=password, topic=topic, **numbers)  # type: ignore[arg-type]
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    gc.disable()
    try:
        found = measure(plan, None if as_json else _told)
    except (LoadError, DeliveryError, OSError) as error:
        click.echo(f"generator: {error}", err=True)
        sys.exit(1)
    finally:
        gc.enable()
    click.echo(json.dumps({"plan": _plain(plan), **asdict(found)}) if as_json else shown(plan, found))


def _plain(plan: Plan) -> dict[str, object]:
    found = asdict(plan)
    del found["password"]
    return found


def _told(seconds: float, rate: float) -> None:
    click.echo(f"{seconds:6.0f} s  {rate:12,.0f}/s", err=True)


def shown(plan: Plan, found: Outcome) -> str:
    """The outcome for people."""
    rows = [
        ("clients", f"{plan.publishers:,} publish, {plan.subscribers:,} subscribe; connected in {found.joined:.2f} s"),
        ("messages", f"QoS {plan.qos}, {plan.payload:,} bytes, for {found.seconds:.1f} s, each came once and in order"),
        ("published", f"{found.published:,.0f}/s"),
        ("delivered", f"{found.delivered:,.0f}/s, {found.octets / 2**20:,.1f} MiB/s"),
    ]
    if found.delays:
        each = ", ".join(f"{name} {value * 1000:,.2f} ms" for name, value in found.delays.items())
        rows.append(("delay", each))
    return "\n".join(f"{name:10}{text}" for name, text in rows)


_options(bench)
