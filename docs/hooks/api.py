"""The pages of the Python API: every public name stands on one of them."""

import ast
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

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
            "collection.matching.CollectionResult",
            "CollectionConfig",
            "MatchStore",
            "reconstruct",
            "collection.reconstruct.Summary",
            "collection.verification.VerificationSummary",
            "collection.keypoints.Statistics",
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
# Types that signatures name, with the module that defines each and what it means; a class has its docstring.
_TYPES = {
    "ImageInput": ("image", "an image: a path, a PIL image, an array (h, w), (h, w, 3), or a tensor (3, h, w)"),
    "Matchable": ("matcher.features", "an image, or its features"),
    "Size": ("types", "width and height"),
    "FloatArray": ("types", "an array of float32 or float64"),
    "IntArray": ("types", "an array of int64"),
    "BoolArray": ("types", "an array of bool: a mask, or a flag for each row"),
    "ImageArray": ("types", "an image as uint8 (height, width, 3), RGB, upright"),
    "Quality": ("config", "how thoroughly to match; see [Quality](../concepts/sizes.md#quality)"),
    "Precision": ("matcher.extract", "number format of the backbone"),
    "ErrorHandling": ("matcher.many", "what `match_many` does with an unreadable image"),
    "EstimateKind": ("matches", "which model to fit"),
    "Names": ("collection.store", "the names of two images"),
    "Mapper": ("collection.mapping", "COLMAP's mapper"),
    "Progress": ("collection.progress", "called with the name of a step, the number of finished items and the total"),
    "Points": ("pixels", "points, as an array or as a tensor"),
    "Unset": ("types", ""),
    "Scale": ("image", ""),
    "Features": ("model.network", ""),
    "Network": ("model.network", ""),
    "Calibration": ("calibration", ""),
    "Seen": ("texture", ""),
    "MapImage": ("localize.maps", ""),
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
        here = [name for name in names if name in public or "." in name]
        shown.update(here)
        result.append(_page(key, title, about, [f"dualrc.{name}" for name in here]))
    if other := [name for name in public if name not in shown]:
        result.append(_page("other", "Other names", "Further public names.", [f"dualrc.{name}" for name in other]))
    result.append(Page(path="reference/types.md", title="Types", text=_types()))
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
        file = page.path.removeprefix("reference/")
        short = [f"[`{name.rpartition('.')[2]}`]({file}#{name})" for name in names]
        rows.append(f"| [{page.title}]({file}) | {', '.join(short) or 'the types that signatures name'} |")
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


def _types() -> str:
    # A heading whose address is the whole name is what signatures link to.
    sections = "\n\n".join(
        f"## {name} {{ #dualrc.{module}.{name} }}\n\n{_definition(name, module, meaning)}"
        for name, (module, meaning) in _TYPES.items()
    )
    return f"""# Types

Signatures use these names. `ArrayLike` is NumPy's: an array, a list, or anything else that
`numpy.asarray` takes. An argument with the default `UNSET` keeps the setting of the matcher; None
is a value of its own, such as "no limit".

{sections}
"""


def _definition(name: str, module: str, meaning: str) -> str:
    """The definition of a type and its meaning; for a class, the first line of its docstring."""
    found = import_module(f"dualrc.{module}")
    if isinstance(found.__dict__[name], type):
        return f"Class of `dualrc.{module}`. {str(found.__dict__[name].__doc__).splitlines()[0]}"
    nodes = ast.parse(Path(str(found.__file__)).read_text(encoding="utf-8")).body
    value = next(ast.unparse(n.value) for n in nodes if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == name)
    return f"`{value}`\n\n{meaning[0].upper()}{meaning[1:]}."


def _page(key: str, title: str, about: str, names: list[str]) -> Page:
    blocks = "\n\n".join(f"::: {name}{_options(name)}" for name in names)
    # The search of the site lists guides before these pages, which have every word.
    text = f"---\nsearch:\n  boost: 0.3\n---\n# {title}\n\n{about}\n\n{blocks}\n"
    return Page(path=f"reference/{key}.md", title=title, text=text)


def _options(name: str) -> str:
    members = _MEMBERS.get(name)
    return "" if members is None else f"\n    options:\n      members: [{', '.join(members)}]"
