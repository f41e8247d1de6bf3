"""The packaging files agree with the package."""

import json
import re
import runpy
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
        name, least = requirement.split(">=")
        assert f"- {names.get(name, name.lower())} >={least}\n" in recipe, requirement


def test_the_citation_names_the_paper():
    yaml = pytest.importorskip("yaml")
    content = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert content["cff-version"] == "1.2.0" and content["license"] == PROJECT["license"]
    paper = content["preferred-citation"]
    assert paper["title"] == "Dual-Resolution Correspondence Networks" and paper["year"] == 2020
    assert [author["family-names"] for author in paper["authors"]] == ["Li", "Han", "Li", "Prisacariu"]


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
