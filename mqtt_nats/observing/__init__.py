# SPDX-License-Identifier: Apache-2.0
"""What is told about a gateway, without sockets and clocks: `$SYS` topics, load averages, events of presence."""
