"""Convert RGB-D frames to InLoc's layout for `dualrc evaluate inloc`.

    python benchmarks/hololens.py DATA/rgbd/hololens /tmp/hololens
    dualrc evaluate inloc /tmp/hololens --candidates 5 --out /tmp/hololens-scores

Every fifth frame is a query. The other frames, with their depth, are the database: each is a scan with one cutout. The
candidates of a query are the most similar frames by the network's global descriptors.
"""

import argparse
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.progress import track
from scipy.io import savemat

import dualrc
from dualrc.collection.retrieval import global_descriptor, most_similar
from dualrc.geometry import RgbdFrame, read_depth_m, read_rgbd
from dualrc.image import read

FLOOR = "HL1"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rgbd", type=Path, help="folder of RGB-D frames")
    parser.add_argument("root", type=Path, help="folder for the dataset")
    parser.add_argument("--every", type=int, default=5, help="interval of query frames; default %(default)s")
    parser.add_argument("--candidates", type=int, default=10)
    args = parser.parse_args()
    frames = read_rgbd(args.rgbd)
    queries = frames[args.every // 2 :: args.every]
    database = [frame for frame in frames if frame not in queries]
    for frame in track(database, "Cut-outs"):
        write_cutout(args.root / "database", frame)
    write_queries(args.root, queries)
    write_candidates(args.root / "shortlist.txt", queries, database, args.candidates)
    print(f"{len(queries)} queries, {len(database)} cutouts: {args.root}")


def cutout_name(frame: RgbdFrame) -> str:
    scan = Path(frame.name).stem
    return f"{FLOOR}/{scan}/HL_cutout_{scan}_0_0.png"


def write_cutout(database: Path, frame: RgbdFrame) -> None:
    """Write a frame as a scan with one cutout; the camera's frame is the scanner's."""
    path, scan, camera = database / "cutouts" / cutout_name(frame), Path(frame.name).stem, frame.camera
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(frame.image, path)
    depth = read_depth_m(frame.depth)
    own = camera.resized((depth.shape[1], depth.shape[0]))
    x, y = np.meshgrid(np.arange(own.width), np.arange(own.height))
    xyz = own.rays(np.stack([x, y], axis=-1).reshape(-1, 2)) * depth.reshape(-1, 1)
    xyz = np.where(depth.reshape(-1, 1) > 0, xyz, np.nan).astype(np.float32).reshape(*depth.shape, 3)
    savemat(path.with_name(path.name + ".mat"), {"XYZcut": xyz, "RGBcut": read(frame.image)}, do_compression=True)
    alignment = database / "alignments" / FLOOR / "transformations" / f"HL_trans_{scan}.txt"
    alignment.parent.mkdir(parents=True, exist_ok=True)
    assert camera.cam_from_world is not None
    world_from_cam = np.linalg.inv(np.vstack([camera.cam_from_world, [0, 0, 0, 1]]))
    rows = "\n".join(" ".join(f"{value:.12g}" for value in row) for row in world_from_cam)
    alignment.write_text(f"before\n{rows}\n\nafter\n{rows}\n", encoding="utf-8")


def write_queries(root: Path, queries: list[RgbdFrame]) -> None:
    """Write the photos with their cameras, and their true poses."""
    folder = root / "query" / "iphone7"
    folder.mkdir(parents=True, exist_ok=True)
    cameras, entries = {}, np.empty((1, len(queries)), dtype=[("queryname", object), ("P", object)])
    for index, frame in enumerate(queries):
        shutil.copyfile(frame.image, folder / frame.name)
        camera = replace(frame.camera, cam_from_world=None)
        cameras[frame.name] = {"width": camera.width, "height": camera.height, "K": camera.K.tolist()}
        entries[0, index] = (frame.name, frame.camera.cam_from_world)
    (folder / "cameras.json").write_text(json.dumps(cameras), encoding="utf-8")
    savemat(root / "refposes.mat", {f"{FLOOR}_RefList": entries})


def write_candidates(path: Path, queries: list[RgbdFrame], database: list[RgbdFrame], count: int) -> None:
    """Write the most similar frames of each query."""
    matcher = dualrc.load()

    def describe(frames: list[RgbdFrame]) -> np.ndarray:
        return np.stack([global_descriptor(matcher.features(frame.image)) for frame in track(frames, "Descriptors")])

    found = most_similar(describe(queries), describe(database), count)
    lines = [
        f"{query.name} {cutout_name(database[index])}\n"
        for query, row in zip(queries, found, strict=True)
        for index in row
    ]
    path.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
