"""Every RAWATTN_* environment variable: its default and its meaning. Read at the moment of use."""

import difflib
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, eq=False, slots=True)  # hashed by identity: at no cost, in every launch
class Variable:
    name: str
    default: str
    meaning: str


CACHE_DIR = Variable(
    "RAWATTN_CACHE_DIR", "", "folder of compiled kernels; empty: the user's cache folder"
)
NO_CACHE = Variable("RAWATTN_NO_CACHE", "0", "1: compile anew, neither read nor write the cache")
DUMP = Variable("RAWATTN_DUMP", "", "folder that gets the source, cubin and log of every compile")
LOG = Variable("RAWATTN_LOG", "0", "1: a line on stderr for every compile and load of a kernel")
LINEINFO = Variable("RAWATTN_LINEINFO", "0", "1: compile with line numbers, for profilers")
CHECK_SPILLS = Variable(
    "RAWATTN_CHECK_SPILLS", "0", "1: a kernel that spills registers raises RuntimeError"
)
VARIANT = Variable(
    "RAWATTN_VARIANT", "", "comma-separated names of table rows to use where they are able to"
)
SYNC = Variable(
    "RAWATTN_SYNC", "0", "1: wait for every kernel after its launch, so that errors name it"
)

VARIABLES = (CACHE_DIR, NO_CACHE, DUMP, LOG, LINEINFO, CHECK_SPILLS, VARIANT, SYNC)


# What os.environ keeps: its own lookup of an unset name raises and catches two exceptions, which
# would be felt in every launch.
_PRESENT = getattr(os.environ, "_data", os.environ)
_KEYS = {
    variable: variable.name if _PRESENT is os.environ else os.environ.encodekey(variable.name)
    for variable in VARIABLES
}


def value(variable: Variable) -> str:
    """The variable's present value, its default when unset."""
    if _KEYS[variable] not in _PRESENT:
        return variable.default
    return os.environ.get(variable.name, variable.default)


def flag(variable: Variable) -> bool:
    """True when the variable is set to anything but 0 or nothing."""
    return _KEYS[variable] in _PRESENT and value(variable) not in ("", "0")


def cache_dir() -> Path:
    """Where compiled kernels are kept."""
    chosen = value(CACHE_DIR)
    if chosen:
        return Path(chosen)
    import platformdirs

    return Path(platformdirs.user_cache_dir("rawattn", appauthor=False))


def unknown() -> dict[str, str]:
    """The RAWATTN_* names in the environment that mean nothing, each with the nearest that does.

    "" where none is near.
    """
    names = [variable.name for variable in VARIABLES]
    strange = [name for name in os.environ if name.startswith("RAWATTN_") and name not in names]
    return {name: next(iter(difflib.get_close_matches(name, names, 1)), "") for name in strange}
