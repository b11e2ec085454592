# SPDX-License-Identifier: Apache-2.0
"""Who may connect how often, and who not at all: counting, without sockets or clocks."""
