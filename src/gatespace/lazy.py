"""Names of a package that are imported at their first use, so that importing the package does not load torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def lazy(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package.

    Type checkers do not run it: under ``if TYPE_CHECKING`` the package imports all names of the modules.

    Args:
        package: The package's name.
        homes: Module of the package → the names in it, separated by spaces; its own name is the module itself.
    """
    home = {name: module for module, names in homes.items() for name in names.split()}

    def get(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(f"{package}.{home[name]}")
        value = module if home[name] == name else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted(home), sorted(home)
