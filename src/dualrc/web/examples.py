"""Example pairs, rendered by `dualrc.scenes` without any download."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

from dualrc.formats import encoded
from dualrc.scenes import make_pair
from dualrc.types import ImageArray, Size
from dualrc.web.problems import Problem
from dualrc.web.uploads import ImageStore, Upload

SIZE = (800, 608)


@dataclass(frozen=True, kw_only=True)
class Example:
    """Example pair as listed on the page."""

    name: str
    title: str
    description: str
    # Rendered scene and side of both images.
    images: tuple[tuple[str, int], tuple[str, int]]
    # Whether both images show the same scene, so that the ground truth is known.
    truth: bool = True

    def describe(self) -> dict[str, Any]:
        """Return the JSON of an example; the small views are files of the page, made by `scripts/figures examples`."""
        thumbnails = [f"example-{scene}-{side}.jpg" for scene, side in self.images]
        return {"name": self.name, "title": self.title, "description": self.description, "thumbnails": thumbnails}


EXAMPLES = (
    Example(
        name="town",
        title="Town square",
        description="Two rendered views of a square, with different viewpoints and lighting.",
        images=(("town", 0), ("town", 1)),
    ),
    Example(
        name="wall",
        title="Wall with posters",
        description="A planar wall seen from two viewpoints. One homography fits all matches.",
        images=(("wall", 0), ("wall", 1)),
    ),
    Example(
        name="unrelated",
        title="Nothing in common",
        description="Two images of different places, which the verdict reports.",
        images=(("town", 0), ("wall", 0)),
        truth=False,
    ),
)


def find(name: str) -> Example:
    """Return the example with this name."""
    found = next((one for one in EXAMPLES if one.name == name), None)
    if found is None:
        names = ", ".join(one.name for one in EXAMPLES)
        raise Problem(404, "unknown_example", f"There is no such example; choose one of {names}.")
    return found


def render(name: str, size: Size = SIZE) -> list[ImageArray]:
    """Render the two images of the scene `town` or `wall`."""
    options = {"kind": "plane", "angle_deg": 40.0, "roll_deg": 15.0} if name == "wall" else {}
    pair = make_pair(1, size=size, **options)  # type: ignore[arg-type]
    return [rendering.image.cpu().numpy() for rendering in pair]


class Examples:
    """Examples, rendered at the first request and stored as images that do not expire."""

    def __init__(self, images: ImageStore, size: Size = SIZE) -> None:
        self._images, self._size = images, size
        self._lock = threading.Lock()
        self._scenes: dict[str, list[Upload]] = {}

    def get(self, name: str) -> list[Upload]:
        """Return the two images of an example; they are rendered if necessary."""
        with self._lock:
            return [self._rendered(scene)[side] for scene, side in find(name).images]

    def ready(self, name: str) -> list[Upload] | None:
        """Return the images of an example, or None if they are not rendered yet."""
        images = find(name).images
        if any(scene not in self._scenes for scene, _ in images):
            return None
        return [self._scenes[scene][side] for scene, side in images]

    def prepare(self, stop: Callable[[], bool]) -> None:
        """Render all examples; `stop` is checked before each of them."""
        for one in EXAMPLES:
            if not stop():
                self.get(one.name)

    def _rendered(self, scene: str) -> list[Upload]:
        if scene not in self._scenes:
            images = render(scene, self._size)
            self._scenes[scene] = [self._keep(pixels, f"{scene}-{side}.png") for side, pixels in enumerate(images)]
        return self._scenes[scene]

    def _keep(self, pixels: ImageArray, name: str) -> Upload:
        file = BytesIO(encoded(Image.fromarray(np.ascontiguousarray(pixels)), "PNG", compress_level=1))
        return self._images.add(file, name, "example", shared=True)
