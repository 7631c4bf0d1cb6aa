"""Where a request may go: schemes, hosts and ports by rule, addresses by what they are.

A name is checked twice: as it stands in the URL, and by every address that it resolves to, at the
moment of connecting, so that no second look-up can lead elsewhere. Both happen for every redirect.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl.errors import ConfigError, ToolError

if TYPE_CHECKING:
    import httpx

_MAX_NAME = 253
_DEFAULT_PORTS = {"http": 80, "https": 443}
_PUBLIC_PORTS = (80, 443, 8080, 8443)
_IPv4, _IPv6 = ipaddress.IPv4Address, ipaddress.IPv6Address
Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_METADATA = tuple(
    ipaddress.ip_network(network)
    for network in (
        "169.254.0.0/16",  # link-local; the metadata service of most clouds
        "fe80::/10",
        "fd00:ec2::/32",  # AWS over IPv6
        "100.100.100.200/32",  # Alibaba
        "168.63.129.16/32",  # Azure, in a public range
        "192.0.0.192/32",  # Oracle
    )
)
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
"""All of IPv6 that is given out to the internet; ``is_global`` takes more for public."""


class Forbidden(ToolError):
    """A request to somewhere that it must not go to; the message may be shown to the model."""


@dataclass(slots=True, frozen=True)
class HostRule:
    """One host that may be asked, or with ``*.`` all below one."""

    host: str
    port: int | None
    """None: the port of the scheme."""

    @property
    def is_exact(self) -> bool:
        """Whether it names one host; only then may the host be a private one."""
        return not self.host.startswith("*.")

    @classmethod
    def parse(cls, text: str) -> HostRule:
        """Read ``host``, ``host:port`` or ``*.host``.

        Raises:
            ConfigError: no such thing.
        """
        match = re.fullmatch(
            r"(\*\.)?(\[[0-9A-Fa-f:.]+\]|[^\s:/?#@\[\]*{}\\]+)(?::(\d{1,5}))?", text
        )
        port = int(match.group(3)) if match and match.group(3) else None
        if match is None or (port is not None and not 0 < port < 65536):
            raise ConfigError(
                f"{text!r} is no host; write 'api.example.com', 'api.example.com:8443' or "
                "'*.example.com'"
            )
        host = _name(match.group(2))
        if host is None:
            raise ConfigError(f"{text[:80]!r} is no host: no name server knows such a name")
        return cls((match.group(1) or "") + host, port)

    def matches(self, host: str, port: int, scheme: str) -> bool:
        """Return whether a normalised host and a port fall under it."""
        if port != (self.port or _DEFAULT_PORTS.get(scheme)):
            return False
        return host == self.host if self.is_exact else host.endswith(self.host[1:])


class Guard:
    """What may be asked.

    Args:
        hosts: rules as :meth:`HostRule.parse` reads them; None for every public host. A host that
            is named exactly may have a private or loopback address; nothing else may.
        schemes: of ``http`` and ``https``.
        private: False takes the exception from names, whose look-up others may decide: only an
            address that is written out, and ``localhost``, may then be private.

    Raises:
        ConfigError: a rule that is none.
    """

    def __init__(
        self,
        hosts: Sequence[str] | None = None,
        *,
        schemes: Sequence[str] = ("http", "https"),
        private: bool = True,
    ) -> None:
        self._rules = None if hosts is None else tuple(HostRule.parse(host) for host in hosts)
        self._schemes = tuple(schemes)
        self._private = private
        self._named: set[Address] = set()

    def check_url(self, url: str | httpx.URL) -> httpx.URL:
        """Return the parsed URL of a request that may be sent, as far as the URL tells.

        Raises:
            Forbidden: its scheme, host or port, or it cannot be read in one way only.
        """
        import httpx

        text = str(url)
        if not text.isprintable() or re.search(r"[\s\\]", text) or len(text) > 8192:
            raise Forbidden("the URL has blanks, backslashes or control characters, or is too long")
        try:
            parsed = url if isinstance(url, httpx.URL) else httpx.URL(text)
            port = parsed.port or _DEFAULT_PORTS.get(parsed.scheme, 0)
            host = _normal(parsed.host)
        except (httpx.InvalidURL, UnicodeError, ValueError) as error:
            raise Forbidden(f"the URL cannot be read: {error}") from None
        if parsed.scheme not in self._schemes:
            raise Forbidden(
                f"the scheme {parsed.scheme[:20]!r} is not allowed; use "
                f"{' or '.join(self._schemes)}"
            )
        if parsed.userinfo:
            raise Forbidden("a URL with a user name or password in it is not allowed")
        if not host:
            raise Forbidden("the URL names no host")
        self._check_host(host, port, parsed.scheme)
        literal = _literal(host)
        if literal is not None:
            self.check_address(host, literal)
        return parsed

    def check_address(self, host: str, address: str | Address) -> None:
        """Check what a host resolved to.

        Raises:
            Forbidden: the address is not public, and the rules do not name this host.
        """
        found = _literal(address) if isinstance(address, str) else address
        if found is None:
            raise Forbidden(f"{host[:80]!r} has an address that cannot be read")
        named = self._is_named(_normal(host))
        # A name that leads to a metadata service is an attack whoever wrote it; an address is not.
        if _is_metadata(found) and not (named and _literal(_normal(host)) == found):
            raise Forbidden(f"{host[:80]!r} leads to a link-local or metadata address")
        if not _is_public(found) and not named:
            raise Forbidden(f"{host[:80]!r} leads to an address that is not public")
        if named:
            self._named.add(found)

    def check_connection(self, address: str) -> None:
        """Check an address at the moment of connecting, whatever name led to it.

        Raises:
            Forbidden: neither public, nor that of a host that the rules name.
        """
        found = _literal(address)
        if found is None or (found not in self._named and not _may_be_reached(found)):
            raise Forbidden("the address connected to is not public")

    def _check_host(self, host: str, port: int, scheme: str) -> None:
        if self._rules is None:
            if port not in _PUBLIC_PORTS:
                raise Forbidden(
                    f"port {port} is not allowed; allowed are {', '.join(map(str, _PUBLIC_PORTS))}"
                )
        elif not any(rule.matches(host, port, scheme) for rule in self._rules):
            known = ", ".join(_shown(rule) for rule in self._rules) or "none"
            raise Forbidden(
                f"the host {host[:80]!r}, port {port}, is not allowed; allowed: {known}"
            )

    def _is_named(self, host: str) -> bool:
        if not self._private and host != "localhost" and _literal(host) is None:
            return False
        return any(rule.is_exact and rule.host == host for rule in self._rules or ())


def _shown(rule: HostRule) -> str:
    return rule.host if rule.port is None else f"{rule.host}:{rule.port}"


def _normal(host: str) -> str:
    """Return a host in lower case, in ASCII, without brackets or the dot of the root."""
    host = host.strip("[]").lower().removesuffix(".")
    if host.isascii():
        return host
    import httpx

    return httpx.URL(scheme="http", host=host).raw_host.decode("ascii").lower()


def _name(text: str) -> str | None:
    """Return a host as :func:`_normal` does; None for what is no address and no name of DNS."""
    import httpx

    try:
        host = _normal(text)
        if _literal(host) is not None:
            return host
        httpx.URL(f"http://{host}/").host.encode("idna")  # refuses labels that decode to nothing
    except (httpx.InvalidURL, UnicodeError):
        return None
    fits = len(host) <= _MAX_NAME and all(0 < len(label) <= 63 for label in host.split("."))
    return host if fits else None


def _literal(text: str) -> Address | None:
    """Return the address that a text is, seen through what wraps IPv4 in IPv6."""
    try:
        address = ipaddress.ip_address(text.strip("[]").partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, _IPv6):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and address in _NAT64:
            inner = _IPv4(int(address) & 0xFFFFFFFF)
        if inner is None and address.teredo is not None:
            inner = address.teredo[1]
        return inner or address
    return address


def _is_metadata(address: Address) -> bool:
    return any(address.version == network.version and address in network for network in _METADATA)


def _is_public(address: Address) -> bool:
    if isinstance(address, _IPv6) and address not in _GLOBAL_UNICAST:
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def _may_be_reached(address: Address) -> bool:
    return _is_public(address) and not _is_metadata(address)
