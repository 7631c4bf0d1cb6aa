"""Who may call a tool server: bearer tokens, known by their hashes only."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import re
from collections.abc import Iterable, Mapping, Sequence

from agentrl.errors import ConfigError

ANYONE = "anyone"
"""The owner of every session where no token is asked for."""
_MIN_LENGTH = 16


class Tokens:
    """Tells callers apart by their bearer tokens.

    Args:
        tokens: those that are accepted; none accepts every caller as :data:`ANYONE`.
    """

    def __init__(self, tokens: Iterable[str] = ()) -> None:
        self._digests = [_digest(token) for token in tokens]

    @property
    def required(self) -> bool:
        """Whether a caller must have one."""
        return bool(self._digests)

    def owner(self, authorization: str | None) -> str | None:
        """Return who calls, by a hash of the token; None where no accepted token was given.

        Args:
            authorization: the header of that name.
        """
        if not self._digests:
            return ANYONE
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        given = _digest(token.strip())
        # All are compared, each in constant time: how long it takes tells nothing.
        found = [digest for digest in self._digests if hmac.compare_digest(digest, given)]
        return found[0] if found else None


def read_tokens(
    names: Sequence[str], *, host: str, environ: Mapping[str, str] | None = None
) -> Tokens:
    """Return the tokens that environment variables hold.

    Args:
        names: of the variables, one token in each.
        host: where the server is to listen.

    Raises:
        ConfigError: a variable is unset or its token too short to be a secret, or the server would
            listen beyond this machine without any.
    """
    environ = os.environ if environ is None else environ
    for name in names:
        length = len(environ.get(name, ""))
        if length < _MIN_LENGTH:
            raise ConfigError(
                f"--token-env {name}: the environment variable "
                + (f"has {length} characters" if length else "is not set")
                + f"; give it a token of at least {_MIN_LENGTH} characters, for example the "
                "output of 'openssl rand -hex 32'"
            )
        if not re.fullmatch(r"[!-~]*", environ[name]):
            raise ConfigError(
                f"--token-env {name}: the token has blanks, line breaks or characters beyond "
                "ASCII, which no header can carry; use the output of 'openssl rand -hex 32'"
            )
    if not names and not is_loopback(host):
        raise ConfigError(
            f"--host {host}: whoever reaches this address could run the tools; name the "
            "environment variable that holds a token with --token-env NAME, or listen on 127.0.0.1"
        )
    return Tokens(environ[name] for name in names)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address to listen on."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name: whatever it stands for tomorrow
        return False


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
