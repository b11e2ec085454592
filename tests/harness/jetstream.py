# SPDX-License-Identifier: Apache-2.0
"""JetStream in memory, for unit tests: streams, consumers as configurations, and the requests of the gateway's stores.

It stores and removes messages and answers as nats-server does. It delivers nothing: no consumer sends a message.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import orjson

from mqtt_nats.protocol.overlap import subject_matches
from mqtt_streams import headers as names
from mqtt_streams.api import ApiError, Reply, RequestTimeout
from mqtt_streams.definitions import EVERY, load_definition
from mqtt_streams.error_codes import NO_MESSAGE_FOUND
from mqtt_streams.stored import StoredMessage, rfc3339, time_ns

SUBJECTS = {name: tuple(load_definition(name)["subjects"]) for name in EVERY}
NS = 1_000_000_000

Answer = dict[str, Any]


def match(subject: str, pattern: str) -> bool:
    """Whether a subject matches a pattern of NATS."""
    return subject_matches(pattern, subject.split("."))


class MemoryJetStream:
    """The streams of a gateway, and consumers by stream and name; each store is a second later than the one before."""

    api_prefix = "$JS.API"
    max_ack_pending = 0

    def __init__(self) -> None:
        self.messages: dict[str, list[StoredMessage]] = {name: [] for name in SUBJECTS}
        self.last = dict.fromkeys(SUBJECTS, 0)
        self.consumers: dict[str, dict[str, Answer]] = {name: {} for name in SUBJECTS}
        """Answers to CONSUMER.INFO; tests change what they tell."""
        self.created = dict.fromkeys(SUBJECTS, rfc3339(0))
        self.replicas = 1
        self.cluster: Answer | None = None
        """What STREAM.INFO tells of the servers of a stream; None = a single server."""
        self.now = 0
        """Nanoseconds since 1970 of the last store."""
        self.asked: list[str] = []
        """Subjects of all requests."""
        self.before: Callable[[str], None] = lambda subject: None
        """Called before each request is carried out; it may raise what the request raises."""
        self.after: Callable[[str], None] = lambda subject: None
        """Called when a request was carried out; what it raises takes the place of the answer."""

    # -- what tests do ----------------------------------------------------------------------------

    def put(self, subject: str, payload: bytes = b"", headers: bytes = b"") -> int:
        """Store a message; returns its sequence."""
        stream = next(name for name, some in SUBJECTS.items() if any(match(subject, one) for one in some))
        self.last[stream] += 1
        self.now += NS
        self.messages[stream].append(StoredMessage(subject, self.last[stream], self.now, headers, payload))
        return self.last[stream]

    def subjects(self, stream: str) -> list[str]:
        """The subjects of the messages in a stream, in their order."""
        return [one.subject for one in self.messages[stream]]

    # -- the protocol -----------------------------------------------------------------------------

    async def request(
        self, subject: str, payload: bytes = b"", headers: bytes = b"", *, timeout: float = 5.0, reply: str = ""
    ) -> Reply:
        """Carry out one request."""
        self.asked.append(subject)
        await asyncio.sleep(0)  # others run while a request is under way
        self.before(subject)
        api = subject.removeprefix(f"{self.api_prefix}.")
        if api.startswith("DIRECT.GET."):
            return self._direct(api.rpartition(".")[2], orjson.loads(payload))
        try:
            if api == subject:
                answer = self._store(subject, payload, headers)
            else:
                answer = self._api(api.split("."), orjson.loads(payload or b"{}"))
        except ApiError as error:
            found = {"code": error.code, "err_code": error.err_code, "description": error.description}
            answer = {"error": found}
        self.after(subject)
        return Reply("", b"", orjson.dumps(answer))

    async def stream(self, subject: str, payload: bytes = b"", *, timeout: float = 5.0) -> AsyncGenerator[Reply, None]:
        """Answer a direct get, or a request for a page of a consumer, message by message."""
        self.asked.append(subject)
        self.before(subject)
        name, body = subject.rpartition(".")[2], orjson.loads(payload)
        if ".CONSUMER.MSG.NEXT." in subject:
            for reply in self._pull(subject.split(".")[-2], name, body["batch"]):
                yield reply
            return
        start, since = body.get("seq", 1), time_ns(body["start_time"]) if "start_time" in body else 0
        some = [one for one in self.messages[name] if one.seq >= start and one.time_ns >= since]
        found = [one for one in some if match(one.subject, body["next_by_subj"])]
        for one in found[: body.get("batch", 1)]:
            yield Reply("", _direct_headers(name, one), one.payload)
        rest = len(found) - body.get("batch", 1)
        yield Reply("", b"NATS/1.0 204 EOB\r\nNats-Num-Pending:%d\r\n\r\n" % max(rest, 0), b"")

    def _pull(self, stream: str, name: str, batch: int) -> Iterator[Reply]:
        """Yield the next messages of a consumer."""
        consumer = self._consumer(stream, name)
        config, done = consumer["config"], consumer.setdefault("delivered", 0)
        some = [one for one in self.messages[stream] if one.seq >= config["opt_start_seq"]]
        found = [one for one in some if any(match(one.subject, each) for each in config["filter_subjects"])]
        for number, one in enumerate(found[done : done + batch], done + 1):
            consumer["delivered"] = number
            reply = f"$JS.ACK.{stream}.{name}.1.{one.seq}.{number}.{one.time_ns}.{len(found) - number}"
            yield Reply(one.subject, one.headers, one.payload, reply)
        if len(found) < done + batch:
            yield Reply("", b"NATS/1.0 404 No Messages\r\n\r\n", b"")

    def _direct(self, name: str, body: Answer) -> Reply:
        try:
            found = self._found(name, body)
        except ApiError:
            return Reply("", b"NATS/1.0 404 Message Not Found\r\n\r\n", b"")
        return Reply("", _direct_headers(name, found), found.payload)

    def _store(self, subject: str, payload: bytes, headers: bytes) -> Answer:
        if not any(match(subject, one) for some in SUBJECTS.values() for one in some):
            return {}
        expected = names.get_int(headers, names.EXPECTED_LAST_SUBJECT_SEQUENCE) if headers else None
        if expected is not None:
            stream = next(name for name, some in SUBJECTS.items() if any(match(subject, one) for one in some))
            present = [one.seq for one in self.messages[stream] if one.subject == subject]
            if (present[-1] if present else 0) != expected:
                raise ApiError(400, 10071, f"wrong last sequence: {present[-1] if present else 0}")
        if names.get(headers, names.ROLLUP) == "sub":
            for stream, some in self.messages.items():
                self.messages[stream] = [one for one in some if one.subject != subject]
        return {"seq": self.put(subject, payload, headers)}

    def _api(self, tokens: list[str], body: Answer) -> Answer:
        match tokens:
            case ["STREAM", "INFO", name]:
                return self._info(name, body)
            case ["STREAM", "LEADER", "STEPDOWN", _]:
                return {"success": True}
            case ["STREAM", "MSG", "GET", name]:
                return {"message": self._message(self._found(name, body))}
            case ["STREAM", "MSG", "DELETE", name]:
                if not any(one.seq == body["seq"] for one in self.messages[name]):
                    raise ApiError(400, 10043, "sequence not found")
                self.messages[name] = [one for one in self.messages[name] if one.seq != body["seq"]]
                return {"success": True}
            case ["STREAM", "PURGE", name]:
                return {"purged": self._purge(name, body["filter"], body.get("seq", self.last[name] + 1))}
            case ["CONSUMER", "NAMES", name]:
                return {"consumers": list(self.consumers[name]), "total": len(self.consumers[name])}
            case ["CONSUMER", "LIST", name]:
                some = [{"name": one} | found for one, found in self.consumers[name].items()]
                return {"consumers": some[body["offset"] :], "total": len(some)}
            case ["CONSUMER", "INFO", stream, name]:
                return self._consumer(stream, name)
            case ["CONSUMER", "DELETE", stream, name]:
                self._consumer(stream, name)
                del self.consumers[stream][name]
                return {"success": True}
            case ["CONSUMER", "RESET", stream, name]:
                if name not in self.consumers[stream]:
                    raise RequestTimeout(name)
                before = {"stream_seq": body["seq"] - 1}
                self.consumers[stream][name] |= {"delivered": before, "ack_floor": before}
                return self.consumers[stream][name]
            case ["CONSUMER", "CREATE", stream]:
                name = f"unnamed{len(self.asked)}"
                return self._api([*tokens, name], body) | {"name": name, "num_pending": len(self.messages[stream])}
            case ["CONSUMER", "DURABLE", "CREATE", stream, name] | ["CONSUMER", "CREATE", stream, name]:
                if body.get("action") == "update":
                    self._consumer(stream, name)
                found = self.consumers[stream].setdefault(name, {})
                found["config"] = body["config"]
                return found
        raise AssertionError(f"a request that is not known: {tokens}")

    def _consumer(self, stream: str, name: str) -> Answer:
        if name not in self.consumers[stream]:
            raise ApiError(404, 10014, "consumer not found")
        return self.consumers[stream][name]

    def _found(self, name: str, body: Answer) -> StoredMessage:
        some = self.messages[name]
        if "last_by_subj" in body:
            some = [one for one in some if match(one.subject, body["last_by_subj"])][-1:]
        elif "next_by_subj" in body:
            since = time_ns(body["start_time"]) if "start_time" in body else 0
            some = [one for one in some if one.seq >= body.get("seq", 1) and one.time_ns >= since]
            some = [one for one in some if match(one.subject, body["next_by_subj"])]
        else:
            some = [one for one in some if one.seq == body["seq"]]
        if not some:
            raise ApiError(404, NO_MESSAGE_FOUND, "no message found")
        return some[0]

    def _message(self, found: StoredMessage) -> Answer:
        return {
            "subject": found.subject,
            "seq": found.seq,
            "time": rfc3339(found.time_ns),
            "hdrs": b64encode(found.headers).decode(),
            "data": b64encode(found.payload).decode(),
        }

    def _info(self, name: str, body: Answer) -> Answer:
        state: Answer = {
            "first_seq": self.messages[name][0].seq if self.messages[name] else self.last[name] + 1,
            "last_seq": self.last[name],
            "messages": len(self.messages[name]),
            "num_subjects": len(set(self.subjects(name))),
            "consumer_count": len(self.consumers[name]),
        }
        state["last_ts"] = rfc3339(self.messages[name][-1].time_ns if self.messages[name] else 0)
        if wanted := body.get("subjects_filter"):
            found: dict[str, int] = {}
            for one in self.messages[name]:
                if match(one.subject, wanted):
                    found[one.subject] = found.get(one.subject, 0) + 1
            state["subjects"] = found
        config = {"num_replicas": self.replicas}
        answer = {"config": config, "state": state, "created": self.created[name], "ts": rfc3339(self.now)}
        return answer if self.cluster is None else answer | {"cluster": self.cluster}

    def _purge(self, name: str, pattern: str, below: int) -> int:
        kept = [one for one in self.messages[name] if one.seq >= below or not match(one.subject, pattern)]
        gone = len(self.messages[name]) - len(kept)
        self.messages[name] = kept
        return gone


def _direct_headers(stream: str, one: StoredMessage) -> bytes:
    own = one.headers.removesuffix(b"\r\n\r\n") or b"NATS/1.0"
    return b"%b\r\nNats-Stream: %b\r\nNats-Subject: %b\r\nNats-Sequence: %d\r\nNats-Time-Stamp: %b\r\n\r\n" % (
        own,
        stream.encode(),
        one.subject.encode(),
        one.seq,
        rfc3339(one.time_ns).encode(),
    )
