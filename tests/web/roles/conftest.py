"""Consoles of all roles, made once for this folder.

It is a package (`__init__.py`), so that they end with its last test. In a plain folder pytest would keep them, and
the workers of their fleet, to the end of the run, beside the tests of all other folders.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.databases import Databases
from web.roles.role_consoles import Consoles, consoles_of_roles


@pytest.fixture(scope="package")
def consoles(databases: Databases) -> Iterator[Consoles]:
    """On a fleet with something of everything."""
    with consoles_of_roles(databases) as found:
        yield found
