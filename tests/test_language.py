"""The prose of the repository is plain technical English: spelling, terms, comments, and lines of Markdown."""

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

# Files and folders that are not converted yet. Only the spelling check covers them. Remove entries, never add any.
UNCONVERTED: list[str] = []
# Files and folders whose prose is checked.
CHECKED = ["src/dualrc", "docs", "scripts", "configs", "benchmarks", "setup.py", "pyproject.toml", "*.md"]
SUFFIXES = (".py", ".c", ".h", ".md", ".toml", "")

# Phrases to avoid, the better ones, and a sentence that must be found.
PHRASES = [
    (r"\bpictures?\b", "image", "Match two pictures."),
    (r"\bso many\b", "a name or a number", "At most so many of each pair."),
    (r"\b(?:eight|8) bits\b", "quantized to int8", "The backbone works in 8 bits."),
    (r"\brecord(?:s|ed)?\b.{0,12}\bCUDA graphs?\b", "captured in a CUDA graph", "Kernels are recorded as CUDA graphs."),
    (r"\bin light\b|\bby light\b|\bof the light\b", "brightness, grayscale", "Points are aligned by light."),
    (r"\bwitness(?:es)?\b", "evidence, neighbor, inlier", "Its neighbors are witnesses."),
    (r"\bvoices?\b", "vote, weight", "Every match has a voice."),
    (r"\bfor who\b", "if, when", "The sums, for who searches twice."),
    (r"\bwhat \w+(?: \w+)? tells?\b", "the information in, the result of", "What the neighbors tell."),
    (r"\bis told\b", "receives", "The callback is told each step."),
    (r"\bthem all\b", "all of them", "The canvas holds them all."),
    (r"\b(?:no|some|every)body\b|\bwhoever\b", "nothing, a user, all", "Nobody has measured it."),
    (r"\bsays (?:how|what|where|whether|which)\b", "gives, selects, explains", "The config says which."),
    (r"\bmend(?:s|ed)?\b", "correct, fix", "It is broken; mend it."),
    (r"\bmade[- ]up\b", "synthetic", "A made-up town."),
    (r"\bslower so\b|\bas it likes\b|\bin vain\b", "a plain statement", "It works, and is slower so."),
]
# Name of a table, which stays as it is for the sake of existing files.
NAMES = re.compile(r"(?:EXISTS|FROM|INTO) pictures|\"pictures\"")
# Comments that may stand behind code: those that tools read, and shapes.
BEHIND_CODE = re.compile(r"#\s*(?:(?:noqa|type:|fmt:|pragma|ruff)|\([^()]*\)(?: \w+)?$)")
MARKDOWN_WIDTH, SOURCE_WIDTH = 100, 120


def checked_files() -> list[Path]:
    """Files whose prose is checked, without those that are not converted yet."""
    found = []
    for pattern in CHECKED:
        for path in sorted(ROOT.glob(pattern)):
            inside = [path] if path.is_file() else sorted(path.rglob("*"))
            found += [file for file in inside if file.is_file() and file.suffix in SUFFIXES and file.name[0] != "."]
    waiting = [ROOT / name for name in UNCONVERTED]
    return [file for file in found if not any(file == path or path in file.parents for path in waiting)]


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line numbers and texts of comments, docstrings, messages, or of Markdown without code."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield from _python_prose(text)
    elif path.suffix in (".c", ".h"):
        for comment in re.finditer(r"/\*.*?\*/", text, re.DOTALL):
            yield text.count("\n", 0, comment.start()) + 1, comment[0]
    elif path.suffix == ".md":
        for number, line in _markdown_lines(text):
            yield number, re.sub(r"`[^`]*`|\]\([^)]*\)", " ", line)
    else:
        for number, line in enumerate(text.splitlines(), start=1):
            if "#" in line:
                yield number, line[line.index("#") :]


def _python_prose(text: str) -> Iterator[tuple[int, str]]:
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        # A string without a space is a name or a value.
        if token.type in kinds and " " in token.string.strip():
            # Code in back quotes and in the braces of an f-string is not prose.
            yield token.start[0], re.sub(r"`[^`]*`|\{[^{}]*\}", " ", token.string)


def _markdown_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield numbered lines outside code blocks."""
    in_code = False
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith(("```", "~~~")):
            in_code = not in_code
        elif not in_code and not line.startswith("    "):
            yield number, line


def run_codespell(*arguments: str) -> str:
    """Return the misspellings that codespell reports; pyproject.toml has its ignore list."""
    command = [sys.executable, "-m", "codespell_lib", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 65), done.stderr
    return done.stdout


def test_words_are_spelled_correctly():
    pytest.importorskip("codespell_lib")
    names = ["src", "docs", "scripts", "configs", "benchmarks", *(path.name for path in ROOT.glob("*.md"))]
    assert run_codespell(*names) == ""


def test_spelling_is_american():
    pytest.importorskip("codespell_lib")
    assert run_codespell("--builtin", "en-GB_to_en-US", *map(str, checked_files())) == ""


def test_codespell_finds_mistakes(tmp_path):
    pytest.importorskip("codespell_lib")
    (tmp_path / "a.md").write_text("A mispelled word in the centre.", encoding="utf-8")
    assert "mispelled ==> misspelled" in run_codespell(str(tmp_path))
    assert "centre ==> center" in run_codespell("--builtin", "en-GB_to_en-US", str(tmp_path))


@pytest.mark.parametrize(("pattern", "better", "example"), PHRASES, ids=[example for _, _, example in PHRASES])
def test_phrases_to_avoid_are_found(pattern, better, example):
    assert re.search(pattern, example, re.IGNORECASE) and not re.search(pattern, better, re.IGNORECASE)


def test_prose_avoids_home_made_terms():
    problems = []
    for path in checked_files():
        for number, text in prose(path):
            words = NAMES.sub(" ", " ".join(text.replace("#", " ").split()))
            for pattern, better, _ in PHRASES:
                if found := re.search(pattern, words, re.IGNORECASE):
                    problems.append(f"{path.relative_to(ROOT)}:{number}: {found[0]!r}; write {better}")
    assert not problems, "\n" + "\n".join(problems)


def test_comments_stand_on_their_own_lines():
    problems = []
    for path in checked_files():
        if path.suffix == ".py":
            for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
                is_comment = token.type == tokenize.COMMENT and not BEHIND_CODE.match(token.string)
                if is_comment and token.line[: token.start[1]].strip():
                    problems.append(f"{path.relative_to(ROOT)}:{token.start[0]}: {token.string}")
        elif path.suffix in (".c", ".h"):
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
                if "/*" in line and line.split("/*")[0].strip():
                    problems.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not problems, "\n" + "\n".join(problems)


def test_lines_are_short():
    problems = []
    for path in checked_files():
        text = path.read_text(encoding="utf-8")
        lines = _markdown_lines(text) if path.suffix == ".md" else enumerate(text.splitlines(), start=1)
        width = MARKDOWN_WIDTH if path.suffix == ".md" else SOURCE_WIDTH
        for number, line in lines:
            # Tables and links cannot be wrapped, and neither can lists of names in pyproject.toml.
            exempt = line.lstrip().startswith("|") or "](" in line or "://" in line or path.suffix == ".toml"
            if len(line) > width and not exempt:
                problems.append(f"{path.relative_to(ROOT)}:{number}: {len(line)} characters")
    assert not problems, "\n" + "\n".join(problems)


def test_no_file_has_conflict_markers_of_git():
    paths = [*checked_files(), *ROOT.glob("docs/**/*.md")]
    marked = re.compile(r"^(<{7}|>{7}) ", re.MULTILINE)
    assert [path for path in paths if marked.search(path.read_text(encoding="utf-8"))] == []


def test_the_list_of_unconverted_files_is_current():
    assert sorted(UNCONVERTED) == UNCONVERTED
    assert [name for name in UNCONVERTED if not (ROOT / name).exists()] == []


def test_prose_of_each_language_is_read(tmp_path):
    files = {
        "a.py": '"""A picture."""\nx = f"no {picture} here: many pictures"  # picture\ny = "picture"\n',
        "a.c": "int picture; /* a picture */\n",
        "a.md": "A picture `picture`\n```\npicture\n```\n[picture](picture.md)\n",
        "a": "echo picture # picture\n",
    }
    counts = {}
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        counts[name] = sum(len(re.findall(r"\bpictures?\b", words)) for _, words in prose(tmp_path / name))
    assert counts == {"a.py": 3, "a.c": 1, "a.md": 2, "a": 1}
