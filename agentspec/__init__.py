"""Speculation middleware: agent workflows run faster, and not one token of their output changes.

All public names can be imported from here (`__init__.pyi` lists them). Each name loads its module on first use, so
`import agentspec` itself is quick and imports neither torch nor numpy.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


class _Package(ModuleType):
    """Keeps `agentspec.step` bound to the decorator: importing the package of that name would otherwise rebind it."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name == "step" and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
