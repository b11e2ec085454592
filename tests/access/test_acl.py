# SPDX-License-Identifier: Apache-2.0
"""Rules: which of them applies, what names may stand in a topic, what a subscription may have."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mqtt_nats.access.acl import Both, Identity, Pattern, Permissions, Rule, Rules, Who, covers, overlaps
from mqtt_nats.access.acl_file import load
from mqtt_nats.base.errors import StartupError
from mqtt_nats.codec import matches

ANNA = Identity("anna", "sensor-1", "10.1.2.3")
NOBODY = Identity(None, "sensor-1", "::ffff:10.1.2.3")


def permissions(tmp_path: Path, text: str, who: Identity = ANNA) -> Permissions:
    file = tmp_path / "acl.toml"
    file.write_text(text, encoding="utf-8")
    return load(file).permissions(who)


def key(topic: str) -> bytes:
    raw = topic.encode()
    return len(raw).to_bytes(2) + raw


def rule(effect: str, topics: str, more: str = "") -> str:
    return f"[[rules]]\neffect = '{effect}'\ntopics = {topics}\n{more}\n"


FILTERS = ["a", "a/b", "a/+", "a/#", "#", "+", "+/+", "+/b", "+/#", "a/b/c", "a/+/c", "a/+/#", "/", "/#", "+/", "$x"]
TOPICS = [
    "/".join(levels) for count in (1, 2, 3, 4) for levels in itertools.product(("a", "b", "c", "", "$x"), repeat=count)
]


@pytest.mark.parametrize("one", FILTERS)
@pytest.mark.parametrize("other", FILTERS)
def test_filters_that_cover_and_overlap(one: str, other: str) -> None:
    """Held against every topic of four levels: what covers has them all, what does not overlap has none in common."""
    left = {topic for topic in TOPICS if topic and matches(one, topic)}
    right = {topic for topic in TOPICS if topic and matches(other, topic)}
    if {one, other} != {"/#", "+"}:  # only the empty topic, which nobody may have
        assert overlaps(one, other) == bool(left & right)
    if covers(one, other):
        assert right <= left
    else:  # the same topics as `#`, and not seen to be
        assert not right <= left or (one, other) == ("+/#", "#")


levels = st.lists(st.sampled_from(["a", "b", "", "+", "$x"]), min_size=1, max_size=4)


@given(levels, levels, st.booleans(), st.booleans())
def test_covering_is_overlapping_and_transitive_to_topics(
    wide: list[str], narrow: list[str], all_wide: bool, all_narrow: bool
) -> None:
    one, other = "/".join([*wide, *["#"] * all_wide]), "/".join([*narrow, *["#"] * all_narrow])
    assume(one and other)
    assert overlaps(one, other) == overlaps(other, one)
    topics = [topic for topic in TOPICS if topic and matches(other, topic)]
    if covers(one, other):
        assert all(matches(one, topic) for topic in topics)
        assert overlaps(one, other) or not topics
    if not overlaps(one, other):
        assert not any(matches(one, topic) for topic in topics)


def test_nothing_is_allowed_that_no_rule_allows(tmp_path: Path) -> None:
    found = permissions(tmp_path, "")
    assert not found.publish(key("a"), 0, False)
    assert not found.subscribe("a", 0)
    assert permissions(tmp_path, "default = 'allow'").publish(key("a"), 2, True)


def test_the_first_rule_that_applies_decides(tmp_path: Path) -> None:
    text = rule("deny", "'a/secret'") + rule("allow", "'a/#'") + rule("deny", "'#'")
    found = permissions(tmp_path, text)
    assert [found.publish(key(topic), 1, False) for topic in ("a", "a/b", "a/secret", "b")] == [
        True,
        True,
        False,
        False,
    ]
    asked = ["a/b", "a/b/#", "a/secret", "a/#", "a/+", "b"]
    assert [found.subscribe(each, 1) for each in asked] == [True, True, False, False, False, False]


def test_access_qos_and_retain(tmp_path: Path) -> None:
    text = (
        rule("allow", "'pub/#'", "access = 'publish'\nqos = [0, 1]\nretain = false")
        + rule("allow", "'sub/#'", "access = 'subscribe'\nqos = [1]")
        + rule("allow", "'both'", "access = 'both'")
    )
    found = permissions(tmp_path, text)
    assert [found.publish(key("pub/x"), qos, False) for qos in (0, 1, 2)] == [True, True, False]
    assert not found.publish(key("pub/x"), 0, True)
    assert not found.subscribe("pub/x", 0)
    assert [found.subscribe("sub/+", qos) for qos in (0, 1, 2)] == [False, True, False]
    assert not found.publish(key("sub/x"), 1, False)
    assert found.publish(key("both"), 2, True)
    assert found.subscribe("both", 2)


def test_a_literal_filter(tmp_path: Path) -> None:
    found = permissions(tmp_path, rule("deny", "[{eq = '#'}]") + rule("allow", "['#']"))
    assert not found.subscribe("#", 0)
    assert found.subscribe("a/#", 0)
    assert found.publish(key("a"), 0, False)


@pytest.mark.parametrize(
    ("who", "identity", "applies"),
    [
        ("user = 'anna'", ANNA, True),
        ("user = ['bert', 'anna']", ANNA, True),
        ("user = 'bert'", ANNA, False),
        ("user = 'anna'", NOBODY, False),
        ("client = 'sensor-1'", ANNA, True),
        ("client = 'sensor-*'", ANNA, True),
        ("client = 'sensor'", ANNA, False),
        ("client = 's*1'", ANNA, False),
        ("group = 'plant'", ANNA, True),
        ("group = ['office', 'plant']", ANNA, True),
        ("group = 'office'", ANNA, False),
        ("group = 'plant'", NOBODY, False),
        ("address = '10.0.0.0/8'", ANNA, True),
        ("address = '10.0.0.0/8'", NOBODY, True),
        ("address = ['192.168.0.0/16', '10.1.2.3/32']", ANNA, True),
        ("address = '10.9.0.0/16'", ANNA, False),
        ("address = '10.0.0.0/8'", Identity("anna", "c"), False),
        ("address = 'fe80::/10'", Identity("anna", "c", "fe80::1%eth0"), True),
        ("anonymous = true", NOBODY, True),
        ("anonymous = true", ANNA, False),
        ("anonymous = false", NOBODY, False),
        ("anonymous = false", ANNA, True),
        ("user = 'anna'\nclient = 'other'", ANNA, False),
        ("user = 'anna'\naddress = '10.0.0.0/8'", ANNA, True),
    ],
)
def test_whom_a_rule_is_about(tmp_path: Path, who: str, identity: Identity, applies: bool) -> None:
    groups = "[groups]\nplant = ['anna']\noffice = ['bert']\n"
    assert permissions(tmp_path, groups + rule("allow", "'#'", who), identity).publish(key("a"), 0, False) is applies


def test_placeholders(tmp_path: Path) -> None:
    found = permissions(tmp_path, rule("allow", "['home/%u/#', 'dev-%c/x', '%u-%c']"))
    assert found.subscribe("home/anna/#", 0)
    assert not found.subscribe("home/+/#", 0)
    assert not found.subscribe("home/bert/#", 0)
    assert found.publish(key("dev-sensor-1/x"), 0, False)
    assert found.publish(key("anna-sensor-1"), 0, False)


@pytest.mark.parametrize("name", ["+", "#", "a/b", "$SYS", "$share", "x/#", "a\0b", ""])
@pytest.mark.parametrize("placeholder", ["%u", "%c"])
def test_names_that_would_change_a_rule(tmp_path: Path, name: str, placeholder: str) -> None:
    """An allowing rule allows nothing; a denying one denies everything from there on."""
    who = Identity(name, name)
    allowing = permissions(tmp_path, rule("allow", f"['home/{placeholder}/x', '{placeholder}/x']"), who)
    for topic in ("home/a/x", f"home/{name}/x", f"{name}/x", "$SYS/x", "home/a/b/x"):
        assert not allowing.publish(key(topic), 0, False)
        assert not allowing.subscribe(topic, 0)
    assert not allowing.subscribe("home/+/x", 0)
    denying = permissions(tmp_path, rule("deny", f"'home/{placeholder}'") + rule("allow", "'#'"), who)
    assert not denying.publish(key("home/a"), 0, False)
    assert not denying.subscribe("home/a/b/#", 0)
    assert denying.publish(key("garden"), 0, False)


def test_a_name_that_looks_like_a_placeholder(tmp_path: Path) -> None:
    """It is put in as it is, and nothing is put into it."""
    found = permissions(tmp_path, rule("allow", "'home/%u/#'"), Identity("%c", "anna"))
    assert found.publish(key("home/%c/x"), 0, False)
    assert not found.publish(key("home/anna/x"), 0, False)


def test_anonymous_clients_have_no_name(tmp_path: Path) -> None:
    """Rules with %u are not about them."""
    text = rule("deny", "'home/%u/#'") + rule("allow", "['home/%u/#', 'open']")
    found = permissions(tmp_path, text, NOBODY)
    assert found.publish(key("open"), 0, False)
    assert not found.publish(key("home//x"), 0, False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rule = 1", "rule: unknown setting: did you mean 'rules'?"),
        ("rules = 1", "rules: input should be a list"),
        ("[[rules]]\ntopics = 'a'", "rule 1, effect: field required"),
        ("[[rules]]\neffect = 'allow'", "rule 1, topics: field required"),
        (rule("allow", "'a'") + rule("permit", "'a'"), "rule 2, effect: input should be 'allow' or 'deny'"),
        (rule("allow", "[]"), "rule 1, topics: value should have at least 1 item"),
        (rule("allow", "'a/#/b'"), "rule 1, topics: 'a/#/b': # is not the whole of the last level"),
        (rule("allow", "'$share/g/a'"), "rule 1, topics: '$share/g/a': rules are about the filter behind $share"),
        (rule("allow", "'a'", "user = []"), "rule 1, user: value should have at least 1 item"),
        (rule("allow", "'a'", "user = ''"), "rule 1, user, 0: string should have at least 1 character"),
        (rule("allow", "'a'", "usr = 'a'"), "rule 1, usr: unknown setting: did you mean 'user'?"),
        (rule("allow", "'a'", "group = 'g'"), "rule 1: there is no group 'g'"),
        (rule("allow", "'a'", "address = '10.0.0.1/8'"), "rule 1, address, 0"),
        (rule("allow", "'a'", "qos = [3]"), "rule 1, qos"),
        (rule("allow", "'a'", "access = 'subscribe'\nretain = true"), "rule 1: retain is about publishing"),
        ("[[rules", "is not valid TOML"),
    ],
)
def test_what_is_wrong_with_a_file(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "acl.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(StartupError) as error:
        load(file)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert str(file) in str(error.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot read the ACL file"):
        load(tmp_path)
    (tmp_path / "acl").write_bytes(b"\xff\xfe")
    with pytest.raises(StartupError, match="is not UTF-8 text"):
        load(tmp_path / "acl")


@given(levels, levels)
def test_a_filter_is_granted_where_one_of_its_topics_is_allowed(one: list[str], other: list[str]) -> None:
    """Where each message is looked at: one rule, held against every topic of four levels."""
    allowed, wanted = "/".join(one), "/".join(other)
    assume(allowed and wanted and {allowed, wanted} != {"/#", "+"})
    found = Rules((Rule(True, Who(), "both", (Pattern(allowed),)),)).permissions(ANNA)
    assert found.touches(wanted, 0) == any(
        found.may_subscribe(topic, 0) for topic in TOPICS if topic and matches(wanted, topic)
    )


def test_what_each_message_is_looked_at_for(tmp_path: Path) -> None:
    """Rules in their order: the first that allows one topic, or denies all; a literal with wildcards is no topic."""
    text = (
        rule("deny", "['a/b', 'c/#', {eq = 'd/#'}]")
        + rule("allow", "['a/#', 'c/d', {eq = 'e/#'}, {eq = 'f/g'}]")
        + rule("allow", "'g/#'", "qos = [0]")
    )
    found = permissions(tmp_path, text)
    granted = ["a/#", "+/b", "#", "f/+", "f/g"]
    refused = ["a/b", "c/d", "c/+", "d/#", "e/#", "e/+", "h", "$SYS/#"]
    assert [each for each in granted + refused if found.may_touch(each, 1)] == granted
    assert found.may_touch("g/+", 0)
    assert not found.may_touch("g/+", 1)
    assert found.explain("subscribe", "$share/x/+/b", 1, False, True)[0]
    assert not found.explain("subscribe", "$share/x/+/b", 1, False)[0]
    both = Both(found, permissions(tmp_path, rule("allow", "'a/#'")))
    assert [each for each in granted if both.may_touch(each, 1)] == ["a/#", "+/b", "#"]


def test_presence_topics_need_a_rule_where_each_message_is_looked_at(tmp_path: Path) -> None:
    within = "$SYS/brokers/+/clients/+/connected"
    default = permissions(tmp_path, "default = 'allow'\n")
    assert default.may_touch("$SYS/#", 0)
    assert not default.may_touch(within, 0)
    assert permissions(tmp_path, rule("allow", "'$SYS/brokers/+/clients/#'")).may_touch(within, 0)
