# SPDX-License-Identifier: Apache-2.0
"""Commands of ``ctl trace``, which print events until they are stopped."""

from __future__ import annotations

import asyncio
import signal
from contextlib import aclosing
from typing import Any

import click
import orjson

from mqtt_nats.backbone.inbox import RequestInbox
from mqtt_nats.config.process_limits import say
from mqtt_nats.config.settings import Settings
from mqtt_nats.ctl.commands.trace import LASTS_MOST, line, trace
from mqtt_nats.ctl.nats_connection import run_connected
from mqtt_nats.ctl.verb import Refused, seconds


@click.group("trace")
def group() -> None:
    """Look at packets and messages as they come."""


@group.group()
def start() -> None:
    """Begin to look; Ctrl-C, or the time of --for, ends it."""


def _shared(command: Any) -> Any:
    command = click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object to a line.")(command)
    return click.option(
        "--for",
        "lasts",
        default="15m",
        show_default=True,
        metavar="TIME",
        help="90s, 30m or 1h; Ctrl-C ends it before.",
    )(command)


@start.command()
@click.argument("client_id")
@_shared
@click.pass_context
def client(context: click.Context, client_id: str, lasts: str, as_json: bool) -> None:
    """Show the packets of one client, on whichever gateway it is, or will be.

    What answers something says how long that took. Payloads are not shown.
    """
    if not client_id:
        raise click.UsageError("the client id is empty", context)
    _run(context, lasts, as_json, client=client_id)


@start.command()
@click.argument("topic_filter")
@_shared
@click.pass_context
def topic(context: click.Context, topic_filter: str, lasts: str, as_json: bool) -> None:
    """Show who publishes on topics that match TOPIC_FILTER, who gets and acknowledges it, and who does not.

    Meanwhile every message costs the gateways what hooks cost. A message of a NATS client is seen when it is delivered.
    """
    _run(context, lasts, as_json, topic=topic_filter)


def _run(context: click.Context, lasts: str, as_json: bool, **what: str) -> None:
    settings: Settings = context.obj
    try:
        length = seconds(lasts)
        if not 0 < length <= LASTS_MOST:
            raise Refused("a trace lasts an hour at most")
    except Refused as error:
        raise click.UsageError(f"for: {error}", context) from None

    async def show(inbox: RequestInbox) -> None:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        stopped = False

        def stop() -> None:
            nonlocal stopped
            stopped = True
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)
        try:
            async with aclosing(trace(inbox, length, **what)) as events:
                async for event in events:
                    say(orjson.dumps(event).decode() if as_json else line(event))
        except asyncio.CancelledError:
            if not stopped:
                raise
            task.uncancel()
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    run_connected(settings, show)
