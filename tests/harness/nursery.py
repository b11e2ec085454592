# SPDX-License-Identifier: Apache-2.0
"""The process that gateways of tests are forked from: it has loaded their modules, once for all of them.

``python -m tests.harness.nursery FD``: FD is a SOCK_SEQPACKET socket. Each packet is a request, JSON with ``module``,
``arguments``, ``env`` and ``cwd``, and two descriptors: the file for the output, and a socket that is told the process
id, then the exit status, as `os.waitstatus_to_exitcode` has it. It ends when nobody has the other end any more.
"""

import gc
import json
import os
import runpy
import signal
import socket
import sys
from typing import Any

REQUEST = 1 << 20
"""Bytes of a request at most."""


def preload() -> None:
    """What a gateway loads and makes when it starts, in any configuration: modules, options, the schema of settings."""
    import encodings.ascii
    import encodings.idna  # noqa: F401

    import anyio._backends._asyncio
    import anyio.streams.tls  # noqa: F401
    import click
    import uvloop  # noqa: F401

    import mqtt_nats.gateway.gateway
    import mqtt_nats.gateway.shutdown
    import mqtt_nats.gateway.supervisor  # noqa: F401
    from mqtt_nats.cli import serve
    from mqtt_nats.config.settings import Settings

    serve.get_params(click.Context(serve))
    Settings.load({})


def attend(request: dict[str, Any], output: int, reply: socket.socket) -> None:
    """Fork the gateway, in which this returns; wait for its end in this process, which ends then."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid:
        try:
            reply.send(str(pid).encode())
            reply.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
        finally:
            os._exit(0)
    os.setsid()  # `LoggedProcess.interrupt` reaches this process and its children only
    reply.detach()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])


def main() -> None:
    """Fork until nobody can ask any more."""
    control = socket.socket(fileno=int(sys.argv[1]))
    preload()
    gc.collect()
    gc.freeze()  # else collections of each gateway would look through what they share, and copy it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those who attend
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, REQUEST, 2)
        if not data:
            return
        output, answers = descriptors
        if os.fork() == 0:
            request = json.loads(data)
            attend(request, output, socket.socket(fileno=answers))
            control.detach()
            break
        for descriptor in descriptors:
            os.close(descriptor)
    sys.argv = [request["module"], *request["arguments"]]
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
