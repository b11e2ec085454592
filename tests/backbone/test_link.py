# SPDX-License-Identifier: Apache-2.0
"""A link to a real nats-server: messages, logins, TLS, refusals, reconnects, servers that are discovered."""

from __future__ import annotations

import asyncio
import contextlib
import operator
import ssl
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from nats.aio.errors import ErrStaleConnection
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from mqtt_nats.backbone import link as link_module
from mqtt_nats.backbone.connect import open_link
from mqtt_nats.backbone.link import NatsConnection
from mqtt_nats.base.server_clock import elapsed
from mqtt_nats.config.nats_connect import nats_options
from mqtt_nats.config.settings import Settings
from tests.backbone.certificates import ACCOUNT, OPERATOR, USER, Authority, credentials, nkey, token
from tests.conftest import NatsFactory
from tests.harness.nats import NatsServer
from tests.harness.waiting import aeventually, free_port

pytestmark = pytest.mark.anyio


class Links:
    """Links opened by a test, and what their callbacks were told."""

    def __init__(self) -> None:
        self.opened: list[NatsConnection] = []
        self.log: list[str] = []

    async def open(self, settings: Settings, *, no_echo: bool = False) -> NatsConnection:
        async def online() -> None:
            self.log.append("online")
            link.online = True

        async def offline() -> None:
            self.log.append("offline")

        link = await open_link(
            nats_options(settings), name="test", no_echo=no_echo, on_online=online, on_offline=offline
        )
        self.opened.append(link)
        return link

    async def url(self, url: str) -> NatsConnection:
        return await self.open(Settings(nats=(url,)))


@pytest.fixture
async def links() -> AsyncIterator[Links]:
    links = Links()
    yield links
    for link in links.opened:
        link.options["allow_reconnect"] = False
        with contextlib.suppress(Exception):
            await link.close()


async def round_trip(link: NatsConnection, text: bytes = b"hello") -> None:
    """Publish to ourselves and wait for it."""
    got: list[tuple[bytes, ...]] = []
    sid = link.subscribe_raw(b"round.*", lambda *message: got.append(message))
    link.out.append(b"HPUB round.trip re.ply 12 %d\r\nNATS/1.0\r\n\r\n%b\r\n" % (12 + len(text), text))
    link.kick()
    await link.fence()
    await aeventually(lambda: got)
    link.unsubscribe_raw(sid)
    assert got == [(b"round.trip", b"re.ply", b"NATS/1.0\r\n\r\n", text)]


# -- messages -------------------------------------------------------------------------------------


async def test_messages_of_every_size(nats_server: NatsServer, links: Links) -> None:
    link = await links.url(nats_server.url)
    assert link.max_payload == 8 * 1024 * 1024
    for size in (0, 1, 1000, 65_536, 900_000):
        await round_trip(link, bytes(range(256)) * (size // 256) + b"x" * (size % 256))


async def test_order_and_one_write_per_turn(nats_server: NatsServer, links: Links) -> None:
    link = await links.url(nats_server.url)
    got: list[bytes] = []
    link.subscribe_raw(b"order", lambda subject, reply, headers, payload: got.append(payload))
    expected = [b"%d" % number for number in range(20_000)]
    for payload in expected:
        link.out.append(b"PUB order %d\r\n%b\r\n" % (len(payload), payload))
    link.kick()
    await aeventually(lambda: len(got) >= len(expected))
    assert got == expected


async def test_an_unsubscribed_handler_is_not_called(nats_server: NatsServer, links: Links) -> None:
    link = await links.url(nats_server.url)
    got: list[bytes] = []
    sid = link.subscribe_raw(b"u", lambda subject, reply, headers, payload: got.append(payload))
    link.out.append(b"PUB u 1\r\na\r\n")
    link.kick()
    await aeventually(lambda: got)
    link.unsubscribe_raw(sid)
    link.unsubscribe_raw(sid)
    link.out.append(b"PUB u 1\r\nb\r\n")
    link.kick()
    await link.fence()
    assert got == [b"a"]


async def test_queue_groups_and_no_echo(nats_server: NatsServer, links: Links) -> None:
    link = await links.open(Settings(nats=(nats_server.url,)), no_echo=True)
    other = await links.url(nats_server.url)
    got: list[str] = []
    link.subscribe_raw(b"q", lambda *message: got.append("own"))
    for name in "ab":
        other.subscribe_raw(b"q", lambda *message, name=name: got.append(name), b"group")
    await other.fence()
    await link.fence()
    for _ in range(50):
        link.out.append(b"PUB q 0\r\n\r\n")
    link.kick()
    await aeventually(lambda: len(got) >= 50)
    await link.fence()
    await other.fence()
    assert len(got) == 50
    assert set(got) == {"a", "b"}


async def test_nats_py_works_beside_it(nats_server: NatsServer, links: Links) -> None:
    """Its own subscriptions, requests and flushes go over the same transport."""
    link = await links.url(nats_server.url)

    async def answer(message: Msg) -> None:
        await message.respond(b"to " + message.data)

    await link.subscribe("service", cb=answer)
    await link.flush()
    replies = await asyncio.gather(*(link.request("service", b"%d" % number, timeout=5) for number in range(20)))
    assert [reply.data for reply in replies] == [b"to %d" % number for number in range(20)]


async def test_pings_of_the_server_are_answered(nats_factory: NatsFactory, links: Links) -> None:
    server = nats_factory(config='ping_interval: "100ms"\nping_max: 2')
    link = await links.url(server.url)
    pings = 0
    control = link.control

    def count(line: bytes) -> None:
        nonlocal pings
        pings += line == b"PING"
        control(line)

    link.control = count  # type: ignore[method-assign]
    await aeventually(lambda: pings >= 8)
    assert link.online
    assert links.log == []


async def test_a_server_that_sends_something_is_not_pinged(
    nats_server: NatsServer, links: Links, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was silent for the interval is pinged, and left when it stays silent."""
    link = await links.url(nats_server.url)
    interval = link.options["ping_interval"]
    silences = [interval / 2, interval - 1, interval + 1, interval / 5, interval, interval * 2, interval * 3]
    seen: list[object] = []

    async def sleep(seconds: float) -> None:
        seen.append(round(seconds))
        link.hear(elapsed() - silences.pop(0))

    async def send_ping() -> None:
        seen.append("ping")

    async def left(error: Exception) -> None:
        seen.append(type(error))

    monkeypatch.setattr(link, "_send_ping", send_ping)
    monkeypatch.setattr(link, "_process_op_err", left)
    with monkeypatch.context() as only_here:
        only_here.setattr(asyncio, "sleep", sleep)
        await link._ping_interval()
    assert seen == [10, 5, 1, "ping", 10, 8, "ping", 10, "ping", 10, ErrStaleConnection]


# -- refusals -------------------------------------------------------------------------------------


async def test_a_refused_command_does_not_end_the_connection(nats_factory: NatsFactory, links: Links) -> None:
    config = "authorization { users: [{user: u, password: p, permissions: {publish: {deny: secret}}}] }"
    server = nats_factory(config=config)
    link = await links.open(Settings(nats=(server.url,), nats_user="u", nats_password="p"))  # type: ignore[arg-type]
    link.out.append(b"PUB secret 1\r\nx\r\n")
    link.kick()
    await round_trip(link)
    assert links.log == []


async def test_a_connection_that_the_server_ends_comes_back(nats_server: NatsServer, links: Links) -> None:
    """A payload that is too large ends the whole connection: other code prevents it, this one survives it."""
    link = await links.url(nats_server.url)
    link.out.append(b"PUB big 9999999\r\n")
    link.kick()
    await aeventually(lambda: links.log == ["offline", "online"])
    await round_trip(link)


async def test_a_fence_ends_with_its_connection(nats_factory: NatsFactory, links: Links) -> None:
    server = nats_factory()
    link = await links.url(server.url)
    server.pause()
    fence = asyncio.ensure_future(link.fence(30.0))
    await asyncio.sleep(0)
    server.kill()
    with pytest.raises((asyncio.CancelledError, TimeoutError)):
        await asyncio.wait_for(fence, 10.0)
    await aeventually(lambda: links.log == ["offline"])
    with pytest.raises(TimeoutError):
        await link.fence()


async def fill(link: NatsConnection) -> None:
    """Send more than a server takes that stands still."""
    while link.writable:
        link.out.append(b"PUB a 1000000\r\n%b\r\n" % bytes(1_000_000))
        link.write_out()
        await asyncio.sleep(0)


async def test_a_server_that_takes_nothing_any_more_is_left(nats_factory: NatsFactory, links: Links) -> None:
    """What waits to be sent to it is not waited for."""
    server = nats_factory()
    link = await links.url(server.url)
    server.pause()
    await fill(link)
    losing = asyncio.ensure_future(link._process_op_err(ErrStaleConnection()))  # as when it answers no PING
    await aeventually(lambda: links.log == ["offline"])
    server.resume()
    await aeventually(lambda: links.log == ["offline", "online"])
    await losing
    await round_trip(link)


async def test_a_connection_is_closed_though_the_server_takes_nothing(
    nats_factory: NatsFactory, links: Links, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "LINGER", 0.1)
    server = nats_factory()
    link = await links.url(server.url)
    server.pause()
    await fill(link)
    await asyncio.wait_for(link.close(), 10.0)


async def test_a_server_that_ends_every_connection_has_a_rest(nats_server: NatsServer, links: Links) -> None:
    link = await links.url(nats_server.url)
    begun = asyncio.get_running_loop().time()
    for number in range(1, 4):
        link.out.append(b"PUB big 9999999\r\n")
        link.kick()
        told = ["offline", "online"] * number
        await aeventually(partial(operator.eq, links.log, told))
    assert asyncio.get_running_loop().time() - begun > 2 * link_module.ROUND_PAUSE


# -- reconnects -----------------------------------------------------------------------------------


async def test_reconnect(nats_factory: NatsFactory, links: Links) -> None:
    server = nats_factory()
    link = await links.url(server.url)
    got: list[bytes] = []
    sid = link.subscribe_raw(b"again", lambda subject, reply, headers, payload: got.append(payload))
    await link.fence()
    for number in range(2):
        server.kill()
        await aeventually(lambda: not link.online)
        link.out.append(b"PUB again 4\r\nlost\r\n")
        link.kick()
        server.start()
        await aeventually(lambda: link.online)
        assert links.log == ["offline", "online"] * (number + 1)
        link.out.append(b"PUB again 6\r\nunseen\r\n")
        await link.fence()
        assert not got, "the subscription is the caller's to renew"
        link.renew(sid, b"again")
        link.out.append(b"PUB again 4\r\nseen\r\n")
        link.kick()
        await aeventually(lambda: got)
        assert got == [b"seen"]
        got.clear()


async def test_what_is_told_of_a_new_connection_comes_before_its_first_frame(
    nats_server: NatsServer, links: Links
) -> None:
    """Whatever is sent then precedes what others send meanwhile; the loss is told once."""
    listener, link = await links.url(nats_server.url), await links.url(nats_server.url)
    got: list[bytes] = []
    listener.subscribe_raw(b"order", lambda subject, reply, headers, payload: got.append(payload))
    await listener.fence()
    told: list[bool] = []

    def changed(up: bool) -> None:
        told.append(up)
        if up:
            link.out.append(b"PUB order 5\r\nfirst\r\n")

    async def publish() -> None:
        while True:
            link.out.append(b"PUB order 5\r\nlater\r\n")
            link.kick()
            await asyncio.sleep(0.001)

    link.call_on_wire(changed)
    assert link.wire is not None
    link.wire.transport.abort()
    await aeventually(lambda: told == [False])
    publishing = asyncio.create_task(publish())
    await aeventually(lambda: {b"first", b"later"} <= set(got), 20.0)
    publishing.cancel()
    assert (got[0], told) == (b"first", [False, True])


async def test_a_discovered_server_takes_over(nats_factory: NatsFactory, links: Links) -> None:
    """The link knows one server of the cluster; the INFO of that one names the other."""
    routes = [free_port(), free_port()]
    servers = [
        nats_factory(
            config=f'server_name: "s{own}"\njetstream: false\n'
            f'cluster {{ name: c, listen: "127.0.0.1:{own}", routes: ["nats://127.0.0.1:{other}"] }}'
        )
        for own, other in (routes, routes[::-1])
    ]
    link = await links.url(servers[0].url)
    assert link.known is not None
    known = link.known
    await aeventually(lambda: len(known.known) == 2)
    servers[0].kill()
    await aeventually(lambda: links.log == ["offline", "online"], 20.0)
    assert link.connected_url is not None
    assert link.connected_url.port == servers[1].port
    await round_trip(link)


# -- logins ---------------------------------------------------------------------------------------


async def refused(links: Links, settings: Settings) -> None:
    with pytest.raises((OSError, NatsError, TimeoutError)):
        await links.open(settings)


async def test_user_and_password(nats_factory: NatsFactory, links: Links) -> None:
    server = nats_factory(config='authorization { user: "u", password: "p w" }')
    link = await links.open(
        Settings(nats=(server.url,), nats_user="u", nats_password="p w")  # type: ignore[arg-type]
    )
    await round_trip(link)
    await refused(links, Settings(nats=(server.url,), nats_user="u", nats_password="q"))  # type: ignore[arg-type]
    await refused(links, Settings(nats=(server.url,)))


async def test_token(nats_factory: NatsFactory, links: Links) -> None:
    server = nats_factory(config='authorization { token: "s3cret" }')
    await round_trip(await links.open(Settings(nats=(server.url,), nats_token="s3cret")))  # type: ignore[arg-type]
    await refused(links, Settings(nats=(server.url,), nats_token="no"))  # type: ignore[arg-type]


async def test_nkey(nats_factory: NatsFactory, links: Links, tmp_path: Path) -> None:
    user, stranger = nkey(USER), nkey(USER)
    server = nats_factory(config=f"authorization {{ users: [{{nkey: {user.public}}}] }}")
    seeds = {}
    for name, key in (("user", user), ("stranger", stranger)):
        seeds[name] = tmp_path / f"{name}.nk"
        seeds[name].write_bytes(key.seed)
    link = await links.open(Settings(nats=(server.url,), nats_nkey=seeds["user"]))
    await round_trip(link)
    await refused(links, Settings(nats=(server.url,), nats_nkey=seeds["stranger"]))
    server.restart()
    await aeventually(lambda: links.log == ["offline", "online"])
    await round_trip(link)


async def test_credentials_file(nats_factory: NatsFactory, links: Links, tmp_path: Path) -> None:
    operator, account, user = nkey(OPERATOR), nkey(ACCOUNT), nkey(USER)
    config = (
        f'operator: "{token(operator, operator, "operator", "O")}"\n'
        f'resolver: MEMORY\nresolver_preload {{ {account.public}: "{token(operator, account, "account", "A")}" }}\n'
        "jetstream: false"
    )
    server = nats_factory(config=config)
    files: list[Path] = []
    for issuer in (account, nkey(ACCOUNT)):
        files.append(tmp_path / f"{len(files)}.creds")
        files[-1].write_text(credentials(token(issuer, user, "user", "U"), user), encoding="utf-8")
    link = await links.open(Settings(nats=(server.url,), nats_creds=files[0]))
    await round_trip(link)
    await refused(links, Settings(nats=(server.url,), nats_creds=files[1]))
    server.restart()
    await aeventually(lambda: links.log == ["offline", "online"])
    await round_trip(link)


@pytest.mark.parametrize("kind", ["nkey", "creds"])
async def test_a_file_that_is_being_replaced(
    nats_factory: NatsFactory, links: Links, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """It says nothing when the connection is lost, and the right thing later."""
    operator, account, user = nkey(OPERATOR), nkey(ACCOUNT), nkey(USER)
    file = tmp_path / "file"
    if kind == "nkey":
        server = nats_factory(config=f"authorization {{ users: [{{ nkey: {user.public} }}] }}")
        text = user.seed.decode()
    else:
        of_account = token(operator, account, "account", "A")
        server = nats_factory(
            config=f'operator: "{token(operator, operator, "operator", "O")}"\n'
            f'resolver: MEMORY\nresolver_preload {{ {account.public}: "{of_account}" }}\njetstream: false'
        )
        text = credentials(token(account, user, "user", "U"), user)
    file.write_text(text, encoding="utf-8")
    link = await links.open(Settings.model_validate({"nats": (server.url,), f"nats_{kind}": file}))
    file.write_text(content := text[: len(text) // 2], encoding="utf-8")
    server.restart()
    await aeventually(lambda: "nats-server cannot be used" in caplog.text)
    assert links.log == ["offline"]
    assert content not in caplog.text
    file.write_text(text, encoding="utf-8")
    await aeventually(lambda: links.log == ["offline", "online"])
    await round_trip(link)


async def test_tls_with_a_client_certificate(nats_factory: NatsFactory, links: Links, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server_pair, client_pair = authority.issue("nats.example"), authority.issue("gateway")
    server = nats_factory(
        config=f'tls {{ cert_file: "{server_pair.certificate}", key_file: "{server_pair.key}", '
        f'ca_file: "{authority.file}", verify: true }}'
    )
    url = server.url.replace("nats://", "tls://")
    options: dict[str, Any] = {"nats": (url,), "nats_tls_ca": authority.file}
    client: dict[str, Any] = {"nats_tls_cert": client_pair.certificate, "nats_tls_key": client_pair.key}
    link = await links.open(Settings(**options, **client))
    assert isinstance(link.wire, object)
    assert link.wire is not None
    assert link.wire.transport.get_extra_info("ssl_object") is not None
    for size in (0, 1, 20_000, 900_000):
        await round_trip(link, b"x" * size)
    by_name = await links.open(Settings(**options, **client, nats_tls_hostname="nats.example"))
    await round_trip(by_name)
    await refused(links, Settings(**options))
    await refused(links, Settings(**options, **client, nats_tls_hostname="another.example"))
    with pytest.raises(ssl.SSLError):
        await links.open(Settings(nats=(url,)))
    server.restart()
    await aeventually(lambda: links.log.count("online") == 2)
    await round_trip(link, b"x" * 300_000)


async def test_tls_that_is_wanted_and_not_offered(nats_factory: NatsFactory, links: Links, tmp_path: Path) -> None:
    """The login is not sent in clear."""
    authority = Authority(tmp_path)
    server = nats_factory(config='authorization { user: "gateway", password: "secret" }')
    url = server.url.replace("nats://", "tls://")
    login: dict[str, Any] = {"nats_user": "gateway", "nats_password": "secret"}
    for options in ({"nats": (url,)}, {"nats": (server.url,), "nats_tls_ca": authority.file}):
        with pytest.raises(NatsError, match="offers no TLS"):
            await links.open(Settings(**options, **login))


async def test_tls_that_a_server_offers_and_does_not_insist_on(
    nats_factory: NatsFactory, links: Links, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("nats.example")
    server = nats_factory(
        config=f'tls {{ cert_file: "{pair.certificate}", key_file: "{pair.key}" }}\nallow_non_tls: true'
    )
    url = server.url.replace("nats://", "tls://")
    link = await links.open(Settings(nats=(url,), nats_tls_ca=authority.file))
    assert link.wire is not None
    assert link.wire.transport.get_extra_info("ssl_object") is not None
    await round_trip(link)
    plain = await links.url(server.url)
    assert plain.wire is not None
    assert plain.wire.transport.get_extra_info("ssl_object") is None
