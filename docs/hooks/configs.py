"""The reference of the configs, made from the dataclasses and the comments above their fields."""

import ast
import dataclasses
import inspect
import sys
import typing
from pathlib import Path
from types import ModuleType
from typing import Any

from comments import comment_of

import dualrc
import dualrc.collection.config
import dualrc.collection.keypoints
import dualrc.collection.reconstruct
import dualrc.config
import dualrc.data
import dualrc.data.open
import dualrc.localize
import dualrc.train.config


def render() -> str:
    """Markdown for every config."""
    sections = [
        (
            "Matcher",
            "Fields are keyword arguments of `dualrc.load`.",
            [dualrc.config.MatcherConfig],
        ),
        (
            "Network",
            "A weights file carries its network's config. In TOML, `backbone.kind` and `ncnet.kind` choose the class.",
            _classes(dualrc.config, "Config", but=("MatcherConfig",)),
        ),
        (
            "Collections",
            "Fields are options of `dualrc collection`, `dualrc reconstruct` and `dualrc localize`, except those of "
            "`MergeConfig`, which are set in Python only.",
            [
                dualrc.collection.config.CollectionConfig,
                dualrc.collection.reconstruct.ReconstructConfig,
                dualrc.collection.keypoints.MergeConfig,
                dualrc.localize.LocalizeConfig,
            ],
        ),
        (
            "Training",
            "A TOML file for `dualrc train` holds a `TrainConfig`; every `[[data]]` table holds one of the "
            "data configs, chosen by `kind`.",
            [
                dualrc.train.config.TrainConfig,
                dualrc.train.config.TeacherConfig,
                *typing.get_args(dualrc.data.DataConfig),
                *_nested(),
            ],
        ),
    ]
    lines = [
        "# Configs",
        "",
        "Configs are frozen dataclasses with keyword-only fields. Files are TOML. Unknown keys and values of the "
        "wrong type are errors. This page is made from the code.",
    ]
    for title, about, classes in sections:
        lines += ["", f"## {title}", "", about]
        for config in classes:
            lines += ["", *_table(config)]
    return "\n".join(lines) + "\n"


def _classes(module: ModuleType, ending: str, but: tuple[str, ...]) -> list[type]:
    return [
        value
        for name, value in vars(module).items()
        if name.endswith(ending) and name not in but and dataclasses.is_dataclass(value) and isinstance(value, type)
    ]


def _nested() -> list[type]:
    """Dataclasses that fields of the data configs hold."""
    found: list[type] = []
    for config in typing.get_args(dualrc.data.DataConfig):
        for hint in typing.get_type_hints(config).values():
            for kind in (hint, *typing.get_args(hint)):
                if dataclasses.is_dataclass(kind) and isinstance(kind, type) and kind not in found:
                    found.append(kind)
    return found


def _table(config: Any) -> list[str]:
    # The address of a class without a page of its own is its whole name, which signatures link to.
    address = "" if hasattr(dualrc, config.__name__) else f" {{ #{config.__module__}.{config.__name__} }}"
    lines = [f"### {config.__name__}{address}", "", inspect.cleandoc(config.__doc__ or ""), ""]
    lines += ['<div class="fields" markdown>', "", "| field | type | default | meaning |", "|---|---|---|---|"]
    for name, kind, default, text in _fields(config):
        # Inside of code a pipe needs no escape.
        cells = (f"`{name}`", f"`{kind}`", f"`{default}`" if default else "required", text.replace("|", "\\|"))
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", "</div>"]


def _fields(config: Any) -> list[tuple[str, str, str, str]]:
    """Name, type, default and comment of each field, as the source has them."""
    path = Path(inspect.getsourcefile(config) or "")
    lines = path.read_text(encoding="utf-8").splitlines()
    # A field that a class declares again replaces that of its base.
    result: dict[str, tuple[str, str, str, str]] = {}
    for base in reversed(config.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        if inspect.getsourcefile(base) != str(path):
            path = Path(inspect.getsourcefile(base) or "")
            lines = path.read_text(encoding="utf-8").splitlines()
        for node in ast.walk(ast.parse("\n".join(lines))):
            if not (isinstance(node, ast.ClassDef) and node.name == base.__name__):
                continue
            for item in node.body:
                if not (isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)):
                    continue
                kind = ast.unparse(item.annotation)
                if kind.startswith("ClassVar"):
                    continue
                # The allowed values say more than the name of their type.
                alias = vars(sys.modules[base.__module__]).get(kind)
                if typing.get_origin(alias) is typing.Literal:
                    kind = f"Literal[{', '.join(map(repr, typing.get_args(alias)))}]"
                default = ast.unparse(item.value) if item.value is not None else ""
                name, comment = item.target.id, comment_of(lines, item.lineno, item.end_lineno)
                result[name] = (name, kind, _short(default), comment)
    return list(result.values())


def _short(default: str) -> str:
    """A default as a user writes it."""
    if default.startswith("field(default_factory=lambda: "):
        return default.removeprefix("field(default_factory=lambda: ").removesuffix(")")
    return default.removeprefix("field(default_factory=").removesuffix(")") + "()" if "factory=" in default else default
