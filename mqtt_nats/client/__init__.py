# SPDX-License-Identifier: Apache-2.0
"""One client: CONNECT, SUBSCRIBE, UNSUBSCRIBE, DISCONNECT, AUTH, keep alive; packets to their packages."""
