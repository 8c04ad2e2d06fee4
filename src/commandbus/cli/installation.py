"""Checks that the imported `commandbus` is this package, and that no other package has written into it.

The distribution is called `commandbus-pg`. Another distribution is called `commandbus`, and belongs to somebody
else. Both write into the same folder, so installing both gives a mixture of two packages.

Everything here needs the standard library and `light_imports.py` only, because it must work when our other
imports fail. The command line calls `clash()` at its start, which looks for one name; `doctor` checks everything.
"""

from __future__ import annotations

import base64
import hashlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from commandbus.lazy import lazy
from commandbus.light_imports import may_be_installed

if TYPE_CHECKING:
    from importlib import metadata
    from importlib.metadata import Distribution, PackagePath
else:
    metadata = lazy("importlib.metadata")

DISTRIBUTION = "commandbus-pg"
PACKAGE = "commandbus"
FILE_LISTS = ("RECORD", "installed-files.txt", "SOURCES.txt")  # the lists that `Distribution.files` reads
REPAIR = f"pip uninstall {{name}} {DISTRIBUTION} && pip install {DISTRIBUTION}"


def clash() -> str | None:
    """The warning if the other `commandbus` is installed beside this one; None if it is not. Fast."""
    if not may_be_installed(PACKAGE):
        return None
    try:
        return clash_text(metadata.distribution(PACKAGE))
    except metadata.PackageNotFoundError:
        return None


def clash_text(other: Distribution) -> str:
    """The text of the warning: which other package there is, and what to do."""
    name = other.metadata["Name"]
    return (
        f"another package is installed over this one: {name} {other.version} provides {PACKAGE}, too, and "
        f"is not {DISTRIBUTION}; run {REPAIR.format(name=name)}"
    )


def say_clash() -> None:
    """Print the warning on standard error, if there is one."""
    text = clash()
    if text is not None and sys.stderr is not None:
        print(f"{PACKAGE}: warning: {ascii(text)[1:-1]}", file=sys.stderr)


def others() -> list[Distribution]:
    """All distributions but ours that have files in our package."""
    found = {}
    for other in [*metadata.distributions(name=PACKAGE), *filter(_mentions_package, metadata.distributions())]:
        name = (other.metadata["Name"] or "").lower().replace("_", "-")
        if name != DISTRIBUTION and (name == PACKAGE or any(_is_in_package(path) for path in other.files or ())):
            found[name] = other
    return list(found.values())


def _mentions_package(other: Distribution) -> bool:
    """Does one of its file lists contain the name of our folder? That is much faster than reading all its
    paths."""
    return any(f"{PACKAGE}/" in (other.read_text(name) or "") for name in FILE_LISTS)


def changed_files() -> list[str]:
    """Files of our package that were overwritten, changed by hand, or deleted since they were installed."""
    try:
        ours = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return []
    return sorted(str(path) for path in ours.files or () if _is_in_package(path) and not _is_unchanged(path))


def _is_in_package(path: PackagePath) -> bool:
    return path.parts[:1] == (PACKAGE,) and path.suffix != ".pyc"


def _is_unchanged(path: PackagePath) -> bool:
    if path.hash is None:
        return True
    try:
        digest = hashlib.new(path.hash.mode, path.read_binary()).digest()
    except (OSError, ValueError):
        return False
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == path.hash.value


def findings() -> Iterator[tuple[str, str]]:
    """What is wrong, and what to do about it."""
    for other in others():
        text, _, remedy = clash_text(other).partition("; run ")
        yield text, f"run {remedy}"
    if changed := changed_files():
        few = ", ".join(changed[:3]) + (", …" if len(changed) > 3 else "")
        yield (
            f"{len(changed)} of its files are not as they were installed: {few}",
            f"run pip install --force-reinstall --no-deps {DISTRIBUTION}",
        )
