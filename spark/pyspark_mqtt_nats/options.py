# SPDX-License-Identifier: Apache-2.0
"""Options of the source and the sink. docs/spark.md lists them in a table; a test compares the two."""

import difflib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Self

from mqtt_streams.messages import PREFIX as MESSAGES_PREFIX
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.retained import PREFIX as RETAINED_PREFIX
from mqtt_streams.retained import STREAM as RETAINED
from mqtt_streams.sessions import PREFIX as SESSIONS_PREFIX
from mqtt_streams.sessions import STREAM as SESSIONS
from mqtt_streams.subjects import filter_to_subjects
from pyspark_mqtt_nats import values
from pyspark_mqtt_nats.errors import OptionError
from pyspark_mqtt_nats.nats import tls
from pyspark_mqtt_nats.nats.access import INBOX_PREFIX, Access, Credentials, Server
from pyspark_mqtt_nats.reading.selection import asked

if TYPE_CHECKING:
    from pyspark_mqtt_nats.decoders.option import Decoder

log: Final = logging.getLogger("pyspark_mqtt_nats")

Use = Literal["all", "read", "batch", "stream", "write"]
"""Where an option has an effect: everywhere, reads, batch reads only, streaming reads only, writes."""

IGNORED: Final = frozenset(("checkpointlocation", "queryname"))
"""Options that Spark passes to every source and sink besides their own, in lower case."""

DEFAULT_SERVERS: Final = "nats://127.0.0.1:4222"
"""Servers of the jobs where none are given. The source has no default: see `Options.require_servers`."""

STARTS: Final = frozenset(("startingsequence", "startingtimestamp", "startingoffsets"))
"""Options that say where a read begins, in lower case."""

_VIEW: Final = "CREATE TEMPORARY VIEW name USING mqtt_nats OPTIONS (servers '...', ...)"

_NO_PATHS: Final = (
    "there are no paths: give MQTT topic filters in the option `topics`, a topic to write to in `topic`; "
    f"in SQL use {_VIEW}"
)
_NO_TABLES: Final = f"Spark keeps no options of a Python source in a table: use {_VIEW}"

_OF_TABLES: Final = frozenset(("provider", "location", "owner", "is_managed_location", "external", "comment"))
"""Properties of a table in lower case. Spark passes them as options for CREATE TABLE without columns."""


_STREAMS: Final[Mapping[str, Mapping[str, Any]]] = {
    "retained": {"stream": RETAINED, "subject_prefix": RETAINED_PREFIX},
    "sessions": {"stream": SESSIONS, "subject_prefix": SESSIONS_PREFIX},
}
"""Mode -> defaults of other options."""

_FROM_FILES: Final = ("creds", "nkey", "tls_ca", "tls_cert", "tls_key")
"""Attributes that a user may give as the name of a file."""

_OF_RANGES: Final = ("starting_", "ending_", "num_partitions", "read_mode", "fail_on_data_loss")
"""Attributes, or their beginnings, that mean nothing where the last message of each subject is read."""

_OF_MESSAGES: Final = ("filters", "include_headers", "decoders", "pushdown")
"""Attributes that mean nothing for sessions either."""


class Option(NamedTuple):
    """Option with its name for users; `default` is text, "" for none, and a description where `literal` is False."""

    name: str
    default: str
    literal: bool
    use: Use
    doc: str
    attribute: str
    parse: Callable[[str], Any]
    secret: bool


def _option(
    name: str,
    parse: Callable[[str], Any],
    doc: str,
    *,
    default: str = "",
    shown: str = "",
    use: Use = "all",
    secret: bool = False,
) -> Any:
    """Return a dataclass field of Options.

    `default`: as a user would write it; `shown`: a description shown instead, where the default depends on something.
    `secret`: the value is never shown, not even in the error of a wrong value.
    """
    info: dict[str, Any] = {"name": name, "parse": parse, "doc": doc, "use": use, "secret": secret}
    info |= {"default": shown or default, "literal": not shown}
    return field(default=parse(default) if default else None, metadata=info, repr=not secret)


@dataclass(frozen=True, kw_only=True)
class Options:
    """All options, checked. `parse` makes an instance; it can be pickled, and its repr has no secrets.

    Store times are in nanoseconds since 1970. `parse` reads files: the attributes hold their contents.
    """

    servers: tuple[Server, ...] = _option(
        "servers",
        values.servers,
        "URLs of the NATS servers, separated by commas; `tls://` insists on TLS",
        default=DEFAULT_SERVERS,
        shown="required",
    )
    user: str | None = _option("user", values.text, "User name; needs `password`")
    password: str | None = _option("password", values.text, "Password of `user`", secret=True)
    token: str | None = _option("token", values.text, "Token to log in with", secret=True)
    creds: Credentials | None = _option(  # noqa: RUF009  # the default is None
        "creds", values.credentials, "Credentials file (JWT and seed), or its text", secret=True
    )
    nkey: str | None = _option("nkey", values.seed, "Seed of a user's nkey, or a file with it", secret=True)
    tls_ca: str | None = _option(
        "tlsCa",
        values.pem("CERTIFICATE"),
        "PEM file, or its text: the authorities that may vouch for the servers; unset: the system's",
        secret=True,
    )
    tls_cert: str | None = _option(
        "tlsCert",
        values.pem("CERTIFICATE"),
        "PEM file, or its text: the client certificate; needs `tlsKey`",
        secret=True,
    )
    tls_key: str | None = _option(
        "tlsKey", values.pem("PRIVATE KEY"), "PEM file, or its text: the key of `tlsCert`, not encrypted", secret=True
    )
    tls_hostname: str | None = _option(
        "tlsHostname", values.text, "Name expected in the certificate of the servers, where it is not the URL's"
    )
    tls_first: bool = _option(
        "tlsFirst",
        values.flag,
        "TLS before anything else, for servers with `handshake_first`",
        default="false",
    )
    connect_timeout: float = _option(
        "connectTimeout", values.seconds, "Seconds in which one of the servers must have let us in", default="10"
    )
    request_timeout: float = _option(
        "requestTimeout", values.seconds, "Seconds for which an answer of JetStream is waited for", default="10"
    )
    js_domain: str | None = _option("jsDomain", values.token, "JetStream domain")
    api_prefix: str | None = _option(
        "apiPrefix",
        values.tokens,
        "Prefix of the JetStream API, where the account imports it under another subject",
        shown="$JS.API",
    )
    inbox_prefix: str = _option(
        "inboxPrefix",
        values.tokens,
        "Prefix of the subjects on which answers come. They have the payloads of all clients: no other user may "
        "subscribe them, so not `_INBOX`",
        default=INBOX_PREFIX,
    )
    mode: str = _option(
        "mode",
        values.one_of("messages", "retained", "sessions"),
        "`messages`: all that are stored; `retained`: the retained message of each topic; "
        "`sessions`: sessions and their positions",
        default="messages",
        use="batch",
    )
    stream: str = _option(
        "stream",
        values.stream,
        f"Stream; `{RETAINED}` with `mode` retained, `{SESSIONS}` with `mode` sessions",
        default=MESSAGES,
    )
    subject_prefix: str = _option(
        "subjectPrefix",
        values.prefix,
        "What stands before the subject of the topic in the stream, may be empty; "
        f"`{RETAINED_PREFIX}` with `mode` retained, `{SESSIONS_PREFIX}` with `mode` sessions",
        default=MESSAGES_PREFIX,
    )
    filters: tuple[str, ...] = _option(
        "topics",
        values.filters,
        "MQTT topic filters, separated by commas or line ends, or a JSON list; `#` is every topic",
        default="#",
        use="read",
    )
    starting_sequence: int | None = _option(
        "startingSequence", values.whole(1), "Sequence of the first message to read", use="read"
    )
    starting_timestamp: int | None = _option(
        "startingTimestamp",
        values.timestamp,
        "Messages stored at this time or later: ISO 8601, UTC where it has no zone, or milliseconds since 1970, "
        "from the year 2000 on",
        use="read",
    )
    starting_offsets: str | None = _option(
        "startingOffsets",
        values.one_of("earliest", "latest"),
        "Start with the oldest message, or with what comes from now on (streaming only)",
        shown="earliest; streaming: latest",
        use="read",
    )
    ending_sequence: int | None = _option(
        "endingSequence", values.whole(1), "Sequence of the last message to read", use="batch"
    )
    ending_timestamp: int | None = _option(
        "endingTimestamp", values.timestamp, "Messages stored before this time", use="batch"
    )
    ending_offsets: str = _option(
        "endingOffsets",
        values.one_of("latest"),
        "End with the newest message that is there when the DataFrame is made",
        default="latest",
        use="batch",
    )
    num_partitions: int | None = _option(
        "numPartitions",
        values.whole(1, 100_000),
        "Partitions of a read, which can be read at the same time",
        shown="processors of the driver, fewer for few messages",
        use="read",
    )
    max_messages: int | None = _option(
        "maxMessagesPerTrigger", values.whole(1), "Messages in one micro-batch, at most", use="stream"
    )
    max_bytes: int | None = _option(
        "maxBytesPerTrigger", values.size, "Bytes of one micro-batch, about (`64m` is understood)", use="stream"
    )
    fail_on_data_loss: bool = _option(
        "failOnDataLoss",
        values.flag,
        "Messages that were to be read and are gone: an error, or a warning with their number",
        default="true",
        use="read",
    )
    include_headers: bool = _option(
        "includeHeaders", values.flag, "Add the column `headers` with all NATS headers", default="false", use="read"
    )
    read_mode: str = _option(
        "readMode",
        values.one_of("auto", "pull", "direct"),
        "Read by pull consumers or by direct gets; `auto` goes by the stream's retention",
        default="auto",
        use="read",
    )
    pushdown: bool = _option(
        "pushdown",
        values.flag,
        "Have NATS evaluate filters of a query, one per `load()`; needs `spark.sql.python.filterPushdown.enabled`",
        default="false",
        use="batch",
    )
    batch_size: int = _option(
        "batchSize", values.whole(1, 1_000_000), "Rows of an Arrow batch, at most", default="10000", use="read"
    )
    decoders: tuple["Decoder", ...] = _option(
        "decoders",
        values.decoders,
        "JSON object: topic filter and how its payloads are read; adds typed columns, see [payloads](#payloads)",
        default="{}",
        shown="none",
        use="read",
    )
    topic: str | None = _option("topic", values.mqtt_topic, "Topic of rows that have none", use="write")
    qos: int = _option("qos", values.whole(0, 2), "QoS of rows that have none", default="1", use="write")
    retain: bool = _option("retain", values.flag, "RETAIN of rows that have none", default="false", use="write")
    query_id: str | None = _option(
        "queryId",
        values.text,
        "Names the write: what it has stored already is not stored again within the stream's duplicate window",
        shown="one per query",
        use="write",
    )
    duplicate_window: float | None = _option(
        "duplicateWindow",
        values.seconds,
        "Seconds for which the stream has to recognise what it has stored already: raises its `duplicate_window`",
        shown="the stream's",
        use="write",
    )
    max_in_flight: int = _option(
        "maxInFlight",
        values.whole(1, 100_000),
        "Messages of one task that may wait for their acknowledgement; those of all tasks should be fewer than 10000",
        default="1000",
        use="write",
    )
    dead_letter_topic: str | None = _option(
        "deadLetterTopic",
        values.mqtt_topic,
        "Topic of a message about each row that cannot be published; without it such a row fails the write",
        use="write",
    )
    files: tuple[tuple[str, str], ...] = ()
    """Attributes whose values were read from files, with the names of the files."""

    given: frozenset[str] = frozenset()
    """Attributes that the user has given, not left at their defaults."""

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> Self:
        """Check a user's options, with names in any case; raises OptionError, one line that names the option.

        Values are texts, as Spark passes them; numbers and booleans are accepted too, and None means not given.
        """
        found: dict[str, Any] = {}
        files: dict[str, str] = {}
        for key, value in options.items():
            option = BY_NAME.get(key.lower())
            if option is None:
                if key.lower() not in IGNORED:
                    raise _unknown(key)
            elif value is not None:
                text = _as_text(value)
                found[option.attribute] = _parse(option, text)
                if option.attribute in _FROM_FILES and values.names_file(text):
                    files[option.attribute] = str(Path(text).expanduser().absolute())
        if (own := _STREAMS.get(found.get("mode", ""))) is not None:
            found = {**own, **found}
        made = cls(**found, files=tuple(files.items()), given=frozenset(found))
        made._check()
        return made

    def _check(self) -> None:
        self._exclusive("user", "token", "creds", "nkey", why="give one way to log in")
        if (self.user is None) != (self.password is None):
            raise OptionError("user and password need each other", "password" if self.password is None else "user")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise OptionError("tlsCert and tlsKey need each other", "tlsKey" if self.tls_key is None else "tlsCert")
        self._exclusive("js_domain", "api_prefix")
        self._exclusive("starting_sequence", "starting_timestamp", "starting_offsets", why="give one start")
        self._exclusive("ending_sequence", "ending_timestamp", "ending_offsets", why="give one end")
        for start, end in (
            (self.starting_sequence, self.ending_sequence),
            (self.starting_timestamp, self.ending_timestamp),
        ):
            if start is not None and end is not None and end < start:
                first, last = ("startingSequence", "endingSequence")
                if start is self.starting_timestamp:
                    first, last = ("startingTimestamp", "endingTimestamp")
                raise OptionError(f"{last} is before {first}", last)
        if self.mode != "messages":
            means_nothing = (*_OF_RANGES, *(_OF_MESSAGES if self.mode == "sessions" else ()))
            for name in sorted(self.given):
                if name.startswith(means_nothing):
                    own = NAMES[name]
                    raise OptionError(
                        f"{own} has no effect with mode {self.mode}, which reads the present messages", own
                    )
        if self.tls_ca is not None or self.tls_cert is not None:
            tls.context(self.access)

    def _exclusive(self, *attributes: str, why: str = "give one of them") -> None:
        given = [NAMES[name] for name in attributes if name in self.given]
        if len(given) > 1:
            raise OptionError(f"{' and '.join(given)} exclude each other: {why}", given[1])

    def require_servers(self) -> None:
        """Raise OptionError when the option `servers` was not given.

        Spark drops the options of a table that CREATE TABLE has made. A default would read and write at another server
        than the table names, without a word.
        """
        if "servers" not in self.given:
            text = f"give the option servers, such as {DEFAULT_SERVERS}. For a table in SQL: {_NO_TABLES}"
            raise OptionError(text, "servers")

    def check_use(self, use: Literal["batch", "stream", "write"]) -> None:
        """Raise OptionError when an option was given that has no effect for this use."""
        allowed = ("all", "write") if use == "write" else ("all", "read", use)
        wording = {"batch": "a batch read", "stream": "a streaming read", "write": "a write"}
        for option in OPTIONS:
            if option.attribute in self.given and option.use not in allowed:
                raise OptionError(f"{option.name} has no effect for {wording[use]}: leave it out", option.name)

    @cached_property
    def access(self) -> Access:
        """Connection settings that these options give."""
        prefix = self.api_prefix or (f"$JS.{self.js_domain}.API" if self.js_domain else "$JS.API")
        return Access(
            servers=self.servers,
            user=self.user,
            password=self.password,
            token=self.token,
            creds=self.creds,
            nkey=self.nkey,
            tls_ca=self.tls_ca,
            tls_cert=self.tls_cert,
            tls_key=self.tls_key,
            tls_hostname=self.tls_hostname,
            tls_first=self.tls_first,
            connect_timeout=self.connect_timeout,
            request_timeout=self.request_timeout,
            api_prefix=prefix,
            inbox_prefix=self.inbox_prefix,
        )

    @cached_property
    def subjects(self) -> tuple[str, ...]:
        """Stream subjects (with the prefix) that match `filters`; () for all subjects of the stream."""
        if "#" in self.filters:
            return ()
        found = (self.subject_prefix + subject for item in self.filters for subject in filter_to_subjects(item))
        return tuple(dict.fromkeys(found))

    @property
    def asked(self) -> tuple[str, ...]:
        """Subjects of `subjects` that NATS evaluates; () where NATS sends every message and the reader selects."""
        return asked(self.subjects)

    def renewed(self) -> Self:
        """Return options with what their files contain now; the same object when nothing has changed.

        A file that is missing or holds no credentials, as while it is being replaced, keeps what was read before.
        """
        changed: dict[str, Any] = {}
        for attribute, name in self.files:
            if not Path(name).exists():  # also on an executor, which need not have it
                continue
            try:
                value = BY_NAME[NAMES[attribute].lower()].parse(name)
            except ValueError as error:
                log.warning("%s: %s; what was read before is used", NAMES[attribute], error)
                continue
            if value != getattr(self, attribute):
                changed[attribute] = value
        if not changed:
            return self
        made = replace(self, **changed)
        try:
            if made.tls_ca is not None or made.tls_cert is not None:
                tls.context(made.access)
        except OptionError as error:  # a certificate is there before its key
            log.warning("%s; what was read before is used", error)
            return self
        return made


def _table() -> Iterator[Option]:
    for item in fields(Options):
        if item.metadata:
            info = item.metadata
            yield Option(attribute=item.name, **info)


OPTIONS: Final = tuple(_table())
"""All options, in the order of the documentation."""

BY_NAME: Final[Mapping[str, Option]] = {option.name.lower(): option for option in OPTIONS}
"""Option name in lower case -> option."""

NAMES: Final[Mapping[str, str]] = {option.attribute: option.name for option in OPTIONS}
"""Attribute of Options -> name of the option."""


def _as_text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def _parse(option: Option, value: str) -> Any:
    try:
        return option.parse(value)
    except ValueError as error:
        hidden = option.secret or (option.name in ("servers", "decoders") and "@" in value)
        shown = "" if hidden else f" = {value[:80]!r}"
        raise OptionError(f"{option.name}{shown}: {error}", option.name) from None


def _unknown(key: str) -> OptionError:
    if key.lower() in _OF_TABLES:
        return OptionError(_NO_TABLES, key)
    if key.lower() in ("path", "paths"):
        return OptionError(f"{key}: {_NO_PATHS}", key)
    near = difflib.get_close_matches(key.lower(), BY_NAME, n=1)
    hint = f"did you mean {BY_NAME[near[0]].name}?" if near else "docs/spark.md lists the options"
    return OptionError(f"there is no option {key[:80]!r}: {hint}", key)
