"""Tests of hard pairs: planes by homography, other pairs by manual points and an estimated fundamental matrix."""

import numpy as np
import pytest
from conftest import texture
from PIL import Image

from dualrc.errors import DataError
from dualrc.evaluation import evaluate

H = np.array([[0.9, 0.1, 4.0], [-0.05, 0.8, 9.0], [1e-4, 2e-4, 1.0]])
# A stereo pair: points keep their row and move by different disparities.
MATCHERS = """
from pathlib import Path

import numpy as np

H = np.array([[0.9, 0.1, 4.0], [-0.05, 0.8, 9.0], [1e-4, 2e-4, 1.0]])


def oracle(path0, path1):
    rng = np.random.default_rng(0)
    points = rng.uniform(10, 110, (200, 2))
    if (Path(path0).parent / "H_1_2").exists():
        there = np.c_[points, np.ones(len(points))] @ H.T
        there = there[:, :2] / there[:, 2:]
        there[::4] += 50  # a quarter is wrong
    else:
        there = points + np.c_[rng.uniform(2, 9, len(points)), np.zeros(len(points))]
    return points, there, np.linspace(1, 0.5, len(points))


def nothing(path0, path1):
    return [], [], []
"""


def write_pair(folder, name, content):
    folder.mkdir(parents=True)
    for number in (1, 2):
        Image.fromarray(texture(number, 128, 128)).save(folder / f"{number}.png")
    np.savetxt(folder / name, content)


@pytest.fixture
def data(tmp_path):
    rng = np.random.default_rng(1)
    points = rng.uniform(10, 110, (20, 2))
    there = points + np.c_[rng.uniform(2, 9, 20), np.repeat([0.0, 10.0, 30.0], [12, 5, 3])]
    write_pair(tmp_path / "hard" / "evd" / "wall", "H_1_2", H)
    write_pair(tmp_path / "hard" / "wxbs" / "street", "points.txt", np.c_[points, there])
    (tmp_path / "matchers.py").write_text(MATCHERS)
    return tmp_path


def run(data, *names):
    out, matchers = data / "out", [f"{data / 'matchers.py'}:{name}" for name in names]
    return evaluate("hard", roots=(data / "hard",), out=out, matchers=tuple(matchers))


def test_known_answers(data):
    results = run(data, "oracle", "nothing")["results"]
    right, none = (result.figures for result in results)
    assert right.evd == (pytest.approx(0.75),)
    # Of 20 points, 12 lie on their epipolar lines, 5 are 10 px away and 3 are 30 px away.
    assert right.wxbs == (pytest.approx(0.6), pytest.approx(0.85))
    assert none.evd == (0,)
    assert none.wxbs == (0, 0)


def test_what_can_not_be_used_is_noted(data):
    write_pair(data / "hard" / "wxbs" / "broken", "points.txt", np.zeros((3, 3)))
    assert "broken is left out" in " ".join(run(data, "nothing")["notes"])


def test_a_folder_without_pairs(tmp_path):
    with pytest.raises(DataError, match="or points"):
        evaluate("hard", roots=(tmp_path,), out=tmp_path / "out")
