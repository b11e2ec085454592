# SPDX-License-Identifier: Apache-2.0
"""An edge node, or a host application, of Sparkplug B on pysparkplug.

Its arguments are ``ROLE ADDRESS GROUP``. Its lines are those of the other programs, with the type of the message in
place of the topic and the value of its metric in place of the payload.
"""

import sys

from pysparkplug import (
    MULTI_LEVEL_WILDCARD,
    Client,
    ClientOptions,
    DataType,
    Device,
    EdgeNode,
    Message,
    MessageType,
    Metric,
    NCmd,
    QoS,
    Topic,
    get_current_timestamp,
)

NODE = "node"


def say(*words: object) -> None:
    print(*words, flush=True)


def metric(value: int) -> Metric:
    return Metric(timestamp=get_current_timestamp(), name="value", datatype=DataType.INT64, value=value)


def received(message: Message) -> None:
    """Say what came: of a birth and a death the number of the connection, else the value."""
    payload = message.payload
    metrics = [payload.bd_seq_metric] if hasattr(payload, "bd_seq_metric") else payload.metrics
    values = {one.name: one.value for one in metrics}
    say("message", str(message.topic).split("/")[2], int(message.qos), values.get("bdSeq", values.get("value")))


def edge(client: Client, group: str, host: str, port: int) -> None:
    """An edge node with a device: publishes its metric, and says which commands it gets."""
    node = EdgeNode(group, NODE, [metric(0)], client, lambda _, message: received(message))
    node.register(Device("device", [metric(0)]))
    node.connect(host, port=port)
    for line in sys.stdin:
        command, *words = line.split()
        if command != "publish":
            break
        node.update([metric(int(words[2]))])
        say("published")
    node.disconnect()


def application(client: Client, group: str, host: str, port: int) -> None:
    """A host application: says what it gets from the group, and publishes commands."""
    everything = Topic(group_id=group, message_type=MULTI_LEVEL_WILDCARD)
    client.subscribe(everything, QoS.AT_LEAST_ONCE, lambda _, message: received(message))
    client.connect(host, port=port, callback=lambda _: say("connected", "?"))
    for line in sys.stdin:
        command, *words = line.split()
        if command != "publish":
            break
        order = NCmd(timestamp=get_current_timestamp(), metrics=(metric(int(words[2])),))
        target = Topic(group_id=group, message_type=MessageType.NCMD, edge_node_id=NODE)
        client.publish(Message(topic=target, payload=order, qos=QoS(int(words[1])), retain=False), include_dtypes=True)
        say("published")
    client.disconnect()


def main() -> None:
    """One of both, until standard input ends."""
    role, address, group = sys.argv[1:]
    host, _, port = address.partition(":")
    options = ClientOptions(reconnection_delay_min=1, reconnection_delay_max=1)
    client = Client(client_id=f"{group}-{role}", client_options=options)
    (edge if role == "edge" else application)(client, group, host, int(port))


main()
