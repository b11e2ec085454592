# SPDX-License-Identifier: Apache-2.0
"""JetStream's error codes, and those of its texts that tell errors of one code apart (`server/errors.json`)."""

import re
from typing import Final

ACCOUNT_RESOURCES_EXCEEDED: Final = 10002
CLUSTER_NO_PEERS: Final = 10005
CLUSTER_NOT_AVAILABLE: Final = 10008
CLUSTER_NOT_LEADER: Final = 10009
CONSUMER_CREATE_FAILED: Final = 10012
CONSUMER_NAME_EXISTS: Final = 10013
CONSUMER_NOT_FOUND: Final = 10014
INSUFFICIENT_RESOURCES: Final = 10023
MAXIMUM_CONSUMERS: Final = 10026
MAXIMUM_STREAMS: Final = 10027
MEMORY_EXCEEDED: Final = 10028
NO_MESSAGE_FOUND: Final = 10037
NOT_ENABLED_FOR_ACCOUNT: Final = 10039
SEQUENCE_NOT_FOUND: Final = 10043
STORAGE_EXCEEDED: Final = 10047
STREAM_CREATE_FAILED: Final = 10049
STREAM_INVALID_CONFIG: Final = 10052
MESSAGE_TOO_LARGE: Final = 10054
MESSAGE_DELETE_FAILED: Final = 10057
STREAM_NAME_EXISTS: Final = 10058
STREAM_NOT_FOUND: Final = 10059
STREAM_MISMATCH: Final = 10060
STREAM_RESTORE_FAILED: Final = 10062
SUBJECTS_OVERLAP: Final = 10065
REPLICAS_NOT_SUPPORTED: Final = 10074
NOT_ENABLED: Final = 10076
STORE_FAILED: Final = 10077
FILTER_NOT_SUBSET: Final = 10093
CONSUMER_ACTIVE: Final = 10105
STREAM_OFFLINE: Final = 10118
STREAM_EXISTS_NO_RESTORE: Final = 10130
DUPLICATE_FILTERS: Final = 10136
OVERLAPPING_FILTERS: Final = 10138
CONSUMER_ALREADY_EXISTS: Final = 10148
CONSUMER_DOES_NOT_EXIST: Final = 10149
DUPLICATE_IN_PROCESS: Final = 10158
TOO_MANY_REQUESTS: Final = 10167

WRONG_LAST_SEQUENCE: Final = (10071, 10164)
"""A store that is conditional on a sequence is refused; the second one names no sequence: a store is on its way."""

CONSUMER_EXISTS: Final = (CONSUMER_ACTIVE, CONSUMER_ALREADY_EXISTS)
"""There is a consumer of this name with another configuration."""

CONSUMER_GONE: Final = (CONSUMER_NOT_FOUND, CONSUMER_DOES_NOT_EXIST)
"""There is no consumer of this name."""

NO_LEADER: Final = (CLUSTER_NOT_AVAILABLE, CLUSTER_NOT_LEADER)
"""No leader is elected, or a majority of JetStream's servers is missing."""

TRANSIENT: Final = frozenset((*NO_LEADER, NOT_ENABLED, STREAM_OFFLINE, DUPLICATE_IN_PROCESS, TOO_MANY_REQUESTS))
"""Errors that pass: system unavailable, no cluster, no leader, more requests than JetStream queues."""

NO_STORAGE: Final = frozenset((ACCOUNT_RESOURCES_EXCEEDED, INSUFFICIENT_RESOURCES, STORAGE_EXCEEDED))
"""The account's limit, the server's resources, or the server's storage is used up."""

MESSAGE_GONE: Final = frozenset((NO_MESSAGE_FOUND, MESSAGE_DELETE_FAILED, SEQUENCE_NOT_FOUND))
"""Answers to the deletion of a message that does not exist."""

# `STORE_FAILED` has one of these texts.
MAXIMUM_BYTES_TEXT: Final = "maximum bytes exceeded"
MAXIMUM_MESSAGES_TEXT: Final = "maximum messages exceeded"
MAXIMUM_PER_SUBJECT_TEXT: Final = "maximum messages per subject exceeded"

WRONG_LAST_SEQUENCE_TEXT: Final = re.compile(r"wrong last sequence: (\d+)")
"""Text of the first error of `WRONG_LAST_SEQUENCE`, with the last sequence that there is."""
