# SPDX-License-Identifier: Apache-2.0
"""Messages with their headers, properties and ids; PUBLISH packets for subscribers; copies, and hooks of deliveries."""
