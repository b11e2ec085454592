# SPDX-License-Identifier: Apache-2.0
"""Mutated files with rules, and with users and their passwords."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import mqtt_nats.access.acl
import mqtt_nats.access.acl_file
import mqtt_nats.access.passwords
import mqtt_nats.access.user_file
import mqtt_nats.access.verifiers
from mqtt_nats.access import acl_file, passwords, verifiers
from mqtt_nats.access.acl import Identity, Permissions, Rules
from mqtt_nats.base.errors import StartupError
from mqtt_nats.codec import matches
from tests.access.test_verifiers import POSTGRES
from tests.codec.support import key
from tests.fuzz.engine import Input, Target, Unexpected, expect
from tests.fuzz.mutation import of_pieces, of_toml

PASSWORDS, VERIFIERS = 0, 1
"""Variants of users: hashes by Argon2, verifiers of SCRAM."""

ERROR_CHARACTERS_MAX: Final = 2000
_SECRET_CHARACTERS: Final = 12
"""So many characters in a row of a hash or a key are not shown."""

_CLIENTS: Final = (
    Identity("ann", "c1", "10.0.0.7"),
    Identity("bert", "dash-1", "2001:db8::1", frozenset({"ops"})),
    Identity(None, "a/b", ""),
    Identity("+", "$x", "::ffff:10.0.0.7"),
    Identity("", "", "fe80::1%eth0"),
)
_NAMES: Final = (
    "a",
    "a/b",
    "a/b/c",
    "a/ann/c1",
    "plant/1/state",
    "plant/1/alarm/x",
    "$SYS/a",
    "device/c1/x",
    "/",
    "a//b",
)
_FILTERS: Final = (
    "#",
    "+",
    "a/#",
    "a/+",
    "+/b",
    "a/+/c1",
    "plant/#",
    "plant/+/alarm/#",
    "$SYS/#",
    "device/c1/#",
    "+/+",
    "/+",
)

_RULES: Final = tuple(
    line.encode()
    for line in (
        *("[[rules]]", 'effect = "allow"', 'effect = "deny"', 'default = "allow"', "[groups]", 'ops = ["ann"]', ""),
        *(f'topics = "{one}"' for one in ("#", "+", "a/+", "a/#", "+/b", "a/b", "plant/#", "+/%c/#", "$SYS/#", "a/%u")),
        *('topics = ["plant/#", "a/%u/%c"]', 'topics = { eq = "a/#" }', 'topics = ["a/b", { eq = "+" }]'),
        *(
            'access = "subscribe"',
            'access = "publish"',
            'user = "ann"',
            'user = "+"',
            'client = "dash-*"',
            'client = "c1"',
        ),
        *(
            'group = "ops"',
            'address = "10.0.0.0/8"',
            'address = "fe80::/10"',
            "qos = [1, 2]",
            "qos = [0]",
            "retain = true",
        ),
    )
)
_TOML: Final = (
    *(b"%u", b"%c", b"+", b"#", b"/", b"$SYS", b"\\u0000", b"\n", b'"', b"'''", b"[", b"]", b"=", b"1e400", b"nan"),
    *(b"99999999999999999999", b"\xff", b"\r", b"[" * 100, b"{", b"\\n", b"\xe2\x80\xa8"),
)
_LINES: Final = (
    *(b":", b"$", b"\n", b"\r", b",", b"=", b"m=1048576", b"m=1048577", b"t=100", b"p=64", b"v=19", b"v=16", b"\xff"),
    *(
        b":$argon2id$",
        b":$7$101$",
        b":$digest$sha256,prefix$",
        b":SCRAM-SHA-256$",
        b"4096",
        b"10000000",
        b"10000001",
        b"\xc2\xad",
        b"\xd9\xa1",
        b"\0",
        b"\xe2\x80\xa8",
    ),
    *(b":acme", b"AAAA", b"====", b"user", b"\xc2\xa0", b"+1", b" 1", b"1_000", b"0" * 30),
)


def rule_seeds() -> list[Input]:
    """Files with rules of every kind."""
    page = """
default = "deny"
[groups]
ops = ["anna", "bert"]
[[rules]]
effect = "allow"
group = "ops"
topics = "#"
[[rules]]
effect = "deny"
topics = "plant/+/alarm/#"
[[rules]]
effect = "allow"
topics = ["device/%c/#", "a/%u/#", { eq = "a/#" }]
qos = [0, 1]
[[rules]]
effect = "allow"
access = "subscribe"
client = "dash-*"
address = ["10.0.0.0/8", "2001:db8::/32"]
topics = "plant/#"
[[rules]]
effect = "allow"
access = "publish"
user = "ann"
retain = true
topics = ["plant/+/state", "a/b"]
"""
    small = '[[rules]]\neffect = "allow"\ntopics = "#"\n'
    denied = '[[rules]]\neffect = "deny"\ntopics = "a/b"\n' + small
    return [(0, text.encode()) for text in (page, "", 'default = "allow"', small, denied, "groups = {}\nrules = []\n")]


def user_seeds() -> list[Input]:
    """Files with users of either kind."""
    argon = "$argon2id$v=19$m=64,t=1,p=1$HbsEHU2v12E6LmKSci/3jw$peVMdSZT1lMzlbfFOpwJThO50B7SlJQCRcCdEpDU+00"
    usual = "$argon2id$v=19$m=19456,t=2,p=1$xGgjHLtFYWDzzbyk2PYpyw$8S+r8poYEOBGLdKbmxbDU3kclboj8lj7ID2M05AJ8ZY"
    return [
        (PASSWORDS, b""),
        (PASSWORDS, f"ann:{argon}\na:b:{argon}:acme\n".encode()),
        (PASSWORDS, f"é:{usual}".encode()),
        (PASSWORDS, f"bob:$7$101$AAAA${'A' * 86}==\nsue:$6$AAAA${'A' * 86}==:acme\n".encode()),
        (PASSWORDS, f"eve:$digest$sha256,suffix$AAAA${'A' * 43}=\n".encode()),
        (VERIFIERS, f"user:{POSTGRES}\n:{POSTGRES}\nnaïve:{POSTGRES}".encode()),
        (VERIFIERS, f"with:colon $ and = sign:{POSTGRES}\n".encode()),
    ]


_directory = tempfile.TemporaryDirectory(prefix="fuzz-")


def _read(data: bytes, load: Callable[[Path], Any]) -> Any:
    """What is in a file of these bytes; None: it is refused, in one line.

    Raises:
        Unexpected: in another way.
    """
    path = Path(_directory.name) / "file"
    path.write_bytes(data)
    try:
        return load(path)
    except StartupError as error:
        text = str(error)
        expect(text.isprintable(), f"the error is not one printable line: {text!r}")
        expect(len(text) <= ERROR_CHARACTERS_MAX, f"the error has {len(text)} characters")
        return None
    except Unexpected:
        raise
    except Exception as error:
        raise Unexpected(f"{type(error).__name__}: {error}") from error


def check_rules(one: Input, number: int) -> tuple[int, bool]:
    """Any bytes are rules, or are refused in one printable line.

    The rules decide about every client, topic and filter without an error. They decide the same each time, and as
    they explain it. A filter that a client may subscribe brings the client no topic that it may not subscribe,
    unless a rule is about that very filter. A file without rules permits nothing, unless its default is to permit.
    """
    _, data = one
    rules: Rules | None = _read(data, acl_file.load)
    if rules is None:
        return 0, True
    try:
        for client in _CLIENTS:
            _decide(rules.permissions(client), rules, number)
    except Unexpected:
        raise
    except Exception as error:
        raise Unexpected(f"{type(error).__name__}: {error}") from error
    return len(rules.rules), False


def _decide(permissions: Permissions, rules: Rules, number: int) -> None:
    qos, retain = number % 3, number % 2 == 1
    literal = any(pattern.literal for rule in rules.rules for pattern in rule.topics)
    for name in _NAMES:
        may = permissions.publish(key(name), qos, retain)
        expect(may == permissions.publish(key(name), qos, retain), f"{name!r} is decided otherwise the second time")
        explained, rule = permissions.explain("publish", name, qos, retain)
        expect(explained == may and (rule.allow if rule else rules.default) == may, f"{name!r}: {may}, not explained")
    for one in _FILTERS:
        may = permissions.may_subscribe(one, qos)
        explained, rule = permissions.explain("subscribe", f"$share/g/{one}", qos, retain)
        hidden = one.startswith("$SYS/")  # what touches presence needs a rule
        decided = rule.allow if rule else rules.default
        expect(explained == may and (may == decided or hidden), f"{one!r}: {may}, not explained")
        if may and not literal:
            for name in _NAMES:
                expect(
                    not matches(one, name) or permissions.subscribe(name, qos),
                    f"{one!r} may be subscribed and brings {name!r}, which may not",
                )
        expect(may or bool(rules.rules) or not rules.default or hidden, "no rule, the default allows, and it is denied")


def check_users(one: Input, number: int) -> tuple[int, bool]:
    """Any bytes are users, or are refused in one printable line that shows no part of a hash or a key.

    Users that are written and read again are the same. The text form of a user shows no hash. No entry makes the
    gateway spend more on a password than the limits: 1 GiB, 100 passes, 64 lanes, ten million iterations.
    """
    variant, data = one
    module = (passwords, verifiers)[variant]
    users = _read(data, lambda path: _shown(path, data, module.load))
    if users is None:
        return 0, True
    for name, entry in users.items():
        expect(name == name.strip("\n\r") and "\n" not in name, f"the name {name!r}")
        expect("$" not in repr(entry) and str(entry) not in repr(entry), f"{name!r} is shown as {entry!r}")
        if variant == PASSWORDS:
            cost = entry.scheme.rpartition("$")[2]
            if entry.foreign:
                expect(not entry.text.startswith("$7$") or int(cost) <= 1_000_000, f"{name!r} has {cost} iterations")
            else:
                memory, passes, lanes = (int(part.partition("=")[2]) for part in cost.split(","))
                expect(passes <= 100 and memory <= 1024 * 1024 and lanes <= 64, f"{name!r} costs {cost}")
            passwords.PasswordUsers({name: entry})
        else:
            expect(
                verifiers.ITERATIONS <= entry.iterations <= 10_000_000, f"{name!r} has {entry.iterations} iterations"
            )
    written = "".join(f"{name}:{entry}\n" for name, entry in users.items()).encode()
    again = _read(written, module.load)
    expect(again == users, f"written again there are {again}")
    return len(users), False


def _shown(path: Path, data: bytes, load: Callable[[Path], Any]) -> Any:
    """As ``load``, with a look at what an error shows of the file."""
    try:
        return load(path)
    except StartupError as error:
        text = str(error)
        for secret in re.findall(rb"[A-Za-z0-9+/=]{%d,}" % _SECRET_CHARACTERS, data):
            shown = secret[:_SECRET_CHARACTERS].decode()
            expect(
                shown not in text or data.count(b":", 0, data.find(secret)) < 1, f"the error shows {shown!r}: {text}"
            )
        raise


RULES: Final = Target(
    "acl-file",
    (mqtt_nats.access.acl, mqtt_nats.access.acl_file),
    rule_seeds,
    check_rules,
    mutate=of_toml(_RULES, *_TOML),
    followed=10,
)
USERS: Final = Target(
    "password-files",
    (mqtt_nats.access.passwords, mqtt_nats.access.user_file, mqtt_nats.access.verifiers),
    user_seeds,
    check_users,
    variants=2,
    mutate=of_pieces(*_LINES),
    followed=10,
)
