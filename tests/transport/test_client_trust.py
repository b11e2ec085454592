# SPDX-License-Identifier: Apache-2.0
"""Whether files that were read again let in a certificate that the former ones have accepted."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from mqtt_nats.base.errors import StartupError
from mqtt_nats.transport.client_trust import ClientTrust, certificate_of, end_of, read_lists
from tests.backbone.certificates import Authority, Pair


def der(path: Path) -> bytes:
    found = x509.load_pem_x509_certificate(path.read_bytes())
    return found.public_bytes(serialization.Encoding.DER)


def made(path: Path, name: str, common: str = "") -> Authority:
    (path / name).mkdir()
    return Authority(path / name, common or name)


def trust(*authorities: Authority, revoked: tuple[Pair, ...] = ()) -> ClientTrust:
    """Trust in these authorities; the first has revoked some."""
    lists = [x509.load_pem_x509_crl(authorities[0].revocations(*revoked))] if authorities else []
    return ClientTrust([der(one.file) for one in authorities], lists)


def between(authority: Authority) -> bytes:
    """A certificate of an authority that is not known."""
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "device")]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "between")]))
        .public_key(key.public_key())
        .serial_number(7)
        .not_valid_before(now)
        .not_valid_after(now + timedelta(days=1))
        .sign(key, hashes.SHA256())
        .public_bytes(serialization.Encoding.DER)
    )


def test_what_is_withdrawn(tmp_path: Path) -> None:
    first, second = made(tmp_path, "first"), made(tmp_path, "second")
    one = first.issue("one")
    before = trust(first)
    for now in (trust(first), trust(first, second)):
        assert not now.withdraws(before)
    for now in (trust(second), trust(second, first, revoked=(second.issue("x"),)), trust(first, revoked=(one,))):
        assert now.withdraws(before)
    assert not trust(first).withdraws(trust(first, revoked=(one,)))


def test_who_stays(tmp_path: Path) -> None:
    """By the signature: another authority may have the same name, and the same serial number."""
    first, second, impostor = made(tmp_path, "first"), made(tmp_path, "second"), made(tmp_path, "other", "first")
    pair, other = first.issue("pair"), first.issue("other one")
    one, two = der(pair.certificate), der(second.issue("two").certificate)
    before = trust(first, second)
    assert trust(second, first).accepts(one, before)
    assert not trust(second).accepts(one, before)
    assert trust(second).accepts(two, before)
    assert not trust(impostor, second).accepts(one, before)
    revoked = trust(first, second, revoked=(pair,))
    assert not revoked.accepts(one, before)
    assert revoked.accepts(two, before)
    assert trust(first, revoked=(other,)).accepts(one, trust(first))


def test_authorities_in_between(tmp_path: Path) -> None:
    """Nobody knows any more which root is theirs: in doubt they have to come again."""
    first, second = made(tmp_path, "first"), made(tmp_path, "second")
    certificate, before = between(first), trust(first, second)
    assert trust(first, second).accepts(certificate, before)
    assert not trust(first).accepts(certificate, before)
    assert not trust(first, second, revoked=(first.issue("x"),)).accepts(certificate, before)


def test_an_authority_that_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = made(tmp_path, "first")
    certificate, before = der(first.issue("one").certificate), trust(first)

    class Later(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return datetime.now(UTC) + timedelta(days=2)

    monkeypatch.setattr("mqtt_nats.transport.client_trust.datetime", Later)
    now = ClientTrust([der(first.file)], [])
    assert now.withdraws(before)
    assert not now.accepts(certificate, before)


@pytest.mark.parametrize("content", [None, b"", b"-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----\n"])
def test_files_without_a_list(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "lists.pem"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StartupError, match=r"lists\.pem"):
        read_lists(path)


def test_several_lists(tmp_path: Path) -> None:
    first, second = made(tmp_path, "first"), made(tmp_path, "second")
    path = tmp_path / "lists.pem"
    path.write_bytes(b"a remark\n" + first.revocations(first.issue("x")) + second.revocations())
    assert [len(list(one)) for one in read_lists(path)] == [1, 0]


def test_connections_without_a_certificate() -> None:
    class Plain:
        def get_extra_info(self, name: str) -> None:
            return None

    for transport in (None, Plain()):
        assert certificate_of(transport) is None
        assert end_of(transport) is None
