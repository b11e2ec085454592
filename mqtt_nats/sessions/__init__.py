# SPDX-License-Identifier: Apache-2.0
"""Session record, takeover, ownership; consumers of a session; shared subscriptions."""
