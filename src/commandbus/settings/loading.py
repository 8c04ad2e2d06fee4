"""Where values come from: arguments > environment > commandbus.toml > [tool.commandbus] > defaults.

Files are searched for in the working directory and its parents, some of which others may write to (/tmp). Settings
name the database and the code that is run. So a file that the search found must belong to this user or root, and
must not be writable by everybody. Otherwise it is refused by name, as git does. A file that somebody named
explicitly is read without this check.
"""

from __future__ import annotations

import functools
import json
import os
import pwd
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeAlias

from commandbus.errors import ConfigurationError
from commandbus.quick_dataclass import dataclass
from commandbus.settings.declaration import BY_ENV, BY_TOML, SECTIONS, SETTINGS, Setting, Settings
from commandbus.settings.limits_and_breakers import (
    TABLES,
    check_key,
    check_options,
    declared_breakers,
    declared_limits,
)

CONFIG_NAME: Final = "commandbus.toml"
PYPROJECT_NAME: Final = "pyproject.toml"


@dataclass(frozen=True, slots=True)
class _Given:
    value: object
    origin: str


_Source: TypeAlias = dict[str, _Given]
_Tables: TypeAlias = Mapping[Path, Mapping[str, object]]


def load_settings(
    overrides: Mapping[str, object] | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    directory: Path | None = None,
    config_file: Path | None = None,
) -> Settings:
    """The effective settings. ConfigurationError names the origin, the setting, the value and what to do.

    `overrides` are the explicit arguments, where None means "not given". `directory` is where the search for
    configuration files begins (the working directory); a `config_file` is read instead of searching.

    Limits and breakers of all sources are combined: each is taken whole from the first source that has its name.
    """
    tables = _search(directory or Path.cwd()) if config_file is None else _named_file(config_file)
    sources = [_from_arguments(overrides or {}), _from_environment(environ)]
    sources += [_from_table(path, table) for path, table in tables.items()]
    given = {name: source[name] for source in reversed(sources) for name in source}
    settings = Settings(
        **{name: _parsed(SETTINGS[name], item) for name, item in given.items() if name in SETTINGS},
        limits=tuple(_entries("limits", given).values()),
        breakers=_entries("breakers", given),
        origins=dict.fromkeys(SETTINGS, "default") | {name: item.origin for name, item in given.items()},
        config_file=next(iter(tables), None),
    )
    return replace(settings, warnings=(*_unknown_variables(environ), *settings.timeouts.doubts()))


def _parsed(setting: Setting, given: _Given) -> Any:
    try:
        return setting.kind.parse(given.value, setting.name)
    except ValueError as error:
        raise ConfigurationError(f"{given.origin}: {error}") from None


def _entries(table: str, given: _Source) -> dict[str, Any]:
    """The limits, or the breakers, of all sources."""
    found: dict[str, Any] = {}
    for name, item in given.items():
        section, _, key = name.partition(".")
        if section == table:
            with _blaming(item.origin):
                found |= _declared(table, {key: item.value})
    return found


def _declared(table: str, value: object) -> dict[str, Any]:
    return (
        {limit.name: limit for limit in declared_limits(value)} if table == "limits" else declared_breakers(value)
    )


@contextmanager
def _blaming(origin: str) -> Iterator[None]:
    """Put the origin before the text of a ConfigurationError."""
    try:
        yield
    except ConfigurationError as error:
        raise ConfigurationError(f"{origin}: {error}") from None


def _from_arguments(overrides: Mapping[str, object]) -> _Source:
    source: _Source = {}
    known = dict.fromkeys((*SETTINGS, *TABLES))
    for name, value in overrides.items():
        if name not in known:
            hint = _did_you_mean(name, known)
            raise ConfigurationError(f"argument {name!r}: unknown setting{hint}")
        if name in TABLES and value is not None:
            with _blaming("argument"):
                entries = _declared(name, value)
            source |= {f"{name}.{key}": _Given(entry, "argument") for key, entry in entries.items()}
        elif value is not None:
            source[name] = _Given(value, "argument")
    return source


def _from_environment(environ: Mapping[str, str]) -> _Source:
    """A variable that is set but empty counts as not given, as in a Compose file or a systemd unit."""
    return {
        name: _Given(environ[setting.env], f"environment {setting.env}")
        for name, setting in SETTINGS.items()
        if environ.get(setting.env, "").strip()
    }


def _unknown_variables(environ: Mapping[str, str]) -> Iterator[str]:
    for variable in sorted(environ):
        if variable.startswith(("WORKER_", "COMMANDBUS_")) and variable not in BY_ENV:
            yield f"environment {variable}: not a setting, ignored{_did_you_mean(variable, BY_ENV)}"


def _from_table(path: Path, table: Mapping[str, object]) -> _Source:
    source: _Source = {}
    for section in TABLES:
        source |= _from_entries(path, section, table.get(section, {}))
    for key, value in _flattened(path, table):
        if key not in BY_TOML:
            hint = _did_you_mean(key, {key: _place(key) for key in BY_TOML})
            raise ConfigurationError(f"{_origin(path, key)}: unknown setting{hint}")
        source[BY_TOML[key].name] = _Given(value, _origin(path, key))
    return source


def _from_entries(path: Path, section: str, entries: object) -> _Source:
    """The sections below [limits] or [breakers]."""
    names = "NAME" if section == "limits" else '"DOMAIN/COMMAND_TYPE"'
    if not isinstance(entries, dict):
        raise ConfigurationError(f"{path}: {section} must be sections, [{section}.{names}]")
    source: _Source = {}
    for key, options in entries.items():
        shown = key if re.fullmatch(r"[\w-]{1,64}", key, re.ASCII) else f"{json.dumps(key):.80}"
        if not isinstance(options, dict):
            kind = type(options).__name__
            raise ConfigurationError(
                f"{_origin(path, f'{section}.{shown}')}: must be a section, [{section}.{shown}], not {kind}"
            )
        root = "tool.commandbus." if path.name == PYPROJECT_NAME else ""
        origin = f"{path} [{root}{section}.{shown}]"
        with _blaming(origin):
            check_key(section, key)
        check_options(section, options, origin)
        source[f"{section}.{key}"] = _Given(options, origin)
    return source


def _flattened(path: Path, table: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for key, value in table.items():
        if key in SECTIONS and not isinstance(value, dict):
            raise ConfigurationError(f"{path}: {key} must be a section, [{key}], not {type(value).__name__}")
        if key in TABLES:
            continue
        if isinstance(value, dict) and key not in BY_TOML:
            if key not in SECTIONS:
                hint = _did_you_mean(key, {section: f"[{section}]" for section in (*SECTIONS, *TABLES)})
                raise ConfigurationError(f"{path}: there is no section [{key}]{hint}")
            yield from ((f"{key}.{inner}", item) for inner, item in value.items())
        else:
            yield key, value


def _origin(path: Path, key: str) -> str:
    return f"{path} {_place(key, root='tool.commandbus' if path.name == PYPROJECT_NAME else '')}"


def _place(key: str, *, root: str = "") -> str:
    section, _, last = key.rpartition(".")
    header = ".".join(part for part in (root, section) if part)
    return f"[{header}] {last}" if header else last


def _did_you_mean(wrong: str, known: Mapping[str, object]) -> str:
    """A guess by spelling, or by the last part of a key that is in the wrong section."""
    import difflib

    last = wrong.rpartition(".")[2]
    close = difflib.get_close_matches(wrong, known, n=1, cutoff=0.75) or [
        key for key in known if key.rpartition(".")[2] == last
    ]
    if not close:
        return ""
    shown = known[close[0]]
    return f"; did you mean {shown if isinstance(shown, str) else close[0]}?"


def _named_file(path: Path) -> _Tables:
    table = _read(path)
    if table is None:
        raise ConfigurationError(f"{path}: has no section [tool.commandbus]")
    return {path: table}


def _search(directory: Path) -> _Tables:
    """The nearest commandbus.toml, then the nearest pyproject.toml that has [tool.commandbus]."""
    folders = list(_folders(directory.absolute()))
    tables: dict[Path, Mapping[str, object]] = {}
    for name in (CONFIG_NAME, PYPROJECT_NAME):
        for path in (folder / name for folder in folders):
            if path.is_file() and (table := _read(path, is_found=True)) is not None:
                tables[path] = table
                break
    return tables


def _folders(directory: Path) -> Iterator[Path]:
    """The folder and its parents, up to one that contains .git, or before one that we may not enter."""
    for folder in (directory, *directory.parents):
        if not os.access(folder, os.X_OK):
            return
        yield folder
        if (folder / ".git").exists():
            return


@functools.lru_cache(maxsize=4)
def _parse_toml(content: bytes) -> Mapping[str, object]:
    """Each new bus reads its settings. A pyproject.toml takes a millisecond to parse, and rarely changes."""
    import tomllib

    return tomllib.loads(content.decode())


def _read(path: Path, *, is_found: bool = False) -> Mapping[str, object] | None:
    """The settings in a file; None for a pyproject.toml that has none. With `is_found`, the file must be
    trustworthy."""
    import tomllib

    try:
        with path.open("rb") as file:
            content, about = file.read(), [os.fstat(file.fileno()), path.lstat()]
        document = _parse_toml(content)
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigurationError(f"{path}, line {line}: is not UTF-8 text") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigurationError(f"{path}: is not TOML: {error}") from error
    table = document if path.name != PYPROJECT_NAME else _tool_table(path, document)
    if table is not None and is_found:
        _check_trusted(path, about)
    return table


def _tool_table(path: Path, document: Mapping[str, object]) -> Mapping[str, object] | None:
    tool = document.get("tool", {})
    table = tool.get("commandbus") if isinstance(tool, dict) else None
    if table is not None and not isinstance(table, dict):
        raise ConfigurationError(f"{path}: tool.commandbus must be a section, [tool.commandbus]")
    return table


def _check_trusted(path: Path, about: Iterable[os.stat_result]) -> None:
    """Refuse a file (or a link to it) that does not belong to this user or root, or that everybody may write
    to."""
    remedy = f"if it is meant, name it (--config {path}, or config_file=); else move or remove it"
    for found in about:
        if found.st_uid not in _trusted_users():
            raise ConfigurationError(
                f"{path}: belongs to user {_user_name(found.st_uid)}, not to {_user_name(os.geteuid())}, and is "
                f"not read: {remedy}"
            )
        if found.st_mode & stat.S_IWOTH and not stat.S_ISLNK(found.st_mode):
            raise ConfigurationError(
                f"{path}: everybody may write to it, so it is not read: chmod o-w, or {remedy}"
            )


def _trusted_users() -> set[int]:
    """This user and root. For root, also the user who called sudo."""
    trusted = {0, os.geteuid()}
    caller = os.environ.get("SUDO_UID", "")
    if os.geteuid() == 0 and caller.isascii() and caller.isdigit():
        trusted.add(int(caller))
    return trusted


def _user_name(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return str(uid)
