# SPDX-License-Identifier: Apache-2.0
"""Keys and credentials for nats-server, made anew for each run: TLS certificates, nkeys, JWTs."""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import json
import secrets
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import nkeys
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

# First byte of a public key, and of a seed together with it.
OPERATOR, ACCOUNT, USER = nkeys.PREFIX_BYTE_OPERATOR, nkeys.PREFIX_BYTE_ACCOUNT, nkeys.PREFIX_BYTE_USER


class Pair(NamedTuple):
    """PEM files of a certificate and its key."""

    certificate: Path
    key: Path


class Authority:
    """A certificate authority that lives for a day."""

    def __init__(self, directory: Path, name: str = "test authority") -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        certificate = (
            self._builder(self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.file = directory / "ca.pem"
        self.file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, lifetime: timedelta = timedelta(days=1)
    ) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + lifetime)
        )

    def issue(self, name: str, lifetime: timedelta = timedelta(days=1)) -> Pair:
        """A certificate for ``name`` and 127.0.0.1, for servers and clients, which ends after ``lifetime``."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([x509.DNSName(name), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        certificate = (
            self._builder(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), key.public_key(), lifetime)
            .add_extension(names, critical=False)
            .add_extension(usage, critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        pair = Pair(self._directory / f"{name}.pem", self._directory / f"{name}-key.pem")
        pair.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        pair.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return pair

    def revocations(self, *revoked: Pair, lifetime: timedelta = timedelta(days=1)) -> bytes:
        """Its list of revoked certificates (PEM), in force for ``lifetime``."""
        now = datetime.now(UTC)
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self._name)
            .last_update(now - timedelta(hours=1))
            .next_update(now + lifetime)
        )
        for one in revoked:
            serial = x509.load_pem_x509_certificate(one.certificate.read_bytes()).serial_number
            entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now).build()
            builder = builder.add_revoked_certificate(entry)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


class Nkey(NamedTuple):
    """An nkey: seed and public key as text."""

    seed: bytes
    public: str

    def sign(self, text: bytes) -> bytes:
        """Sign with the seed."""
        signature: bytes = nkeys.from_seed(bytearray(self.seed)).sign(text)
        return signature


def nkey(prefix: int) -> Nkey:
    """A new nkey of a kind: OPERATOR, ACCOUNT or USER."""
    seed = nkeys.encode_seed(secrets.token_bytes(32), prefix)
    return Nkey(bytes(seed), nkeys.from_seed(bytearray(seed)).public_key.decode())


def token(issuer: Nkey, subject: Nkey, kind: str, name: str, **more: object) -> str:
    """A JWT of NATS, version 2, without limits: ``issuer`` vouches for ``subject``; ``more`` is said of a user."""
    nats: dict[str, object] = {"type": kind, "version": 2}
    if kind == "account":
        nats["limits"] = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1) | {
            "wildcards": True
        }
    if kind == "user":
        nats |= {"pub": {}, "sub": {}, "subs": -1, "data": -1, "payload": -1} | more
    claims: dict[str, object] = {
        "iat": int(datetime.now(UTC).timestamp()),
        "iss": issuer.public,
        "name": name,
        "sub": subject.public,
        "nats": nats,
    }
    digest = hashlib.new("sha512_256", json.dumps(claims).encode()).digest()
    claims["jti"] = base64.b32encode(digest).decode().rstrip("=")
    head = _part(json.dumps({"typ": "JWT", "alg": "ed25519-nkey"}).encode())
    signed = f"{head}.{_part(json.dumps(claims).encode())}"
    return f"{signed}.{_part(issuer.sign(signed.encode()))}"


def _part(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def credentials(user_jwt: str, user: Nkey) -> str:
    """The text of a credentials file."""
    return (
        f"-----BEGIN NATS USER JWT-----\n{user_jwt}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed.decode()}\n------END USER NKEY SEED------\n"
    )
