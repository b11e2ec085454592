# SPDX-License-Identifier: Apache-2.0
"""``mqtt-nats ctl cluster status`` where there are several nats-servers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from tests.conftest import GatewayFactory, NatsFactory
from tests.harness.cluster import Cluster, running_cluster
from tests.harness.waiting import eventually
from tests.integration.test_ctl import ctl


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


def look(url: str) -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads(ctl(url, "status", "--json"))
    return found


def test_every_server_and_who_leads(cluster: Cluster, gateway_factory: GatewayFactory) -> None:
    gateway_factory(cluster.url)
    logs = [server.log for server in cluster.servers]
    (leader,) = [f"n{number}" for number, log in enumerate(logs) if "Self is new JetStream cluster metadata" in log]
    for server in cluster.servers[:2]:
        nats = look(server.url)["nats"]
        found = nats["servers"]
        assert [(one["name"], one["cluster"], one["jetstream"]) for one in found] == [
            (f"n{number}", "c", True) for number in range(3)
        ]
        assert [one["name"] for one in found if one["leader"]] == [leader]
        assert {one["version"] for one in found} == {nats["version"]}
        assert sum(one["connections"] for one in found) >= 4  # three of the gateway, and this one
    text = ctl(cluster.servers[0].url, "status")
    assert len(re.findall(r"^n[012] +2\.\d+\S* +c +yes ", text, re.MULTILINE)) == 3, text
    assert len(re.findall(rf"^{leader} .* meta(, \d streams)?$", text, re.MULTILINE)) == 1, text


def test_a_server_that_is_down_is_not_shown(cluster: Cluster, gateway_factory: GatewayFactory) -> None:
    """The first server of the list is down; `ctl` asks the next."""
    gateway_factory(cluster.servers[1].url)
    cluster.servers[0].kill()

    def two() -> bool:
        found = look(cluster.url)["nats"]["servers"]
        return [one["name"] for one in found] == ["n1", "n2"] and any(one["leader"] for one in found)

    eventually(two, 40.0)


def test_a_user_who_may_not_ask_sees_his_own_server(nats_factory: NatsFactory, gateway_factory: GatewayFactory) -> None:
    permissions = 'permissions: {publish: {deny: "$SYS.>"}, subscribe: {deny: "$JS.EVENT.>"}}'
    server = nats_factory(config=f"authorization {{ users: [{{user: u, password: p, {permissions}}}] }}")
    url = server.url.replace("://", "://u:p@")
    gateway_factory(url)
    (found,) = look(url)["nats"]["servers"]
    assert (found["name"], found["connections"], found["leader"], found["connected"]) == ("test", None, False, True)
