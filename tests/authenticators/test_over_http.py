# SPDX-License-Identifier: Apache-2.0
"""A service that is asked over HTTP, and keys that come from a URL: whatever goes wrong denies."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mqtt_nats.access.authenticator import IGNORE, Allow, Denied
from mqtt_nats.access.settings import HttpSettings, TokenSettings
from mqtt_nats.authenticators import tokens
from mqtt_nats.authenticators.callback import Callback
from mqtt_nats.authenticators.tokens import Tokens
from mqtt_nats.base.errors import StartupError
from tests.access.test_chain import credentials
from tests.access.test_tokens import Signer
from tests.authenticators.web import Answer, Service, serving
from tests.backbone.certificates import Authority
from tests.harness.waiting import aeventually

pytestmark = pytest.mark.anyio

ALLOW = b'{"result": "allow"}'
ANN = credentials("ann", b"pencil")


@pytest.fixture
def service() -> Iterator[Service]:
    with serving() as found:
        yield found


def callback(service: Service | str, **more: Any) -> Callback:
    url = service if isinstance(service, str) else service.url
    return Callback(HttpSettings.model_validate({"type": "http", "url": f"{url}/auth", **more}))


async def test_what_is_asked(service: Service, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("abc.def\n", encoding="utf-8")
    one = callback(service, token_file=token)
    assert await one.check(ANN) == Allow("ann")
    assert await one.check(credentials()) is IGNORE
    assert isinstance(await one.check(credentials("ann", b"\xff")), Denied)
    ((path, headers, body),) = service.asked
    assert path == "/auth"
    assert headers["Authorization"] == "Bearer abc.def"
    assert headers["Content-Type"] == "application/json"
    assert json.loads(body)["password"] == "pencil"
    token.write_text("next", encoding="utf-8")
    one.reload()()
    await one.check(ANN)
    assert service.asked[-1][1]["Authorization"] == "Bearer next"
    token.write_text("two words", encoding="utf-8")
    with pytest.raises(StartupError, match="one line"):
        one.reload()
    await one.close()


def late(path: str, body: bytes) -> Answer:
    time.sleep(1)
    return 200, ALLOW


BAD: dict[str, Callable[[str, bytes], Answer]] = {
    "denies": lambda path, body: (200, b'{"result": "deny"}'),
    "error": lambda path, body: (500, ALLOW),
    "not found": lambda path, body: (404, ALLOW),
    "redirect": lambda path, body: (302, b"") if path == "/auth" else (200, ALLOW),
    "rubbish": lambda path, body: (200, b"yes"),
    "too long": lambda path, body: (200, ALLOW + b" " * 300_000),
    "late": late,
}


@pytest.mark.parametrize("what", BAD)
async def test_answers_that_deny(service: Service, what: str) -> None:
    service.answer = BAD[what]
    one = callback(service, timeout=0.3 if what == "late" else 9)
    found = await one.check(ANN)
    assert isinstance(found, Denied)
    assert "pencil" not in repr(found)
    assert all(path == "/auth" for path, _, _ in service.asked)
    await one.close()


async def test_nobody_answers() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        one = callback(url)
        assert isinstance(await one.check(ANN), Denied)  # refused
        silent.listen()
        await one.close()
        one = callback(url, timeout=0.3)
        assert isinstance(await one.check(ANN), Denied)  # accepted, not answered
        await one.close()


async def test_a_proxy_of_the_environment_is_not_used(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    one = callback(service)
    assert isinstance(await one.check(ANN), Allow)
    await one.close()


async def test_so_many_questions_at_the_same_time(service: Service) -> None:
    go = threading.Event()

    def wait(path: str, body: bytes) -> Answer:
        go.wait(20)
        return 200, ALLOW

    service.answer = wait
    one = callback(service, concurrency=3, timeout=9)
    asking = [asyncio.create_task(one.check(ANN)) for _ in range(12)]
    await aeventually(lambda: service.running == 3, 30)
    go.set()
    assert await asyncio.gather(*asking) == [Allow("ann")] * 12
    assert service.most == 3
    await one.close()


async def test_tls(tmp_path: Path) -> None:
    """Only who can prove that it is the service is asked."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    mine, other = Authority(tmp_path / "a"), Authority(tmp_path / "b")
    with serving(mine.issue("service")) as service:
        for more, expected in (({"tls_ca": mine.file}, Allow), ({"tls_ca": other.file}, Denied), ({}, Denied)):
            one = callback(service, **more)
            assert isinstance(await one.check(ANN), expected)
            await one.close()
        assert len(service.asked) == 1
    with pytest.raises(StartupError, match="TLS files"):
        callback("https://127.0.0.1:1", tls_ca=__file__)
    with pytest.raises(StartupError, match="TLS files"):
        callback("https://127.0.0.1:1", tls_cert=mine.file, tls_key=mine.file)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"url": "http://example.org/"}, "use https"),
        ({"url": "https://me:secret@example.org/"}, "must not have"),
        ({"url": "ftp://127.0.0.1/"}, "expected a URL"),
        ({"url": "https://127.0.0.1/", "tls_cert": __file__}, "need each other"),
        ({"url": "https://127.0.0.1/", "timeout": 10}, "timeout"),
        ({"url": "https://127.0.0.1/", "token_file": "/none"}, "token_file"),
    ],
)
async def test_settings_that_are_refused(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named) as caught:
        HttpSettings.model_validate({"type": "http", **values})
    assert "secret" not in str(caught.value)


# -- keys ---------------------------------------------------------------------------------------


class Keyed:
    """Tokens whose keys come from a service."""

    def __init__(self, service: Service, signer: Signer) -> None:
        self.lost = 0
        self.serve(service, signer, "RSA")
        self.service = service
        values = {"type": "jwt", "keys": f"{service.url}/keys", "algorithms": ["RS256", "ES256"]}
        self.tokens = Tokens(TokenSettings.model_validate(values), self._changed)
        self.task = asyncio.create_task(self.tokens.keep_current())

    def _changed(self) -> None:
        self.lost += 1

    def serve(self, service: Service, signer: Signer, *kinds: str) -> None:
        """Have these keys."""
        service.answer = lambda path, body: (200, signer.keys(*kinds))

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.tokens.close()

    async def check(self, token: bytes) -> Any:
        return await self.tokens.check(credentials("x", token))


@pytest.fixture(scope="module")
def signer() -> Signer:
    return Signer()


def fresh(signer: Signer, *how: str) -> bytes:
    return signer.token(*how, exp=time.time() + 60)


async def test_keys_of_a_url_and_their_rotation(
    service: Service, signer: Signer, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Keyed(service, signer)
    found = await one.check(fresh(signer))  # waits for the first reading
    assert isinstance(found, Allow)
    for _ in range(5):
        await one.check(fresh(signer))
        # A key that is not there: it was read just now, so it is not asked for again
        assert isinstance(await one.check(fresh(signer, "EC", "ES256")), Denied)
    assert len(service.asked) == 1
    one.serve(service, signer, "RSA", "EC")
    monkeypatch.setattr(tokens, "FETCH_PAUSE_LEAST_S", 0.0)
    assert isinstance(await one.check(fresh(signer, "EC", "ES256")), Allow)
    assert len(service.asked) == 2
    assert (found.valid(), one.lost) == (True, 0)
    one.serve(service, signer, "EC")
    one.tokens.reload()()
    await aeventually(lambda: one.lost == 1, 30)
    assert not found.valid()
    monkeypatch.setattr(tokens, "FETCH_PAUSE_LEAST_S", 1000.0)
    assert isinstance(await one.check(fresh(signer)), Denied)
    await one.close()


async def test_keys_are_kept_while_their_url_does_not_answer(
    service: Service, signer: Signer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = Keyed(service, signer)
    assert isinstance(await one.check(fresh(signer)), Allow)
    for number, answer in enumerate([(500, b""), (200, b"rubbish"), (200, signer.keys("oct"))], 1):
        service.answer = lambda path, body, answer=answer: answer  # type: ignore[misc]
        one.tokens.reload()()
        await aeventually(lambda number=number: caplog.text.count("no keys can be read") == number, 30)  # type: ignore[misc]
        assert isinstance(await one.check(fresh(signer)), Allow)
    monkeypatch.setattr(tokens, "KEYS_KEPT_S", -1.0)
    one.tokens.reload()()
    await aeventually(lambda: one.lost == 1, 30)
    assert isinstance(await one.check(fresh(signer)), Denied)
    await one.close()


async def test_without_keys_nobody_gets_in(service: Service, signer: Signer) -> None:
    service.answer = lambda path, body: (404, b"")
    one = Keyed(service, signer)
    service.answer = lambda path, body: (404, b"")
    found = await one.check(fresh(signer))
    assert isinstance(found, Denied)
    assert fresh(signer).decode() not in found.why
    await one.close()


async def test_keys_of_a_file(tmp_path: Path, signer: Signer) -> None:
    file = tmp_path / "keys.json"
    values = {"type": "jwt", "keys": str(file), "algorithms": "RS256"}
    file.write_bytes(signer.keys())
    one = Tokens(TokenSettings.model_validate(values), lambda: None)
    found = await one.check(credentials(None, fresh(signer)))
    assert isinstance(found, Allow)
    assert found.user == "ann"
    assert found.expires is not None
    assert await one.check(credentials("ann", b"pencil")) is IGNORE
    assert await one.check(credentials("ann")) is IGNORE
    assert isinstance(await one.check(credentials(None, signer.token(exp=time.time() - 60))), Denied)
    file.write_bytes(b"{}")
    with pytest.raises(StartupError, match="cannot be used: expected JSON"):
        one.reload()
    assert found.valid()
    file.write_bytes(Signer().keys())
    one.reload()()
    assert not found.valid()
    assert isinstance(await one.check(credentials(None, fresh(signer))), Denied)
    file.unlink()
    with pytest.raises(StartupError, match="cannot read the keys"):
        one.reload()
    await one.close()
