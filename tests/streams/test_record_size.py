# SPDX-License-Identifier: Apache-2.0
"""The size of a session record is never more than what was counted for its subscriptions, and not much less."""

from hypothesis import given
from hypothesis import strategies as st

from mqtt_streams.hashing import name_hash
from mqtt_streams.messages import subscription_consumer
from mqtt_streams.record_size import subscription_bytes
from mqtt_streams.sessions import V5, SessionRecord, SubscriptionOptions, second_sid
from mqtt_streams.subjects import filter_to_subjects

LEVELS = st.text(st.characters(exclude_characters="/+#\0", exclude_categories=("Cs", "Cc")), min_size=1, max_size=20)


@given(st.lists(LEVELS, min_size=1, max_size=6), st.booleans(), st.integers(0, 2**53), st.booleans())
def test_a_subscription_takes_no_more_than_was_counted(
    levels: list[str], everything_below: bool, start: int, whole: bool
) -> None:
    topic_filter = "/".join([*levels, "#"] if everything_below else levels)
    subjects = filter_to_subjects(topic_filter)
    empty = SessionRecord("client", v5=V5())
    record = SessionRecord("client", v5=V5())
    assert record.v5 is not None
    for index, subject in enumerate(subjects):
        key = second_sid(subject) if index else subject
        record.cons[key] = subscription_consumer(
            name_hash("client"),
            subject,
            name_nuid="n" * 22,
            deliver_nuid="d" * 22,
            max_ack_pending=1024,
            start_seq=start,
            inactive_threshold=10**15,
        )
        record.v5.start[key] = start
        if whole:
            record.v5.replay[key] = start
            record.v5.was[key] = (1, start)
    record.subs[subjects[0]] = 1
    record.v5.options[subjects[0]] = SubscriptionOptions(topic_filter)
    grown = len(record.encode()) - len(empty.encode())
    counted = subscription_bytes(topic_filter, subjects)
    assert grown <= counted <= 2 * grown + 400
