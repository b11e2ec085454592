#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes an authority, certificates and passwords of one installation: sh deploy/secrets.sh [DIRECTORY]
#
# They are in deploy/secrets unless another directory is named, which only its owner can enter. What is there stays: to get
# another certificate or password, remove the file. Containers with users of their own read the files, so these have no
# protection beyond that of the directory; keep ca-key.pem elsewhere once everybody has a certificate.
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

# NAME SUBJECT USAGES [ALTERNATIVE-NAMES]: a certificate of our authority.
certificate() {
    [ -s "$1.pem" ] && return
    key "$1-key.pem"
    openssl req -new -key "$1-key.pem" -subj "/CN=$2" -out "$1.csr"
    {
        echo "basicConstraints=critical,CA:FALSE"
        echo "keyUsage=critical,digitalSignature"
        echo "extendedKeyUsage=$3"
        [ -z "${4:-}" ] || echo "subjectAltName=$4"
    } >"$1.ext"
    openssl x509 -req -in "$1.csr" -CA ca.pem -CAkey ca-key.pem -set_serial "0x$(openssl rand -hex 16)" \
        -days "$DAYS" -extfile "$1.ext" -out "$1.pem" 2>/dev/null
    rm "$1.csr" "$1.ext"
}

if [ ! -s ca.pem ]; then
    key ca-key.pem
    chmod 400 ca-key.pem
    openssl req -x509 -key ca-key.pem -days 3650 -subj "/CN=mqtt-nats authority" -out ca.pem \
        -addext "keyUsage=critical,keyCertSign,cRLSign"
fi

# nats-servers are clients of each other.
certificate nats nats serverAuth,clientAuth \
    "DNS:nats,DNS:nats-1,DNS:nats-2,DNS:nats-3,DNS:nats.nats.svc,DNS:*.nats-headless,DNS:localhost,IP:127.0.0.1"
certificate gateway gateway serverAuth "DNS:gateway-1,DNS:gateway-2,DNS:localhost,IP:127.0.0.1"
# The MQTT user "device" is whoever has this one.
certificate device device clientAuth

for name in gateway-password operator-password spark-password application-password admin-token grafana-password; do
    once "$name"
done

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
