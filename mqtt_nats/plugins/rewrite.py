# SPDX-License-Identifier: Apache-2.0
"""Plugin for topic rewrite: replaces topics of publishes and filters of subscriptions."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mqtt_nats.codec import MqttError, Subscription, matches, validate_topic_filter
from mqtt_nats.hooks.chain import Continue
from mqtt_nats.hooks.events import ClientView, Drop, Published, Publishing, Subscribing, Unsubscribing, Wanted
from mqtt_nats.hooks.points import CLIENT_SUBSCRIBE, CLIENT_UNSUBSCRIBE, MESSAGE_PUBLISH
from mqtt_nats.plugins.base import Options, Plugin
from mqtt_nats.plugins.names import GROUP, filled

PRIORITY = 100
"""Priority of the hooks: hooks with a lower priority see rewritten topics."""

_SHARED = "$share/"


class Rule(BaseModel):
    """Rule of topic rewrite."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    action: Literal["publish", "subscribe", "all"] = Field(default="all", description="What it is about.")
    filter: str = Field(description="Topics, or filters, that it is about: a topic filter that matches them.")
    regex: str = Field(
        description="Regular expression that the whole topic, or filter, has to match too; `.` is any character."
    )
    to: str = Field(
        description="What takes its place: `$1` to `$9` stand for the groups, `%c` for the client id, `%u` for the "
        "user."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        try:
            validate_topic_filter(self.filter)
        except MqttError as error:
            raise ValueError(f"filter: {error}") from None
        try:
            groups = re.compile(self.regex, re.DOTALL).groups
        except re.error as error:
            raise ValueError(f"regex: {error}") from None
        missing = [number for number in GROUP.findall(self.to) if not 1 <= int(number) <= groups]
        if missing:
            raise ValueError(f"to: ${missing[0]} is no group of the regular expression")
        return self

    def apply(self, topic: str, client: ClientView) -> str | None:
        """Return the topic or filter that replaces ``topic``; None: the rule does not apply."""
        if not topic or not matches(self.filter, topic):
            return None
        # A topic may contain a line feed, which `.` has to match: else a client would evade the rule by one.
        found = re.fullmatch(self.regex, topic, re.DOTALL)
        return None if found is None else filled(self.to, client, found)


class RewriteOptions(Options):
    """Options of the plugin."""

    rules: tuple[Rule, ...] = Field(min_length=1, description="The first that is about a topic counts.")


class Rewrite(Plugin[RewriteOptions]):
    """Plugin that rewrites topics of publishes and filters of subscriptions."""

    options_type = RewriteOptions

    async def load(self) -> None:
        """Add the hooks that the rules need."""
        rules = self.options.rules
        self._publish = [rule for rule in rules if rule.action != "subscribe"]
        self._subscribe = [rule for rule in rules if rule.action != "publish"]
        if self._publish:
            self.gateway.on(MESSAGE_PUBLISH, self._published, priority=PRIORITY)
        if self._subscribe:
            self.gateway.on(CLIENT_SUBSCRIBE, self._subscribed, priority=PRIORITY)
            self.gateway.on(CLIENT_UNSUBSCRIBE, self._unsubscribed, priority=PRIORITY)

    def _published(self, event: Publishing, message: Published | Drop) -> Continue[Published | Drop] | None:
        if isinstance(message, Drop):
            return None
        topic = rewritten(self._publish, message.topic, event.client)
        return None if topic is None else Continue(replace(message, topic=topic))

    def _subscribed(self, event: Subscribing, wanted: Wanted) -> Continue[Wanted]:
        return Continue(
            tuple(
                replace(one, topic_filter=self._filter(one.topic_filter, event.client))
                if isinstance(one, Subscription)
                else one
                for one in wanted
            )
        )

    def _unsubscribed(self, event: Unsubscribing, filters: tuple[str, ...]) -> Continue[tuple[str, ...]]:
        return Continue(tuple(self._filter(one, event.client) for one in filters))

    def _filter(self, text: str, client: ClientView) -> str:
        """Return a rewritten filter; of a shared subscription the part behind the group's name is rewritten."""
        before = ""
        if text.startswith(_SHARED) and text.count("/") > 1:
            _, group, rest = text.split("/", 2)
            before, text = f"{_SHARED}{group}/", rest
        found = rewritten(self._subscribe, text, client)
        return before + (text if found is None else found)


def rewritten(rules: list[Rule], topic: str, client: ClientView) -> str | None:
    """Return the topic rewritten by the first rule that applies; None: no rule applies."""
    for rule in rules:
        found = rule.apply(topic, client)
        if found is not None:
            return found
    return None
