# SPDX-License-Identifier: Apache-2.0
"""Payloads as typed columns: the option `decoders`, the formats, and the conversion to Arrow."""
