"""Render courtyards with the same five houses on each side, in different orders, with known cameras.

    python benchmarks/courtyard.py DIR --seeds 1 2
    python benchmarks/verification.py DIR --work WORK

Copies of a house differ only in dirt and lighting, so a matcher finds hundreds of matches between images of different
sides. Only the neighbors of a house and the objects in front of it differ. A scene is a folder DIR/courtyard-SEED with
images/ and cameras.json, the layout that `benchmarks/verification.py` and `benchmarks/reconstruct.py` read. The cameras
are placed on a ring around the center and look outward.
"""

import argparse
from pathlib import Path

import numpy as np

from dualrc.machine import block_idle_threads

# This must run before torch is imported.
block_idle_threads()

from dualrc import draw, scenes  # noqa: E402
from dualrc.files import make_folder, write_json  # noqa: E402


def main() -> None:
    """Parse the arguments and render the scenes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the scenes")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2], help="one scene each")
    parser.add_argument("--count", type=int, default=16, help="images per scene")
    parser.add_argument("--size", type=int, nargs=2, default=(640, 480), help="width and height of the images")
    parser.add_argument("--fov", type=float, default=70.0, help="field of view of the longer side in degrees")
    args = parser.parse_args()
    for seed in args.seeds:
        write_scene(args.out / f"courtyard-{seed}", seed, args.count, (args.size[0], args.size[1]), args.fov)


def write_scene(
    folder: Path, seed: int, count: int, size: tuple[int, int], fov_deg: float, texture_size: int = 512
) -> None:
    """Render one courtyard from `count` viewpoints."""
    scene = scenes.make_scene(seed, kind="courtyard", texture_size=texture_size)
    make_folder(folder / "images")
    cameras = {}
    for number, view in enumerate(ring(seed, count, size, fov_deg)):
        name = f"{number:02}.png"
        rendering = scenes.render(scene, view, supersample=1)
        draw.save(rendering.image.numpy(), folder / "images" / name)
        cameras[name] = {
            "width": size[0],
            "height": size[1],
            "K": view.K.tolist(),
            "cam_from_world": view.cam_from_world.tolist(),
        }
        print(f"{folder.name}: {number + 1} of {count} images", flush=True)
    write_json(folder / "cameras.json", cameras)


def ring(seed: int, count: int, size: tuple[int, int], fov_deg: float) -> list[scenes.View]:
    """Return cameras at eye height on a ring around the center; each looks outward, turned by up to 20 degrees."""
    rng = np.random.default_rng([seed, 3])
    views = []
    for place in np.linspace(0, 2 * np.pi, count, endpoint=False):
        eye = np.array([np.cos(place), np.sin(place), 0]) * rng.uniform(2.5, 5.0) + (0, 0, rng.uniform(2.5, 4.5))
        toward = place + np.radians(rng.uniform(-20, 20))
        target = eye + np.array([np.cos(toward), np.sin(toward), -0.05])
        views.append(scenes.look_at(eye, target, size=size, fov_deg=fov_deg))
    return views


if __name__ == "__main__":
    main()
