# SPDX-License-Identifier: Apache-2.0
"""The blocking connection: logins, TLS, several servers, what is refused and by which option, a server that goes."""

import socket
import ssl
import sys
import threading
import time
from base64 import urlsafe_b64encode
from datetime import timedelta
from fcntl import ioctl
from pathlib import Path
from termios import FIONREAD

import pytest

from pyspark_mqtt_nats.errors import AccessError, ApiError, ConnectError, RequestTimeout
from pyspark_mqtt_nats.nats.connection import Connection
from pyspark_mqtt_nats.nats.frames import Frames
from tests.backbone.certificates import ACCOUNT, OPERATOR, USER, Authority, credentials, nkey, token
from tests.conftest import NatsFactory
from tests.harness.nats import NatsServer
from tests.harness.waiting import eventually
from tests.spark.connecting import at_once, lost, receive, refusal, round_trip
from tests.spark.servers import INFO, connect, listener, says, says_hello

TLS_INFO = INFO.replace(b"}", b',"tls_required":true}')


# -- bytes and requests ---------------------------------------------------------------------------


def test_bytes_of_every_size(nats_server: NatsServer) -> None:
    with connect(nats_server.url) as connection:
        assert connection.max_payload == 8 * 1024 * 1024
        assert connection.info["version"].startswith("2.")
        for size in (0, 1, 1000, 65_536, 1_000_000):
            round_trip(connection, b"x" * size)
        started = time.monotonic()
        assert connection.receive(0.2) == b""
        assert 0.15 < time.monotonic() - started < 5


def test_messages_that_come_during_a_request_are_collected() -> None:
    """Whole messages, the end of one whose beginning came before, and half a one: each is parsed once."""

    def serve(client: socket.socket) -> None:
        says_hello(client)
        client.sendall(b"HMSG others 7 in.box 12 15\r\nNATS/1.0\r\n\r\no")
        asked = b""
        while not asked.endswith(b"\r\nwhat\r\n"):
            asked += client.recv(65_536)
        reply = asked.splitlines()[-2].split()[2]
        client.sendall(
            b"ne\r\nPING\r\nHMSG others 7 in.box 12 15\r\nNATS/1.0\r\n\r\ntwo\r\nMSG others 7 3\r\nend\r\n"
            b"HMSG %b R 17 19\r\nNATS/1.0\r\nA:b\r\n\r\nok\r\nHMSG others 7 in.box 12 17\r\nNATS/1.0\r\n\r\nth" % reply
        )
        assert client.recv(65_536) == b"PONG\r\n"
        client.sendall(b"ree\r\n")
        client.recv(65_536)

    with listener(serve) as url, connect(url) as connection:
        frames = Frames(b"7")
        connection.collect(frames)
        assert connection.read(5)
        reply = connection.request("echo", b"what")
        assert (reply.headers, reply.payload) == (b"NATS/1.0\r\nA:b\r\n\r\n", b"ok")
        assert (len(frames), [one.payload for one in frames.loose(b"7")]) == (2, [b"end"])
        while len(frames) < 3:
            assert connection.read(5)
        assert frames.take(3).payloads.to_pylist() == [b"one", b"two", b"three"]


@pytest.mark.parametrize(
    ("said", "kind", "text"),
    [
        (b"-ERR 'Permissions Violation for Publish to \"$JS.API.X\"'", AccessError, r"JS\.API\.X.*option user"),
        (b"-ERR 'Slow Consumer'", ConnectError, "was lost: Slow Consumer"),
        (b"-ERR 'Stale\xff Connection'", ConnectError, "was lost: Stale"),
        (b"-ERR", ConnectError, "was lost: it was closed"),
    ],
)
def test_what_the_server_refuses_while_messages_come(said: bytes, kind: type[Exception], text: str) -> None:
    def serve(client: socket.socket) -> None:
        says_hello(client)
        client.sendall(b"HMSG others 7 in.box 12 15\r\nNATS/1.0\r\n\r\none\r\n" + said + b"\r\n")

    def read_on(connection: Connection) -> None:
        while True:
            connection.read(5)

    with listener(serve) as url, connect(url) as connection:
        frames = Frames(b"7")
        connection.collect(frames)
        with pytest.raises(kind, match=text):
            read_on(connection)
        assert len(frames) == 1


def test_requests(nats_server: NatsServer) -> None:
    with connect(nats_server.url) as service, connect(nats_server.url) as connection:
        with pytest.raises(ApiError, match="no server answers on echo") as nobody:
            connection.request("echo")
        assert nobody.value.code == 503
        service.send(b"SUB echo 1\r\nPING\r\n")
        assert receive(service, 6) == b"PONG\r\n"
        with pytest.raises(RequestTimeout, match=r"no answer on echo within 0.2 s \(option requestTimeout\)"):
            connection.request("echo", timeout=0.2)
        late = receive(service, 1).split()[3]
        service.send(b"PUB %b 4\r\nlate\r\n" % late)

        def answer() -> None:
            line, _, body = receive(service, 300_000).partition(b"\r\n")
            service.send(b"PUB %b %d\r\n%b" % (line.split()[3], len(body) - 2, body))

        thread = threading.Thread(target=answer)
        thread.start()
        reply = connection.request("echo", b"y" * 300_000)
        thread.join()
        assert reply.payload == b"y" * 300_000


def test_what_is_too_large_is_not_sent(nats_factory: NatsFactory) -> None:
    server = nats_factory(config="max_payload: 1000")
    with connect(server.url) as connection:
        with pytest.raises(ApiError, match="1001 bytes are more than the max_payload of nats://") as caught:
            connection.request("a", b"x" * 989, b"NATS/1.0\r\n\r\n")
        assert caught.value.code == 400
        round_trip(connection, b"x" * 1000)


def test_pings_of_the_server_are_answered(nats_factory: NatsFactory) -> None:
    server = nats_factory(config='ping_interval: "100ms"\nping_max: 2')
    with connect(server.url) as connection:
        frames = Frames(b"1")
        connection.collect(frames)
        connection.send(b"SUB quiet 1\r\n")
        pings = 0
        obey = connection.control

        def count(line: bytes) -> AccessError | None:
            nonlocal pings
            pings += line == b"PING"
            return obey(line)

        connection.control = count  # type: ignore[method-assign]
        while pings < 8:
            with pytest.raises(RequestTimeout):
                connection.request("quiet", timeout=0.3)
        assert frames.take(1).subjects.to_pylist() == [b"quiet"]


# -- a connection that is lost --------------------------------------------------------------------


def test_a_server_that_dies(nats_factory: NatsFactory) -> None:
    server = nats_factory()
    with connect(server.url) as connection, connect(server.url) as other:
        other.send(b"SUB a 1\r\n")
        server.kill()
        assert str(lost(connection)) == f"the connection to {server.url} was lost: it was closed (option servers)"
        with pytest.raises(ConnectError, match="was lost"):
            other.request("a", timeout=10)


def test_a_server_that_takes_no_more(nats_factory: NatsFactory) -> None:
    server = nats_factory()
    with connect(server.url, requestTimeout=0.3) as connection:
        server.pause()
        with pytest.raises(ConnectError, match="was lost: it takes no more data"):
            connection.send(b"PUB a 1000000\r\n%b\r\n" % bytes(1_000_000) * 20)
        server.resume()


def test_the_server_says_why_it_ends_a_connection(nats_server: NatsServer) -> None:
    with connect(nats_server.url) as connection:
        connection.send(b"PUB a 99999999\r\n")
        assert "was lost: Maximum Payload Violation" in str(lost(connection))
    with connect(nats_server.url) as connection:
        connection.send(b"NONSENSE\r\n")
        with pytest.raises(ConnectError, match=r"was lost: Unknown Protocol Operation"):
            connection.request("a", timeout=10)


def test_what_is_not_the_protocol_ends_a_request() -> None:
    def serve(client: socket.socket) -> None:
        says_hello(client)
        client.recv(65_536)
        client.sendall(b"MSG a b c d\r\n")
        client.recv(65_536)

    with listener(serve) as url, connect(url) as connection, pytest.raises(ConnectError, match="not NATS"):
        connection.request("a")


# -- permissions ----------------------------------------------------------------------------------


def test_permissions(nats_factory: NatsFactory) -> None:
    server = nats_factory(
        config="""authorization { users: [
            {user: u, password: p, permissions: {publish: {deny: secret}}}
            {user: v, password: p, permissions: {subscribe: {allow: ["mine.>"]}}}
        ] }"""
    )
    with connect(server.url, user="u", password="p") as connection:
        with pytest.raises(AccessError, match=r'Publish to "secret".* \(option user\)') as caught:
            connection.request("secret")
        assert caught.value.option == "user"
        round_trip(connection)
    with connect(server.url, user="v", password="p") as connection:
        with pytest.raises(AccessError, match=r"subscribe to \$MQTT.spark.> \(option inboxPrefix\)") as caught:
            connection.request("a")
        assert caught.value.option == "inboxPrefix"
    with connect(server.url, user="v", password="p", inboxPrefix="mine.in") as connection:
        assert connection.inbox.startswith(b"mine.in.")
        round_trip(connection)
        connection.send(b"SUB theirs 5\r\n")
        with pytest.raises(AccessError, match=r'Subscription to "theirs".* \(option user\)'):
            connection.request("a")


# -- logins ---------------------------------------------------------------------------------------


def test_user_and_password(nats_factory: NatsFactory) -> None:
    server = nats_factory(config='authorization { user: "u", password: "p @w" }')
    with connect(server.url, user="u", password="p @w") as connection:
        round_trip(connection)
    in_url = server.url.replace("nats://", "nats://u:p%20%40w@")
    with connect(in_url) as connection:
        round_trip(connection)
        assert "p" not in str(connection.server).replace("nats://127.0.0.1", "")
    with connect(in_url.replace("p%20", "q"), user="u", password="p @w") as connection:
        round_trip(connection)
    error = at_once(server.url, user="u", password="wrong-one")
    assert (error.option, "the login by user and password" in str(error)) == ("user", True)
    assert "wrong-one" not in str(error)
    error = at_once(in_url.replace("p%20", "wrong-one"))
    assert (error.option, "wrong-one" in str(error)) == ("servers", False)
    error = at_once(server.url)
    assert (error.option, "it wants a login" in str(error)) == ("user", True)


def test_token(nats_factory: NatsFactory) -> None:
    server = nats_factory(config='authorization { token: "s3cret" }')
    with connect(server.url, token="s3cret") as connection:
        round_trip(connection)
    with connect(server.url.replace("nats://", "nats://s3cret@")) as connection:
        round_trip(connection)
    error = at_once(server.url, token="wrong-one")
    assert (error.option, "wrong-one" in str(error)) == ("token", False)


def test_nkey(nats_factory: NatsFactory, tmp_path: Path) -> None:
    user, stranger = nkey(USER), nkey(USER)
    server = nats_factory(config=f"authorization {{ users: [{{nkey: {user.public}}}] }}")
    file = tmp_path / "user.nk"
    file.write_bytes(user.seed)
    for given in (str(file), user.seed.decode()):
        with connect(server.url, nkey=given) as connection:
            round_trip(connection)
    assert at_once(server.url, nkey=stranger.seed.decode()).option == "nkey"
    plain = nats_factory(config='authorization { token: "t" }')
    assert at_once(plain.url, nkey=user.seed.decode()).option == "nkey"


def test_credentials_file(nats_factory: NatsFactory, tmp_path: Path) -> None:
    operator, account, user = nkey(OPERATOR), nkey(ACCOUNT), nkey(USER)
    server = nats_factory(
        config=f'operator: "{token(operator, operator, "operator", "O")}"\n'
        f'resolver: MEMORY\nresolver_preload {{ {account.public}: "{token(operator, account, "account", "A")}" }}\n'
        "jetstream: false"
    )
    file = tmp_path / "user.creds"
    file.write_text(credentials(token(account, user, "user", "U"), user), encoding="utf-8")
    with connect(server.url, creds=str(file)) as connection:
        round_trip(connection)
    with connect(server.url, creds=file.read_text(encoding="utf-8")) as connection:
        round_trip(connection)
    strange = credentials(token(nkey(ACCOUNT), user, "user", "U"), user)
    error = at_once(server.url, creds=strange)
    assert (error.option, "refused the login by creds" in str(error)) == ("creds", True)
    claims = urlsafe_b64encode(b'{"exp":1600000000}').decode().rstrip("=")
    error = at_once(server.url, creds=credentials(f"e30.{claims}.e30", user))
    assert (error.option, "has expired" in str(error)) == ("creds", True)
    assert at_once(server.url, creds=credentials("no.jwt", user)).option == "creds"


# -- TLS ------------------------------------------------------------------------------------------


class Tls:
    """Certificates for a server called nats.example on 127.0.0.1, and for a client."""

    def __init__(self, directory: Path) -> None:
        self.authority = Authority(directory)
        self.server, self.client = self.authority.issue("nats.example"), self.authority.issue("client")
        self.ca = {"tlsCa": str(self.authority.file)}
        self.pair = {"tlsCert": str(self.client.certificate), "tlsKey": str(self.client.key)}

    def config(self, more: str = "") -> str:
        return (
            f'tls {{ cert_file: "{self.server.certificate}", key_file: "{self.server.key}", '
            f'ca_file: "{self.authority.file}"{more} }}'
        )


def tls_url(server: NatsServer) -> str:
    return server.url.replace("nats://", "tls://")


def test_tls(nats_factory: NatsFactory, tmp_path: Path) -> None:
    keys = Tls(tmp_path)
    server = nats_factory(config=keys.config())
    for url, options in (
        (tls_url(server), keys.ca),
        (server.url, keys.ca),  # the server insists
        (tls_url(server), keys.ca | {"tlsHostname": "nats.example"}),
    ):
        with connect(url, **options) as connection:
            assert isinstance(connection._wire, ssl.SSLSocket)
            for size in (0, 1, 16_384, 16_385, 1_000_000):
                round_trip(connection, b"x" * size)
            assert connection.receive(0.05) == b""
    error = at_once(tls_url(server))
    assert (error.option, "not trusted" in str(error)) == ("tlsCa", True)
    assert at_once(server.url).option == "tlsCa"
    assert at_once(tls_url(server), tlsHostname="other.example", **keys.ca).option == "tlsHostname"
    other = tmp_path / "other"
    other.mkdir()
    assert at_once(tls_url(server), tlsCa=str(Authority(other).file)).option == "tlsCa"


def test_tls_brings_what_is_there_in_long_strides(nats_factory: NatsFactory, tmp_path: Path) -> None:
    keys = Tls(tmp_path)
    server = nats_factory(config=keys.config())
    with connect(tls_url(server), **keys.ca) as connection, connect(server.url, **keys.ca) as publisher:
        connection.send(b"SUB a 1\r\nPING\r\n")
        assert receive(connection, 6) == b"PONG\r\n"
        publisher.send(b"PUB a 500000\r\n%b\r\n" % bytes(500_000) * 4)
        publisher.send(b"PING\r\n")
        assert receive(publisher, 6) == b"PONG\r\n"

        def waiting() -> bool:
            return int.from_bytes(ioctl(connection._wire, FIONREAD, bytes(4)), sys.byteorder) > 3 * 16_384

        eventually(waiting)
        assert len(connection.receive(5)) > 2 * 16_384


def test_client_certificates(nats_factory: NatsFactory, tmp_path: Path) -> None:
    keys = Tls(tmp_path)
    server = nats_factory(config=keys.config(", verify: true"))
    with connect(tls_url(server), **keys.ca, **keys.pair) as connection:
        round_trip(connection)
    error = at_once(tls_url(server), **keys.ca)
    assert (error.option, "client certificate" in str(error)) == ("tlsCert", True)
    other = tmp_path / "other"
    other.mkdir()
    strange = Authority(other).issue("client")
    options = {"tlsCert": str(strange.certificate), "tlsKey": str(strange.key)}
    assert refusal(tls_url(server), **keys.ca, **options).option == "tlsCert"
    mapped = nats_factory(
        config=keys.config(", verify_and_map: true") + '\nauthorization { users: [{user: "somebody@else"}] }'
    )
    error = at_once(tls_url(mapped), **keys.ca, **keys.pair)
    assert (error.option, "client certificate of tlsCert" in str(error)) == ("tlsCert", True)


def test_tls_first(nats_factory: NatsFactory, tmp_path: Path) -> None:
    keys = Tls(tmp_path)
    server = nats_factory(config=keys.config(", handshake_first: true"))
    with connect(tls_url(server), tlsFirst="true", **keys.ca) as connection:
        round_trip(connection)
    error = refusal(tls_url(server), connectTimeout=1, **keys.ca)
    assert "set tlsFirst" in str(error)
    verifying = nats_factory(config=keys.config(", handshake_first: true, verify: true"))
    error = refusal(tls_url(verifying), tlsFirst="true", connectTimeout=2, **keys.ca)
    assert "client certificate" in str(error) or error.option == "servers"
    usual = nats_factory(config=keys.config())
    assert at_once(tls_url(usual), tlsFirst="true", **keys.ca).option == "tlsFirst"


def test_nothing_is_said_in_the_clear_when_tls_was_asked_for(nats_server: NatsServer, tmp_path: Path) -> None:
    for url, options in ((tls_url(nats_server), {}), (nats_server.url, Tls(tmp_path).ca)):
        error = at_once(url, user="u", password="p", **options)
        assert (error.option, "offers no TLS" in str(error)) == ("servers", True)


def test_what_follows_info_in_the_clear_is_refused() -> None:
    """Somebody between us and the server could put words into its mouth before TLS begins."""
    with listener(says(TLS_INFO + b"PONG\r\n")) as url:
        assert "it sends data between INFO and the TLS handshake" in str(at_once(url))
    with listener(says(TLS_INFO + b"-ERR 'maximum connections exceeded'\r\n")) as url:
        assert "no more clients now" in str(refusal(url, connectTimeout=0.5))


def test_handshakes_that_fail(nats_factory: NatsFactory, tmp_path: Path) -> None:
    with listener(says(TLS_INFO, b"220 hello\r\n")) as url:
        assert "it does not speak TLS" in str(at_once(url))
    with listener(says(TLS_INFO)) as url:
        assert "the TLS handshake does not end" in str(refusal(url, connectTimeout=0.5))
    with listener(says(b"")) as url:
        assert refusal(url, connectTimeout=0.5, tlsFirst="true").option == "tlsFirst"
    with listener(says(TLS_INFO)) as url:
        assert at_once(url, tlsHostname=".example").option == "tlsHostname"
    keys = Tls(tmp_path)
    old = keys.authority.issue("old", lifetime=timedelta(minutes=-5))
    server = nats_factory(config=f'tls {{ cert_file: "{old.certificate}", key_file: "{old.key}" }}')
    error = at_once(tls_url(server), **keys.ca)
    assert (error.option, "has expired" in str(error)) == ("servers", True)


# -- several servers, time, and what is no server -------------------------------------------------
