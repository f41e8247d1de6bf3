"""The packaging files agree with the package."""

import json
import re
import runpy
import shutil
import subprocess
import tomllib

import pytest
from conftest import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_versions_and_dependencies_agree():
    recipe = (ROOT / "recipe" / "meta.yaml").read_text(encoding="utf-8")
    assert f'version = "{PROJECT["version"]}"' in recipe
    assert f"version: {PROJECT['version']}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    names = {"torch": "pytorch", "matplotlib": "matplotlib-base"}  # conda's
    for requirement in PROJECT["dependencies"]:
        name, least = requirement.partition(";")[0].split(">=")
        assert f"- {names.get(name, name.lower())} >={least}\n" in recipe, requirement


def test_the_citation_names_the_paper():
    yaml = pytest.importorskip("yaml")
    content = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert content["cff-version"] == "1.2.0" and content["license"] == PROJECT["license"]
    paper = content["preferred-citation"]
    assert paper["title"] == "Dual-Resolution Correspondence Networks" and paper["year"] == 2020
    assert [author["family-names"] for author in paper["authors"]] == ["Li", "Han", "Li", "Prisacariu"]


@pytest.mark.skipif(shutil.which("cffconvert") is None, reason="cffconvert is not installed")
def test_the_citation_is_valid():
    subprocess.run(["cffconvert", "--validate", "--infile", str(ROOT / "CITATION.cff")], check=True)


@pytest.mark.parametrize("platform", ["linux", "osx", "win"])
def test_the_recipe_is_what_conda_reads(platform):
    """conda drops lines whose selector is false, renders the template, and reads YAML."""
    jinja2, yaml = pytest.importorskip("jinja2"), pytest.importorskip("yaml")
    given = {"linux": platform == "linux", "osx": platform == "osx", "win": platform == "win", "py": 311}
    lines = (ROOT / "recipe" / "meta.yaml").read_text(encoding="utf-8").splitlines()
    selectors = [re.search(r"  # \[(.+)\]$", line) for line in lines]
    kept = [line for line, chosen in zip(lines, selectors, strict=True) if chosen is None or eval(chosen[1], given)]
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
    functions = {"compiler": lambda name: f"{name}-compiler", "PYTHON": "python"}
    content = yaml.safe_load(environment.from_string("\n".join(kept)).render(functions))
    assert content["package"] == {"name": PROJECT["name"], "version": PROJECT["version"]}
    assert content["build"].get("skip", False) is (platform == "win")
    assert content["build"]["entry_points"] == [f"dualrc = {PROJECT['scripts']['dualrc']}"]
    assert content["build"]["script"].startswith("python -m pip install . ")
    needed = content["requirements"]
    assert needed["build"] == ["c-compiler", *(["libgomp"] if platform == "linux" else [])]
    assert f"python {PROJECT['requires-python']}" in needed["run"] and "setuptools >=77" in needed["host"]
    assert len(needed["run"]) == 1 + len(PROJECT["dependencies"])
    assert (ROOT / "recipe" / content["source"]["path"]).resolve() == ROOT.resolve()
    assert content["about"]["license"] == PROJECT["license"]
    assert content["about"]["license_file"] == PROJECT["license-files"]


@pytest.mark.skipif(shutil.which("cibuildwheel") is None, reason="cibuildwheel is not installed")
@pytest.mark.parametrize(
    ("platform", "ends"),
    [("linux", {"manylinux_x86_64", "manylinux_aarch64"}), ("macos", {"macosx_arm64"}), ("windows", set())],
)
def test_cibuildwheel_builds_the_wheels_that_are_promised(platform, ends):
    command = ["cibuildwheel", "--platform", platform, "--print-build-identifiers", str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert set(done.stdout.split()) == {f"{python}-{end}" for python in ("cp311", "cp312", "cp313") for end in ends}


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed")
@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_dockerfiles_pass_the_linter(name):
    done = subprocess.run(["hadolint", str(ROOT / name)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["ci", "wheels"])
def test_workflows_are_yaml_and_use_no_secrets(name):
    yaml = pytest.importorskip("yaml")
    text = (ROOT / ".github" / "workflows" / f"{name}.yml").read_text(encoding="utf-8")
    content = yaml.safe_load(text)
    assert content["jobs"] and content["permissions"] == {"contents": "read"} and "secrets." not in text
    steps = [step for job in content["jobs"].values() for step in job["steps"]]
    scripts = {match for step in steps for match in re.findall(r"scripts/[\w-]+", step.get("run", ""))}
    assert scripts and all((ROOT / script).is_file() for script in scripts)


def test_the_docker_steps_are_read_from_the_dockerfile():
    read = runpy.run_path(str(ROOT / "scripts" / "docker-steps"))["instructions"]
    found = read((ROOT / "Dockerfile").read_text(encoding="utf-8"))
    kinds = [kind for kind, _ in found]
    assert kinds.count("FROM") == 2 and kinds[-1] == "CMD"
    runs = [argument for kind, argument in found if kind == "RUN"]
    assert any("DUALRC_STRICT=1 pip wheel" in run for run in runs) and not any("\\" in run for run in runs)
    assert json.loads(dict(found)["ENTRYPOINT"]) == ["dualrc"]
    copied = [name for kind, argument in found if kind == "COPY" for name in argument.split()[:-1]]
    assert all((ROOT / name).exists() for name in copied if not name.startswith(("--", "/")))
    assert set(PROJECT["license-files"]) <= set(copied)
    extras = re.search(r"\[([\w,]+)\]", " ".join(runs))
    assert extras and set(extras[1].split(",")) <= PROJECT["optional-dependencies"].keys()


def test_the_pure_wheel_has_no_extensions(monkeypatch):
    import setuptools

    made = {}
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(setuptools, "setup", lambda **options: made.update(options))
    monkeypatch.setenv("DUALRC_PURE", "1")
    runpy.run_path("setup.py")
    assert made["ext_modules"] == []
    monkeypatch.delenv("DUALRC_PURE")
    monkeypatch.setenv("DUALRC_STRICT", "1")
    runpy.run_path("setup.py")
    assert made["ext_modules"] and not any(extension.optional for extension in made["ext_modules"])
