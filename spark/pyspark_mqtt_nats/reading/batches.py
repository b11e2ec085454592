# SPDX-License-Identifier: Apache-2.0
"""Stored messages, as parallel lists, into Arrow record batches. Only the columns that are wanted are decoded."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from mqtt_streams import retained
from mqtt_streams.stored import StoredMessage
from pyspark_mqtt_nats.reading.decoding import (
    Decoded,
    Topic,
    decode_headers,
    decode_subject,
    header_pairs,
    message_id,
    without_varying,
)
from pyspark_mqtt_nats.reading.dictionaries import Dictionary
from pyspark_mqtt_nats.schema import COLUMNS, HEADERS, MESSAGE_ID, arrow_schema

_COMMON: Final = b"NATS/1.0\r\nNmqtt-Pub:1\r\nNmqtt-Id:"
"""How the block of a QoS 1 message of a gateway begins; 32 digits and a line end follow."""

_TWICE: Final = b"\r\nNats-Msg-Id:"
"""Where ids are replicated the same 32 digits follow once more, most often at the end of the block."""

_ID_END: Final = len(_COMMON) + 32
_TWICE_START: Final = -len(_TWICE) - 32 - 4
_PUB_END: Final = _COMMON.index(b"\r\nNmqtt-Id")
_VISIBLE: Final = "visible"


class Batches:
    """Makes record batches of one read.

    Args:
        columns: names of `schema.COLUMNS`, in the order of the batches.
        prefix: what subjects of the stream begin with.
        visible: whether a subject without prefix is wanted; None: all are.
        retained: the messages are records of `$MQTT_rmsgs`; those that retain nothing are left out.
    """

    def __init__(
        self,
        columns: Sequence[str],
        prefix: str = "",
        visible: Callable[[str], bool] | None = None,
        retained: bool = False,
    ) -> None:
        self.schema = arrow_schema(columns)
        self._retained = retained
        self._filtered = visible is not None
        topics = {
            name: (place, COLUMNS[name].arrow_type) for place, name in enumerate(Topic._fields) if name in columns
        }
        if visible is not None:
            topics[_VISIBLE] = (len(Topic._fields), pa.bool_())
        raw = prefix.encode()

        def subject(key: bytes) -> tuple[Any, ...]:
            topic = decode_subject(key, raw)
            return (*topic, visible is None or (key.startswith(raw) and visible(topic.subject)))

        parts = {
            name: (place, COLUMNS[name].arrow_type) for place, name in enumerate(Decoded._fields) if name in columns
        }
        self._topics = Dictionary(subject, topics) if topics else None
        self._parts = Dictionary(decode_headers, parts) if parts else None

    def batch(
        self, sequences: pa.Array, times: pa.Array, subjects: pa.Array, headers: pa.Array, payloads: pa.Array
    ) -> pa.RecordBatch:
        """Batch of the rows that `rows.Rows` has collected; filters may have left fewer rows than messages."""
        flags: list[int] = []
        if self._retained:
            kept, flags, payloads = _retained(headers, payloads)
            if len(kept) < len(headers):
                rows = pa.array(kept, pa.int64())
                sequences, times = sequences.take(rows), times.take(rows)
                subjects, headers = subjects.take(rows), headers.take(rows)
        codes = self._topics.codes(subjects) if self._topics is not None else None
        keep = self._topics.column(_VISIBLE, codes) if self._topics is not None and self._filtered else None
        parts = self._parts.codes(header_keys(headers)) if self._parts is not None else None
        arrays = []
        for name in self.schema.names:
            if name == "sequence":
                array = sequences
            elif name == "timestamp":
                array = pc.divide(times, 1000).cast(COLUMNS[name].arrow_type)
            elif name == "payload":
                array = payloads
            elif name == HEADERS:
                array = headers_column(headers)
            elif name == MESSAGE_ID:
                array = ids_column(headers)
            elif self._retained and name == "qos":
                array = pa.array(flags, pa.int32())
            elif self._retained and name == "retain":
                array = pa.array([True] * len(headers), pa.bool_())
            elif name in Topic._fields:
                assert self._topics is not None
                array = self._topics.column(name, codes)
            else:
                assert self._parts is not None
                array = self._parts.column(name, parts)
            arrays.append(array)
        batch = pa.RecordBatch.from_arrays(arrays, schema=self.schema)
        return batch if keep is None or pc.all(keep).as_py() else batch.filter(keep)


def _retained(headers: pa.Array, payloads: pa.Array) -> tuple[list[int], list[int], pa.Array]:
    """Places of the records that retain something, with their QoS and payload."""
    found = [
        (place, message.qos, message.payload)
        for place, (block, payload) in enumerate(zip(headers.to_pylist(), payloads.to_pylist(), strict=True))
        if (message := retained.parse(StoredMessage("", 0, 0, block, payload))) is not None
    ]
    kept = pa.array([payload for _, _, payload in found], pa.binary())
    return [place for place, _, _ in found], [qos for _, qos, _ in found], kept


def header_keys(array: pa.Array) -> pa.Array:
    """The blocks without what differs in each message of a gateway, so that few different ones are left to decode."""
    common = pc.and_(pc.starts_with(array, _COMMON), pc.equal(pc.binary_slice(array, _ID_END, _ID_END + 2), b"\r\n"))
    found = pc.sum(common).as_py() or 0
    if found == len(array):
        keys = pc.binary_replace_slice(array, _PUB_END, _ID_END, b"")
        if not any(_TWICE in block for block in (*array[:1].to_pylist(), *array[-1:].to_pylist())):
            return keys
        if pc.all(_ending_with_id(array)).as_py():
            return pc.binary_replace_slice(keys, _TWICE_START, -4, b"")
    blocks = array.to_pylist()
    if not found:
        return pa.array(list(map(without_varying, blocks)), pa.binary())
    return pa.array(
        [
            block[:_PUB_END] + block[_ID_END:] if short and _TWICE not in block else without_varying(block)
            for block, short in zip(blocks, common.to_pylist(), strict=True)
        ],
        pa.binary(),
    )


def _ending_with_id(array: pa.Array) -> pa.Array:
    """Which of the blocks of the usual form have nothing but their own id, once more, in the last line."""
    line = pc.binary_join_element_wise(_TWICE, pc.binary_slice(array, len(_COMMON), _ID_END), b"\r\n\r\n", b"")
    return pc.equal(pc.binary_slice(array, _TWICE_START), line)


def ids_column(array: pa.Array) -> pa.Array:
    """The column `message_id`: in bulk for blocks of the usual form, else each by itself."""
    if len(array) and pc.all(pc.starts_with(array, _COMMON)).as_py():
        try:
            found = pc.binary_slice(array, len(_COMMON), _ID_END + 2).cast(pa.string())
            if pc.all(pc.match_substring_regex(found, "^[0-9a-f]{32}\r\n$")).as_py():
                return pc.utf8_slice_codeunits(found, 0, 32)
        except pa.ArrowInvalid:  # not UTF-8
            pass
    return pa.array(list(map(message_id, array.to_pylist())), pa.string())


def headers_column(array: pa.Array) -> pa.Array:
    """The column `headers`: in bulk for blocks of the usual form, else each by itself."""
    kind = COLUMNS[HEADERS].arrow_type
    usual = pc.and_(pc.starts_with(array, b"NATS/1.0\r\n"), pc.ends_with(array, b"\r\n\r\n"))
    if pc.all(pc.or_(usual, pc.equal(array, b""))).as_py():
        try:
            return _headers_in_bulk(array, kind)
        except pa.ArrowInvalid:  # a name that is not UTF-8
            pass
    return pa.array(list(map(header_pairs, array.to_pylist())), kind)


def _headers_in_bulk(array: pa.Array, kind: pa.DataType) -> pa.Array:
    blocks = pc.split_pattern(array, "\r\n")
    lines = blocks.flatten()
    fields = pc.match_substring(lines, ":")
    counted = pa.concat_arrays([pa.array([0], pa.int32()), pc.cumulative_sum(fields.cast(pa.int32()))])
    pieces = pc.split_pattern(lines.filter(fields), ":", max_splits=1)
    keys = pc.list_element(pieces, 0).cast(pa.string())
    values = pc.ascii_trim(pc.list_element(pieces, 1).view(pa.string()), " \t").view(pa.binary())
    pairs = pa.StructArray.from_arrays([keys, values], fields=list(kind.value_type))
    return pa.ListArray.from_arrays(counted.take(blocks.offsets), pairs, type=kind)
