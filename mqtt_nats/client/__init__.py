# SPDX-License-Identifier: Apache-2.0
"""A client's connection: CONNECT, SUBSCRIBE, UNSUBSCRIBE, DISCONNECT, AUTH, keep alive; dispatch of other packets."""
