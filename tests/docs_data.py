"""The documents as tests see them: code blocks, links, and a folder with the files that examples use."""

import re
import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from conftest import ROOT
from evaluation_data import write_hpatches
from PIL import Image

from dualrc import scenes

DOCS = ROOT / "docs"
SIZE = (256, 192)
_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)")
_MARK = re.compile(r"<!-- (skip|file|run): (.+?) -->")


@dataclass(frozen=True)
class Block:
    """A fenced block of code."""

    page: Path
    line: int
    language: str
    text: str
    skip: str | None  # why it is not run
    file: str | None  # the file that it stands for
    run: str | None = None  # the modules it needs, on a page whose blocks are otherwise only checked

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def commands(self) -> list[list[str]]:
        """The commands of a shell block, split as a shell does, without comments."""
        joined = re.sub(r"\\\n\s*", "", self.text)
        return [words for line in joined.splitlines() if (words := shlex.split(line, comments=True))]


def pages() -> list[Path]:
    """All documents."""
    top = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md")
    return [*(ROOT / name for name in top), *sorted(DOCS.rglob("*.md"))]


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page; those inside of tabs are indented."""
    found, body, mark, opened, start = [], [], {}, None, 0
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fence = _FENCE.match(line)
        if opened is not None:
            if fence and not fence["language"] and fence["indent"] == opened["indent"]:
                text = textwrap.dedent("\n".join(body))
                found.append(
                    Block(page, start, opened["language"], text, mark.get("skip"), mark.get("file"), mark.get("run"))
                )
                opened, body, mark = None, [], {}
            else:
                body.append(line)
        elif fence:
            opened, start = fence, number
        elif said := _MARK.search(line):
            mark[said[1]] = said[2]
        elif line.strip():
            mark = {}
    assert opened is None, f"{page}: a block of code has no end"
    return found


def prose(page: Path) -> list[tuple[int, str]]:
    """The lines of a page outside of code, with their numbers."""
    lines, inside = [], False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if _FENCE.match(line):
            inside = not inside
        elif not inside:
            lines.append((number, line))
    return lines


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and Python-Markdown make them."""
    found = set()
    for _, line in prose(page):
        if heading := re.match(r"#+ (.+)", line):
            plain = re.sub(r"[`*_]|\[([^]]*)\]\([^)]*\)", r"\1", heading[1])
            found.add(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower()))
    return found


def write_samples(root: Path) -> None:
    """The files that examples name: images, an RGB-D folder, sequences of a benchmark."""
    scene = scenes.make_scene(3, texture_size=256)
    torch.set_num_threads(1)

    def take(eye, target) -> scenes.Rendering:
        return scenes.render(scene, scenes.look_at(eye, target, size=SIZE, fov_deg=60), supersample=1)

    steps = np.linspace(-2.0, 2.0, 5)
    walk = [take((x, -9.0 + 0.2 * abs(x), 2.0 + 0.1 * x), (0.4 * x, 6.0, 2.0)) for x in steps]
    for number, rendering in enumerate(walk):
        _save(rendering, root / "photos" / f"{number}.jpg")
        if number in (1, 2, 3):
            _save(rendering, root / "images" / f"{number}.jpg")
            _save(rendering, root / "project" / "images" / f"{number}.jpg")
    for name, rendering in zip("abc", walk, strict=False):
        _save(rendering, root / f"{name}.jpg")
    query = take((0.4, -8.8, 2.1), (0.2, 6.0, 2.0))
    _save(query, root / "new-photos" / "1.jpg")
    _save(query, root / "queries" / "1.jpg")
    for name, x in (("left", -3.0), ("middle", 0.0), ("right", 3.0)):
        _save(take((0, -9.0, 2.0), (x, 6.0, 2.0)), root / f"{name}.jpg")
    (root / "broken.jpg").write_bytes(b"not an image")
    _write_rgbd(root / "rooms", walk[1:])
    write_hpatches(root / "sequences", names=("v_wall",))
    for folder in ("configs", "benchmarks"):
        (root / folder).symlink_to(ROOT / folder)


def _save(rendering: scenes.Rendering, path: Path) -> None:
    """A JPEG whose EXIF data have the focal length, as a phone writes them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    exif = Image.Exif()
    focal_35mm = 36 * rendering.view.K[0, 0] / max(SIZE)
    exif.get_ifd(0x8769)[0xA405] = round(focal_35mm)
    Image.fromarray(rendering.image.numpy()).save(path, quality=95, exif=exif)


def _write_rgbd(root: Path, renderings) -> None:
    (root / "images").mkdir(parents=True)
    (root / "depth").mkdir()
    lines = []
    for number, rendering in enumerate(renderings):
        Image.fromarray(rendering.image.numpy()).save(root / "images" / f"{number:04}.jpg", quality=95)
        depth = np.nan_to_num(rendering.depth.numpy(), posinf=0.0) * 1000
        Image.fromarray(np.where(depth < 65535, depth, 0).astype(np.uint16)).save(root / "depth" / f"{number:04}.png")
        pose = np.linalg.inv(np.vstack([rendering.view.cam_from_world, [0, 0, 0, 1]]))
        lines.append(" ".join([f"{number:04}.jpg", *(f"{value:.9g}" for value in pose.ravel())]))
    np.savetxt(root / "K.txt", renderings[0].view.K)
    (root / "world_from_cam.txt").write_text("\n".join(lines) + "\n")


def documented_keys(command: str) -> set[str]:
    """Return the keys of a command's --json output that docs/running.md lists."""
    table = (DOCS / "running.md").read_text().split("### Keys of `--json`")[1]
    (row,) = re.findall(rf"^\| `{command}` \| (.*) \|$", table, re.MULTILINE)
    return set(re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", row)))
