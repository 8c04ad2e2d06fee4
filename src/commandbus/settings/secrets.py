"""Masks secrets: passwords in database and Redis URLs.

A masked value is composed again from its parts, never made by replacing text.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import SplitResult, parse_qsl, quote, urlencode, urlsplit

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

MASK: Final = "***"
_SECRET_CONNINFO: Final = frozenset(
    {"password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key"}
)
SECRET_WORD = re.compile(r"passw|passphrase|secret|token", re.IGNORECASE)
SECRET_WITHIN = re.compile(rf"(?:{SECRET_WORD.pattern})\w*\s*=|://", re.IGNORECASE)
POSTGRES_URL = re.compile(r"postgres(?:ql)?://")


def mask_database_url(value: str) -> str:
    """The URL or conninfo string for people, composed again from its parts without secrets.

    Text is never replaced: the masked part is what libpq itself reads as the password, whatever the quoting or
    encoding. A string that libpq cannot read is not shown at all.
    """
    if is_embedded(value):
        return value
    parts = conninfo_parts(value)
    if parts is None:
        return MASK
    shown = {key: _masked_part(key in _SECRET_CONNINFO, text) for key, text in parts.items()}
    return _as_url(shown) if POSTGRES_URL.match(value) else make_conninfo("", **shown)


def mask_redis_url(value: str) -> str:
    """The URL for people. A single word before the @ is masked, too, because it may be a token."""
    parts = redis_parts(value)
    if parts is None:
        return MASK
    userinfo, at, host = parts.netloc.rpartition("@")
    user, colon, _ = userinfo.partition(":")
    netloc = f"{user}:{MASK}@{host}" if colon else f"{MASK if at else ''}{at}{host}"
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    shown = [(key, _masked_part(bool(SECRET_WORD.search(key)), text)) for key, text in pairs]
    query = urlencode(shown, safe="*/")
    return f"{parts.scheme}://{netloc}{parts.path}" + (f"?{query}" if query else "")


def _masked_part(is_secret: bool, text: str) -> str:  # noqa: FBT001 - of two, and private
    """Mask a part. Even a part whose name is harmless may contain a secret: options, or a URL as dbname."""
    return MASK if is_secret or SECRET_WITHIN.search(text) else text


def conninfo_parts(value: str) -> dict[str, str] | None:
    """The parts as libpq reads them; None if it cannot, or if an unencoded character splits the password."""
    try:
        parts = {key: str(text) for key, text in conninfo_to_dict(value).items()}
    except (psycopg.Error, UnicodeError):
        return None
    if POSTGRES_URL.match(value):
        # libpq ends the user's part at the first "@" or "/". If the password contains one of these unencoded, the
        # rest of the password becomes a part of the host, the port or the database name.
        after_scheme = value.partition("://")[2]
        end = re.search(r"[@/]", after_scheme)
        rest = after_scheme[end.end() :] if end and end.group() == "@" else after_scheme
        if "@" in rest.partition("?")[0]:
            return None
    if not re.fullmatch(r"[\d,]*", parts.get("port", ""), re.ASCII):
        return None
    return parts


def _as_url(parts: dict[str, str]) -> str:
    rest = dict(parts)
    user, password = rest.pop("user", ""), rest.pop("password", "")
    userinfo = quote(user, safe="") + (f":{password}" if password else "")
    netloc = f"{userinfo}@" if userinfo else ""
    if "/" not in rest.get("host", ""):  # the folder of a unix socket stays readable in the query
        hosts, ports = rest.pop("host", "").split(","), rest.pop("port", "").split(",")
        ports += [""] * (len(hosts) - len(ports))
        netloc += ",".join(map(_host_and_port, hosts, ports))
    dbname = quote(rest.pop("dbname", ""), safe="*")
    query = urlencode(rest, safe="*/,", quote_via=quote)
    return f"postgresql://{netloc}/{dbname}" + (f"?{query}" if query else "")


def _host_and_port(host: str, port: str) -> str:
    return (f"[{host}]" if ":" in host else host) + (f":{port}" if port else "")


def redis_parts(value: str) -> SplitResult | None:
    """The URL as redis-py splits it; None if it is not a URL, or if an unencoded character splits the password."""
    try:
        parts = urlsplit(value)
        _ = parts.port, parse_qsl(parts.query, strict_parsing=True) if parts.query else None
    except ValueError:
        return None
    torn = parts.fragment or "@" in parts.path or "@" in parts.query
    known = parts.hostname if parts.scheme in {"redis", "rediss"} else parts.scheme == "unix" and parts.path
    return None if torn or not known else parts


def is_embedded(value: str) -> bool:
    return value == "embedded" or (value.startswith("embedded:") and len(value) > len("embedded:"))
