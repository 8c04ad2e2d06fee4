"""Who may look and who may act in the console, and how changes are protected.

There are three ways in, and one of them is chosen when the console starts:

- **Loopback** (nothing is configured): only programs on this machine reach it. The `Host` header must name this
  machine, so that a page on another site cannot reach it under a name of its own. The visitor is an operator.
- **Tokens**: each belongs to a name and a role. A browser gives it once, and then has a signed cookie. Programs
  send `Authorization: Bearer TOKEN`.
- **A proxy header**: a proxy in front of the console has checked the visitor, and names them in a header. Nobody
  else may reach the console then, because anybody can send a header.

A browser's change needs a mark that only our own pages have (`csrf_mark`), and must not come from another site.
"""

from __future__ import annotations

import getpass
import hmac
import ipaddress
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Final, Literal
from urllib.parse import quote, unquote

from starlette.requests import Request

from commandbus.errors import ConfigurationError

Role = Literal["reader", "operator"]
COOKIE: Final = "commandbus_console"
MARK_FIELD: Final = "mark"
LONGEST_NAME: Final = 200
SHORTEST_TOKEN: Final = 16


@dataclass(frozen=True, slots=True)
class Visitor:
    """A person or program that uses the console. `is_program`: it sends its token with each request, so no other
    site can act in its name."""

    name: str
    role: Role
    is_program: bool = False

    @property
    def may_act(self) -> bool:
        """May they change anything?"""
        return self.role == "operator"


def is_same_site(request: Request) -> bool:
    """Does a browser say that this request comes from a page of this site? A program says nothing of it."""
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return False
    origin = request.headers.get("origin")
    return origin in (None, "null") or origin.partition("://")[2] == request.headers.get("host")


class Access:
    """Decides who a visitor is. Without tokens and header, only this machine gets in."""

    def __init__(
        self,
        *,
        tokens: Mapping[str, Visitor] | None = None,
        user_header: str | None = None,
        operators: Collection[str] = (),
    ) -> None:
        self._tokens = dict(tokens or {})
        self._user_header = user_header
        self._operators = frozenset(operators)
        if self._tokens and user_header is not None:
            raise ConfigurationError("give tokens or a proxy header, not both: each says who a visitor is")
        for token, visitor in self._tokens.items():
            if len(token) < SHORTEST_TOKEN:
                raise ConfigurationError(
                    f"the token of {visitor.name!r} has {len(token)} characters; give it {SHORTEST_TOKEN} or more"
                )
        secret = "".join(sorted(self._tokens)).encode() or secrets.token_bytes(32)
        self._secret = sha256(b"commandbus console" + secret).digest()

    @property
    def is_open_to_the_network(self) -> bool:
        """May it listen on other addresses than loopback?"""
        return bool(self._tokens) or self._user_header is not None

    @property
    def has_tokens(self) -> bool:
        """Can a visitor sign in with a token?"""
        return bool(self._tokens)

    def visitor(self, request: Request) -> Visitor | None:
        """Who sent this request; None if they may not even look."""
        if self._user_header is not None:
            return self._by_header(_as_sent(request.headers.get(self._user_header)))
        if self._tokens:
            return self._by_bearer(_as_sent(request.headers.get("authorization"))) or self._by_cookie(
                request.cookies.get(COOKIE)
            )
        return Visitor(_this_user(), "operator") if _names_this_machine(request) else None

    def cookie_for(self, token: str) -> str | None:
        """The value of the cookie for a visitor who has given this token; None if there is no such token."""
        visitor = self._of_token(token)
        return None if visitor is None else f"{self._sign('cookie', visitor.name)}.{quote(visitor.name)}"

    def csrf_mark(self, visitor: Visitor) -> str:
        """What a form of ours carries."""
        return self._sign("mark", visitor.name)

    def is_ours(self, request: Request, visitor: Visitor, mark: str) -> bool:
        """Does this change come from a page of ours?"""
        if visitor.is_program:
            return True
        return is_same_site(request) and hmac.compare_digest(mark.encode(), self.csrf_mark(visitor).encode())

    def _by_header(self, name: str | None) -> Visitor | None:
        if not name or len(name) > LONGEST_NAME or not name.isprintable():
            return None
        return Visitor(name, "operator" if name in self._operators else "reader")

    def _by_bearer(self, header: str | None) -> Visitor | None:
        scheme, _, token = (header or "").partition(" ")
        found = self._of_token(token.strip()) if scheme.lower() == "bearer" else None
        return None if found is None else Visitor(found.name, found.role, is_program=True)

    def _by_cookie(self, cookie: str | None) -> Visitor | None:
        signature, _, quoted = (cookie or "").partition(".")
        name = unquote(quoted)  # a cookie has no other letters than those of ASCII
        if not hmac.compare_digest(signature.encode(), self._sign("cookie", name).encode()):
            return None
        return next((visitor for visitor in self._tokens.values() if visitor.name == name), None)

    def _of_token(self, given: str) -> Visitor | None:
        """All tokens are compared, so that the time taken tells nothing."""
        found = None
        for token, visitor in self._tokens.items():
            if hmac.compare_digest(token.encode(), given.encode()):
                found = visitor
        return found

    def _sign(self, purpose: str, name: str) -> str:
        return hmac.new(self._secret, f"{purpose}:{name}".encode(), sha256).hexdigest()


def read_tokens(text: str, *, source: str) -> dict[str, Visitor]:
    """Tokens from lines `NAME ROLE TOKEN`. Empty lines and lines that begin with # do not count."""
    found: dict[str, Visitor] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        words = line.split()
        if len(words) != 3 or words[1] not in ("reader", "operator"):
            raise ConfigurationError(
                f"line {number} of {source} is not NAME ROLE TOKEN, where ROLE is reader or operator"
            )
        name, role, token = words
        if token in found or name in {visitor.name for visitor in found.values()}:
            raise ConfigurationError(f"line {number} of {source} repeats a name or a token: each has its own")
        found[token] = Visitor(name, "operator" if role == "operator" else "reader")
    if not found:
        raise ConfigurationError(f"{source} has no token: write lines NAME ROLE TOKEN into it")
    return found


def is_loopback(host: str) -> bool:
    """Is this an address that only this machine reaches?"""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _as_sent(header: str | None) -> str | None:
    """The text of a header. Its bytes are UTF-8 if they can be, so that a name has its own letters."""
    try:
        return None if header is None else header.encode("latin-1").decode()
    except UnicodeError:
        return header


def _names_this_machine(request: Request) -> bool:
    host = request.headers.get("host", "")
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return is_loopback(name)


def _this_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "console"
