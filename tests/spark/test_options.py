# SPDX-License-Identifier: Apache-2.0
"""Options of the source and the sink: values, refusals in one line, secrets, and the table in the documentation."""

import json
import pickle
import re
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtt_streams.stored import rfc3339
from pyspark_mqtt_nats import values
from pyspark_mqtt_nats.decoders.option import Decoder
from pyspark_mqtt_nats.errors import OptionError
from pyspark_mqtt_nats.nats.access import Credentials, Server
from pyspark_mqtt_nats.options import BY_NAME, IGNORED, OPTIONS, Options
from tests.backbone.certificates import ACCOUNT, USER, Authority, credentials, nkey
from tests.harness.nats import ROOT

SECRET = "correct-horse-battery"


def parse(**options: Any) -> Options:
    return Options.parse(options)


def refusal(options: dict[str, Any]) -> OptionError:
    with pytest.raises(OptionError) as caught:
        Options.parse(options)
    assert "\n" not in str(caught.value)
    return caught.value


def test_without_options() -> None:
    options = Options.parse({})
    assert options.servers == (Server("127.0.0.1", 4222),)
    assert (options.stream, options.subject_prefix, options.subjects) == ("$MQTT_msgs", "$MQTT.msgs.", ())
    assert options.given == frozenset()
    assert options.access.api_prefix == "$JS.API"
    assert options.access.login == ""
    assert not options.access.wants_tls


@pytest.mark.parametrize(
    ("options", "attribute", "value"),
    [
        ({"servers": "nats://a, tls://b:5,"}, "servers", (Server("a"), Server("b", 5, True))),
        ({"servers": "nats://u:p%40w@[::1]:7"}, "servers", (Server("::1", 7, False, "u", "p@w"),)),
        ({"servers": "nats://t%2Fk@a"}, "servers", (Server("a", 4222, False, "t/k"),)),
        ({"SERVERS": "nats://a/"}, "servers", (Server("a"),)),
        ({"user": "u", "password": " p "}, "password", " p "),
        ({"connectTimeout": "1.5"}, "connect_timeout", 1.5),
        ({"connecttimeout": "20s"}, "connect_timeout", 20.0),
        ({"requestTimeout": 3}, "request_timeout", 3.0),
        ({"tlsFirst": True}, "tls_first", True),
        ({"tlsFirst": "FALSE"}, "tls_first", False),
        ({"stream": "archive"}, "stream", "archive"),
        ({"subjectPrefix": "a.b"}, "subject_prefix", "a.b."),
        ({"subjectPrefix": "a.b."}, "subject_prefix", "a.b."),
        ({"subjectPrefix": ""}, "subject_prefix", ""),
        ({"topics": "a/+, b/# ,a/+"}, "filters", ("a/+", "b/#")),
        ({"topics": "a b\n/c\n"}, "filters", ("a b", "/c")),
        ({"topics": '["a,b/#", "c"]'}, "filters", ("a,b/#", "c")),
        ({"startingSequence": "18446744073"}, "starting_sequence", 18446744073),
        ({"startingTimestamp": "1970-01-01T00:00:01.000000001Z"}, "starting_timestamp", 1_000_000_001),
        ({"startingTimestamp": "1970-01-02"}, "starting_timestamp", 86_400 * 10**9),
        ({"startingTimestamp": "1970-01-01 01:00:00.5+01:00"}, "starting_timestamp", 500_000_000),
        ({"endingTimestamp": "1970-01-01T00:01"}, "ending_timestamp", 60 * 10**9),
        ({"endingTimestamp": "1700000000123"}, "ending_timestamp", 1_700_000_000_123 * 10**6),
        ({"startingTimestamp": "0"}, "starting_timestamp", 0),
        ({"startingOffsets": "Latest"}, "starting_offsets", "latest"),
        ({"numPartitions": 8}, "num_partitions", 8),
        ({"maxMessagesPerTrigger": "1000"}, "max_messages", 1000),
        ({"maxBytesPerTrigger": "64m"}, "max_bytes", 64 << 20),
        ({"maxBytesPerTrigger": "2 GiB"}, "max_bytes", 2 << 30),
        ({"maxBytesPerTrigger": "512kb"}, "max_bytes", 512 << 10),
        ({"maxBytesPerTrigger": "7b"}, "max_bytes", 7),
        ({"failOnDataLoss": "false"}, "fail_on_data_loss", False),
        ({"readMode": "direct"}, "read_mode", "direct"),
        ({"decoders": '{"site/+/temp": " number "}'}, "decoders", (Decoder("site/+/temp", "number"),)),
        ({"topic": "site/7"}, "topic", "site/7"),
        ({"qos": "0"}, "qos", 0),
        ({"user": None, "token": "t"}, "user", None),
    ],
)
def test_values(options: dict[str, Any], attribute: str, value: object) -> None:
    assert getattr(Options.parse(options), attribute) == value


@pytest.mark.parametrize(
    ("options", "option", "words"),
    [
        ({"servers": "127.0.0.1:4222"}, "servers", "expected URLs"),
        ({"servers": "ws://a"}, "servers", "expected URLs"),
        ({"servers": "nats://a:x"}, "servers", "expected URLs"),
        ({"servers": "nats://a:0"}, "servers", "expected URLs"),
        ({"servers": "nats://a/b"}, "servers", "expected URLs"),
        ({"servers": "nats://a?tls=1"}, "servers", "expected URLs"),
        ({"servers": " , "}, "servers", "expected URLs"),
        ({"servers": "nats://a b"}, "servers", "expected URLs"),
        ({"user": "u"}, "password", "user and password need each other"),
        ({"password": "p"}, "user", "user and password need each other"),
        ({"user": ""}, "user", "it is empty"),
        ({"user": "u", "password": "p", "token": "t"}, "token", "user and token exclude each other"),
        ({"creds": "/does/not/exist"}, "creds", "the file '/does/not/exist' cannot be read: No such file"),
        ({"creds": "/"}, "creds", "Is a directory"),
        ({"creds": "a\0b"}, "creds", "null"),
        ({"creds": str(ROOT / "LICENSE")}, "creds", "not a credentials file"),
        ({"nkey": "/does/not/exist"}, "nkey", "the file cannot be read: No such file"),
        ({"nkey": str(ROOT / "LICENSE")}, "nkey", "no seed of an nkey"),
        ({"nkey": "SU" + "A" * 56}, "nkey", "not the seed of an nkey"),
        ({"creds": credentials("a.b.c", nkey(USER)).replace("SU", "1U")}, "creds", "not the seed of an nkey"),
        ({"tlsCa": str(ROOT / "LICENSE")}, "tlsCa", "no CERTIFICATE in PEM format"),
        ({"tlsCa": "-----BEGIN CERTIFICATE-----"}, "tlsCa", "cannot be read"),
        ({"connectTimeout": "0"}, "connectTimeout", "more than 0"),
        ({"connectTimeout": "nan"}, "connectTimeout", "more than 0"),
        ({"connectTimeout": "soon"}, "connectTimeout", "= 'soon': expected a number of seconds"),
        ({"tlsFirst": "yes"}, "tlsFirst", "expected true or false"),
        ({"jsDomain": "a.b"}, "jsDomain", "without dots"),
        ({"jsDomain": "a", "apiPrefix": "b"}, "apiPrefix", "exclude each other"),
        ({"apiPrefix": "a.>"}, "apiPrefix", "without wildcards"),
        ({"inboxPrefix": "a b"}, "inboxPrefix", "without wildcards and spaces"),
        ({"mode": "all"}, "mode", "expected messages or retained"),
        ({"mode": "retained", "endingSequence": "4"}, "endingSequence", "has no effect with mode retained"),
        ({"stream": "a.b"}, "stream", "= 'a.b': expected the name of a stream"),
        ({"stream": ""}, "stream", "expected the name of a stream"),
        ({"subjectPrefix": "a..b"}, "subjectPrefix", "without wildcards"),
        ({"topics": ""}, "topics", "expected MQTT topic filters"),
        ({"topics": "a/#/b"}, "topics", "'a/#/b': a wildcard must be a whole level"),
        ({"topics": "a+/b"}, "topics", "'a+/b': a wildcard must be a whole level"),
        ({"topics": "$share/g/a"}, "topics", "leave out $share"),
        ({"topics": "$MQTT/msgs"}, "topics", "reserved"),
        ({"topics": "a\0"}, "topics", "NUL"),
        ({"topics": "[1]"}, "topics", "expected a JSON list of texts"),
        ({"topics": '["a"'}, "topics", "not JSON"),
        ({"topics": "a" * 4000}, "topics", "more than 3800 bytes"),
        ({"startingSequence": "0"}, "startingSequence", "= '0': expected 1 or more"),
        ({"startingSequence": "1e3"}, "startingSequence", "expected a whole number"),
        ({"startingSequence": "9" * 19}, "startingSequence", "expected 9223372036854775807 or less"),
        ({"startingSequence": "1", "startingTimestamp": "0"}, "startingTimestamp", "give one start"),
        ({"startingOffsets": "latest", "startingSequence": "1"}, "startingOffsets", "give one start"),
        ({"startingOffsets": '{"a":1}'}, "startingOffsets", "expected earliest or latest"),
        ({"startingTimestamp": "yesterday"}, "startingTimestamp", "expected a time such as 2026-01-31T12:00:00Z"),
        ({"startingTimestamp": "2026-02-30"}, "startingTimestamp", "expected a time"),
        ({"startingTimestamp": "0001-01-01T00:00:00+14:00"}, "startingTimestamp", "expected a time"),
        ({"startingTimestamp": "9" * 18}, "startingTimestamp", "expected a time"),
        ({"startingTimestamp": "1700000000"}, "startingTimestamp", "for seconds since 1970 append 000"),
        ({"endingTimestamp": "946684799999"}, "endingTimestamp", "before the year 2000"),
        ({"endingSequence": "3", "endingTimestamp": "0"}, "endingTimestamp", "give one end"),
        ({"endingOffsets": "earliest"}, "endingOffsets", "expected latest"),
        ({"startingSequence": "9", "endingSequence": "8"}, "endingSequence", "is before startingSequence"),
        (
            {"startingTimestamp": "946684800001", "endingTimestamp": "946684800000"},
            "endingTimestamp",
            "is before startingTimestamp",
        ),
        ({"numPartitions": "0"}, "numPartitions", "expected 1 or more"),
        ({"maxBytesPerTrigger": "64 parsecs"}, "maxBytesPerTrigger", "expected a number of bytes"),
        ({"maxBytesPerTrigger": "0"}, "maxBytesPerTrigger", "expected a number of bytes"),
        ({"readMode": "push"}, "readMode", "expected auto or pull or direct"),
        ({"decoders": "[]"}, "decoders", "expected a JSON object"),
        ({"decoders": '{"a/#/b": "json"}'}, "decoders", "a wildcard must be a whole level"),
        ({"topic": "a/+"}, "topic", "without + and #"),
        ({"topic": ""}, "topic", "it is empty"),
        ({"qos": "3"}, "qos", "expected 2 or less"),
    ],
)
def test_refused_values_are_named_in_one_line(options: dict[str, Any], option: str, words: str) -> None:
    error = refusal(options)
    assert error.option == option
    assert option in str(error)
    assert words in str(error)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("topic_s", "did you mean topics?"),
        ("startingoffset", "did you mean startingOffsets?"),
        ("failondataloss2", "did you mean failOnDataLoss?"),
        ("kafka.bootstrap.servers", "docs/spark.md lists the options"),
        ("path", "option `topics`"),
        ("paths", "option `topics`"),
    ],
)
def test_an_unknown_option_is_an_error(name: str, hint: str) -> None:
    error = refusal({name: "x"})
    assert error.option == name
    assert name in str(error)
    assert hint in str(error)


def test_what_spark_adds_is_no_error() -> None:
    assert Options.parse({"checkpointLocation": "/tmp/c", "queryName": "q"}) == Options.parse({})
    assert not IGNORED & set(BY_NAME)


def test_retained_messages_have_a_stream_of_their_own() -> None:
    options = parse(mode="retained", topics="a/#")
    assert (options.stream, options.subjects) == ("$MQTT_rmsgs", ("$MQTT.rmsgs.a.>", "$MQTT.rmsgs.a"))
    assert parse(mode="retained", stream="copy", subjectPrefix="").subject_prefix == ""


def test_subjects_of_filters() -> None:
    assert parse(topics="a/+/c,a b/#").subjects == ("$MQTT.msgs.a.*.c", "$MQTT.msgs.a/_b.>", "$MQTT.msgs.a/_b")
    assert parse(topics="a,#").subjects == ()
    assert parse(topics="+/x", subjectPrefix="").subjects == ("*.x",)


def test_the_prefix_of_the_api() -> None:
    assert parse(jsDomain="hub").access.api_prefix == "$JS.hub.API"
    assert parse(apiPrefix="imported.js.").access.api_prefix == "imported.js"


@pytest.mark.parametrize(
    ("options", "use", "words"),
    [
        ({"endingSequence": "5"}, "stream", "endingSequence has no effect for a streaming read"),
        ({"maxMessagesPerTrigger": "5"}, "batch", "maxMessagesPerTrigger has no effect for a batch read"),
        ({"topics": "a"}, "write", "topics has no effect for a write"),
        ({"qos": "1"}, "batch", "qos has no effect for a batch read"),
    ],
)
def test_an_option_of_another_use(options: dict[str, Any], use: Any, words: str) -> None:
    parsed = Options.parse(options)
    with pytest.raises(OptionError, match=words):
        parsed.check_use(use)
    Options.parse({"servers": "nats://a", "stream": "s"}).check_use(use)


def test_secrets_are_in_no_text(tmp_path: Path) -> None:
    user = nkey(USER)
    file = tmp_path / "user.creds"
    file.write_text(credentials("e30.e30.e30", user), encoding="utf-8")
    given: list[dict[str, Any]] = [
        {"servers": f"nats://u:{SECRET}@a"},
        {"user": "u", "password": SECRET},
        {"token": SECRET},
        {"creds": str(file)},
        {"creds": file.read_text(encoding="utf-8")},
        {"nkey": user.seed.decode()},
    ]
    seed = user.seed.decode()
    for options in given:
        parsed = Options.parse(options)
        assert pickle.loads(pickle.dumps(parsed)) == parsed
        for text in (
            repr(parsed),
            str(parsed.access),
            repr(parsed.servers),
            repr(parsed.creds),
            str(parsed.servers[0]),
        ):
            assert SECRET not in text
            assert seed not in text
            assert "e30" not in text
    bad: list[dict[str, Any]] = [
        {"servers": f"nats://u:{SECRET}@"},
        {"servers": f"http://u:{SECRET}@a"},
        {"nkey": seed[:-1]},
        {"nkey": seed[:20] + ("A" if seed[20] != "A" else "B") + seed[21:]},
        {"creds": file.read_text(encoding="utf-8").replace("USER NKEY SEED", "SEED")},
        {"password": SECRET},
    ]
    for options in bad:
        error = refusal(options)
        assert SECRET not in str(error)
        assert seed[:-1] not in str(error)


def test_ways_to_give_a_seed_and_credentials(tmp_path: Path) -> None:
    user = nkey(USER)
    seed = user.seed.decode()
    file = tmp_path / "seed.nk"
    file.write_text(f"# my key\n{seed}\n{user.public}\n", encoding="utf-8")
    assert parse(nkey=f" {seed}\n").nkey == parse(nkey=str(file)).nkey == seed
    text = credentials("a.b.c", user)
    file.write_text(text.replace("\n", "\r\n"), encoding="utf-8")
    assert parse(creds=str(file)).creds == parse(creds=text).creds == Credentials("a.b.c", seed)
    account = nkey(ACCOUNT).seed.decode()
    assert "not a user's" in str(refusal({"nkey": account}))
    assert "not a user's" in str(refusal({"creds": text.replace(seed, account)}))
    file.write_bytes(b"\xff\xfe")
    assert "not text" in str(refusal({"nkey": str(file)}))
    file.write_bytes(bytes(2 << 20))
    assert "larger than 1 MiB" in str(refusal({"creds": str(file)}))


def test_certificates_are_read_and_checked_at_once(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair, other = authority.issue("a"), authority.issue("b")
    options = parse(tlsCa=str(authority.file), tlsCert=str(pair.certificate), tlsKey=str(pair.key))
    assert options.tls_ca == authority.file.read_text(encoding="ascii")
    assert "PRIVATE KEY" in (options.tls_key or "")
    assert "PRIVATE" not in repr(options) + repr(options.access)
    assert options.access.wants_tls
    assert refusal({"tlsCert": str(pair.certificate)}).option == "tlsKey"
    assert refusal({"tlsKey": str(pair.key)}).option == "tlsCert"
    mixed = refusal({"tlsCert": str(pair.certificate), "tlsKey": str(other.key)})
    assert (mixed.option, str(mixed)) == ("tlsKey", "tlsKey: it is not the key of tlsCert")
    assert "no CERTIFICATE" in str(refusal({"tlsCert": str(pair.key), "tlsKey": str(pair.key)}))
    broken = "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"
    assert "cannot be read" in str(refusal({"tlsCert": str(pair.certificate), "tlsKey": broken}))


def test_an_encrypted_key_is_refused_without_asking_for_its_password(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    pair = Authority(tmp_path).issue("a")
    key = serialization.load_pem_private_key(pair.key.read_bytes(), None)
    text = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(SECRET.encode()),
    )
    error = refusal({"tlsCert": str(pair.certificate), "tlsKey": text.decode()})
    assert (error.option, "the key is encrypted" in str(error)) == ("tlsKey", True)


zones = st.integers(-14 * 60, 14 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))


@given(st.datetimes(datetime(1970, 1, 2), datetime(2200, 1, 1)), zones, st.integers(0, 999))
def test_times_are_exact_to_the_nanosecond(moment: datetime, zone: timezone, nanoseconds: int) -> None:
    moment = moment.replace(tzinfo=zone)
    delta = moment - datetime(1970, 1, 1, tzinfo=UTC)
    expected = (delta.days * 86_400 + delta.seconds) * 10**9 + delta.microseconds * 1000 + nanoseconds
    text = f"{moment:%Y-%m-%dT%H:%M:%S.%f}{nanoseconds:03d}{moment:%z}"
    assert values.timestamp(text) == expected
    assert values.timestamp(rfc3339(expected)) == expected


@given(st.lists(st.text("abc/ é$.,*>\t", min_size=1), min_size=1, max_size=5))
def test_every_topic_can_be_given_as_a_json_list(topics: list[str]) -> None:
    wanted = [topic for topic in topics if not topic.startswith("$")]
    if wanted:
        assert values.filters(json.dumps(wanted)) == tuple(dict.fromkeys(wanted))


WHERE = {"all": "both", "read": "reads", "batch": "batch reads", "stream": "streaming reads", "write": "writes"}


def table_rows() -> list[str]:
    rows = []
    for option in OPTIONS:
        default = f"`{option.default}`" if option.literal and option.default else option.default or "–"
        rows.append(f"| `{option.name}` | {default} | {WHERE[option.use]} | {option.doc}. |")
    return rows


def test_the_documentation_has_every_option_with_its_default() -> None:
    page = (ROOT / "docs" / "spark.md").read_text(encoding="utf-8")
    section = page.partition("\n## Options\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `.*\|$", section, re.MULTILINE)
    assert rows == table_rows(), "\n".join(table_rows())
