"""The pages of the Python API: every public name stands on one of them."""

from dataclasses import dataclass
from importlib import import_module

import dualrc

# Pages, with the names on them. A name that is public and stands nowhere goes to the page of other names.
_GROUPS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "matching": (
        "Matching",
        "Load a matcher, match images, and use what it returns.",
        (
            *("load", "Matcher", "ImageFeatures", "Matches", "Match", "Warp"),
            *("Estimate", "RelativePose", "warp_image", "panorama"),
        ),
    ),
    "collections": (
        "Collections and localization",
        "Match folders of images, reconstruct them, and localize images in a map.",
        (
            "match_collection",
            "CollectionConfig",
            "MatchStore",
            "reconstruct",
            "ReconstructConfig",
            "Localizer",
            "LocalizeConfig",
        ),
    ),
    "configs-and-errors": (
        "Settings and errors",
        "Settings are frozen dataclasses. Every error that a user can cause is a `DualRCError`.",
        (
            "MatcherConfig",
            "NetworkConfig",
            "DualRCError",
            "ConfigError",
            "DataError",
            "ImageError",
            "OutputError",
            "WeightsError",
        ),
    ),
}
# Public modules have a page each, with the names of their `__all__`.
_MODULES = {
    "geometry": "Cameras, poses, and robust two-view estimation. All robust estimators are PoseLib's LO-RANSAC.",
    "draw": "Drawings of matches and warps. A drawing is an array that a notebook shows as an image.",
    "colmap": "COLMAP's models, cameras and conventions.",
    "localize": "Maps, queries and results of localization.",
}
# Members to show, where other parts of the package use further ones.
_MEMBERS = {
    "dualrc.Matcher": (
        *("info", "features", "match", "match_features", "match_many", "match_points", "warp"),
        "with_covariance",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Page:
    """A generated page."""

    path: str
    title: str
    text: str


def pages() -> list[Page]:
    """All pages of the Python API."""
    public = [name for name in dualrc.__all__ if name != "__version__"]
    result, shown = [], {"__version__", *_MODULES}
    for key, (title, about, names) in _GROUPS.items():
        here = [name for name in names if name in public]
        shown.update(here)
        result.append(_page(key, title, about, [f"dualrc.{name}" for name in here]))
    if other := [name for name in public if name not in shown]:
        result.append(_page("other", "Other names", "Further public names.", [f"dualrc.{name}" for name in other]))
    for module, about in _MODULES.items():
        names = names_of(module)
        result.append(_page(module, f"dualrc.{module}", about, [f"dualrc.{module}.{name}" for name in names]))
    return result


def names_of(module: str) -> list[str]:
    """The public names of a public module: its `__all__`, or what it defines itself."""
    found = import_module(f"dualrc.{module}")
    names = getattr(found, "__all__", None)
    if names is not None:
        return sorted(names, key=str.lower)
    own = [name for name, value in vars(found).items() if getattr(value, "__module__", None) == found.__name__]
    return [name for name in own if not name.startswith("_")]


def index() -> str:
    """The first page of the reference."""
    rows = []
    for page in pages():
        names = [line.removeprefix("::: ") for line in page.text.splitlines() if line.startswith("::: ")]
        short = [f"[`{name.rpartition('.')[2]}`]({page.path.removeprefix('reference/')}#{name})" for name in names[:12]]
        rows.append(
            f"| [{page.title}]({page.path.removeprefix('reference/')}) | {', '.join(short)}"
            f"{', ...' if len(names) > 12 else ''} |"
        )
    table = "\n".join(rows)
    return f"""# Reference

The pages of the Python API are made from the docstrings and type hints of the code.
`dualrc.__version__` is the version of the package.

| page | names |
|---|---|
{table}

- [Command line](cli.md): every command with its options, made from the program itself.
- [Configs](configs.md): every field of every config, with its default.
- [File formats](../files.md): what is read and written, and the limits on untrusted files.
- [Model card](model-card.md): the bundled weights, their data, figures and limits.
- [Long runs](../running.md): output, JSON keys, exit status, threads.
"""


def _page(key: str, title: str, about: str, names: list[str]) -> Page:
    blocks = "\n\n".join(f"::: {name}{_options(name)}" for name in names)
    # The search of the site lists guides before these pages, which have every word.
    text = f"---\nsearch:\n  boost: 0.3\n---\n# {title}\n\n{about}\n\n{blocks}\n"
    return Page(path=f"reference/{key}.md", title=title, text=text)


def _options(name: str) -> str:
    members = _MEMBERS.get(name)
    return "" if members is None else f"\n    options:\n      members: [{', '.join(members)}]"
