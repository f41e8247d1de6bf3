"""What hloc and deep-image-matching share: settings, the matcher, and a module added to their package of matchers."""

import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

# Settings by their names in both libraries.
SETTINGS = {"preset": "default", "weights": None, "match_threshold": 0.2, "max_num_matches": 4000}


def load_matcher(conf: Mapping[str, Any], device: Any) -> Any:
    """Return a matcher with these settings."""
    from dualrc.matcher import load

    top, min_score = conf["max_num_matches"], conf["match_threshold"]
    # Most pairs of a collection have nothing in common, and a search over tilted views would find that again.
    return load(conf["preset"], weights=conf["weights"], device=device, top=top, min_score=min_score, max_tilt=1.0)


def add_module(matchers: Any, make: Callable[[], type]) -> Any:
    """Add the module `dualrc` with one class to a package, unless it is there, and return it."""
    name = f"{matchers.__name__}.dualrc"
    if name not in sys.modules:
        made = make()
        # Both libraries load the only class that a matcher module defines.
        made.__module__ = name
        sys.modules[name] = matchers.dualrc = ModuleType(name, "The matcher of dualrc.")
        setattr(matchers.dualrc, made.__name__, made)
    return sys.modules[name]
