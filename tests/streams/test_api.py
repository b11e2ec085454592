# SPDX-License-Identifier: Apache-2.0
"""Answers of JetStream, as the stores see them."""

import contextlib
import gc

import orjson
import pytest

from mqtt_streams.api import ApiError, NoLeader, NoResponders, decode


@pytest.mark.parametrize("code", [10008, 10009])
def test_an_error_that_an_election_ends_is_none_of_the_request(code: int) -> None:
    with pytest.raises(NoLeader, match="temporarily unavailable"):
        decode(orjson.dumps({"error": {"code": 503, "err_code": code, "description": "temporarily unavailable"}}))
    assert issubclass(NoLeader, NoResponders)


def test_other_errors_are_refusals() -> None:
    with pytest.raises(ApiError, match="stream not found") as caught:
        decode(b'{"error":{"code":404,"err_code":10059,"description":"stream not found"}}')
    assert (caught.value.code, caught.value.err_code) == (404, 10059)


@pytest.mark.parametrize("answer", [b"", b"+OK", b"[1]", b'{"error":"no"}'])
def test_what_cannot_be_read_is_an_error(answer: bytes) -> None:
    with pytest.raises(ApiError):
        decode(answer)


def test_an_error_is_freed_without_the_collector() -> None:
    """Each return of a session asks for messages that are not there: all clients wait while the collector runs."""
    gc.collect()
    gc.disable()
    try:
        for code in (10037, 10008):
            with contextlib.suppress(ApiError, NoLeader):
                decode(orjson.dumps({"error": {"code": 404, "err_code": code, "description": "no message found"}}))
        assert not gc.collect()
    finally:
        gc.enable()
