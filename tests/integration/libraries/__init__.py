# SPDX-License-Identifier: Apache-2.0
"""MQTT 5.0 with the client libraries that people use: paho-mqtt, aiomqtt, and gmqtt, which shares no code with them."""
