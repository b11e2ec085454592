# SPDX-License-Identifier: Apache-2.0
"""From a socket to packets and back: deadlines, keepalive, back-pressure. Knows no topics."""
