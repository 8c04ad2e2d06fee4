"""Every setting, declared once, and where its value came from.

A setting is a field of `Settings` together with its default, environment variable, TOML key, kind and help
text; `SETTINGS` is that table, and command line, documentation and tests are made from it. `load_settings`
takes each value from the first of

    arguments > environment > commandbus.toml > [tool.commandbus] in pyproject.toml > default

and `settings.origins[name]` says from which. Limits (`[limits.docai]`) and breakers (`[breakers."orders/ship"]`)
have names of their own, so they are tables (`limits_and_breakers.py`). Entries of several sources are combined.
Two invariants: what `load_settings` returns is valid, including the hierarchy of time limits; and a password never
gets into `masked()`, `displayed()`, `repr()` or an error.

Nothing here connects, imports handlers, or configures logging. A relative folder in `embedded:FOLDER` is left
as it is; `config_file` says which file it may be relative to.
"""

from commandbus.settings.declaration import SETTINGS, Setting, Settings
from commandbus.settings.kinds import Kind
from commandbus.settings.loading import CONFIG_NAME, PYPROJECT_NAME, load_settings
from commandbus.settings.secrets import MASK, mask_database_url, mask_redis_url

__all__ = [
    "CONFIG_NAME",
    "MASK",
    "PYPROJECT_NAME",
    "SETTINGS",
    "Kind",
    "Setting",
    "Settings",
    "load_settings",
    "mask_database_url",
    "mask_redis_url",
]
