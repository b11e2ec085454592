# SPDX-License-Identifier: Apache-2.0
"""Plugin for automatic subscriptions, which every client gets when it connects."""

from __future__ import annotations

import logging
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mqtt_nats.codec import MqttError, Subscription, validate_topic_filter
from mqtt_nats.hooks.events import ClientView, Connected
from mqtt_nats.hooks.points import CLIENT_CONNECTED
from mqtt_nats.plugins.base import Options, Plugin
from mqtt_nats.plugins.names import filled

log = logging.getLogger("mqtt_nats.plugins")


class Wanted(BaseModel):
    """One automatic subscription."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    filter: str = Field(description="Topic filter; `%c` stands for the client id, `%u` for the user.")
    qos: Literal[0, 1, 2] = Field(default=0, description="QoS that is granted.")
    no_local: bool = Field(default=False, description="The client's own messages are left out.")
    retain_as_published: bool = Field(default=False, description="RETAIN stays as it was published.")
    retain_handling: Literal[0, 1, 2] = Field(
        default=0,
        description="Retained messages are sent at every connection (0), where the subscription is new (1), never (2).",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        try:
            validate_topic_filter(self.filter)
        except MqttError as error:
            raise ValueError(f"filter: {error}") from None
        if self.filter.startswith("$share/"):
            raise ValueError("filter: a shared subscription is not for everybody")
        return self


class SubscriptionOptions(Options):
    """Options of the plugin."""

    subscriptions: tuple[Wanted, ...] = Field(min_length=1, description="What every client gets.")


class Subscriptions(Plugin[SubscriptionOptions]):
    """Plugin that subscribes connecting clients."""

    options_type = SubscriptionOptions

    async def load(self) -> None:
        """Add the hook; clients that are connected already get no subscriptions."""
        self.gateway.on(CLIENT_CONNECTED, self._connected)

    def _connected(self, event: Connected) -> None:
        wanted = [found for one in self.options.subscriptions if (found := _for(one, event.client)) is not None]
        if wanted:
            self.gateway.subscribe(event.client, *wanted)


def _for(one: Wanted, client: ClientView) -> Subscription | None:
    text = filled(one.filter, client)
    if text is None:
        log.info(
            "%s: no subscription of %r: the client id or user name cannot be a level of a filter", client, one.filter
        )
        return None
    return Subscription(text, one.qos, one.no_local, one.retain_as_published, one.retain_handling)
