# SPDX-License-Identifier: Apache-2.0
"""Clients that people use, against a gateway: ``python -m tests.clients``, and the cheap ones in ``make test``.

Each client library has a small program in ``programs/``, in its own language. Its arguments are

    ADDRESS VERSION CLIENT_ID CLEAN [WILL_TOPIC]

VERSION is 3 (3.1.1) or 5; CLEAN is 1 for a clean session, 0 for one that stays for some minutes; the will is ``gone``
at QoS 1. The program connects, and again when the connection is lost. It reads commands from its standard input:

    subscribe FILTER QOS
    publish TOPIC QOS PAYLOAD
    disconnect

and writes what happens to its standard output:

    connected PRESENT             0 or 1: whether the session was present; ? where the library does not tell
    subscribed CODE               of SUBACK
    published                     acknowledged, QoS 0: sent
    message TOPIC QOS PAYLOAD

``disconnect`` sends DISCONNECT and ends the program. What is no library has a module of its own here, with scenarios of
the same names: a mosquitto bridge, Node-RED, an edge node of Sparkplug.
"""
