# SPDX-License-Identifier: Apache-2.0
"""Mapping between MQTT topic names and filters, and NATS subjects.

The mapping extends nats-server's own: a level becomes a token, an empty level the token `/`, a `.` in a level `//`.
nats-server's mapping never puts another character after a `/` inside a token. So a `/` and another character can
escape characters that a subject cannot contain: a space is `/_`, the others are `/~` and a letter (`ESCAPES`).
nats-server drops only the slash of such an escape. Exactly these characters are escaped:
  - characters that end a word of the NATS protocol: space, TAB, LF, CR, and VT (nats-py's parser fails on VT);
  - characters that JetStream refuses in a filter or cannot look up: FF and DEL;
  - NATS wildcards: `*` and `>`.
So the mapping is one-to-one on all legal topics, and equals nats-server's for every topic without these characters.
"""

from typing import Final

MAX_SUBJECT_BYTES: Final = 3800
"""Longest encoded subject: nats-server ends a connection that sends a control line of more than 4096 bytes."""

MAX_TOPIC_BYTES: Final = 65535
"""Longest MQTT string [MQTT-4.7.3-3] (3.1.1, 5.0)."""

ESCAPES: Final[dict[str, str]] = {
    " ": "/_",
    "\t": "/~t",
    "\n": "/~n",
    "\v": "/~v",
    "\f": "/~f",
    "\r": "/~r",
    "\x7f": "/~d",
    "*": "/~s",
    ">": "/~g",
}

SYSTEM_LEVEL: Final = "$SYS"
SYSTEM_ROOT: Final = "$MQTT_SYS"
"""Root of the subjects of MQTT's `$SYS/...` topics; `$SYS.>` belongs to nats-server."""

REPLY_LEVEL: Final = "$reply"
"""First level of topics on which MQTT clients answer NATS clients; these topics have no subject."""

_HIDDEN: Final = frozenset(("_INBOX", "_R_", "_GR_"))
RESERVED_ROOTS: Final = _HIDDEN | frozenset(
    ("$MQTT", SYSTEM_ROOT, SYSTEM_LEVEL, REPLY_LEVEL, "$JS", "$JSC", "$KV", "$O", "$OBJ", "$NRG", "$GNR", "$GR", "$LDS")
)
"""First tokens of subjects that belong to nats-server, JetStream, reply inboxes or the gateways."""

_OWN_INBOXES: Final = "_INBOX_"
"""Beginning of first tokens of reply inboxes of single NATS users, such as `_INBOX_app`."""

_ENCODE: Final = str.maketrans({".": "//", **ESCAPES})
_READABLE: Final = str.maketrans({char: code[1:] for char, code in ESCAPES.items()})
_SPECIAL: Final = {code[2]: char for char, code in ESCAPES.items() if len(code) == 3}


class SubjectTooLong(ValueError):
    """The encoded subject would exceed MAX_SUBJECT_BYTES."""


class ReservedSubject(ValueError):
    """The subject belongs to NATS or to the gateways."""


def _levels(topic: str) -> str:
    """Encode all levels of a topic without wildcards."""
    if "/" not in topic:
        return topic.translate(_ENCODE)
    return ".".join(level.translate(_ENCODE) or "/" for level in topic.split("/"))


def _checked(subject: str) -> str:
    if len(subject) > MAX_SUBJECT_BYTES or len(subject.encode()) > MAX_SUBJECT_BYTES:
        raise SubjectTooLong(f"the topic needs a NATS subject of more than {MAX_SUBJECT_BYTES} bytes")
    return subject


def encode_topic(topic: str) -> str:
    """Map a legal topic name to its subject, reserved or not; raises SubjectTooLong."""
    return _checked(_levels(topic))


def topic_to_subject(topic: str) -> str:
    """Map the topic name of a client's publish to its subject; raises SubjectTooLong, ReservedSubject.

    `topic` is a legal topic name: not empty, no NUL, no `+` or `#`.
    """
    subject = encode_topic(topic)
    if is_reserved(subject):
        raise ReservedSubject(f"topics under {root_of(subject)!r} are reserved")
    return subject


def readable_topic(topic: str) -> str:
    """Return the name of a topic at nats-server's listener: the topic itself, unless it needed escapes."""
    return topic.translate(_READABLE)


def system_subject(topic: str) -> str:
    """Return the subject on which gateways publish the topic `$SYS/<...>`; raises SubjectTooLong, ValueError."""
    if not topic.startswith("$SYS/"):
        raise ValueError("not a $SYS/ topic")
    return _checked(SYSTEM_ROOT + _levels(topic)[len(SYSTEM_LEVEL) :])


def filter_to_subjects(topic_filter: str) -> tuple[str, ...]:
    """Map a topic filter to subjects to subscribe: `a/#` to (`a.>`, `a`), a bare `#` to (`>`,), any other to one.

    `$SYS/...` is mapped to SYSTEM_ROOT. Raises SubjectTooLong, ReservedSubject, and ValueError for an illegal
    filter [MQTT-4.7.1-2] [MQTT-4.7.1-3]. A shared subscription's `$share/<group>/` must have been removed.
    """
    if not topic_filter:
        raise ValueError("an empty topic filter")
    levels = topic_filter.split("/")
    last = len(levels) - 1
    tokens = []
    for index, level in enumerate(levels):
        if level == "+":
            tokens.append("*")
        elif level == "#" and index == last:
            tokens.append(">")
        elif "+" in level or "#" in level:
            raise ValueError("a wildcard must be a whole level, and # the last one")
        else:
            tokens.append(level.translate(_ENCODE) or "/")
    root = tokens[0]
    if root == SYSTEM_LEVEL:
        tokens[0] = SYSTEM_ROOT
    elif is_reserved(root):
        raise ReservedSubject(f"topics under {root!r} are reserved")
    subject = _checked(".".join(tokens))
    if last > 0 and tokens[last] == ">":
        return subject, subject[:-2]
    return (subject,)


def subject_to_topic(subject: str) -> str:
    """Map any subject to a topic as nats-server does (a lone `/` is dropped), and decode the escapes of this module.

    The subject of a NATS client may give an illegal topic name: see `wire_topic`.
    """
    if subject.startswith(SYSTEM_ROOT) and (len(subject) == len(SYSTEM_ROOT) or subject[len(SYSTEM_ROOT)] == "."):
        subject = SYSTEM_LEVEL + subject[len(SYSTEM_ROOT) :]
    return _decoded(subject)


def _decoded(subject: str) -> str:
    """Decode tokens from anywhere in a subject; no token is treated as a root."""
    if "/" not in subject:
        return subject.replace(".", "/")
    parts = iter(subject.split("/"))
    out = [next(parts).replace(".", "/")]
    for part in parts:
        # Each part was preceded by one slash; an empty one means that the next slash is the second of a pair.
        if not part:
            following = next(parts, None)
            if following is None:
                break
            out.append(".")
            part = following
        elif part[0] == "_":
            out.append(" ")
            part = part[1:]
        elif part[0] == "~" and part[1:2] in _SPECIAL:
            out.append(_SPECIAL[part[1]])
            part = part[2:]
        out.append(part.replace(".", "/"))
    return "".join(out)


def wire_topic(subject: bytes) -> str | None:
    """Return the topic name with which a message on `subject` is sent to a client, None when no legal one exists.

    Subjects of NATS clients may contain bytes that are no UTF-8, NUL, `+` or `#`, or may be too long.
    """
    try:
        topic = subject_to_topic(subject.decode())
    except UnicodeDecodeError:
        return None
    if not topic or "+" in topic or "#" in topic or "\0" in topic:
        return None
    if len(topic) > MAX_TOPIC_BYTES // 4 and len(topic.encode()) > MAX_TOPIC_BYTES:
        return None
    return topic


def subject_to_filter(subject: str) -> str:
    """Map the first subject of `filter_to_subjects` back to its topic filter; only the first token can be a root."""
    tokens = subject.split(".")
    last = len(tokens) - 1
    levels = []
    for index, token in enumerate(tokens):
        if token == "*":
            levels.append("+")
        elif token == ">" and index == last:
            levels.append("#")
        elif token == SYSTEM_ROOT:
            levels.append(token if index else SYSTEM_LEVEL)  # only the first token is a root
        else:
            levels.append(_decoded(token))
    return "/".join(levels)


def root_of(subject: str) -> str:
    """Return the first token of a subject."""
    return subject.partition(".")[0]


def is_reserved(subject: str) -> bool:
    """Whether clients may neither publish to this subject nor name its root in a filter."""
    return subject[:1] in "$_" and (subject.startswith(_OWN_INBOXES) or subject.partition(".")[0] in RESERVED_ROOTS)


def starts_with_wildcard(subject: str) -> bool:
    """Whether a subject from `filter_to_subjects` matches any first level."""
    return subject in (">", "*") or subject.startswith("*.")


def visible_to_wildcard(subject: str) -> bool:
    """Whether a filter that starts with a wildcard may match a subject [MQTT-4.7.2-1]; reply inboxes are hidden too."""
    first = subject[:1]
    if first == "$":
        return False
    return first != "_" or not (subject.startswith(_OWN_INBOXES) or subject.partition(".")[0] in _HIDDEN)
