# SPDX-License-Identifier: Apache-2.0
"""JSON Web Tokens (RFC 7519) and their signing keys (RFC 7517). This module has no clock, input or output.

The settings name the algorithms of tokens, and a key must have the type that the algorithm needs. So a token without a
signature, or signed with a public key as if it were a shared key, is refused.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import jwt
import orjson
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from mqtt_nats.access.acl import Rules
from mqtt_nats.access.acl_file import own_rules
from mqtt_nats.access.settings import TokenSettings

# Most bytes of a set of keys, and most keys in it.
KEYS_BYTES: Final = 1024 * 1024
KEYS_MOST: Final = 100

# Most keys that are tried for a token without `kid`.
TRIED: Final = 8

# Most bytes of a token's header; a header with `kid` and `typ` has less than 200.
HEAD_MOST: Final = 4096

RSA_BITS: Final = 2048
SHARED_BYTES: Final = 32

# Required `kty` of a key by algorithm, and the allowed `crv` (None: any).
_NEEDED: Final[dict[str, tuple[str, Collection[str] | None]]] = {
    **dict.fromkeys(("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"), ("RSA", None)),
    **dict.fromkeys(("HS256", "HS384", "HS512"), ("oct", None)),
    "ES256": ("EC", ("P-256",)),
    "ES384": ("EC", ("P-384",)),
    "ES512": ("EC", ("P-521",)),
    "EdDSA": ("OKP", ("Ed25519", "Ed448")),
}


class BadToken(Exception):
    """The token is not valid; the text gives the reason and does not contain the token."""


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a set."""

    values: dict[str, Any] = field(repr=False)
    fingerprint: bytes

    @property
    def id(self) -> Any:
        """``kid`` of the key."""
        return self.values.get("kid")

    def serves(self, algorithm: str) -> bool:
        """Whether the key may verify signatures of this algorithm."""
        kind, curves = _NEEDED[algorithm]
        return (
            self.values.get("kty") == kind
            and (curves is None or self.values.get("crv") in curves)
            and self.values.get("alg") in (None, algorithm)
        )


class Keys:
    """A set of keys."""

    def __init__(self, keys: Sequence[Key] = ()) -> None:
        self._keys = tuple(keys)
        self.fingerprints = frozenset(one.fingerprint for one in keys)

    def find(self, head: Head) -> list[Key]:
        """Return the keys that may have signed a token."""
        found = [one for one in self._keys if one.serves(head.algorithm)]
        return found[:TRIED] if head.key is None else [one for one in found if one.id == head.key]


def parse_keys(data: bytes, algorithms: Sequence[str]) -> Keys:
    """Read a set of keys (JWKS).

    Raises:
        ValueError: the data is no set of keys, a key cannot be used, or no key is for the algorithms.
    """
    if len(data) > KEYS_BYTES:
        raise ValueError(f"it has more than {KEYS_BYTES} bytes")
    try:
        found = orjson.loads(data)["keys"]
    except (ValueError, KeyError, TypeError):
        raise ValueError("expected JSON with the list 'keys'") from None
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ValueError("expected JSON with the list 'keys'")
    if len(found) > KEYS_MOST:
        raise ValueError(f"it has more than {KEYS_MOST} keys")
    keys: list[Key] = []
    for number, values in enumerate(found, 1):
        operations = values.get("key_ops", ["verify"])
        if not isinstance(operations, list):
            raise ValueError(f"key {number} cannot be read")
        if values.get("use", "sig") != "sig" or "verify" not in operations:
            continue
        key = Key(values, hashlib.sha256(orjson.dumps(values, option=orjson.OPT_SORT_KEYS)).digest())
        served = [one for one in algorithms if key.serves(one)]
        if served:
            _check_key(key, served[0], number)
            keys.append(key)
    if not keys:
        raise ValueError(f"no key in it is for {' or '.join(algorithms)}")
    return Keys(keys)


def _check_key(key: Key, algorithm: str, number: int) -> None:
    try:
        made = jwt.PyJWK(key.values, algorithm=algorithm).key
    except (jwt.PyJWTError, ValueError, TypeError, KeyError):
        raise ValueError(f"key {number} cannot be read") from None
    if isinstance(made, RSAPublicKey) and made.key_size < RSA_BITS:
        raise ValueError(f"key {number} has less than {RSA_BITS} bits")
    if isinstance(made, bytes) and len(made) < SHARED_BYTES * int(algorithm[2:]) // 256:
        raise ValueError(f"key {number} is shorter than {algorithm} needs")


@dataclass(frozen=True, slots=True)
class Head:
    """Unverified fields of a token: algorithm, ``kid`` and issuer."""

    algorithm: str
    key: str | None
    """``kid``; None: the token has none."""
    issuer: str | None


def read_head(password: bytes, settings: TokenSettings) -> Head | None:
    """Return the head of the token in a password; None for no token, or a token of another issuer.

    Raises:
        BadToken: the token does not conform to the settings.
    """
    parts = password.split(b".")
    if len(parts) != 3 or len(parts[0]) > HEAD_MOST:
        return None
    head, claims = _json(parts[0]), _json(parts[1])
    if head is None or "alg" not in head:
        return None
    if claims is None:  # orjson refuses NaN and infinite numbers too
        raise BadToken("its claims cannot be read")
    issuer = claims.get("iss")
    if settings.issuer is not None and issuer != settings.issuer:
        return None
    if head["alg"] not in settings.algorithms:
        raise BadToken("its algorithm is not one of the settings")
    if "crit" in head:
        raise BadToken("its header has critical parts that are not supported")
    key = head.get("kid")
    if key is not None and not isinstance(key, str):
        raise BadToken("its kid is not text")
    return Head(head["alg"], key, issuer if isinstance(issuer, str) else None)


def _json(part: bytes) -> dict[str, Any] | None:
    try:
        found = orjson.loads(base64.urlsafe_b64decode(part + b"=" * (-len(part) % 4)))
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def verify(password: bytes, head: Head, keys: Sequence[Key]) -> tuple[dict[str, Any], Key]:
    """Return the claims of a token, and the key that has signed the token.

    Raises:
        BadToken: no key fits the signature.
    """
    for key in keys:
        try:
            made = jwt.PyJWK(key.values, algorithm=head.algorithm)
            payload = jwt.PyJWS().decode(password, made.key, algorithms=[head.algorithm])
            claims = orjson.loads(payload)
        except (jwt.PyJWTError, ValueError, TypeError):
            continue
        if isinstance(claims, dict):
            return claims, key
    raise BadToken("no key fits its signature")


@dataclass(frozen=True, slots=True)
class Claims:
    """Checked claims of a token."""

    user: str
    groups: frozenset[str]
    rules: Rules | None
    expires: float
    """Unix time in seconds, leeway included."""
    tenant: str | None


def check_claims(claims: dict[str, Any], settings: TokenSettings, client_id: str, now: float) -> Claims:
    """Check the claims of a token with a valid signature; ``now`` is Unix time in seconds.

    Raises:
        BadToken: the claims are not valid.
    """
    if settings.issuer is not None and claims.get("iss") != settings.issuer:
        raise BadToken("its issuer is another one")
    audience = claims.get("aud")
    named = [audience] if isinstance(audience, str) else audience
    if settings.audience is None:
        if audience is not None:
            raise BadToken("it names an audience, and the setting audience is empty")
    elif not isinstance(named, list) or not any(one in settings.audience for one in named):
        raise BadToken("it is for another audience")
    expires = _time(claims, "exp")
    if expires is None:
        raise BadToken("it has no expiry")
    if now >= expires + settings.leeway:
        raise BadToken("it has expired")
    for name in ("nbf", "iat"):
        begins = _time(claims, name)
        if begins is not None and now < begins - settings.leeway:
            raise BadToken("it is not valid yet")
    user = claims.get(settings.user_claim)
    if not isinstance(user, str) or not user or not user.isprintable():
        raise BadToken(f"{settings.user_claim} is not the name of a user")
    if settings.client_claim is not None and claims.get(settings.client_claim) != client_id:
        raise BadToken("it is for another client id")
    groups = claims.get(settings.groups_claim, [])
    if isinstance(groups, str):
        groups = [groups]
    if not isinstance(groups, list) or not all(isinstance(one, str) for one in groups):
        raise BadToken(f"{settings.groups_claim} is not a list of names")
    tenant = None
    if settings.tenant_claim is not None:
        tenant = claims.get(settings.tenant_claim)
        if not isinstance(tenant, str) or not tenant:
            raise BadToken(f"{settings.tenant_claim} is not the name of a tenant")
    rules = None
    if settings.acl_claim in claims:
        try:
            rules = own_rules(claims[settings.acl_claim])
        except ValueError as error:
            raise BadToken(f"{settings.acl_claim}: {error}") from None
    return Claims(user, frozenset(groups), rules, expires + settings.leeway, tenant)


def _time(claims: dict[str, Any], name: str) -> float | None:
    value = claims.get(name)
    if value is None:
        return None
    try:
        found = math.nan if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):  # a token with an infinite or NaN `exp` would never expire
        raise BadToken(f"{name} is not a time")
    return found
