# SPDX-License-Identifier: Apache-2.0
"""Who gets which message. Knows no packet identifiers and no sockets."""
