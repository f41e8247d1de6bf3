"""Configs as dictionaries and as TOML: unknown keys and values of a wrong type are refused."""

import dataclasses
import tomllib
import types
import typing
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from dualrc.errors import ConfigError

T = TypeVar("T")
# Largest TOML file in bytes.
_MOST_TOML = 1 << 20


def to_dict(config: Any) -> dict[str, Any]:
    """Convert a config to nested dictionaries; fields that are None are omitted, because TOML has no null."""
    return dataclasses.asdict(config, dict_factory=_without_nulls)


def from_dict(kind: type[T], values: dict[str, Any], where: str = "") -> T:
    """Create a config of this kind; unknown keys and values of the wrong type raise a ConfigError."""
    hints = typing.get_type_hints(kind)
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    known = [f.name for f in fields]
    for key in values:
        if key not in known:
            raise ConfigError(f"Unknown setting {where}{key}; choose one of {', '.join(known)}.")
    for f in fields:
        if f.name not in values and f.default is f.default_factory is dataclasses.MISSING:
            raise ConfigError(f"The setting {where}{f.name} is missing; add it.")
    return kind(**{key: _convert(hints[key], value, where + key) for key, value in values.items()})


def read_toml(kind: type[T], path: str | Path) -> T:
    """Read a config of this kind from a TOML file of at most 1 MiB."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_TOML + 1)
        if len(content) > _MOST_TOML:
            raise ConfigError(f"{path} is larger than {_MOST_TOML >> 20} MiB, so it is not a config; check the path.")
        values = tomllib.loads(content.decode().replace("\r\n", "\n"))
    except OSError as error:
        raise ConfigError(f"Cannot read {path} ({error.strerror}); check the path.") from error
    except RecursionError as error:
        raise ConfigError(f"{path} is not valid TOML (nested too deeply); correct it.") from error
    except ValueError as error:
        # ValueError also covers numbers with thousands of digits.
        raise ConfigError(f"{path} is not valid TOML ({error}); correct it.") from error
    return from_dict(kind, values)


def to_toml(config: Any) -> str:
    """Convert a config to TOML text."""
    # Imported here, because matching with ONNX Runtime works without this package.
    import tomlkit

    return tomlkit.dumps(to_dict(config))


def first_difference(there: Any, here: Any, where: str = "") -> str | None:
    """Describe the first setting in which two configs, as nested dictionaries, differ; None if they are equal."""
    if isinstance(there, dict) and isinstance(here, dict):
        for key in sorted(there.keys() | here.keys()):
            found = first_difference(there.get(key), here.get(key), f"{where}.{key}" if where else key)
            if found is not None:
                return found
        return None
    return None if there == here else f"{where} is {there!r} there and {here!r} now"


def _without_nulls(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in items if value is not None}


def _convert(hint: Any, value: Any, where: str) -> Any:
    """Check a value from TOML or JSON against the type of a field, and convert it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return _convert_union(arguments, value, where)
    if origin is Literal:
        # The types must match too: 256.0 is not 256.
        if any(value == choice and type(value) is type(choice) for choice in arguments):
            return value
        raise ConfigError(f"{where} = {value!r} must be one of {', '.join(map(repr, arguments))}.")
    if origin is tuple:
        return _convert_tuple(arguments, value, where)
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return from_dict(hint, value, where + ".")  # type: ignore[arg-type]
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise ConfigError(f"{where} = {value!r} must be of type {hint.__name__}.")


def _convert_union(options: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in options:
        return None
    options = tuple(option for option in options if option is not type(None))
    # The field `kind` distinguishes several dataclasses.
    if isinstance(value, dict) and len(options) > 1:
        kinds = {kind: option for option in options for kind in typing.get_args(typing.get_type_hints(option)["kind"])}
        if value.get("kind") not in kinds:
            raise ConfigError(f"{where}.kind must be one of {', '.join(map(repr, kinds))}.")
        return from_dict(kinds[value["kind"]], value, where + ".")
    return _convert(options[0], value, where)


def _convert_tuple(arguments: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{where} = {value!r} must be a list.")
    if arguments[-1] is Ellipsis:
        arguments = arguments[:1] * len(value)
    if len(arguments) != len(value):
        raise ConfigError(f"{where} = {value!r} must have {len(arguments)} entries.")
    return tuple(_convert(kind, item, where) for kind, item in zip(arguments, value, strict=True))
