"""The documents: their code runs, their commands exist, their links lead somewhere, and the site builds."""

import contextlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT
from docs_data import DOCS, Block, anchors, blocks, pages, prose, write_samples
from PIL import Image
from typer.main import get_command
from typer.testing import CliRunner

import dualrc
from dualrc import cli

PAGES = pages()
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
# Pages that the site makes from the code, and pages of parts that a checkout may lack. The blocks of the latter need
# servers and other libraries: they are compiled and parsed. A comment `<!-- run: MODULES -->` above a block runs it
# where these modules are installed.
GENERATED = re.compile(r"docs/reference/[\w-]+\.md")
OPTIONAL = {f"docs/{name}.md" for name in ("service", "onnx", "integrations")}
# Commands that go on until they are stopped: only parsed.
ENDLESS = {"serve"}
# Pages whose examples make a model, or read the one that was made.
CONTINUE = {"docs/collections.md", "docs/files.md", "docs/guides/localize.md"}
# Programs that shell blocks may call besides our own; none of them is run.
OTHERS = {"cd", "curl", "docker", "git", "jq", "pip", "ray", "source"}
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_LONGEST = 100


def missing(module: str) -> bool:
    """Whether a package is not installed."""
    return importlib.util.find_spec(module) is None


@pytest.fixture(scope="session")
def samples(tmp_path_factory) -> Path:
    """A folder with the files that the examples name."""
    folder = tmp_path_factory.mktemp("docs")
    write_samples(folder)
    return folder


@pytest.fixture(scope="session")
def town(samples) -> Path:
    """A reconstruction of the sample images: what docs/collections.md does, for the pages that go on with it."""
    pytest.importorskip("pycolmap")
    with contextlib.chdir(samples):
        run_page("docs/collections.md", samples)
    return samples / "town"


def run_command(block: Block, words: list[str], *, execute: bool) -> None:
    """Check a command of a shell block, and run it if it is ours."""
    words = list(words)
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words.pop(0)
    program, *arguments = words
    if program == "dualrc":
        command = get_command(cli.app)
        name = ""
        while hasattr(command, "commands"):
            if arguments and arguments[0].startswith("--"):
                return
            name = arguments.pop(0)
            assert name in command.commands, f"{block}: there is no command {name}"
            command = command.commands[name]
        # Parsing refuses unknown options, wrong values and missing arguments.
        with command.make_context(name, list(arguments)):
            pass
        if execute and name not in ENDLESS:
            done = CliRunner().invoke(cli.app, words[1:])
            assert done.exit_code == 0, f"{block}: {' '.join(words)}\n{done.output}"
    elif program == "python" and arguments and arguments[0].startswith("benchmarks/"):
        source = (ROOT / arguments[0]).read_text()
        for option in (word for word in arguments if word.startswith("--")):
            assert f'"{option}"' in source, f"{block}: {arguments[0]} has no option {option}"
    elif "scripts/" in program:
        assert (ROOT / program).exists(), f"{block}: there is no {program}"
    else:
        assert program in OTHERS or block.skip, f"{block}: {program} is not known; mark the block with skip"


def run_page(name: str, samples: Path) -> None:
    """Run the blocks of a page in order, in one namespace; what they write stays in the folder of the samples."""
    namespace: dict[str, object] = {"__name__": "docs"}
    for block in blocks(ROOT / name):
        needed = (block.run or "").split()
        possible = name not in OPTIONAL or (needed and all(map(importlib.util.find_spec, needed)))
        runs = block.skip is None and possible
        if block.language == "python":
            code = compile(block.text, str(block), "exec")
            if block.file is not None:
                (samples / block.file).write_text(block.text)
            elif runs:
                exec(code, namespace)
        elif block.language in ("sh", "bash"):
            for words in block.commands():
                run_command(block, words, execute=runs)
        elif block.language in ("json", "toml"):
            {"json": json.loads, "toml": tomllib.loads}[block.language](block.text)
        else:
            known = ("cpp", "js", "json", "text", "toml")
            assert block.language in known, f"{block}: name its language: python, sh, {', '.join(known)}"


def with_code() -> list:
    """Pages with code. hloc, vismatch and deep-image-matching give warnings of their own."""
    names = [name for name in NAMES if any(blocks(ROOT / name))]
    ignored = {"docs/integrations.md": [pytest.mark.filterwarnings("ignore")]}
    return [pytest.param(name, marks=ignored.get(name, [])) for name in names]


@pytest.mark.parametrize("name", with_code())
def test_the_code_of_a_document_runs(name, samples, monkeypatch, request):
    if name in CONTINUE:
        request.getfixturevalue("town")
    if name != "docs/collections.md":
        monkeypatch.chdir(samples)
        run_page(name, samples)


def test_what_a_document_skips_has_a_reason():
    reasons = [block.skip for page in PAGES for block in blocks(page) if block.skip is not None]
    assert reasons and all(len(reason.split()) >= 2 for reason in reasons)
    for page in (ROOT / name for name in OPTIONAL if (ROOT / name).exists()):
        for block in blocks(page):
            marked = block.skip or block.run or block.language not in ("python", "sh")
            assert marked, f"{block}: mark it with run or skip"


def test_the_requests_of_the_service_page_work(samples, monkeypatch):
    if not (DOCS / "service.md").exists() or any(map(missing, ("fastapi", "httpx", "multipart", "pycolmap"))):
        pytest.skip("needs the extras web and colmap")
    from web_data import serving

    monkeypatch.chdir(samples)
    address = "http://127.0.0.1:8000"
    requests = [block for block in blocks(DOCS / "service.md") if address in block.text and "JOB" not in block.text]
    assert {block.language for block in requests} == {"python", "sh"}
    with serving() as served:
        for block in requests:
            text = block.text.replace(address, served.url.rstrip("/"))
            if block.language == "python":
                exec(compile(text, str(block), "exec"), {})
            elif shutil.which("curl") and shutil.which("jq"):
                command = ["bash", "-euo", "pipefail", "-c", text.replace("curl ", "curl --noproxy '*' --fail ")]
                done = subprocess.run(command, capture_output=True, check=False)
                assert done.returncode == 0, f"{block}: {done.stderr.decode()}"


@pytest.mark.parametrize("name", NAMES)
def test_commands_in_sentences_exist(name):
    """Parse `dualrc COMMAND --option` in sentences and tables; arguments may be left out there."""
    text = re.sub(r"^ *```.*?^ *```", "", (ROOT / name).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for code in re.findall(r"`((?:dualrc\s|python benchmarks/)[^`]+)`", text):
        program, *words = shlex.split(code.replace("...", " "))
        if program == "python":
            run_command(Block(ROOT / name, 1, "sh", "", None, None), [program, *words], execute=False)
            continue
        command = get_command(cli.app)
        while hasattr(command, "commands") and words and words[0] in command.commands:
            command = command.commands[words.pop(0)]
        whole = not hasattr(command, "commands") or not words or words[0].startswith("--") or words[0] == "COMMAND"
        assert whole, f"{name}: there is no {code}"
        known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
        unknown = {word.partition("=")[0] for word in words if word.startswith("--")} - known
        assert not unknown, f"{name}: {code} has unknown options {unknown}"


def test_a_wrong_command_in_a_document_is_found():
    block = Block(ROOT / "README.md", 1, "sh", "", None, None)
    with pytest.raises(AssertionError, match="no command"):
        run_command(block, ["dualrc", "mach", "a.jpg", "b.jpg"], execute=False)
    for words in (["dualrc", "match", "a.jpg"], ["dualrc", "match", "a.jpg", "b.jpg", "--best", "3"]):
        with pytest.raises(Exception, match=r"(?i)missing|no such option"):
            run_command(block, words, execute=False)
    with pytest.raises(AssertionError, match="no option"):
        run_command(block, ["python", "benchmarks/sizes.py", "--none"], execute=False)
    with pytest.raises(AssertionError, match="not known"):
        run_command(block, ["dualcr", "match"], execute=False)


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name):
    page = ROOT / name
    for number, line in prose(page):
        # A link may be broken over two lines; such ones are joined by the site's own check.
        for target in _LINK.findall(line):
            if target.startswith(("https://", "http://", "mailto:")):
                continue
            path, _, anchor = target.partition("#")
            found = (page.parent / path).resolve() if path else page
            inside = str(found.relative_to(ROOT))
            if GENERATED.fullmatch(inside) or inside in OPTIONAL or inside == "docs/page.png":
                continue
            assert found.exists(), f"{name}:{number}: {target} is not there"
            if anchor and found.suffix == ".md":
                assert anchor in anchors(found), f"{name}:{number}: {found.name} has no heading for #{anchor}"


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OPTIONAL])
def test_lines_of_prose_are_short(name):
    for number, line in prose(ROOT / name):
        if not line.startswith("|") and not _LINK.search(line) and "](" not in line:
            assert len(line) <= _LONGEST, f"{name}:{number} has {len(line)} characters"


def test_images_are_small_and_used():
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    for path in (DOCS / "images").iterdir():
        assert path.stat().st_size <= 200_000, f"{path.name} is too large"
        assert f"images/{path.name}" in text, f"no document shows {path.name}"


def digest(path: Path) -> str:
    """The hash of the data that a chart shows."""
    with Image.open(path) as image:
        return image.info.get("Data", "")


def test_charts_are_drawn_from_the_tables_of_the_documents(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "FIGURES": str(tmp_path)}
    command = [sys.executable, str(DOCS / "figures"), "speed", "accuracy", "calibration", "pair_score"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names = {"speed.png", "accuracy.png", "calibration.png", "pair-score.png"}
    assert {path.name for path in tmp_path.iterdir()} == names
    for name in names:
        shown, drawn = digest(DOCS / "images" / name), digest(tmp_path / name)
        assert shown == drawn, f"docs/images/{name} shows other figures than its table; run scripts/figures"


def test_the_readme_is_short_and_has_the_caption_of_the_home_page():
    readme, home = (path.read_text(encoding="utf-8") for path in (ROOT / "README.md", DOCS / "index.md"))
    assert len(readme.encode()) <= 6500
    captions = [re.search(r"hero\.jpg\)\n\n(.+?)\n\n", text, re.DOTALL) for text in (readme, home)]
    assert captions[0] and captions[1] and captions[0][1] == captions[1][1]


def table(page: Path, first: str) -> list[list[str]]:
    """The rows of the first table whose header begins with `first`, without the header."""
    lines = page.read_text(encoding="utf-8").split(f"\n{first}", 1)[1].split("\n\n", 1)[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_readme_has_the_figures_of_the_benchmark_pages():
    readme = ROOT / "README.md"
    pages = [table(DOCS / "benchmarks.md", f"| matcher | top | {first} |") for first in ("1 px", "H 3 px")]
    names = ("dualrc", "dualrc-high", "sift-ratio", "sift-mutual")
    for name, (_, *shown) in zip(names, table(readme, "| matcher | accuracy"), strict=True):
        matching, homographies = (next(row for row in rows if row[:2] == [name, "1000"]) for rows in pages)
        assert shown == [*matching[2:5], matching[8], *homographies[2:5]], name
    stages = {stage: times for stage, *times in table(DOCS / "speed.md", "| stage | 320x240 |")}
    for name, *times in table(readme, "| | 320x240 |"):
        assert times == stages["whole pair" if name == "dualrc" else f"{name}, whole pair"], name
    text = " ".join(readme.read_text(encoding="utf-8").split())
    own, faster, _, worst = (times for _, *times in table(DOCS / "speed.md", "| variant of `paper` |"))
    small, large = (time.partition(" (")[0] for time in own)
    assert f"takes {small} at 800x592 and {large} at 1600x1200" in text
    assert all(f"{times[0].removesuffix(' ms')} and {times[1]}" in text for times in (faster, worst))


def test_the_model_card_tells_of_misuse():
    card = (ROOT / "src" / "dualrc" / "weights" / "README.md").read_text(encoding="utf-8")
    found = re.search(r"\*\*Broader impact and misuse\.\*\*(.+?)(\n\n|$)", card, re.DOTALL)
    assert found and len(found[1].split()) > 50


def test_the_guide_names_every_benchmark():
    from dualrc.evaluation import BENCHMARKS

    text = (DOCS / "guides" / "evaluate.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in text for name in BENCHMARKS)


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    """The whole site; any warning of the build is an error."""
    if any(importlib.util.find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings")):
        pytest.skip("the site needs the extra `docs`")
    out = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_the_site_has_every_page_command_and_public_name(site):
    for page in PAGES:
        if DOCS in page.parents:
            assert (site / page.relative_to(DOCS)).with_suffix(".html").exists()
    api = "".join(path.read_text(encoding="utf-8") for path in (site / "reference").glob("*.html"))
    modules = {"colmap", "draw", "geometry", "localize"}
    for name in set(dualrc.__all__) - modules - {"__version__"}:
        assert f'id="dualrc.{name}"' in api, f"the reference has no {name}"
    for kind in (value for name in dualrc.__all__ if isinstance(value := getattr(dualrc, name), type)):
        for field in getattr(kind, "__dataclass_fields__", getattr(kind, "_fields", ())):
            shown = f'id="dualrc.{kind.__name__}.{field}"' in api
            assert shown or field[0] == "_", f"the reference lacks {kind.__name__}.{field}; explain it in a comment"
    commands = (site / "reference" / "cli.html").read_text(encoding="utf-8")
    for name in get_command(cli.app).commands:
        assert f'id="dualrc-{name}' in commands, f"the reference has no command {name}"
    assert (site / "search" / "search_index.json").exists()


def test_the_site_loads_nothing_from_elsewhere(site):
    loaded = re.compile(r"<(?:script|img|iframe|source)[^>]+src=\"?(https?:)?//|<link[^>]+href=\"?(https?:)?//")
    for path in site.rglob("*.html"):
        assert not loaded.search(path.read_text(encoding="utf-8")), f"{path} loads something from elsewhere"
    for path in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//|@import", path.read_text(encoding="utf-8")), path
