# SPDX-License-Identifier: Apache-2.0
"""The dashboard in a real browser: what others have named stays text, and everything works that it shows."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from mqtt_nats.config.build_info import build_and_reason
from tests.admin.support import TOKEN, Admin, serving
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness.nats import NatsServer
from tests.harness.raw5 import PUBACK, SESSION_EXPIRY, Raw5, prop, publish
from tests.harness.waiting import eventually

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium is installed")

PATIENCE = 60_000.0
"""Milliseconds."""

HOSTILE = [
    '<img src=x onerror="window.pwned=1">',
    "<script>window.pwned=1</script>",
    "'\"><svg/onload=window.pwned=1>",
    "javascript:window.pwned=1",
]


@pytest.fixture(scope="module")
def admin(nats_server: NatsServer) -> Iterator[Admin]:
    """A gateway that asks for a token."""
    with serving(nats_server.url) as found:
        yield found


def click(page: Any, selector: str) -> None:
    """Click, also where a browser has so little CPU that it draws nothing for a while."""
    page.locator(selector).first.evaluate("one => one.click()")


VIEWS = (
    *("overview", "clients", "sessions", "subscriptions", "groups", "topics", "retained"),
    *("gateways", "streams", "plugins", "bans", "audit", "rules", "trace", "try"),
)


class Seen:
    """A page, and what its browser complained about."""

    def __init__(self, browser: Any, admin: Admin, **how: Any) -> None:
        self.complaints: list[str] = []
        self.strange: list[str] = []
        self.context = browser.new_context(**how)
        self.context.set_default_timeout(PATIENCE)
        self.page = self.context.new_page()
        self.page.on("console", lambda one: self._told(one.type, one.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda one: self._asked(one.url, admin.url))
        self.page.goto(admin.url)
        self.page.fill("input[name=token]", "not-the-token-of-this-gateway")
        click(self.page, "dialog button")
        self.page.wait_for_selector("text=That is not the token.")
        self.page.fill("input[name=token]", TOKEN)
        click(self.page, "dialog button")
        self.page.wait_for_selector("#state.good")

    def _told(self, kind: str, text: str) -> None:
        if kind in ("error", "warning") and "401" not in text:
            self.complaints.append(text)

    def _asked(self, url: str, own: str) -> None:
        if not url.startswith((own, own.replace("http", "ws", 1))):
            self.strange.append(url)

    def at(self, part: str) -> None:
        """Open a part of the page."""
        click(self.page, f'nav a[href="#/{part}"]')
        self.page.wait_for_selector(f"section#{part}:not([hidden])")

    def end(self) -> None:
        """Nothing went wrong, nobody else was asked, and no name has become a program."""
        assert self.page.evaluate("window.pwned") is None
        assert self.page.evaluate("document.querySelectorAll('main script, main img, main svg[onload]').length") == 0
        assert (self.complaints, self.strange) == ([], [])
        self.context.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium."""
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(
            executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu", "--in-process-gpu"]
        )
        yield found
        found.close()


def test_names_of_others_stay_text(browser: Any, admin: Admin) -> None:
    keep = prop(SESSION_EXPIRY, 600)
    clients = [Raw5.open(admin.port, name, keep) for name in HOSTILE]
    for name, client in zip(HOSTILE, clients, strict=True):
        assert client.subscribed((f"{name}/+", 1)) == (1,)
    clients[0].deliver(f"page/{HOSTILE[0]}", HOSTILE[1].encode(), flags=1)
    seen = Seen(browser, admin, viewport={"width": 1200, "height": 800}, color_scheme="dark")
    page = seen.page
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    seen.at("clients")
    page.wait_for_selector("#clients-table td")
    assert sorted(page.locator("#clients-table tbody tr td:first-child").all_inner_texts()) == sorted(HOSTILE)

    page.fill("#clients-form input[name=match]", "onerror")
    click(page, "#clients-form button")
    eventually(lambda: page.locator("#clients-table tbody tr").count() == 1, 60, what="one client")
    click(page, "#clients-table button.link")
    page.wait_for_selector("#dialog[open] >> text=Subscription")
    assert f"{HOSTILE[0]}/+" in page.inner_text("#dialog")
    click(page, "#dialog button.danger")
    assert page.inner_text("#dialog button.danger") == "Disconnect: sure?"
    click(page, "#dialog button.danger")
    page.wait_for_selector("text=Nobody like that is connected.")
    clients[0].close()

    seen.at("sessions")
    page.select_option("#sessions-form select", "disconnected")

    def listed() -> bool:
        """Whether the list, which does not renew itself, has the session by now: its connection has just ended."""
        click(page, "#sessions-form button")
        return bool(page.locator("#sessions-table tbody tr").count() == 1)

    eventually(listed, 60, what="one session")
    assert page.inner_text("#sessions-table tbody tr td:first-child") == HOSTILE[0]
    for part, name in (("subscriptions", HOSTILE[3]), ("topics", HOSTILE[0])):
        seen.at(part)
        page.wait_for_selector(f"#{part}-table td")
        assert name in page.inner_text(f"#{part}-table")
    seen.at("retained")
    click(page, "#retained-table button.link")
    page.wait_for_selector("#dialog pre")
    assert page.inner_text("#dialog pre") == HOSTILE[1]
    click(page, "#dialog button.quiet")
    seen.at("streams")
    page.wait_for_selector("#streams-table >> text=$MQTT_msgs")
    seen.at("gateways")
    page.wait_for_selector("#gateways-table >> text=running")
    page.wait_for_selector("#listeners-table >> text=anonymous")
    seen.end()
    for client in clients[1:]:
        client.close()


def test_the_address_with_the_token_signs_in(browser: Any, admin: Admin) -> None:
    """At once, and in a tab that is open; the token does not stay in the address."""
    context = browser.new_context()
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    page.goto(f"{admin.url}/#token={TOKEN}")
    page.wait_for_selector("#state.good")
    assert page.locator("input[name=token]").count() == 0
    assert page.url == f"{admin.url}/"
    page.evaluate("sessionStorage.setItem('token', 'that-of-a-gateway-before')")
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # where looks are slow, the next one is far
    page.wait_for_selector("input[name=token]")
    page.evaluate(f"location.hash = '#token={TOKEN}'")
    page.wait_for_selector("#state.good")
    eventually(lambda: page.url == f"{admin.url}/", 60, what="the address without the token")
    assert page.locator("input[name=token]").count() == 0
    context.close()


def test_publish_and_subscribe_on_a_phone(browser: Any, admin: Admin) -> None:
    seen = Seen(browser, admin, viewport={"width": 390, "height": 800}, is_mobile=True, has_touch=True)
    page = seen.page
    seen.at("try")
    page.wait_for_selector("#bridge >> text=connected as dashboard-")
    page.fill("#subscribe-form input[name=filter]", "phone/#")
    click(page, "#subscribe-form button[type=submit]")
    page.wait_for_selector("#filters >> text=phone/#")
    page.fill("#publish-form input[name=topic]", f"phone/{HOSTILE[0]}")
    page.fill("#publish-form textarea", HOSTILE[2])
    page.select_option("#publish-form select[name=qos]", "1")
    click(page, "#publish-form button[type=submit]")
    page.wait_for_selector("#published >> text=published on")
    page.wait_for_selector("#messages td.text")
    assert HOSTILE[2] in page.inner_text("#messages")
    page.fill("#publish-form input[name=topic]", "phone/#")
    click(page, "#publish-form button[type=submit]")
    page.wait_for_selector("#trouble >> text=wildcard")
    click(page, "#filters button")
    eventually(lambda: page.locator("#filters li").count() == 0, 60, what="no subscription")
    for part in VIEWS:
        seen.at(part)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, part
    click(page, "#theme")
    click(page, "#theme")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.reload()
    page.wait_for_selector("#state.good")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    seen.at("overview")
    eventually(lambda: page.locator("#charts path").count() > 3, 60, what="lines")
    shown = page.locator("#charts svg").first.get_attribute("aria-label")
    assert shown.startswith("Messages per second: received ")
    assert page.locator("#tiles .tile").count() >= 8
    named = page.inner_text('.tile:has(.name:text-is("Build"))').split("\n")
    assert ": ".join(filter(None, named[1:])) == build_and_reason()
    seen.end()


def test_a_full_storage_is_seen(browser: Any, nats_factory: NatsFactory) -> None:
    """How much of it is used, and what was refused for which reason."""
    server = nats_factory(config="jetstream { max_file_store: 3MB }")
    with serving(server.url) as admin, Raw5.open(admin.port, "filler") as client:
        for number in range(1, 100):
            client.send(publish("full", bytes(100_000), qos=1, id=number))
            if client.answer(PUBACK, number).reason == 0x97:
                break
        seen = Seen(browser, admin)
        seen.page.wait_for_selector('.tile:has-text("JetStream storage") >> text=the account has no limit')
        seen.page.wait_for_selector('.tile:has-text("Stores refused") >> text=1 storage full')
        seen.end()


def test_a_gateway_is_drained(
    browser: Any, admin: Admin, nats_server: NatsServer, gateway_factory: GatewayFactory
) -> None:
    """Another one than that which serves the page."""
    other = gateway_factory(nats_server.url, "--drain-time", "0.5")
    (mine,) = (one["id"] for one in admin.get("/cluster")["gateways"] if one["listen"][0].endswith(f":{other.port}"))
    seen = Seen(browser, admin)
    seen.at("gateways")
    click(seen.page, f'#gateways-table button.link:has-text("{mine}")')
    seen.page.wait_for_selector("#dialog[open] >> text=Drain")
    click(seen.page, "#dialog button.danger")
    assert seen.page.inner_text("#dialog button.danger") == "Drain: sure?"
    assert other.process.alive
    click(seen.page, "#dialog button.danger")
    eventually(lambda: not other.process.alive, 60, what="the end of the gateway")
    seen.end()
