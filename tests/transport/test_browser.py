# SPDX-License-Identifier: Apache-2.0
"""MQTT.js in a page of a real browser, through a WebSocket listener."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.nats import NatsServer
from tests.harness.raw5 import Raw5
from tests.integration.inprocess import running
from tests.transport.browser import find_chromium, find_mqtt_js

WAIT = 120_000
"""Milliseconds for each step of the browser; a machine that has other work takes long to start one."""

TALK = """
async ({url, version}) => {
  const options = {protocolVersion: version, clientId: `page-${version}`, reconnectPeriod: 0};
  const client = await mqtt.connectAsync(url, options);
  const got = [];
  const wanted = 5;
  const all = new Promise((done, failed) => {
    client.on("message", (topic, body, packet) => {
      got.push([topic, Array.from(body), packet.qos, packet.retain]);
      if (got.length === wanted) done();
    });
    client.on("error", failed);
    client.on("close", () => failed(new Error("the connection is closed")));
  });
  const granted = await client.subscribeAsync(`page/${version}/#`, {qos: 2});
  for (const qos of [0, 1, 2]) await client.publishAsync(`page/${version}/own`, new Uint8Array([0, 255, qos]), {qos});
  await client.publishAsync(`page/${version}/long`, "x".repeat(100000), {qos: 1, retain: true});
  await client.publishAsync(`to/tcp/${version}`, "hello", {qos: 1});
  await all;
  client.removeAllListeners("close");
  await client.endAsync();
  return {granted: granted.map((one) => one.qos), got};
}
"""


@pytest.mark.long
@pytest.mark.timeout(400)
def test_mqtt_js_in_a_browser(nats_server: NatsServer, tmp_path: Path) -> None:
    """Both versions: every QoS to itself, a long message, and messages from and to a client on TCP."""
    chromium, script = find_chromium(), find_mqtt_js(tmp_path)
    from playwright.sync_api import sync_playwright

    # The page has no site: browsers say so.
    listeners = ({"listen": "127.0.0.1:0", "type": "ws", "origins": ["null"]}, {"listen": "127.0.0.1:0"})
    with (
        running(nats=(nats_server.url,), listeners=listeners) as gateway,
        Raw5.open(gateway.addresses[1].port) as other,
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"], timeout=WAIT) as browser,
    ):
        other.subscribed(("to/tcp/+", 1))
        page = browser.new_page()
        page.set_default_timeout(WAIT)
        page.add_script_tag(path=script)
        with Raw5.open(gateway.addresses[1].port) as writer:
            for version in (4, 5):
                writer.deliver(f"page/{version}/kept", b"from tcp", flags=1)
                found: Any = page.evaluate(TALK, {"url": f"ws://127.0.0.1:{gateway.port}/mqtt", "version": version})
                assert found["granted"] == [2]
                assert sorted(found["got"]) == [
                    [f"page/{version}/kept", list(b"from tcp"), 1, True],
                    [f"page/{version}/long", [120] * 100_000, 1, False],
                    *([f"page/{version}/own", [0, 255, qos], qos, False] for qos in (0, 1, 2)),
                ]
                assert other.receive_message(b"hello").topic == f"to/tcp/{version}"
