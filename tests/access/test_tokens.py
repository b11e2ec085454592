# SPDX-License-Identifier: Apache-2.0
"""Tokens that let in, and every way in which one does not."""

import base64
import hmac
import json
from collections.abc import Callable, Sequence
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from mqtt_nats.access.acl import Identity
from mqtt_nats.access.settings import Algorithm, TokenSettings
from mqtt_nats.access.tokens import BadToken, Claims, check_claims, parse_keys, read_head, verify

NOW = 1_800_000_000.0
SHARED = b"0123456789abcdef0123456789abcdef"


def b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


class Signer:
    """Keys of each kind, and the set that verifies them."""

    def __init__(self) -> None:
        self.private: dict[str, Any] = {
            "RSA": rsa.generate_private_key(65537, 2048),
            "EC": ec.generate_private_key(ec.SECP256R1()),
            "OKP": ed25519.Ed25519PrivateKey.generate(),
            "oct": SHARED,
        }
        algorithms: dict[str, Any] = {
            "RSA": jwt.algorithms.RSAAlgorithm,
            "EC": jwt.algorithms.ECAlgorithm,
            "OKP": jwt.algorithms.OKPAlgorithm,
        }
        self.jwks: list[dict[str, Any]] = [{"kty": "oct", "k": b64(SHARED), "kid": "oct"}]
        for kind, algorithm in algorithms.items():
            self.jwks.append({**algorithm.to_jwk(self.private[kind].public_key(), as_dict=True), "kid": kind})

    def keys(self, *kinds: str) -> bytes:
        return json.dumps({"keys": [one for one in self.jwks if not kinds or one["kty"] in kinds]}).encode()

    def token(
        self, kind: str = "RSA", algorithm: str = "RS256", /, *, head: dict[str, Any] | None = None, **more: Any
    ) -> bytes:
        claims = {"sub": "ann", "exp": NOW + 60, **more}
        claims = {name: value for name, value in claims.items() if value is not ...}
        header = {"kid": kind} if head is None else head
        return jwt.encode(claims, self.private[kind], algorithm, headers=header).encode()


@pytest.fixture(scope="module")
def signer() -> Signer:
    return Signer()


def settings(*algorithms: Algorithm, **more: Any) -> TokenSettings:
    values = {"type": "jwt", "keys": __file__, "algorithms": algorithms or ("RS256",), **more}
    return TokenSettings.model_validate(values)


def enter(token: bytes, keys: bytes, how: TokenSettings, now: float = NOW, client_id: str = "c1") -> Claims:
    """What a gateway does with a token."""
    head = read_head(token, how)
    if head is None:
        raise BadToken("ignored")
    claims, _ = verify(token, head, parse_keys(keys, how.algorithms).find(head))
    return check_claims(claims, how, client_id, now)


ALGORITHMS: list[tuple[str, Algorithm]] = [
    ("RSA", "RS256"),
    ("RSA", "RS512"),
    ("RSA", "PS256"),
    ("EC", "ES256"),
    ("OKP", "EdDSA"),
    ("oct", "HS256"),
]


@pytest.mark.parametrize(("kind", "algorithm"), ALGORITHMS)
@pytest.mark.parametrize("head", [None, {}])
def test_each_algorithm(signer: Signer, kind: str, algorithm: Algorithm, head: dict[str, Any] | None) -> None:
    """With the id of its key, and without."""
    found = enter(signer.token(kind, algorithm, head=head), signer.keys(), settings(algorithm))
    assert (found.user, found.groups, found.rules, found.expires) == ("ann", frozenset(), None, NOW + 70)


@pytest.mark.parametrize(("kind", "algorithm"), ALGORITHMS)
def test_an_algorithm_that_is_not_named(signer: Signer, kind: str, algorithm: Algorithm) -> None:
    other: Algorithm = "ES384" if kind != "oct" else "HS512"
    head = settings(other)
    with pytest.raises(BadToken, match="algorithm"):
        read_head(signer.token(kind, algorithm), head)


def forged(head: Any, claims: Any, signature: bytes = b"") -> bytes:
    return ".".join(
        b64(one if isinstance(one, bytes) else json.dumps(one).encode()) for one in (head, claims, signature)
    ).encode()


GOOD = {"sub": "ann", "exp": NOW + 60}


def public_pem(signer: Signer) -> bytes:
    key: rsa.RSAPrivateKey = signer.private["RSA"]
    return key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def confused(signer: Signer) -> bytes:
    """Signed with the public key, as if it were a shared one."""
    body = forged({"alg": "HS256", "kid": "RSA"}, GOOD).rpartition(b".")[0]
    return body + b"." + b64(hmac.digest(public_pem(signer), body, "sha256")).encode()


FORGED: dict[str, Callable[[Signer], bytes]] = {
    "none": lambda _: forged({"alg": "none"}, GOOD),
    "None": lambda _: forged({"alg": "None"}, GOOD),
    "no algorithm": lambda _: forged({"typ": "JWT"}, GOOD),
    "another type of algorithm": lambda _: forged({"alg": ["RS256"]}, GOOD),
    "HMAC with the public key": confused,
    "no signature": lambda signer: signer.token().rpartition(b".")[0] + b".",
    "another signature": lambda signer: signer.token().rpartition(b".")[0] + b"." + b64(bytes(256)).encode(),
    "changed claims": lambda signer: signer.token().replace(
        signer.token().split(b".")[1], forged({}, {**GOOD, "sub": "bob"}).split(b".")[1]
    ),
    "another key": lambda _: Signer().token(),
    "a key that is not there": lambda signer: signer.token(head={"kid": "none"}),
    "a kid that is no text": lambda signer: forged({"alg": "RS256", "kid": 1}, GOOD, b"x"),
    "its own key": lambda signer: forged({"alg": "RS256", "jwk": signer.jwks[0]}, GOOD, b"x"),
    "parts to be understood": lambda signer: signer.token(head={"kid": "RSA", "crit": ["b64"], "b64": False}),
    "a key of another kind": lambda signer: signer.token("EC", "ES256", head={"kid": "RSA"}),
    "claims that are no object": lambda signer: jwt.PyJWS().encode(b"[]", signer.private["RSA"], "RS256").encode(),
    "a password": lambda _: b"pencil",
    "two dots": lambda _: b"..",
    "rubbish": lambda _: b"\xff.\xff.\xff",
    "a long head": lambda _: forged({"alg": "RS256", "x": "x" * 5000}, GOOD, b"x"),
}


@pytest.mark.parametrize("what", FORGED)
def test_forged_tokens(signer: Signer, what: str) -> None:
    how = settings("RS256", "ES256")
    with pytest.raises(BadToken):
        enter(FORGED[what](signer), signer.keys("RSA", "EC"), how)


@pytest.mark.parametrize(
    ("claims", "how", "why"),
    [
        ({"exp": ...}, {}, "no expiry"),
        ({"exp": None}, {}, "no expiry"),
        ({"exp": NOW - 11}, {}, "expired"),
        ({"exp": NOW - 10}, {}, "expired"),
        ({"exp": NOW}, {"leeway": 0}, "expired"),
        ({"exp": "2030"}, {}, "not a time"),
        ({"exp": True}, {}, "not a time"),
        ({"exp": float("inf")}, {}, "cannot be read"),
        ({"exp": float("nan")}, {}, "cannot be read"),
        ({"nbf": float("-inf")}, {}, "cannot be read"),
        ({"exp": 10**400}, {}, "cannot be read"),
        ({"nbf": NOW + 11}, {}, "not valid yet"),
        ({"iat": NOW + 11}, {}, "not valid yet"),
        ({"nbf": "x"}, {}, "not a time"),
        ({}, {"issuer": "me"}, "ignored"),
        ({"iss": "other"}, {"issuer": "me"}, "ignored"),
        ({"iss": ["me"]}, {"issuer": "me"}, "ignored"),
        ({"aud": "other"}, {"audience": "mqtt"}, "audience"),
        ({"aud": []}, {"audience": "mqtt"}, "audience"),
        ({"aud": {"mqtt": 1}}, {"audience": "mqtt"}, "audience"),
        ({}, {"audience": "mqtt"}, "audience"),
        ({"aud": "mqtt"}, {}, "audience"),
        ({"sub": ...}, {}, "sub"),
        ({"sub": ""}, {}, "sub"),
        ({"sub": "a\0"}, {}, "sub"),
        ({"name": 5}, {"user_claim": "name"}, "name"),
        ({"device": "c2"}, {"client_claim": "device"}, "another client id"),
        ({}, {"client_claim": "device"}, "another client id"),
        ({}, {"tenant_claim": "org"}, "org"),
        ({"org": ""}, {"tenant_claim": "org"}, "org"),
        ({"org": ["acme"]}, {"tenant_claim": "org"}, "org"),
        ({"groups": 5}, {}, "groups"),
        ({"groups": [["a"]]}, {}, "groups"),
        ({"acl": None}, {}, "acl"),
        ({"acl": {"effect": "allow"}}, {}, "acl"),
        ({"acl": [{"effect": "allow", "topics": "a/+b"}]}, {}, "acl"),
        ({"acl": [{"effect": "permit", "topics": "a"}]}, {}, "acl"),
        ({"acl": [{"effect": "allow", "topics": "a", "client": "*"}]}, {}, "acl"),
    ],
)
def test_claims_that_let_nobody_in(signer: Signer, claims: dict[str, Any], how: dict[str, Any], why: str) -> None:
    values = {name: value for name, value in {**GOOD, **claims}.items() if value is not ...}
    token = jwt.PyJWS().encode(json.dumps(values).encode(), signer.private["RSA"], "RS256").encode()
    with pytest.raises(BadToken, match=why) as caught:
        enter(token, signer.keys("RSA"), settings(**how))
    assert token.decode() not in str(caught.value)


def test_the_tenant(signer: Signer) -> None:
    """Only the claim of the settings says it."""
    token = signer.token(org="acme", tenant="other")
    assert enter(token, signer.keys("RSA"), settings(tenant_claim="org")).tenant == "acme"
    assert enter(token, signer.keys("RSA"), settings()).tenant is None


def test_claims_that_let_in(signer: Signer) -> None:
    how = settings(issuer="me", audience=["mqtt", "b"], user_claim="name", client_claim="device")
    token = signer.token(
        iss="me",
        aud=["a", "mqtt"],
        name="bob",
        device="c1",
        nbf=NOW + 9,
        iat=NOW - 5,
        exp=NOW - 9,
        groups=["staff", "x"],
        acl=[{"effect": "allow", "access": "publish", "topics": "out/%c"}],
    )
    found = enter(token, signer.keys("RSA"), how)
    assert (found.user, found.groups, found.expires) == ("bob", frozenset({"staff", "x"}), NOW + 1)
    assert found.rules is not None
    permissions = found.rules.permissions(Identity("bob", "c1"))
    assert permissions.may_publish("out/c1", 0, False)
    assert not permissions.may_publish("out/c2", 0, False)
    assert not permissions.subscribe("out/c1", 0)


def small(signer: Signer) -> dict[str, Any]:
    with_small = rsa.generate_private_key(65537, 1024)
    found: dict[str, Any] = jwt.algorithms.RSAAlgorithm.to_jwk(with_small.public_key(), as_dict=True)
    return found


@pytest.mark.parametrize(
    ("make", "algorithms", "why"),
    [
        (lambda _: b"", ["RS256"], "expected JSON"),
        (lambda _: b"[]", ["RS256"], "expected JSON"),
        (lambda _: b'{"keys": [1]}', ["RS256"], "expected JSON"),
        (lambda _: b'{"keys": [[[1, 2]]]}', ["RS256"], "expected JSON"),
        (lambda _: b'{"keys": []}', ["RS256"], "no key in it is for RS256"),
        (lambda _: b" " * 1_048_577, ["RS256"], "more than"),
        (lambda _: b'{"keys": [' + b",".join([b"{}"] * 101) + b"]}", ["RS256"], "more than 100 keys"),
        (lambda signer: signer.keys("EC", "oct"), ["RS256"], "no key in it is for RS256"),
        (lambda signer: signer.keys("EC"), ["ES384"], "no key in it is for ES384"),
        (lambda _: b'{"keys": [{"kty": "RSA", "n": "!", "e": "AQAB"}]}', ["RS256"], "key 1 cannot be read"),
        (lambda signer: json.dumps({"keys": [small(signer)]}).encode(), ["RS256"], "less than 2048 bits"),
        (lambda _: b'{"keys": [{"kty": "oct", "k": "c2hvcnQ"}]}', ["HS256"], "shorter than HS256 needs"),
        (
            lambda signer: json.dumps({"keys": [{**signer.jwks[1], "use": "enc"}]}).encode(),
            ["RS256"],
            "no key in it",
        ),
        (
            lambda signer: json.dumps({"keys": [{**signer.jwks[1], "key_ops": ["encrypt"]}]}).encode(),
            ["RS256"],
            "no key in it",
        ),
        (
            lambda signer: json.dumps({"keys": [{**signer.jwks[1], "key_ops": None}]}).encode(),
            ["RS256"],
            "key 1 cannot be read",
        ),
        (
            lambda signer: json.dumps({"keys": [{**signer.jwks[1], "alg": "RS512"}]}).encode(),
            ["RS256"],
            "no key in it",
        ),
    ],
)
def test_keys_that_cannot_be_used(
    signer: Signer, make: Callable[[Signer], bytes], algorithms: Sequence[str], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        parse_keys(make(signer), algorithms)


def test_keys_say_nothing_of_themselves(signer: Signer) -> None:
    keys = parse_keys(signer.keys("oct"), ["HS256"])
    head = read_head(signer.token("oct", "HS256"), settings("HS256"))
    assert head is not None
    assert b64(SHARED) not in repr(keys.find(head))


def test_settings_that_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="exclude each other"):
        settings("RS256", "HS256")
    with pytest.raises(ValueError, match="read from a file"):
        settings("HS256", keys="https://example.org/keys")
    for keys in ("http://example.org/keys", "https://me:x@example.org/", "https://", "/none", "ftp://x/"):
        with pytest.raises(ValueError, match="keys"):
            settings(keys=keys)
    with pytest.raises(ValueError, match="algorithms"):
        settings("none")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["exp", "nbf", "iat"])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 10**400])
def test_a_time_that_is_no_number(name: str, value: float) -> None:
    """Whatever reads the claims: such a token would be valid for ever."""
    with pytest.raises(BadToken, match=f"{name} is not a time"):
        check_claims({**GOOD, name: value}, settings(), "c1", NOW)
