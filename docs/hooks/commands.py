"""The reference of the command line, made from the commands themselves."""

import re
from typing import Any

import typer.main

from dualrc.cli import app


def render() -> str:
    """Markdown for every command."""
    group = typer.main.get_command(app)
    lines = [
        "# Command line",
        "",
        "This page is made from the program. `dualrc COMMAND --help` prints the same.",
        "Results go to standard output, everything else to standard error; see [Long runs](../running.md).",
        "`dualrc --install-completion` installs shell completion.",
        "",
        "| command | what it does |",
        "|---|---|",
    ]
    found = list(_commands(group, "dualrc"))
    for path, command in found:
        anchor = path.replace(" ", "-")
        lines.append(f"| [`{path}`](#{anchor}) | {_cell(command.get_short_help_str(200))} |")
    for path, command in found:
        lines += ["", *_command(path, command)]
    return "\n".join(lines) + "\n"


def _commands(group: Any, path: str) -> Any:
    """All commands below a group, with their whole names."""
    for name, command in sorted(group.commands.items()):
        if command.hidden:
            continue
        if hasattr(command, "commands"):
            yield from _commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def _command(path: str, command: Any) -> list[str]:
    context = command.make_context(path, [], resilient_parsing=True)
    # Versions of click differ in the braces and brackets around arguments.
    usage = re.sub(r"\{([^{}]+)\}", r"\1", " ".join(command.collect_usage_pieces(context)))
    usage = re.sub(r"\[\[(\w+)\]\]", r"[\1]", usage).replace("...]...", "]...").replace("......", "...")
    lines = [f"## {path} {{ #{path.replace(' ', '-')} }}", ""]
    for paragraph in re.split(r"\n\s*\n", _plain(command.help or "").strip()):
        # Lines that begin with the name of the program are examples.
        rows = [row.strip() for row in paragraph.replace("\b", "").splitlines()]
        examples = [row for row in rows if re.match(r"(?:[A-Z_]+=\S+ )?dualrc ", row)]
        text = " ".join(row for row in rows if row not in examples)
        lines += [text, ""] if text else []
        lines += ["```sh", *examples, "```", ""] if examples else []
    lines += ["```text", f"{path} {usage}", "```", ""]
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and not getattr(p, "hidden", False)]
    if arguments:
        lines += ["| argument | meaning |", "|---|---|"]
        lines += [f"| `{p.metavar or p.name.upper()}` | {_cell(p.help or '')} |" for p in arguments]
        lines.append("")
    if options:
        lines += ['<div class="fields" markdown>', "", "| option | default | meaning |", "|---|---|---|"]
        lines += [_option(p, context) for p in options if p.name != "help"]
        lines += ["", "</div>"]
    return lines


def _option(option: Any, context: Any) -> str:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    if not option.is_flag:
        value = option.display_type_rich(context)
        short = _plain(value or "").strip("<>").removeprefix("list[").removesuffix("]")
        short = {"Path": "path", "int range": "int"}.get(short, short)
        names += " " + ", ".join(f"`{choice}`" for choice in short.split("|")) if short else ""
    default = option.default
    if callable(default) or default is None or default is False or type(default).__name__ == "Sentinel":
        shown = "required" if option.required else ""
    else:
        shown = f"`{' '.join(map(str, default)) if isinstance(default, (list, tuple)) else default}`"
    return f"| {_cell(names)} | {_cell(shown)} | {_cell(option.help or '')} |"


def _plain(text: str) -> str:
    """Text without rich's markup."""
    return re.sub(r"\[/?(?:bold|dim|cyan|green|yellow|italic)\]", "", text)


def _cell(text: str) -> str:
    """Text for a cell of a table."""
    return " ".join(_plain(text).split()).replace("|", "\\|")
