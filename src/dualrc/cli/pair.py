"""Commands for two images."""

import logging
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dualrc import draw
from dualrc.cli import common, running
from dualrc.errors import ConfigError, OutputError
from dualrc.files import check_writable
from dualrc.image import read
from dualrc.matcher import Matcher
from dualrc.matches import Matches, files

if TYPE_CHECKING:
    from dualrc.geometry import Camera

# Inlier threshold as a fraction of the long side. It is wide, because a warped image may be off by some pixels.
_WARP_THRESHOLD = 0.003

_TOP = common.matches_option(help="Maximum number of matches; those with the highest scores are kept. Default: all.")
_geometry_option = partial(typer.Option, rich_help_panel="Geometric model")

logger = logging.getLogger(__name__)


@running.command()
def match(
    image0: Annotated[Path, typer.Argument(metavar="A", help="First image.")],
    image1: Annotated[Path, typer.Argument(metavar="B", help="Second image.")],
    *,
    out: Annotated[
        Path | None,
        common.out_option(
            help="File to write the matches to: .npz, .json, or .csv with the columns x0, y0, x1, y1, score (all other "
            "results go to FILE.csv.json).",
        ),
    ] = None,
    drawing: Annotated[Path | None, typer.Option("--draw", help="File to draw the matches to: .png or .jpg.")] = None,
    network: Annotated[common.LoadOptions, {"top": _TOP, **common.SHARED}],
    estimate: Annotated[
        Literal["homography", "fundamental", "essential"] | None,
        _geometry_option(
            metavar="MODEL",
            help="Model to fit with RANSAC: homography, fundamental or essential. The matrix and the inliers are saved "
            "with the matches.",
        ),
    ] = None,
    threshold: Annotated[float, _geometry_option(help="Inlier threshold of --estimate, in pixels.")] = 2.0,
    cameras: Annotated[
        Path | None,
        _geometry_option(
            help="Camera file for --estimate essential: cameras.json or COLMAP's cameras.txt, with lens distortion. "
            "Default: focal lengths from EXIF, or a guess."
        ),
    ] = None,
) -> dict[str, Any]:
    """Match two images.

    Prints a summary; --out saves the matches, --draw draws them, and --estimate fits a geometric model to them.

    Examples:
      dualrc match a.jpg b.jpg -o matches.npz --draw matches.png
      dualrc match a.jpg b.jpg --estimate homography --top 2000
    """
    _check_outputs(out, drawing, inputs=(image0, image1))
    # Check all options before the slow steps.
    if cameras is not None and estimate != "essential":
        raise ConfigError("--cameras needs --estimate essential; add that option, or omit --cameras.")
    if not 0 < threshold < float("inf"):
        raise ConfigError(f"--threshold is {threshold}; pass a positive number of pixels.")
    views = _cameras((image0, image1), cameras) if estimate == "essential" else (None, None)
    with common.status("Loading the network..."):
        matcher = network.load()
    with common.status("Matching..."):
        start = time.perf_counter()
        matches = matcher.match(image0, image1)
        seconds = time.perf_counter() - start
    if estimate is not None:
        from dualrc import geometry

        camera0, camera1 = views
        model = geometry.estimate(matches, estimate, camera0=camera0, camera1=camera1, threshold_px=threshold)
        if estimate == "essential" and cameras is None:
            told = [f"{path}: {why}." for path in (image0, image1) if (why := geometry.lacks_sensor_size(path))]
            model = replace(model, warnings=(*model.warnings, *told))
        matches = replace(matches, estimate=model)
    if out is not None:
        matches.save(out)
    if drawing is not None:
        colors: Literal["score", "inliers"] = "score" if matches.estimate is None else "inliers"
        draw.save(draw.draw_matches(read(image0), read(image1), matches, colors=colors), drawing)
    _print_matches(matcher, matches, seconds)
    _warn(matches)
    files = [path for path in (out, drawing) if path is not None]
    for path in files:
        common.written(path)
    return _result(matcher, matches, seconds, files)


@running.command()
def warp(
    image0: Annotated[Path, typer.Argument(metavar="A", help="Image to warp.")],
    image1: Annotated[Path, typer.Argument(metavar="B", help="Image that defines the frame of the result.")],
    *,
    out: Annotated[
        Path,
        common.out_option(help="File to write: .png, transparent where A has no pixels, or .jpg."),
    ],
    by: Annotated[
        Literal["homography", "dense"],
        typer.Option(
            help="Motion model. homography: one transformation for the whole image, for planar scenes and rotating "
            "cameras. dense: one displacement per pixel."
        ),
    ] = "homography",
    network: Annotated[common.LoadOptions, common.shared("size", "preset", "weights", "device")],
) -> dict[str, Any]:
    """Warp one image into the frame of another.

    The result has the size of B and shows A there, so that both can be compared pixel by pixel.

    Examples:
      dualrc warp a.jpg b.jpg -o a-in-b.png
      dualrc warp a.jpg b.jpg -o a-in-b.png --by dense
    """
    _check_outputs(None, out, inputs=(image0, image1))
    from dualrc import geometry, stitch

    with common.status("Loading the network..."):
        matcher = network.load()
    with common.status("Matching and warping..."):
        if by == "dense":
            drawn = stitch.warp_image(image0, matcher.warp(image1, image0))
        else:
            matches = matcher.match(image0, image1)
            model = geometry.estimate(matches, "homography", threshold_px=_WARP_THRESHOLD * max(matches.size1))
            _warn(matches)
            drawn = stitch.warp_image(image0, model, matches.size1)
    drawn.save(out)
    common.written(out)
    return {"files": [out], "size": drawn.shape[1::-1], "device": str(matcher.device)}


@running.command()
def panorama(
    images: Annotated[
        list[Path],
        typer.Argument(metavar="A B...", help="Images. Pass more than eight images in the order they were taken."),
    ],
    *,
    out: Annotated[
        Path,
        common.out_option(help="File to write: .png, transparent outside of the images, or .jpg."),
    ],
    reference: Annotated[
        int | None,
        typer.Option(help="Index, from 0, of the image whose frame the panorama uses. Default: the middle one."),
    ] = None,
    network: Annotated[common.LoadOptions, common.shared("size", "device")],
) -> dict[str, Any]:
    """Stitch images into a panorama.

    The images must show a plane, or must be taken from one place by a rotating camera.

    Examples:
      dualrc panorama left.jpg middle.jpg right.jpg -o panorama.jpg
      dualrc panorama left.jpg middle.jpg right.jpg -o panorama.png --reference 0
    """
    _check_outputs(None, out, inputs=tuple(images))
    from dualrc import stitch

    with common.status("Loading the network..."):
        matcher = network.load()
    with common.status("Matching and stitching..."):
        drawn = stitch.panorama(images, matcher=matcher, reference=reference)
    drawn.save(out)
    size_text = f"{drawn.shape[1]}x{drawn.shape[0]}"
    common.screen.print(f"Stitched {len(images)} images to {size_text} pixels.", highlight=False)
    common.written(out)
    return {"files": [out], "size": drawn.shape[1::-1], "device": str(matcher.device)}


@running.command()
def demo(
    out: Annotated[Path, common.out_option(help="Folder for the figures and the summary.")] = Path("demo"),
    device: common.DeviceOption = None,
) -> dict[str, Any]:
    """Match two photographs, and two rendered images, and measure how accurate the matches are.

    The matches of the photographs are compared with the epipolar lines of a pose that was estimated with another
    method. Those of the rendered images are compared with the exact ground truth.

    Writes the images, drawings of the matches and summary.json to --out.

    Examples:
      dualrc demo
      dualrc demo --out demo --device cpu
    """
    from dualrc.demo import run

    start = time.perf_counter()

    def tell(step: str) -> None:
        # Log files get one line per step too.
        logger.info("%5.1f s  %s...", time.perf_counter() - start, step)

    summary = run(out, device=device, tell=tell)
    photos = summary["photographs"]
    table = common.table(f"Demo on {summary['device']}")
    table.add_row("", "photographs", "rendered town")
    table.add_row("matches", *(f"{pair['matches']:,}" for pair in (photos, summary)))
    table.add_row("distance to", "epipolar line", "true point")
    for threshold, correct in summary["correct_within_px"].items():
        near = photos["near_epipolar_line_within_px"][threshold]
        table.add_row(f"within {threshold} px", f"{near:.1%}", f"{correct:.1%}")
    table.add_row("time", *(f"{pair['seconds']:.2f} s" for pair in (photos, summary)))
    common.screen.print(table)
    drawings = f"{out / 'photo-matches.png'} and {out / 'matches.png'}"
    common.screen.print(f"Open {drawings} to see the matches; {out / 'summary.json'} has the numbers.")
    return {**summary, "out": out}


def _check_outputs(out: Path | None, drawing: Path | None, inputs: tuple[Path, ...]) -> None:
    """Raise an error, before any work, for an output that cannot be written or would replace an input."""
    for path, endings in ((out, files.SUFFIXES), (drawing, draw.SUFFIXES)):
        if path is None:
            continue
        if path.suffix.lower() not in endings:
            raise OutputError(f"{path} has an unknown file type; choose one of {', '.join(endings)}.")
        check_writable(path)
        if any(path.resolve() == image.resolve() for image in inputs):
            raise OutputError(f"{path} is one of the input images; write to another file.")


def _cameras(images: tuple[Path, Path], file: Path | None) -> "tuple[Camera | None, Camera | None]":
    """Return the cameras of both images from a file, else from EXIF, else None."""
    from dualrc import colmap, geometry

    if file is None:
        return geometry.camera_from_exif(images[0]), geometry.camera_from_exif(images[1])
    found = colmap.read_cameras(file, [str(path) for path in images])
    return found[str(images[0])], found[str(images[1])]


def _print_matches(matcher: Matcher, matches: Matches, seconds: float) -> None:
    table = common.table(f"{len(matches):,} matches in {seconds:.2f} s on {matcher.device}")
    for number, size in enumerate((matches.size0, matches.size1)):
        seen = matches.info[f"network_size{number}"]
        table.add_row(f"image {number}", f"{size[0]}x{size[1]}, network input {seen[0]}x{seen[1]}")
    if "zoom" in matches.info and "warning" not in matches.info:
        zoom = matches.info["zoom"]
        larger = f"{max(zoom, 1 / zoom):.2g} times larger in image {int(zoom > 1)}"
        table.add_row("scale", f"the scene is {larger}; matched at that scale")
    if "tilted" in matches.info:
        table.add_row("tilt", "the viewing angles differ much; matched through tilted views")
    if len(matches):
        table.add_row("scores", f"{matches.scores.max():.3g} to {matches.scores.min():.3g}")
        table.add_row("pair score", _pair_verdict(matches))
    if matches.estimate is not None:
        model = matches.estimate
        inliers = int(model.inliers.sum())
        if model.matrix is None:
            table.add_row(model.kind, f"none found: {model.info.get('reason', '')}")
        else:
            table.add_row(model.kind, _rows(model.matrix))
        if model.pose is not None:
            table.add_row("rotation, direction", _rows(model.pose.cam1_from_cam0))
        share = inliers / max(1, len(matches))
        table.add_row("inliers", f"{inliers:,} of {len(matches):,} ({share:.0%})")
        if model.matrix is not None and (inliers < 30 or share < 0.1):
            table.add_row("warning", "the inlier ratio is low: the images may not show the same scene")
        if "cameras" in model.info:
            table.add_row("cameras", str(model.info["cameras"]))
        for warning in model.warnings:
            table.add_row("warning", warning)
    common.screen.print(table)


def _pair_verdict(matches: Matches) -> str:
    """Return the pair score with its interpretation."""
    score = matches.pair_score
    if matches.info.get("pair_model") is None:
        return f"{score:.3g} (use it only to rank pairs: these weights have no calibration)"
    # Scores close to 1 need more digits to differ.
    digits = f"{score:.3g}" if score < 0.99 else f"{score:.5f}"
    verdicts = ((0.9, "the images overlap"), (0.5, "the images probably overlap"), (0.05, "doubtful"))
    return f"{digits} ({next((words for low, words in verdicts if score >= low), 'no overlap found')})"


def _warn(matches: Matches) -> None:
    """Print the warning about unreliable matches, if there is one."""
    if "warning" in matches.info:
        common.note(f"Note: {matches.info['warning']}")


def _result(matcher: Matcher, matches: Matches, seconds: float, files: list[Path]) -> dict[str, Any]:
    """Return the result that --json prints."""
    model = matches.estimate
    return {
        "matches": len(matches),
        "pair_score": matches.pair_score,
        "size0": matches.size0,
        "size1": matches.size1,
        "network_size0": matches.info["network_size0"],
        "network_size1": matches.info["network_size1"],
        "zoom": matches.info.get("zoom"),
        "tilted": matches.info.get("tilted", False),
        "warning": matches.info.get("warning"),
        "estimate": model
        and {
            "kind": model.kind,
            "matrix": model.matrix,
            "inliers": int(model.inliers.sum()),
            "cam1_from_cam0": model.pose and model.pose.cam1_from_cam0,
            **model.info,
        },
        "device": str(matcher.device),
        "seconds": seconds,
        "files": files,
    }


def _rows(matrix: Any) -> str:
    """Format a matrix as aligned lines."""
    return "\n".join("".join(f"{value:>13.6g}" for value in row) for row in matrix)
