# SPDX-License-Identifier: Apache-2.0
"""What a gateway tells about itself: logs, `$SYS` topics, presence, a NATS service."""
