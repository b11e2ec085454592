# SPDX-License-Identifier: Apache-2.0
"""Work for CONNECTs: so much at the same time, so many that wait, and a flood from one address keeps nobody out."""

import asyncio
import errno
import os
import threading
import time
from pathlib import Path

import pytest

from mqtt_nats.access import passwords
from mqtt_nats.access.authenticator import IGNORE, Allow, Denied
from mqtt_nats.access.passwords import PasswordHash, delete_user, load, set_password
from mqtt_nats.access.settings import PasswordSettings
from mqtt_nats.authenticators.admission_queue import Crowd
from mqtt_nats.authenticators.passwords import PasswordFile
from mqtt_nats.base.errors import StartupError
from mqtt_nats.codec import MqttError, ReasonCode
from tests.access.test_chain import credentials
from tests.access.test_passwords import CHEAP, mosquitto_line
from tests.harness.waiting import aeventually

pytestmark = pytest.mark.anyio


class Work:
    """Counts what runs at the same time, until it is let go."""

    def __init__(self) -> None:
        self.running: list[str] = []
        self.most = 0
        self.go = asyncio.Event()

    async def do(self, name: str) -> str:
        self.running.append(name)
        self.most = max(self.most, len(self.running))
        await self.go.wait()
        await asyncio.sleep(0)
        self.running.remove(name)
        return name


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_so_much_at_the_same_time() -> None:
    crowd, work = Crowd(3), Work()
    tasks = [asyncio.create_task(crowd.run("a", lambda name=str(n): work.do(name))) for n in range(10)]  # type: ignore[misc]
    await settled()
    assert work.running == ["0", "1", "2"]
    work.go.set()
    assert await asyncio.gather(*tasks) == [str(n) for n in range(10)]
    assert work.most == 3


async def test_a_flood_does_not_keep_others_out() -> None:
    crowd, work = Crowd(1, waiting=50), Work()
    flood = [asyncio.create_task(crowd.run("192.0.2.1", lambda: work.do("flood"))) for _ in range(200)]
    await settled()
    others = [asyncio.create_task(crowd.run(f"192.0.2.{n}", lambda: work.do("other"))) for n in range(2, 12)]
    await settled()
    refused = [one for one in flood if one.done()]
    assert len(refused) == 159  # one works, fifty wait, of whom ten are others
    for one in refused:
        error = one.exception()
        assert isinstance(error, MqttError)
        assert error.reason is ReasonCode.SERVER_BUSY
    order: list[str] = []
    for one in (*flood, *others):
        one.add_done_callback(lambda done: order.append("x" if done.exception() else done.result()))
    order.clear()
    work.go.set()
    assert await asyncio.gather(*others) == ["other"] * 10
    assert order.count("flood") <= 3
    await asyncio.gather(*flood, return_exceptions=True)


async def test_who_gives_up() -> None:
    """Waiting, it gives its place to the next; working, it keeps it until the work is done."""
    crowd, work = Crowd(1), Work()
    first, second, third = (asyncio.create_task(crowd.run("a", lambda name=n: work.do(name))) for n in "123")  # type: ignore[misc]
    await settled()
    second.cancel()
    first.cancel()
    await settled()
    assert first.cancelled()
    assert second.cancelled()
    assert work.running == ["1"]
    work.go.set()
    assert await third == "3"
    assert await crowd.run("a", lambda: work.do("4")) == "4"
    assert work.most == 1


async def test_who_waits_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mqtt_nats.authenticators.admission_queue.CONNECT_WAIT_MOST_S", 0.05)
    crowd, work = Crowd(1), Work()
    first = asyncio.create_task(crowd.run("a", lambda: work.do("1")))
    await settled()
    with pytest.raises(MqttError) as caught:
        await crowd.run("b", lambda: work.do("2"))
    assert caught.value.reason is ReasonCode.SERVER_BUSY
    work.go.set()
    assert await first == "1"
    assert await crowd.run("b", lambda: work.do("3")) == "3"


async def test_work_that_fails() -> None:
    async def fail() -> None:
        raise KeyError

    def not_even_begun() -> asyncio.Future[None]:
        raise RuntimeError

    crowd = Crowd(1)
    for _ in range(3):
        with pytest.raises(KeyError):
            await crowd.run("a", fail)
        with pytest.raises(RuntimeError):
            await crowd.run("a", not_even_begun)


# -- passwords ----------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(passwords, "DEVICE_COST", CHEAP)
    found = tmp_path / "passwords"
    set_password(found, "ann", "pencil")
    return found


def known(file: Path, concurrency: int = 2) -> PasswordFile:
    return PasswordFile(PasswordSettings(type="password", file=file, concurrency=concurrency))


async def test_users(file: Path) -> None:
    users = known(file)
    assert await users.check(credentials("ann", b"pencil")) == Allow("ann")
    found = await users.check(credentials("ann", b"wrong"))
    assert isinstance(found, Denied)
    assert found.reason is ReasonCode.BAD_USER_NAME_OR_PASSWORD
    assert "wrong password" in found.why
    for one in (credentials("bob", b"pencil"), credentials("ann"), credentials(None, b"pencil"), credentials()):
        assert await users.check(one) is IGNORE
    await users.close()


async def test_a_file_that_changes(file: Path) -> None:
    users = known(file)
    found = await users.check(credentials("ann", b"pencil"))
    assert isinstance(found, Allow)
    set_password(file, "bob", "x")
    assert await users.check(credentials("bob", b"x")) is IGNORE
    users.reload()()
    assert isinstance(await users.check(credentials("bob", b"x")), Allow)
    assert found.valid()
    set_password(file, "ann", "pencil")  # another salt
    users.reload()()
    assert not found.valid()
    file.write_text("rubbish", encoding="utf-8")
    with pytest.raises(StartupError, match="line 1"):
        users.reload()
    assert isinstance(await users.check(credentials("bob", b"x")), Allow)
    await users.close()


async def test_a_change_while_a_password_is_verified(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go = threading.Event(), threading.Event()
    fits = PasswordHash.fits

    def slow(self: PasswordHash, password: bytes) -> bool:
        begun.set()
        assert go.wait(30)
        return fits(self, password)

    monkeypatch.setattr(PasswordHash, "fits", slow)
    users = known(file)
    checking = asyncio.create_task(users.check(credentials("ann", b"pencil")))
    assert await asyncio.to_thread(begun.wait, 30)
    set_password(file, "ann", "another")
    users.reload()()
    go.set()
    assert isinstance(await checking, Denied)
    monkeypatch.setattr(PasswordHash, "fits", fits)
    assert isinstance(await users.check(credentials("ann", b"pencil")), Denied)
    assert isinstance(await users.check(credentials("ann", b"another")), Allow)
    await users.close()


async def test_who_comes_back_soon_costs_no_computation(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verified password is accepted, also after the same hash was read again; a wrong one is verified each time."""
    verified: list[bytes] = []
    fits = PasswordHash.fits

    def spy(self: PasswordHash, password: bytes) -> bool:
        verified.append(password)
        return fits(self, password)

    monkeypatch.setattr(PasswordHash, "fits", spy)
    users = known(file)
    admitted = []
    for _ in range(3):
        found = await users.check(credentials("ann", b"pencil"))
        assert isinstance(found, Allow)
        admitted.append(found)
    assert verified == [b"pencil"]
    for _ in range(2):
        assert isinstance(await users.check(credentials("ann", b"pen")), Denied)
    assert verified == [b"pencil", b"pen", b"pen"]
    users.reload()()
    assert all(one.valid() for one in admitted)
    assert isinstance(await users.check(credentials("ann", b"pencil")), Allow)
    assert verified == [b"pencil", b"pen", b"pen"]
    set_password(file, "ann", "pencil")  # another salt
    users.reload()()
    assert not any(one.valid() for one in admitted)
    assert isinstance(await users.check(credentials("ann", b"pencil")), Allow)
    assert verified == [b"pencil", b"pen", b"pen", b"pencil"]
    set_password(file, "ann", "pen")
    users.reload()()
    assert isinstance(await users.check(credentials("ann", b"pencil")), Denied)
    delete_user(file, "ann")
    users.reload()()
    assert await users.check(credentials("ann", b"pen")) is IGNORE
    await users.close()


# -- hashes of mosquitto --------------------------------------------------------------------------


def of_mosquitto(path: Path) -> Path:
    path.write_text(
        "".join(f"{name}:{mosquitto_line('7', name.encode())}\n" for name in ("ann", "bob", "sue")), encoding="utf-8"
    )
    return path


def schemes(path: Path) -> dict[str, str]:
    return {name: entry.scheme for name, entry in load(path).items()}


async def test_hashes_of_mosquitto_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one write, of those who have logged in; connections outlive it, and reloads before and after it."""
    monkeypatch.setattr("mqtt_nats.authenticators.passwords.WRITE_PAUSE", 0.05)
    file = of_mosquitto(tmp_path / "passwords")
    users, others = (PasswordFile(PasswordSettings(type="password", file=file, cost="m=64,t=1,p=1")) for _ in "12")
    both = [await users.check(credentials(name, name.encode())) for name in ("ann", "bob")]
    both += await asyncio.gather(*(users.check(credentials("ann", b"ann")) for _ in range(4)))
    both.append(await others.check(credentials("ann", b"ann")))
    assert isinstance(await users.check(credentials("sue", b"wrong")), Denied)
    users.reload()()  # before anything is written
    keeping = asyncio.create_task(users.keep_current())
    await aeventually(lambda: schemes(file)["bob"] != "$7$101")
    assert schemes(file) == dict.fromkeys(("ann", "bob"), "$argon2id$v=19$m=64,t=1,p=1") | {"sue": "$7$101"}
    for one in (users, others):
        one.reload()()
    for found in both:
        assert isinstance(found, Allow)
        assert found.valid()
    assert isinstance(await users.check(credentials("ann", b"ann")), Allow)
    assert isinstance(await users.check(credentials("sue", b"sue")), Allow)
    await aeventually(lambda: schemes(file)["sue"] != "$7$101")
    keeping.cancel()
    for one in (users, others):
        await one.close()


async def test_a_file_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning; users get in, also after a reload, which keeps their connections."""
    monkeypatch.setattr("mqtt_nats.authenticators.passwords.WRITE_PAUSE", 0.01)
    monkeypatch.setattr("mqtt_nats.authenticators.passwords.RETRY_PAUSE", 0.01)
    tries = 0

    def refuse(*_: object) -> None:
        nonlocal tries
        tries += 1
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("mqtt_nats.access.user_file.os.fsync", refuse)
    file = of_mosquitto(tmp_path / "passwords")
    users = PasswordFile(PasswordSettings(type="password", file=file, cost="m=64,t=1,p=1"))
    keeping = asyncio.create_task(users.keep_current())
    found = []
    for name in ("ann", "bob"):
        found.append(await users.check(credentials(name, name.encode())))
        before = tries
        await aeventually(lambda before=before: tries > before + 1)  # type: ignore[misc]
    users.reload()()
    for one in found:
        assert isinstance(one, Allow)
        assert one.valid()
    assert isinstance(await users.check(credentials("ann", b"ann")), Allow)
    said = [one.getMessage() for one in caplog.records if "hashes of other brokers" in one.getMessage()]
    assert said == [
        f"authenticator password: hashes of other brokers stay in the file: cannot write the users to {file}: "
        "Read-only file system"
    ]
    assert set(schemes(file).values()) == {"$7$101"}
    keeping.cancel()
    await users.close()


async def test_the_event_loop_goes_on_meanwhile(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And never more passwords are verified at the same time than the settings say."""
    lock = threading.Lock()
    running = [0, 0]

    def slow(self: PasswordHash, password: bytes) -> bool:
        assert threading.current_thread() is not threading.main_thread()
        with lock:
            running[0] += 1
            running[1] = max(running)
        time.sleep(0.02)
        with lock:
            running[0] -= 1
        return False

    monkeypatch.setattr(PasswordHash, "fits", slow)
    users = known(file, concurrency=3)
    checks = asyncio.gather(*(users.check(credentials("ann", b"x")) for _ in range(30)))
    turns = 0
    while not checks.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert all(isinstance(one, Denied) for one in await checks)
    assert running == [0, 3]
    assert turns > 10
    await users.close()
