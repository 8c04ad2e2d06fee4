"""A registry whose handlers another module adds: importing this one does not import them."""

from __future__ import annotations

from commandbus import HandlerRegistry

far = HandlerRegistry()
