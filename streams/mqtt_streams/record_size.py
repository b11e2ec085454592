# SPDX-License-Identifier: Apache-2.0
"""Size of a session record, which has to fit one JetStream message."""

from typing import Final

from mqtt_streams.messages import subscription_consumer
from mqtt_streams.sessions import V5, SessionRecord, SubscriptionOptions, second_sid

_NUMBER: Final = 2**63 - 1
_NUID: Final = "x" * 22
_HASH: Final = "x" * 8
_EMPTY: Final = len(SessionRecord("", v5=V5()).encode())


def subscription_bytes(topic_filter: str, subjects: tuple[str, ...]) -> int:
    """Return the most bytes by which a subscription at QoS 1 or 2 makes a session record longer.

    `subjects`: result of `filter_to_subjects`. The cursor of its retained replay and a former QoS are included.
    """
    v5 = V5(options={subjects[0]: SubscriptionOptions(topic_filter, True, True, 2, 2**28)})
    record = SessionRecord("", subs={subjects[0]: 2}, v5=v5)
    for index, subject in enumerate(subjects):
        key = second_sid(subject) if index else subject
        record.cons[key] = subscription_consumer(
            _HASH,
            subject,
            name_nuid=_NUID,
            deliver_nuid=_NUID,
            max_ack_pending=0xFFFF,
            start_seq=_NUMBER,
            inactive_threshold=_NUMBER,
        )
        v5.start[key] = v5.replay[key] = _NUMBER
        v5.was[key] = (2, _NUMBER)
    return len(record.encode()) - _EMPTY
