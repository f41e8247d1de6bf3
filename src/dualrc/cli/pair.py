"""Commands for two pictures."""

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dualrc import draw
from dualrc.cli import common, running
from dualrc.errors import ConfigError, OutputError
from dualrc.files import check_writable
from dualrc.image import read
from dualrc.matcher import Matcher, load
from dualrc.matches import Matches

if TYPE_CHECKING:
    from dualrc.geometry import Camera

_WARP_THRESHOLD = 0.003  # of the long side: what is warped need not fit to the pixel everywhere

logger = logging.getLogger(__name__)


@running.command()
def match(
    image0: Annotated[Path, typer.Argument(metavar="A", help="First picture.")],
    image1: Annotated[Path, typer.Argument(metavar="B", help="Second picture.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Write the matches: FILE.npz, .json, or .csv with x0, y0, x1, y1, score (the rest: FILE.csv.json).",
        ),
    ] = None,
    drawing: Annotated[
        Path | None, typer.Option("--draw", help="Write a picture of the matches: FILE.png or FILE.jpg.")
    ] = None,
    top: Annotated[int | None, typer.Option(help="Keep only the best so many matches.")] = None,
    min_score: common.MinScoreOption = 0.0,
    size: common.SizeOption = None,
    quality: common.QualityOption = "standard",
    preset: common.PresetOption = "default",
    weights: common.WeightsOption = None,
    device: common.DeviceOption = None,
    max_memory: common.MaxMemoryOption = None,
    estimate: Annotated[
        Literal["homography", "fundamental", "essential"] | None,
        typer.Option(
            metavar="MODEL",
            help="Fit a homography, fundamental or essential matrix with RANSAC; matrix and inliers are saved too.",
        ),
    ] = None,
    threshold: Annotated[float, typer.Option(help="Inlier threshold of the fit, in pixels.")] = 2.0,
    cameras: Annotated[
        Path | None,
        typer.Option(
            help="For --estimate essential: cameras.json or cameras.txt, with lenses; else EXIF, else a guess."
        ),
    ] = None,
) -> dict[str, Any]:
    """Match two pictures.

    dualrc match a.jpg b.jpg -o matches.npz --draw matches.png

    dualrc match a.jpg b.jpg --estimate homography --top 2000
    """
    _check_outputs(out, drawing, inputs=(image0, image1))
    # What can be refused is refused before the long work.
    if cameras is not None and estimate != "essential":
        raise ConfigError("--cameras serves --estimate essential; add that, or leave the cameras out.")
    if not 0 < threshold < float("inf"):
        raise ConfigError(f"--threshold {threshold} must be a positive number of pixels.")
    views = _cameras((image0, image1), cameras) if estimate == "essential" else (None, None)
    with common.status("Loading the network..."):
        settings: dict[str, Any] = {"size": size, "top": top, "min_score": min_score, "quality": quality}
        matcher = load(preset, weights=weights, device=device, max_memory=max_memory, **settings)
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
    image0: Annotated[Path, typer.Argument(metavar="A", help="Picture to warp.")],
    image1: Annotated[Path, typer.Argument(metavar="B", help="Picture into whose frame it is warped.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Write FILE.png, transparent where A shows nothing, or .jpg.")
    ],
    by: Annotated[
        Literal["homography", "dense"],
        typer.Option(help="homography: one motion for all, for planes and turned cameras; dense: each pixel its own."),
    ] = "homography",
    size: common.SizeOption = None,
    preset: common.PresetOption = "default",
    weights: common.WeightsOption = None,
    device: common.DeviceOption = None,
) -> dict[str, Any]:
    """Warp one picture into the frame of another.

    dualrc warp a.jpg b.jpg -o a-in-b.png
    """
    _check_outputs(None, out, inputs=(image0, image1))
    from dualrc import geometry, stitch

    with common.status("Loading the network..."):
        matcher = load(preset, weights=weights, device=device, size=size)
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
    images: Annotated[list[Path], typer.Argument(metavar="A B...", help="Pictures; more than eight: in order.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Write FILE.png, transparent around the pictures, or .jpg.")],
    reference: Annotated[
        int | None, typer.Option(help="Number, from 0, of the picture whose frame is kept; without it, the middle one.")
    ] = None,
    size: common.SizeOption = None,
    device: common.DeviceOption = None,
) -> dict[str, Any]:
    """Join pictures taken from one place, or of one plane, into one.

    dualrc panorama left.jpg middle.jpg right.jpg -o panorama.jpg
    """
    _check_outputs(None, out, inputs=tuple(images))
    from dualrc import stitch

    with common.status("Loading the network..."):
        matcher = load(device=device, size=size)
    with common.status("Matching and joining..."):
        drawn = stitch.panorama(images, matcher=matcher, reference=reference)
    drawn.save(out)
    common.screen.print(f"{len(images)} pictures joined to {drawn.shape[1]}x{drawn.shape[0]} pixels.", highlight=False)
    common.written(out)
    return {"files": [out], "size": drawn.shape[1::-1], "device": str(matcher.device)}


@running.command()
def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the images and the summary.")] = Path("demo"),
    device: common.DeviceOption = None,
) -> dict[str, Any]:
    """Match two views of a rendered town and a photograph with a warped copy, and compare with the exact truth."""
    from dualrc.demo import run

    start = time.perf_counter()

    def tell(step: str) -> None:
        # One line per step, also without a terminal.
        logger.info("%5.1f s  %s...", time.perf_counter() - start, step)

    summary = run(out, device=device, tell=tell)
    photo = summary["photograph"]
    table = common.table(f"Demo on {summary['device']}")
    table.add_row("", "rendered town", *(["photograph"] if photo else []))
    pairs = [summary, photo] if photo else [summary]
    table.add_row("matches", *(f"{pair['matches']:,}" for pair in pairs))
    for threshold in summary["correct_within_px"]:
        shares = (f"{pair['correct_within_px'][threshold]:.1%}" for pair in pairs)
        table.add_row(f"correct within {threshold} px", *shares)
    table.add_row("time", *(f"{pair['seconds']:.2f} s" for pair in pairs))
    common.screen.print(table)
    drawings = f"{out / 'matches.png'} and {out / 'photo-matches.png'}" if photo else f"{out / 'matches.png'}"
    common.screen.print(f"Look at {drawings}; the figures are in {out / 'summary.json'}.")
    return {**summary, "out": out}


def _check_outputs(out: Path | None, drawing: Path | None, inputs: tuple[Path, ...]) -> None:
    """Refuse what can't or shouldn't be written before any work is done."""
    for path, endings in ((out, (".npz", ".json", ".csv")), (drawing, (".png", ".jpg", ".jpeg"))):
        if path is None:
            continue
        if path.suffix.lower() not in endings:
            raise OutputError(f"{path}: this is written as {', '.join(endings)}; choose one of these endings.")
        check_writable(path)
        if any(path.resolve() == picture.resolve() for picture in inputs):
            raise OutputError(f"{path} is one of the pictures to match; write to another file.")


def _cameras(pictures: tuple[Path, Path], file: Path | None) -> "tuple[Camera | None, Camera | None]":
    """The pictures' cameras from a file, else from EXIF, else None."""
    from dualrc import colmap, geometry

    if file is None:
        return geometry.camera_from_exif(pictures[0]), geometry.camera_from_exif(pictures[1])
    found = colmap.read_cameras(file, [str(path) for path in pictures])
    return found[str(pictures[0])], found[str(pictures[1])]


def _print_matches(matcher: Matcher, matches: Matches, seconds: float) -> None:
    table = common.table(f"{len(matches):,} matches in {seconds:.2f} s on {matcher.device}")
    for number, size in enumerate((matches.size0, matches.size1)):
        seen = matches.info[f"network_size{number}"]
        table.add_row(f"picture {number}", f"{size[0]}x{size[1]}, seen as {seen[0]}x{seen[1]}")
    if "zoom" in matches.info:
        zoom = matches.info["zoom"]
        larger = f"{max(zoom, 1 / zoom):.2g} times larger in picture {int(zoom > 1)}"
        table.add_row("scale", f"things are {larger}; matched at that scale")
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
            table.add_row("beware", "few matches agree: the pictures may not show the same thing")
        if "cameras" in model.info:
            table.add_row("cameras", str(model.info["cameras"]))
        for warning in model.warnings:
            table.add_row("beware", warning)
    common.screen.print(table)


def _pair_verdict(matches: Matches) -> str:
    """The pair score in words and in digits that tell small values apart."""
    score = matches.pair_score
    if matches.info.get("pair_model") is None:
        return f"{score:.3g} (ranks pairs only: these weights have no calibration)"
    digits = f"{score:.3g}" if score < 0.99 else f"{score:.5f}"
    verdicts = ((0.9, "the pictures share a part"), (0.5, "the pictures probably share a part"), (0.05, "doubtful"))
    return f"{digits} ({next((words for low, words in verdicts if score >= low), 'nothing in common was found')})"


def _warn(matches: Matches) -> None:
    """Tell where the matches are not to be trusted."""
    if "warning" in matches.info:
        common.note(f"Note: {matches.info['warning']}")


def _result(matcher: Matcher, matches: Matches, seconds: float, files: list[Path]) -> dict[str, Any]:
    """What --json prints."""
    model = matches.estimate
    return {
        "matches": len(matches),
        "pair_score": matches.pair_score,
        "size0": matches.size0,
        "size1": matches.size1,
        "network_size0": matches.info["network_size0"],
        "network_size1": matches.info["network_size1"],
        "zoom": matches.info.get("zoom"),
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
    """A matrix as aligned lines."""
    return "\n".join("".join(f"{value:>13.6g}" for value in row) for row in matrix)
