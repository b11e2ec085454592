# SPDX-License-Identifier: Apache-2.0
"""File with the access rules for publishing and subscribing (TOML, docs/acl.md)."""

from __future__ import annotations

from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from mqtt_nats.access.acl import Access, Group, Pattern, Rule, Rules, Who
from mqtt_nats.base.config_files import read_toml, unknown_key
from mqtt_nats.base.errors import StartupError, worded
from mqtt_nats.codec import MqttError, validate_topic_filter


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Texts = Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(_listed), Field(min_length=1)]
Networks = Annotated[list[IPv4Network | IPv6Network], BeforeValidator(_listed), Field(min_length=1)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=False)


class _Literal(_Model):
    eq: str


class _OwnRule(_Model):
    effect: Literal["allow", "deny"]
    access: Access = "both"
    topics: Annotated[list[str | _Literal], BeforeValidator(_listed), Field(min_length=1)]
    qos: Annotated[set[Annotated[int, Field(ge=0, le=2)]], Field(min_length=1)] | None = None
    retain: bool | None = None

    @field_validator("topics")
    @classmethod
    def _check(cls, topics: list[str | _Literal]) -> list[str | _Literal]:
        for one in topics:
            text = one if isinstance(one, str) else one.eq
            if text.startswith("$share/"):
                raise ValueError(f"{text!r}: rules are about the filter behind $share/<group>/")
            try:
                validate_topic_filter(text)
            except MqttError as error:
                raise ValueError(f"{text!r}: {error}") from None
        return topics

    @model_validator(mode="after")
    def _together(self) -> Self:
        if self.retain is not None and self.access == "subscribe":
            raise ValueError("retain is about publishing, access is subscribe")
        return self


class _Rule(_OwnRule):
    user: Texts | None = None
    client: Texts | None = None
    group: Texts | None = None
    address: Networks | None = None
    anonymous: bool | None = None


class _File(_Model):
    default: Literal["allow", "deny"] = "deny"
    groups: dict[str, list[str]] = {}
    rules: list[_Rule] = []


def load(path: Path) -> Rules:
    """Read the rules of an ACL file.

    Raises:
        StartupError: one line with the error and the number of the rule (the first is 1).
    """
    values, _ = read_toml(path, "ACL file")
    try:
        found = _File.model_validate(values)
    except ValidationError as error:
        raise StartupError(f"the ACL file {path}: {_one_line(error, _File)}") from None
    for number, rule in enumerate(found.rules, 1):
        for name in rule.group or ():
            if name not in found.groups:
                raise StartupError(f"the ACL file {path}: rule {number}: there is no group {name!r}")
    groups = {name: Group(name, frozenset(users)) for name, users in found.groups.items()}
    return Rules(tuple(_rule(rule, _who(rule, groups)) for rule in found.rules), found.default == "allow")


OWN_MOST: Final = 1000
"""Most rules that an authenticator may give one client."""

_OWN: Final = TypeAdapter(Annotated[list[_OwnRule], Field(max_length=OWN_MOST)])


def own_rules(values: Any) -> Rules:
    """Return rules for one client from a list of entries as in the file, without clients; the default is deny.

    Raises:
        ValueError: one line with the error.
    """
    try:
        found = _OWN.validate_python(values)
    except ValidationError as error:
        raise ValueError(_one_line(error, _OwnRule)) from None
    return Rules(tuple(_rule(rule, Who()) for rule in found))


def _who(rule: _Rule, groups: dict[str, Group]) -> Who:
    return Who(
        None if rule.user is None else tuple(rule.user),
        None if rule.client is None else tuple(rule.client),
        None if rule.group is None else tuple(groups[name] for name in rule.group),
        None if rule.address is None else tuple(rule.address),
        rule.anonymous,
    )


def _rule(rule: _OwnRule, who: Who) -> Rule:
    return Rule(
        rule.effect == "allow",
        who,
        rule.access,
        tuple(Pattern(one) if isinstance(one, str) else Pattern(one.eq, True) for one in rule.topics),
        None if rule.qos is None else frozenset(rule.qos),
        rule.retain,
    )


def _one_line(error: ValidationError, model: type[_Model]) -> str:
    detail = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = [each for each in detail["loc"] if each not in ("str", "_Literal")]
    if where[:1] == ["rules"] and len(where) > 1 and isinstance(where[1], int):
        where = [f"rule {where[1] + 1}", *where[2:]]
    message = worded(detail)
    if detail["type"] == "extra_forbidden":
        message = unknown_key(model, detail["loc"])
    place = ", ".join(str(each) for each in where)
    return f"{place}: {message}" if place else message
