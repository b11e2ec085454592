# SPDX-License-Identifier: Apache-2.0
"""Authenticators in a gateway: who gets in, how the others are told, what ends when something changes."""

import logging
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mqtt_nats.access import passwords
from mqtt_nats.access.passwords import delete_user, set_password
from mqtt_nats.access.verifiers import set_password as set_verifier
from tests.access.test_passwords import CHEAP
from tests.access.test_tokens import Signer
from tests.authenticators.web import Service, serving
from tests.backbone.certificates import Authority
from tests.harness import raw, raw5
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw
from tests.harness.raw5 import CONNACK, Raw5
from tests.harness.waiting import eventually
from tests.integration.inprocess import Running, running
from tests.integration.test_authentication import begin, credentials, final
from tests.transport.support import NAME, Secure, dial, trusting
from tests.transport.web import Framed

BAD, NOT, EXPIRED = 0x86, 0x87, 0xA0
PATIENCE = 30.0


def connect(user: str | None, password: str | bytes | None, client_id: str = "", level: int = 4) -> bytes:
    flags = 2 | (0x80 if user is not None else 0) | (0x40 if password is not None else 0)
    tail = [one for one in (user, password) if one is not None]
    if level == 5:
        return raw5.connect(client_id, flags=flags & 0xC0, tail=b"".join(map(raw.field, tail)))
    return raw.connect(client_id, flags=flags, tail=tail)


def refused(port: int, user: str | None, password: str | bytes | None, code: int) -> None:
    """By 5.0 with the reason code, and by 3.1.1 with the return code that belongs to it."""
    if password is None or user is not None:  # 3.1.1 has no password without a user name
        with Raw(port, patience=PATIENCE) as client:
            client.send(connect(user, password))
            (answer,) = client.expect_closed()
            assert (answer.first, answer.body) == (0x20, bytes((0, {BAD: 4, NOT: 5, 0x88: 3}[code])))
    raw5.refused(port, connect(user, password, level=5), code)


def entered(port: int, user: str | None, password: str | bytes | None, client_id: str = "") -> Raw5:
    client = Raw5(port, patience=PATIENCE)
    try:
        client.send(connect(user, password, client_id, level=5))
        client.answer(CONNACK, 0, 0)
    except AssertionError:
        client.close()
        raise
    return client


class Place:
    """Files, keys and the service that a gateway asks."""

    def __init__(self, directory: Path, service: Service) -> None:
        self.directory = directory
        self.users = directory / "passwords"
        self.scram = directory / "scram"
        self.keys = directory / "keys.json"
        self.acl = directory / "acl.toml"
        self.service = service
        self.signer = Signer()
        set_password(self.users, "ann", "pencil")
        set_password(self.users, "op", "pencil")
        set_verifier(self.scram, "sue", "eus")
        self.keys.write_bytes(self.signer.keys("RSA"))
        self.write_rules("")

    def write_rules(self, more: str) -> None:
        self.acl.write_text(f'[groups]\nstaff = ["op"]\n{more}\n{RULES}', encoding="utf-8")

    def token(self, **claims: Any) -> bytes:
        return self.signer.token(**{"exp": time.time() + 600, **claims})

    def settings(self, nats: NatsServer) -> dict[str, Any]:
        return {
            "nats": (nats.url,),
            "password_file": self.users,
            "scram_file": self.scram,
            "acl_file": self.acl,
            "authenticators": [
                {"type": "jwt", "keys": str(self.keys), "algorithms": ["RS256"], "leeway": 0},
                {"type": "http", "url": self.service.url},
            ],
        }


RULES = """
[[rules]]
effect = "allow"
group = "staff"
topics = "#"

[[rules]]
effect = "allow"
topics = ["user/%u/#", "shared/#"]
"""


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with serving() as found:
        yield found


@pytest.fixture
def place(service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(passwords, "DEVICE_COST", CHEAP)
    service.answer = lambda path, body: (200, b'{"result": "ignore"}')
    return Place(tmp_path, service)


@pytest.fixture
def gateway(nats_server: NatsServer, place: Place) -> Iterator[Running]:
    with running(**place.settings(nats_server)) as found:
        yield found


def may_publish(client: Raw5, topic: str) -> bool:
    client.send(raw5.publish(topic, b"x", qos=1, id=7))
    return client.answer(raw.PUBACK, 7).reason < 0x80


def test_who_gets_in(gateway: Running, place: Place, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    port = gateway.port
    place.service.answer = lambda path, body: (
        (200, b'{"result": "allow", "groups": ["staff"]}') if b'"hal"' in body else (200, b'{"result": "ignore"}')
    )
    with entered(port, "ann", "pencil") as client:
        assert may_publish(client, "user/ann/x")
        assert not may_publish(client, "user/op/x")
        assert client.subscribed(("user/ann/#", 1), ("user/op/#", 1), ("other", 1)) == (1, NOT, NOT)
    with entered(port, "op", "pencil") as client:
        assert may_publish(client, "other")
    with entered(port, None, place.token(sub="tom")) as client:
        assert may_publish(client, "user/tom/x")
        assert not may_publish(client, "user/ann/x")
    with entered(port, "whatever", place.token(sub="tom", groups=["staff"])) as client:
        assert may_publish(client, "other")
    with entered(port, "hal", "hunter2") as client:
        assert may_publish(client, "other")
    with begin(port, scram := credentials("sue")) as client:
        client.send(final(scram))
        client.answer(CONNACK, 0, 0)
        assert may_publish(client, "user/sue/x")
    refused(port, "ann", "hunter2", BAD)
    refused(port, "nobody", "hunter2", BAD)
    refused(port, "ann", None, BAD)
    refused(port, None, "hunter2", BAD)
    refused(port, None, None, NOT)
    refused(port, "tom", place.token(sub="tom", exp=time.time() - 1), BAD)
    refused(port, "tom", Signer().token(exp=time.time() + 60), BAD)
    place.service.answer = lambda path, body: (500, b"")
    refused(port, "nobody", "hunter2", NOT)
    with begin(port, scram := credentials("sue", "hunter2")) as client:
        client.send(final(scram))
        assert raw5.answer(client.expect_closed()[0]).reason == NOT
    for secret in ("pencil", "hunter2", place.token().decode()[:40], "$argon2id"):
        assert secret not in caplog.text
    assert "user 'ann': wrong password" in caplog.text


def test_rules_that_a_token_brings(gateway: Running, place: Place) -> None:
    """They permit nothing that the file does not, and the other way round; the will is looked at too."""
    rules = [
        {"effect": "deny", "topics": "shared/secret"},
        {"effect": "allow", "topics": ["shared/#", "elsewhere", "own/%c"]},
    ]
    token = place.token(sub="tom", acl=rules)
    with entered(gateway.port, None, token) as client:
        assert may_publish(client, "shared/x")
        for topic in ("shared/secret", "elsewhere", "user/tom/x"):
            assert not may_publish(client, topic)
        assert client.subscribed(("shared/x", 1), ("shared/#", 1), ("user/tom/#", 1)) == (1, NOT, NOT)
        assert client.subscribed(("$share/g/shared/x", 1), ("$share/g/user/tom/x", 1)) == (1, NOT)
    tail = raw5.will("shared/secret", "x") + raw.field(token)
    raw5.refused(gateway.port, raw5.connect("", flags=0x44, tail=tail), NOT)
    with entered(gateway.port, None, place.token(acl=[])) as client:
        assert not may_publish(client, "shared/x")
        assert client.subscribed(("shared/x", 0)) == (NOT,)


def test_rules_of_a_token_without_a_file(nats_server: NatsServer, place: Place) -> None:
    values = place.settings(nats_server)
    del values["acl_file"]
    with running(**values) as gateway:
        with entered(gateway.port, None, place.token(acl=[{"effect": "allow", "topics": "a"}])) as client:
            assert may_publish(client, "a")
            assert not may_publish(client, "b")
        with entered(gateway.port, None, place.token()) as client:
            assert may_publish(client, "b")


@pytest.mark.long
def test_a_token_that_expires(gateway: Running, place: Place) -> None:
    """The connection ends, with its will, and the token lets nobody in any more."""
    topic = "shared/" + secrets.token_hex(6)
    token = place.token(exp=time.time() + 3)
    with entered(gateway.port, "ann", "pencil") as watcher, Raw5(gateway.port, patience=PATIENCE) as client:
        watcher.subscribed((topic, 0))
        client.send(raw5.connect("", flags=0x46, tail=raw5.will(topic, "gone") + raw.field(token)))
        client.answer(CONNACK, 0, 0)
        with Raw(gateway.port, patience=PATIENCE) as old:
            old.send(raw.connect("", flags=0xC2, tail=("x", token)))
            old.expect(raw.CONNACK)
            assert old.expect_closed() == []
        client.ended(EXPIRED)
        assert watcher.message(b"gone")
    refused(gateway.port, "x", token, BAD)


def test_what_is_read_again(gateway: Running, place: Place) -> None:
    """Who would not be let in any more is disconnected, the others stay; what is wrong changes nothing at all."""
    port = gateway.port
    with (
        entered(port, "ann", "pencil") as ann,
        entered(port, "op", "pencil") as op,
        entered(port, None, place.token(sub="tom")) as tom,
        begin(port, scram := credentials("sue")) as sue,
    ):
        sue.send(final(scram))
        sue.answer(CONNACK, 0, 0)
        everybody = (ann, op, tom, sue)
        assert op.subscribed(("other", 1)) == (1,)
        gateway.reload()
        for one in everybody:
            one.quiet()
        # Four changes, and one of the files is wrong: none is made
        delete_user(place.users, "ann")
        place.keys.write_bytes(Signer().keys("RSA"))
        set_verifier(place.scram, "sue", "another")
        place.acl.write_text("[[rules]]\neffect = 'permit'", encoding="utf-8")
        gateway.reload()
        for one in everybody:
            one.quiet()
        entered(port, "ann", "pencil").close()
        place.write_rules("[[rules]]\neffect = 'deny'\ntopics = 'other'")
        gateway.reload()
        for one in (ann, tom, sue):
            one.ended(NOT)
        op.quiet()
        assert not may_publish(op, "other")
        refused(port, "ann", "pencil", BAD)
        refused(port, "tom", place.token(sub="tom"), BAD)
        with begin(port, scram := credentials("sue")) as client:
            client.send(final(scram))
            assert raw5.answer(client.expect_closed()[0]).reason == NOT
        with begin(port, scram := credentials("sue", "another")) as client:
            client.send(final(scram))
            client.answer(CONNACK, 0, 0)


def test_each_listener_asks_its_own(nats_server: NatsServer, place: Place) -> None:
    address = "127.0.0.1:0"
    values = place.settings(nats_server) | {
        "listeners": [
            {"listen": address, "authenticators": ["password"]},
            {"listen": address, "authenticators": ["jwt", "http"]},
            {"listen": address, "authenticators": ["scram"]},
            {"listen": address, "authenticators": ["password"], "allow_anonymous": True},
            {"listen": address, "authenticators": []},
        ]
    }
    with running(**values) as gateway:
        passwords_, others, scram_only, mixed, nobody = (one.port for one in gateway.addresses)
        entered(passwords_, "ann", "pencil").close()
        refused(passwords_, None, place.token(), BAD)
        raw5.refused(passwords_, raw5.connect("", *method()), 0x8C)
        entered(others, None, place.token()).close()
        refused(others, "ann", "pencil", BAD)
        refused(others, None, None, NOT)
        refused(scram_only, "ann", "pencil", NOT)
        with begin(scram_only, scram := credentials("sue")) as client:
            client.send(final(scram))
            client.answer(CONNACK, 0, 0)
        entered(mixed, None, None).close()
        entered(mixed, "ann", "pencil").close()
        refused(mixed, "ann", "wrong", BAD)
        refused(mixed, "nobody", "pencil", BAD)
        entered(nobody, "whoever", "x").close()  # on loopback, and told so


def method() -> tuple[bytes, bytes]:
    return raw5.prop(raw5.METHOD, "SCRAM-SHA-256"), raw5.prop(raw5.DATA, "n,,n=sue,r=abc")


def test_users_by_their_certificates(nats_server: NatsServer, place: Place) -> None:
    """A password does not let in whom the certificate does not name; SCRAM neither."""
    authority = Authority(place.directory)
    server = authority.issue(NAME)
    tls = {
        "listen": "127.0.0.1:0",
        "type": "tls",
        "tls_cert": server.certificate,
        "tls_key": server.key,
        "tls_client_ca": authority.file,
    }
    values = place.settings(nats_server)
    kinds = [{"use_identity": "cn"}, {"use_identity": "dns"}, {"use_identity": "uri"}]
    values["listeners"] = [*(tls | kind for kind in kinds), tls | kinds[0] | {"type": "wss"}]
    lamp = trusting(authority, authority.issue("lamp"))
    with running(**values) as gateway:
        by_name, by_dns, by_uri, by_web = (one.port for one in gateway.addresses)
        for user, code in ((None, 0), ("ann", 4)):
            with dial(by_web, lamp) as secure:
                web = Framed(secure)
                web.upgrade()
                web.sendall(connect(user, None))
                assert web.recv(0) == bytes((0x20, 2, 0, code))
        for port in (by_name, by_dns):
            for user, password, code in (
                (None, None, 0),
                ("lamp", None, 0),
                ("lamp", "whatever", 0),
                ("ann", "pencil", 4),
                ("op", "pencil", 4),
            ):
                assert by_tls(port, lamp, user, password) == code
        assert by_tls(by_uri, lamp, None, None) == 5
        assert by_tls(by_uri, lamp, "ann", "pencil") == 5
        with Secure(by_name, lamp) as client:
            client.send(connect(None, None))
            client.expect(raw.CONNACK)
            assert client.subscribe(("user/lamp/#", 1), ("user/ann/#", 1)) == [1, 0x80]
        with Secure(by_name, lamp) as client:
            client.send(raw5.connect("", *method()))
            assert raw5.answer(client.expect_closed()[0]).reason == 0x8C


def by_tls(port: int, context: Any, user: str | None, password: str | None) -> int:
    with Secure(port, context) as client:
        client.send(connect(user, password))
        return client.expect(raw.CONNACK).body[1]


def test_who_is_denied_takes_no_session_over(gateway: Running) -> None:
    name = secrets.token_hex(6)
    with entered(gateway.port, "ann", "pencil", name) as owner:
        for user, password in (("ann", "wrong"), ("nobody", "x"), (None, None)):
            raw5.refused(gateway.port, connect(user, password, name, 5), NOT if user is None else BAD)
            owner.quiet()
        with entered(gateway.port, "ann", "pencil", name):
            owner.ended(0x8E)


def test_a_flood_of_wrong_passwords(nats_server: NatsServer, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is connected notices nothing; of those who are too many some are told that the server is busy."""
    fits = passwords.PasswordHash.fits

    def slow(self: passwords.PasswordHash, password: bytes) -> bool:
        time.sleep(0.05)
        return fits(self, password)

    with running(nats=(nats_server.url,), password_file=place.users) as gateway:
        with entered(gateway.port, "ann", "pencil") as bystander:
            monkeypatch.setattr(passwords.PasswordHash, "fits", slow)
            flood = [Raw5(gateway.port, patience=PATIENCE) for _ in range(60)]
            for client in flood:
                client.send(connect("ann", "wrong", level=5))
            bystander.quiet()
            answers = {raw5.answer(client.expect_closed()[0]).reason for client in flood}
            assert answers == {BAD}
            bystander.quiet()
            for client in flood:
                client.close()
        eventually(lambda: not gateway.gateway.account or not gateway.gateway.account.registry.connections, PATIENCE)
