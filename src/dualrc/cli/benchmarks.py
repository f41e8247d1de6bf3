"""The command that scores matchers; the benchmarks declare its options."""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_type_hints

import typer
from rich.console import Console

from dualrc.cli import common, running
from dualrc.errors import ConfigError
from dualrc.evaluation import BENCHMARKS, evaluate
from dualrc.evaluation.benchmark import OneNetworkSettings, Option, Settings


class Declared(NamedTuple):
    """A setting of a benchmark that is an option of the command line."""

    setting: str
    type: Any
    option: Option


def declared_options(settings_class: type[Settings]) -> dict[str, Declared]:
    """Return the options of a benchmark's settings by their first flag."""
    options = {}
    for name, hint in get_type_hints(settings_class, include_extras=True).items():
        for option in getattr(hint, "__metadata__", ()):
            flag = (option.flags or (f"--{name.replace('_', '-')}",))[0]
            options[flag] = Declared(name, get_args(hint)[0], option)
    return options


def make_command() -> Callable[..., Mapping[str, Any]]:
    """Make the command `evaluate`, with the options of all benchmarks."""
    # By flag, then by benchmark.
    takers: dict[str, dict[str, Declared]] = {}
    for name, benchmark in BENCHMARKS.items():
        for flag, declared in declared_options(benchmark.settings_class).items():
            takers.setdefault(flag, {})[name] = declared

    def run(benchmark: str, roots: list[Path] | None, **given: Any) -> Mapping[str, Any]:
        options: dict[str, Any] = {"roots": tuple(roots or ()), "out": Path(f"evaluation-{benchmark}")}
        for name, value in given.items():
            if value is not None and value is not False and value != []:
                options |= _setting(flags[name], value, benchmark, takers[flags[name]])
        messages = Console(stderr=True, quiet=True) if common.quiet else common.messages
        return evaluate(benchmark, screen=common.screen, messages=messages, **options)

    flags = {flag[2:].replace("-", "_"): flag for flag in takers}
    listed = f"One of {', '.join(BENCHMARKS)}."
    names: Any = Literal.__getitem__(tuple(BENCHMARKS))
    folders = Annotated[list[Path] | None, typer.Argument(metavar="ROOT...", help="Folders of the dataset.")]
    annotations = {"roots": folders} | {name: _annotation(flag, takers[flag]) for name, flag in flags.items()}
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(
            "benchmark", keyword, annotation=Annotated[names, typer.Argument(metavar="BENCHMARK", help=listed)]
        )
    ]
    parameters += [inspect.Parameter(n, keyword, annotation=a, default=None) for n, a in annotations.items()]
    # Typer reads the parameters of a command from its signature.
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    paragraphs = ["Score matchers on a benchmark and write a report."]
    for name, declared_benchmark in BENCHMARKS.items():
        paragraphs += [f"{declared_benchmark.summary}\n  dualrc evaluate {name} {declared_benchmark.example}"]
    run.__doc__ = "\n\n".join(paragraphs)
    return run


def _setting(flag: str, value: Any, benchmark: str, takers: Mapping[str, Declared]) -> dict[str, Any]:
    """Return the setting of an option; raise ConfigError if the benchmark does not have the option."""
    if benchmark not in takers:
        raise ConfigError(f"{flag} is an option of {' and '.join(takers)} only; omit it.")
    setting, hint, option = takers[benchmark]
    values = value if isinstance(value, list) else [value]
    values = [option.parse(text) for text in values] if option.parse else values
    if running.is_repeatable(hint):
        return {setting: tuple(values)}
    if len(values) > 1:
        raise ConfigError(f"{flag} was passed {len(values)} times; {benchmark} accepts it once.")
    return {setting: values[0]}


def _annotation(flag: str, takers: Mapping[str, Declared]) -> Any:
    """Return the annotation from which Typer makes an option."""
    general = {declared.option for declared in declared_options(OneNetworkSettings).values()}
    by_option: dict[Option, list[str]] = {}
    for name, declared in takers.items():
        by_option.setdefault(declared.option, []).append(name)
    texts = [option.help for option in by_option if option in general]
    texts += [f"{' and '.join(names)}: {own.help}" for own, names in by_option.items() if own not in general]
    _, hint, option = next(iter(takers.values()))
    panel = None if any(option in general for option in by_option) else "Options of single benchmarks"
    flags = option.flags or (flag,)
    described = typer.Option(*flags, help=" ".join(texts), metavar=option.metavar, rich_help_panel=panel)
    scalar = str if option.parse else next(part for part in get_args(hint) or (hint,) if part is not NoneType)
    several = any(running.is_repeatable(declared.type) for declared in takers.values())
    return Annotated[(list[scalar] if several else scalar) | None, described]  # type: ignore[valid-type]


def _kept(options: Mapping[str, Any]) -> str:
    """Describe the matches that a stopped run leaves."""
    out = options["out"] or f"evaluation-{options['benchmark']}"
    return f"The matched pairs are in {out}."


running.command("evaluate", kept=_kept)(make_command())
