#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes authorities, certificates and passwords of one installation: sh deploy/secrets.sh [DIRECTORY]
#
# Each kind of certificate has an authority of its own: servers (ca.pem), MQTT devices (devices-ca.pem), and nats-servers as
# routes of their cluster (routes-ca.pem). Who is a route reads and writes everything: no other certificate may be good for it.
#
# They are in deploy/secrets unless another directory is named, which only its owner can enter. What is there stays: to get
# another certificate or password, remove the file. Containers with users of their own read the files, so these have no
# protection beyond that of the directory; keep the keys of the authorities elsewhere once everybody has a certificate.
set -eu
umask 022

DIR=${1:-$(dirname "$0")/secrets}
DAYS=825

mkdir -p "$DIR"
chmod 700 "$DIR"
cd "$DIR"

key() { openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1" 2>/dev/null; chmod 444 "$1"; }

# A password that nats-server does not take for a number.
password() { printf 'p%s' "$(openssl rand -hex 24)"; }

once() { [ -s "$1" ] || { password >"$1.new"; chmod 444 "$1.new"; mv "$1.new" "$1"; }; }

# NAME SUBJECT: an authority.
authority() {
    [ -s "$1.pem" ] && return
    key "$1-key.pem"
    chmod 400 "$1-key.pem"
    openssl req -x509 -key "$1-key.pem" -days 3650 -subj "/CN=$2" -out "$1.pem" \
        -addext "keyUsage=critical,keyCertSign,cRLSign"
}

# AUTHORITY NAME SUBJECT USAGES [ALTERNATIVE-NAMES]: a certificate of one of the authorities.
certificate() {
    [ -s "$2.pem" ] && return
    key "$2-key.pem"
    openssl req -new -key "$2-key.pem" -subj "/CN=$3" -out "$2.csr"
    {
        echo "basicConstraints=critical,CA:FALSE"
        echo "keyUsage=critical,digitalSignature"
        echo "extendedKeyUsage=$4"
        [ -z "${5:-}" ] || echo "subjectAltName=$5"
    } >"$2.ext"
    openssl x509 -req -in "$2.csr" -CA "$1.pem" -CAkey "$1-key.pem" -set_serial "0x$(openssl rand -hex 16)" \
        -days "$DAYS" -extfile "$2.ext" -out "$2.pem" 2>/dev/null
    rm "$2.csr" "$2.ext"
}

authority ca "mqtt-nats authority of servers"
authority devices-ca "mqtt-nats authority of devices"
authority routes-ca "mqtt-nats authority of routes"

HEADLESS="DNS:nats-0.nats-headless,DNS:nats-1.nats-headless,DNS:nats-2.nats-headless"
NATS="DNS:nats,DNS:nats-1,DNS:nats-2,DNS:nats-3,DNS:nats.nats.svc,$HEADLESS,DNS:*.nats-headless,DNS:localhost,IP:127.0.0.1"
certificate ca nats nats serverAuth "$NATS"
certificate ca gateway gateway serverAuth "DNS:gateway-1,DNS:gateway-2,DNS:localhost,IP:127.0.0.1"
# nats-servers are clients of each other.
certificate routes-ca route route serverAuth,clientAuth "$NATS"
# The MQTT user "device" is whoever has this one.
certificate devices-ca device device clientAuth

for name in gateway-password operator-password spark-password application-password admin-token viewer-token grafana-password; do
    once "$name"
done

# Administrators with names, beside the one of admin-token. Prometheus sees metrics and lists, and changes nothing.
rm -f admin-tokens.toml
cat >admin-tokens.toml <<END
[prometheus]
role = "viewer"
token = "$(cat viewer-token)"
END
chmod 444 admin-tokens.toml

# As programs want them that take passwords from their environment.
rm -f nats.env gateway.env spark.env
cat >nats.env <<END
GATEWAY_PASSWORD=$(cat gateway-password)
OPERATOR_PASSWORD=$(cat operator-password)
SPARK_PASSWORD=$(cat spark-password)
APPLICATION_PASSWORD=$(cat application-password)
END
cat >gateway.env <<END
MQTT_NATS_NATS_PASSWORD=$(cat gateway-password)
MQTT_NATS_ADMIN_TOKEN=$(cat admin-token)
END
echo "MQTT_NATS_SPARK_PASSWORD=$(cat spark-password)" >spark.env
chmod 400 nats.env gateway.env spark.env
echo "secrets are in $(pwd)"
