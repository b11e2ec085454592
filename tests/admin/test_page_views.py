# SPDX-License-Identifier: Apache-2.0
"""Views of the dashboard in a real browser: long lists, what administrators do and viewers do not, accessibility."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.admin.support import Admin, serving
from tests.admin.test_administrators import FILE, GRAFANA
from tests.admin.test_page import PATIENCE, VIEWS, Seen, browser, click, pytestmark
from tests.harness.nats import NatsServer
from tests.harness.raw5 import SESSION_EXPIRY, Raw5, prop
from tests.harness.waiting import eventually

axe_playwright = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed")

__all__ = ["browser", "pytestmark"]

KEEP = prop(SESSION_EXPIRY, 600)


@pytest.fixture(scope="module")
def admin(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Admin]:
    """A gateway with an administrator and a viewer."""
    tokens = tmp_path_factory.mktemp("tokens") / "tokens.toml"
    tokens.write_text(FILE, encoding="utf-8")
    with serving(nats_server.url, admin_tokens_file=tokens) as found:
        yield found


@pytest.fixture(scope="module")
def absent(admin: Admin) -> None:
    """Sessions of 120 clients that are away, and a member of a group that is there."""
    for number in range(120):
        with Raw5.open(admin.port, f"view-{number:03}", KEEP) as client:
            if number < 2:
                assert client.subscribed((f"view/{number}/#", 1)) == (1,)


@pytest.fixture
def seen(browser: Any, admin: Admin) -> Iterator[Seen]:
    """A page of an administrator that has seen nothing wrong at the end."""
    found = Seen(browser, admin, viewport={"width": 1280, "height": 800})
    yield found
    found.end()


def rows(page: Any, table: str) -> list[str]:
    found: list[str] = page.locator(f"#{table}-table tbody tr td:first-child").all_inner_texts()
    return found


def test_a_long_list_has_parts(seen: Seen, absent: None) -> None:
    """The gateway sorts and searches; the page has 50 sessions, whatever there are."""
    page = seen.page
    names = [f"view-{number:03}" for number in range(120)]
    seen.at("sessions")
    page.fill("#sessions-form input", "view-")
    click(page, "#sessions-form button")
    eventually(lambda: rows(page, "sessions") == names[:50], 60, what="the first part")
    assert page.inner_text("#sessions-table [role=status]") == "1 to 50 of 120"
    click(page, '#sessions-table button:has-text("Next")')
    eventually(lambda: rows(page, "sessions") == names[50:100], 60, what="the second part")
    click(page, '#sessions-table button:has-text("Next")')
    eventually(lambda: rows(page, "sessions") == names[100:], 60, what="the last part")
    assert page.locator('#sessions-table button:has-text("Next")').is_disabled()
    click(page, '#sessions-table th button:has-text("Client")')
    eventually(lambda: rows(page, "sessions") == names[:69:-1], 60, what="the other order")
    assert page.get_attribute("#sessions-table th[aria-sort]", "aria-sort") == "descending"


def test_an_absent_session_is_opened_and_ended(seen: Seen, absent: None) -> None:
    page = seen.page
    seen.at("sessions")
    page.fill("#sessions-form input", "view-000")
    click(page, "#sessions-form button")
    eventually(lambda: rows(page, "sessions") == ["view-000"], 60, what="the session")
    click(page, "#sessions-table button.link")
    page.wait_for_selector("#dialog[open] >> text=view/0/#")
    click(page, "#dialog button.danger")
    click(page, "#dialog button.danger")
    page.wait_for_selector("#sessions-table >> text=There are none like that.")


def test_retained_messages_are_deleted(seen: Seen, admin: Admin) -> None:
    assert admin.post("/publish", topic="view/retained", payload="text", retain=True).status_code == 200
    page = seen.page
    seen.at("retained")
    page.fill("#retained-form input", "view/retained")
    click(page, "#retained-form button")
    eventually(lambda: rows(page, "retained") == ["view/retained"], 60, what="the message")
    click(page, "#retained-table button.link")
    page.wait_for_selector("#dialog pre >> text=text")
    click(page, "#dialog button.danger")
    click(page, "#dialog button.danger")
    page.wait_for_selector("#retained-table >> text=Nothing is retained there.")


def test_bans_rules_and_the_audit_trail(seen: Seen) -> None:
    page = seen.page
    seen.at("bans")
    page.fill("#bans-form input[name=who]", "view-banned")
    page.fill("#bans-form input[name=reason]", "test")
    click(page, "#bans-form button")
    page.wait_for_selector("#bans-table >> text=view-banned")
    click(page, "#bans-table button.danger")
    click(page, "#bans-table button.danger")
    page.wait_for_selector("#bans-table >> text=Nobody is banned.")
    page.fill("#bans-form input[name=who]", "not-a-network")
    page.select_option("#bans-form select", "address")
    click(page, "#bans-form button")
    page.wait_for_selector("#trouble >> text=not-a-network")
    seen.at("rules")
    page.fill("#rules-form input[name=topic]", "view/a")
    click(page, "#rules-form button")
    page.wait_for_selector("#rules-table >> text=there are no rules")
    seen.at("audit")
    page.wait_for_selector("#audit-table >> text=bans.remove")
    assert "admin" in page.inner_text("#audit-table")
    seen.complaints = [one for one in seen.complaints if "400" not in one]  # the ban that is refused


def test_a_trace_as_it_happens(seen: Seen, admin: Admin) -> None:
    page = seen.page
    with Raw5.open(admin.port, "view-traced") as client:
        seen.at("trace")
        page.fill("#trace-form input", "view-traced")
        click(page, "#trace-form button[type=submit]")

        def subscribes() -> bool:
            assert client.subscribed(("view/traced", 0)) == (0,)
            return "view/traced" in page.inner_text("#trace-table")

        eventually(subscribes, 60, what="the packets")
        click(page, "#trace-stop")
        page.wait_for_selector("#trace-state >> text=stopped")


def test_groups(seen: Seen, admin: Admin) -> None:
    with ExitStack() as stack:
        for number in range(3):
            client = stack.enter_context(Raw5.open(admin.port, f"view-member-{number}"))
            assert client.subscribed(("$share/view/work/#", 1)) == (1,)
        seen.at("groups")
        seen.page.wait_for_selector("#groups-table >> text=work/#")
        assert seen.page.inner_text("#groups-table tbody td.number") == "3"


def test_a_viewer_is_offered_nothing_that_is_refused(browser: Any, admin: Admin, absent: None) -> None:
    context = browser.new_context()
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    page.goto(f"{admin.url}/#token={GRAFANA}")
    page.wait_for_selector("#state.good")
    assert page.inner_text("#administrator") == "grafana, viewer"
    assert not page.locator('nav a[href="#/trace"]').is_visible()
    for part in VIEWS:
        page.evaluate(f"location.hash = '#/{part}'")
        wanted = "overview" if part in ("trace", "try") else part
        page.wait_for_selector(f"section#{wanted}:not([hidden])")
    page.evaluate("location.hash = '#/sessions'")
    page.wait_for_selector("#sessions-table button.link")
    click(page, "#sessions-table button.link")
    page.wait_for_selector("#dialog[open]")
    assert page.locator("#dialog button.danger").count() == 0
    assert not page.locator("#bans-form").is_visible()
    context.close()


def test_by_keyboard(seen: Seen, absent: None) -> None:
    """The first key leads to the content; a name opens with Enter, and Escape closes. A refresh takes no focus away."""
    page = seen.page
    page.reload()  # it begins at its top, without the dialog for the token
    page.wait_for_selector("#state.good")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    seen.at("sessions")
    page.wait_for_selector("#sessions-table button.link")
    page.locator("#sessions-table button.link").nth(1).focus()
    name = page.evaluate("document.activeElement.textContent")
    page.evaluate("document.getElementById('sessions-form').requestSubmit()")
    page.wait_for_function(f"document.activeElement.textContent === {name!r}")
    page.keyboard.press("Enter")
    page.wait_for_selector("#dialog[open]")
    page.keyboard.press("Escape")
    eventually(lambda: page.locator("#dialog[open]").count() == 0, 60, what="the end of the dialog")
    page.wait_for_function(f"document.activeElement.textContent === {name!r}")


def test_a_tab_that_nobody_sees_asks_for_nothing(seen: Seen) -> None:
    page = seen.page
    asked: list[str] = []
    page.on("request", lambda one: asked.append(one.url))
    hide = "Object.defineProperty(document, 'hidden', { value: %s, configurable: true });"
    told = "document.dispatchEvent(new Event('visibilitychange'));"
    page.evaluate(hide % "true" + told)
    page.wait_for_timeout(500)  # what is under way
    asked.clear()
    page.wait_for_timeout(6000)  # longer than between two refreshes
    assert asked == []
    page.evaluate(hide % "false" + told)
    eventually(lambda: page.wait_for_timeout(50) or asked, 60, what="requests")


def test_what_has_not_changed_is_not_drawn_again(seen: Seen) -> None:
    """The charts without a new point, and the table of slow clients."""
    page = seen.page
    page.wait_for_selector("#charts svg path", state="attached")
    asked: list[str] = []

    def nothing(route: Any) -> None:
        asked.append(route.request.url)
        route.fulfill(json={"step": 10, "gateways": []})

    page.route("**/api/v1/history?*", nothing)
    page.evaluate("performance.now = () => 0")  # however busy this machine is, the next look follows soon
    seen.at("clients")
    seen.at("overview")
    eventually(lambda: page.wait_for_timeout(50) or len(asked) > 1, 60, what="two looks without a point")
    page.evaluate("window.drawn = [...document.querySelectorAll('#charts path, #charts text, #slow > *')]")
    asked.clear()
    eventually(lambda: page.wait_for_timeout(50) or len(asked) > 1, 60, what="two more looks")
    assert page.evaluate("drawn.length > 8 && drawn.every((one) => one.isConnected)")


def test_a_look_that_failed_is_repeated_soon(seen: Seen) -> None:
    """However long it took: here each look takes a minute, and one that succeeds is not repeated within the hour."""
    page = seen.page
    asked: list[str] = []

    def answer(route: Any) -> None:
        asked.append(route.request.url)
        if len(asked) == 1:
            route.fulfill(status=504, json={"error": "no gateway has answered"})
        else:
            route.continue_()

    page.evaluate("let now = 0; performance.now = () => (now += 60_000)")
    page.route("**/api/v1/topics?*", answer)
    seen.at("topics")
    page.wait_for_selector("text=no gateway has answered")
    page.wait_for_selector("#topics-table > *")
    assert not page.locator("#trouble").is_visible()
    assert len(asked) == 2
    (complaint,) = seen.complaints
    assert "504" in complaint
    seen.complaints.clear()


@pytest.mark.parametrize("scheme", ["light", "dark", "phone"])
def test_axe_finds_nothing(browser: Any, admin: Admin, absent: None, scheme: str) -> None:
    """Names of controls, contrast, order of headings and so on, in every view and in a dialog."""
    how: dict[str, Any] = {"viewport": {"width": 1280, "height": 800}, "color_scheme": scheme}
    if scheme == "phone":
        how = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
    seen = Seen(browser, admin, **how)
    page, axe = seen.page, axe_playwright.Axe()

    def complaints() -> list[Any]:
        return [(one["id"], one["nodes"][0]["html"]) for one in axe.run(page).response["violations"]]

    for part in VIEWS:
        seen.at(part)
        if page.locator(f"#{part}-table").count() and part not in ("rules", "trace"):
            page.wait_for_selector(f"#{part}-table > *")
        assert complaints() == [], part
    seen.at("sessions")
    click(page, "#sessions-table button.link")
    page.wait_for_selector("#dialog[open]")
    assert complaints() == []
    seen.end()
