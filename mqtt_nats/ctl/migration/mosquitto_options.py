# SPDX-License-Identifier: Apache-2.0
"""Options of mosquitto: the text of a finding for each option that needs no conversion of its own."""

from __future__ import annotations

from typing import Final

from mqtt_nats.ctl.migration.findings import Kind

_STORED: Final = "JetStream stores everything before it is acknowledged"
_PROCESS: Final = "systemd or the container runtime does this"
_LOG: Final = "the log goes to stderr; log_level and log_format are its settings"
_TLS: Final = "the defaults of OpenSSL hold; tls_minimum is the only setting"
_MEMORY: Final = "max_outbound_bytes and max_unread_bytes bound the memory of clients"
_PLUGIN: Final = (
    "authenticators (files, tokens, HTTP, NATS) and plugins of the gateway: docs/authentication.md, docs/plugins.md"
)
_CLIENT_ID: Final = "rules with both user and client tie client ids to users: docs/acl.md"
_PSK: Final = "TLS with pre-shared keys is not served; use certificates"

OPTIONS: Final[dict[str, tuple[Kind, str]]] = {
    "accept_protocol_versions": ("changes", "3.1.1 and 5.0 are served, on every listener"),
    "allow_duplicate_messages": ("not needed", "overlapping subscriptions bring one copy or several as MQTT has it"),
    "allow_zero_length_clientid": ("changes", "clients without a client id always get one"),
    "auth_plugin": ("missing", _PLUGIN),
    "auth_plugin_deny_special_chars": ("not needed", "such names are never put into a topic filter"),
    "auto_id_prefix": ("changes", "assigned client ids have no prefix"),
    "autosave_interval": ("not needed", _STORED),
    "autosave_on_changes": ("not needed", _STORED),
    "bind_interface": ("missing", "listen at the address of the interface"),
    "bridge_attempt_unsubscribe": ("not needed", "it is an option of a bridge"),
    "capath": ("missing", "put the authorities of the directory into one file: tls_client_ca"),
    "check_retain_source": ("changes", "the rules of a publisher are asked when it publishes, and not later"),
    "ciphers": ("changes", _TLS),
    "ciphers_tls1.3": ("changes", _TLS),
    "clientid_prefixes": ("changes", "clients with other ids are let in; " + _CLIENT_ID),
    "connection_messages": ("changes", "log_connections = false turns the records of connections off"),
    "dhparamfile": ("not needed", "only key exchange by elliptic curves is used"),
    "disable_client_cert_date_checks": ("missing", "an expired client certificate is refused"),
    "enable_control_api": ("not needed", "`mqtt-nats ctl` asks gateways"),
    "enable_proxy_protocol": ("missing", "name the networks of the proxies in proxy_protocol of the listener"),
    "http_dir": ("missing", "the listener serves MQTT over WebSocket only"),
    "log_dest": ("not needed", _LOG),
    "log_facility": ("not needed", _LOG),
    "log_timestamp": ("not needed", _LOG),
    "log_timestamp_format": ("not needed", _LOG),
    "log_type": ("not needed", _LOG),
    "max_inflight_bytes": ("changes", _MEMORY),
    "max_queued_bytes": ("changes", "max_backlog counts messages; " + _MEMORY),
    "memory_limit": ("changes", _MEMORY),
    "mount_point": ("missing", "the plugin rewrite, or a tenant with an account of its own: docs/tenants.md"),
    "per_listener_settings": ("moved", "listeners have settings of their own"),
    "persistence": ("not needed", _STORED),
    "persistence_file": ("not needed", _STORED),
    "persistence_location": ("not needed", _STORED),
    "pid_file": ("not needed", _PROCESS),
    "plugin": ("missing", _PLUGIN),
    "psk_file": ("missing", _PSK),
    "psk_hint": ("missing", _PSK),
    "queue_qos0_messages": ("changes", "QoS 0 messages are not kept for absent clients"),
    "retain_available": ("changes", "max_retained bounds the retained messages; they cannot be turned off"),
    "retain_expiry_interval": ("missing", "publishers may give retained messages an expiry (5.0)"),
    "retry_interval": ("not needed", "messages are sent again when a client comes back, as MQTT has it"),
    "set_tcp_nodelay": ("not needed", "it is always set"),
    "socket_domain": ("not needed", "the address of the listener says it"),
    "store_clean_interval": ("not needed", _STORED),
    "tls_engine": ("missing", _TLS),
    "tls_engine_kpass_sha1": ("missing", _TLS),
    "tls_keyform": ("missing", "the key is read from a PEM file"),
    "upgrade_outgoing_qos": ("missing", "a message is delivered at the lower QoS of publisher and subscription"),
    "use_subject_as_username": ("missing", "use_identity takes the common name or an alternative name"),
    "use_username_as_clientid": ("missing", "clients keep their client id; " + _CLIENT_ID),
    "user": ("not needed", _PROCESS),
    "websockets_headers_size": ("not needed", "the header of a WebSocket request is bounded"),
    "websockets_log_level": ("not needed", _LOG),
    "sys_interval": ("moved", "sys_interval"),
}

PLUGIN_OPTIONS: Final = ("auth_opt_", "plugin_opt_")
"""Beginnings of the names of options of plugins."""
