# SPDX-License-Identifier: Apache-2.0
"""Plugin for delayed publish: publishes a message on ``$delayed/<seconds>/<topic>`` on ``<topic>`` after the delay."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from mqtt_nats.backbone.pending_stores import CountedStore
from mqtt_nats.base.limit_settings import DURATION
from mqtt_nats.codec import TopicNameInvalid
from mqtt_nats.ingress.interceptors import Taken
from mqtt_nats.plugins.base import Options, Plugin

BEGINNING: Final = "$delayed/"


class DelayedOptions(Options):
    """Options of the plugin."""

    max_delay: Annotated[int, DURATION] = Field(
        default=4_294_967, ge=1, le=4_294_967_295, description="Longest delay that is accepted, in seconds."
    )


class Delayed(Plugin[DelayedOptions]):
    """Plugin that schedules delayed messages by timers in JetStream."""

    options_type = DelayedOptions

    async def load(self) -> None:
        """Take the messages on `$delayed/` topics."""
        self.gateway.take(BEGINNING, self)

    def target(self, topic: str) -> str:
        """Return the topic on which a delayed message is published.

        Raises:
            TopicNameInvalid: the delay is no number of seconds, or too long, or no topic follows it.
        """
        return parse(topic, self.options.max_delay)[1]

    def take(self, taken: Taken, operation: CountedStore) -> None:
        """Schedule a delayed message."""
        self.gateway.schedule(taken, parse(taken.topic, self.options.max_delay)[0], operation)


def parse(topic: str, most: int) -> tuple[int, str]:
    """Return seconds and topic of ``$delayed/<seconds>/<topic>``.

    Raises:
        TopicNameInvalid: the topic has another form, or the delay is more than ``most`` seconds.
    """
    digits, slash, rest = topic.removeprefix(BEGINNING).partition("/")
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 10):
        raise TopicNameInvalid("the delay is no number of seconds")
    if int(digits) > most:
        raise TopicNameInvalid(f"the delay is longer than {most} seconds")
    if not slash or not rest or rest.startswith(BEGINNING):
        raise TopicNameInvalid("no topic follows the delay")
    return int(digits), rest
