"""The notebooks run from top to bottom and show what they say."""

import os
from pathlib import Path

import pytest
from conftest import ROOT

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def outputs(cell) -> dict[str, object]:
    """What a cell shows, by type, and what it prints."""
    found: dict[str, object] = {}
    for output in cell.get("outputs", []):
        found |= output.get("data", {})
        if output["output_type"] == "stream":
            found[output["name"]] = output["text"]
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "clear the outputs before committing"
    # The kernel is another process; it gets the same package and few threads.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    if (keep := os.environ.get("DUALRC_NOTEBOOKS")) is not None:  # a folder to look at them in
        nbformat.write(notebook, Path(keep) / path.name)
    shown = [outputs(cell) for cell in notebook.cells if cell.cell_type == "code"]
    # tqdm, which lightning imports, asks for widgets.
    complaints = [str(output["stderr"]) for output in shown if "stderr" in output]
    assert all("tqdm" in complaint for complaint in complaints), complaints
    images = sum("image/png" in output for output in shown)
    text = "\n".join(str(output.get(key, "")) for output in shown for key in ("text/plain", "stdout"))
    if path.stem == "match":
        assert images >= 3 and any("<svg" in str(output.get("text/html", "")) for output in shown)
        assert "of the matches are within 3 px" in text and "Estimate(fundamental" in text
    elif path.stem == "reconstruct":
        assert images >= 2 and "5 of 5 images" in text and text.count("degrees") == 4
    else:
        assert images >= 2 and "weights.safetensors" in text and "Matches(" in text


def test_there_are_three():
    assert [path.stem for path in NOTEBOOKS] == ["match", "reconstruct", "train"]
