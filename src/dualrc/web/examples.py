"""Example pairs, rendered by `dualrc.scenes` without any download."""

import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

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
    # Small views among the files of the page, made by `scripts/figures examples`.
    thumbnails: tuple[str, str]
    # Whether both images show the same scene, so that the ground truth is known.
    truth: bool = True


EXAMPLES = (
    Example(
        name="town",
        title="Town square",
        description="Two rendered views of a square, with different viewpoints and lighting.",
        thumbnails=("example-town-0.jpg", "example-town-1.jpg"),
    ),
    Example(
        name="wall",
        title="Wall with posters",
        description="A planar wall seen from two viewpoints. One homography fits all matches.",
        thumbnails=("example-wall-0.jpg", "example-wall-1.jpg"),
    ),
    Example(
        name="unrelated",
        title="Nothing in common",
        description="Two images of different places, which the verdict reports.",
        thumbnails=("example-town-0.jpg", "example-wall-0.jpg"),
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
    """Render the two images of `town` or `wall`."""
    options = {"kind": "plane", "angle_deg": 40.0, "roll_deg": 15.0} if name == "wall" else {}
    pair = make_pair(1, size=size, **options)  # type: ignore[arg-type]
    return [rendering.image.cpu().numpy() for rendering in pair]


class Examples:
    """Examples, rendered at the first request and stored as images that do not expire."""

    def __init__(self, images: ImageStore, size: Size = SIZE) -> None:
        self._images, self._size = images, size
        self._lock = threading.Lock()
        self._ready: dict[str, tuple[Upload, Upload]] = {}

    def list(self) -> list[dict[str, Any]]:
        """Return what the page shows of all examples."""
        return [{key: value for key, value in asdict(one).items() if key != "truth"} for one in EXAMPLES]

    def get(self, name: str) -> tuple[Example, tuple[Upload, Upload]]:
        """Return an example and its two images; they are rendered if necessary."""
        found = find(name)
        with self._lock:
            if name == "unrelated":
                return found, (self._pair("town")[0], self._pair("wall")[0])
            return found, self._pair(name)

    def ready(self, name: str) -> tuple[Upload, Upload] | None:
        """Return the images of an example, or None if they are not rendered yet."""
        find(name)
        if name != "unrelated":
            return self._ready.get(name)
        town, wall = self._ready.get("town"), self._ready.get("wall")
        return (town[0], wall[0]) if town and wall else None

    def prepare(self, stop: Callable[[], bool]) -> None:
        """Render all examples; `stop` is checked before each of them."""
        for one in EXAMPLES:
            if not stop():
                self.get(one.name)

    def _pair(self, name: str) -> tuple[Upload, Upload]:
        if name not in self._ready:
            images = render(name, self._size)
            first, second = (self._keep(pixels, f"{name}-{number}.png") for number, pixels in enumerate(images))
            self._ready[name] = first, second
        return self._ready[name]

    def _keep(self, pixels: ImageArray, name: str) -> Upload:
        file = BytesIO()
        Image.fromarray(np.ascontiguousarray(pixels)).save(file, "PNG", compress_level=1)
        file.seek(0)
        return self._images.add(file, name, "example", shared=True)
