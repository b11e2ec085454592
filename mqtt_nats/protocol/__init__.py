# SPDX-License-Identifier: Apache-2.0
"""State machines of QoS 1 and 2: senders, receiver, packet identifiers, position of a session."""
