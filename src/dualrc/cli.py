"""The command line: parse and delegate."""

import sys
import time
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from dualrc import draw
from dualrc.config import PRESETS
from dualrc.errors import ConfigError, DualRCError, OutputError
from dualrc.files import check_writable
from dualrc.image import read
from dualrc.matcher import Matcher, load
from dualrc.matches import Matches

if TYPE_CHECKING:
    from dualrc.data.pairs import PairSource
    from dualrc.geometry import Camera
    from dualrc.localize import Localization, Localizer

T = TypeVar("T")

app = typer.Typer(
    name="dualrc",
    help="Dense correspondences between photographs, by Dual-Resolution Correspondence Networks.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
screen = Console()
messages = Console(stderr=True)


def _show_version(wanted: bool) -> None:
    if wanted:
        screen.print(f"dualrc {metadata.version('dualrc')}", highlight=False)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and stop.")
    ] = False,
) -> None:
    pass


PresetOption = Annotated[str, typer.Option(help=f"Network: {' or '.join(PRESETS)}.")]
WeightsOption = Annotated[
    Path | None, typer.Option(help="Weights file (.safetensors); without it, those inside the package.")
]
DeviceOption = Annotated[str | None, typer.Option(help="cuda, mps or cpu; without it, the best there is.")]
SizeOption = Annotated[
    int | None,
    typer.Option(
        help="Long side that the network sees, in multiples of 16, scaling up or down. More finds more, for more time."
    ),
]


@app.command()
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
    min_score: Annotated[float, typer.Option(help="Keep only matches with at least this score.")] = 0.0,
    size: SizeOption = None,
    quality: Annotated[
        Literal["standard", "high"],
        typer.Option(help="high looks again: better if pictures are turned, zoomed or seen from the side, and slower."),
    ] = "standard",
    preset: PresetOption = "default",
    weights: WeightsOption = None,
    device: DeviceOption = None,
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
        typer.Option(help="For --estimate essential: cameras.json or COLMAP's cameras.txt; else EXIF, else a guess."),
    ] = None,
) -> None:
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
    with messages.status("Loading the network..."):
        settings: dict[str, Any] = {"size": size, "top": top, "min_score": min_score, "quality": quality}
        matcher = load(preset, weights=weights, device=device, **settings)
    with messages.status("Matching..."):
        start = time.perf_counter()
        matches = matcher.match(image0, image1)
        seconds = time.perf_counter() - start
    if estimate is not None:
        from dualrc import geometry

        camera0, camera1 = views
        model = geometry.estimate(matches, estimate, camera0=camera0, camera1=camera1, threshold_px=threshold)
        matches = replace(matches, estimate=model)
    if out is not None:
        matches.save(out)
    if drawing is not None:
        colors: Literal["score", "inliers"] = "score" if matches.estimate is None else "inliers"
        draw.save(draw.draw_matches(read(image0), read(image1), matches, colors=colors), drawing)
    _print_matches(matcher, matches, seconds)
    for path in (out, drawing):
        if path is not None:
            screen.print(f"Written: {path}")


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the pictures and the summary.")] = Path("demo"),
    device: DeviceOption = None,
) -> None:
    """Match two pictures of a made-up town, check against the exact truth, and leave pictures to look at."""
    from dualrc.demo import run

    with messages.status("Making two pictures, matching and drawing them..."):
        summary = run(out, device=device)
    table = _table(f"Demo: {summary['matches']:,} matches in {summary['seconds']:.2f} s on {summary['device']}")
    for threshold, share in summary["correct_within_px"].items():
        table.add_row(f"correct within {threshold} px", f"{share:.1%}")
    screen.print(table)
    screen.print(f"Look at {out / 'matches.png'}; the figures are in {out / 'summary.json'}.")


@app.command()
def evaluate(
    benchmark: Annotated[
        Literal["hpatches", "pose", "inloc", "aachen", "appendix"], typer.Argument(help="What to evaluate.")
    ],
    roots: Annotated[list[Path] | None, typer.Argument(metavar="ROOT...", help="Folders of the data set.")] = None,
    matcher: Annotated[
        list[str] | None,
        typer.Option(
            help="dualrc (if nothing is given), sift (RootSIFT with OpenCV: sift-ratio and sift-mutual), or "
            "FILE.py:function, a function of two paths that returns points0, points1, scores. Give it several times "
            "to compare in one table."
        ),
    ] = None,
    preset: PresetOption = "default",
    weights: Annotated[
        list[Path] | None,
        typer.Option(
            help="Weights file (.safetensors); without it, those inside the package. "
            "appendix: several, one for each fusion variant and number of channels."
        ),
    ] = None,
    device: DeviceOption = None,
    size: Annotated[
        list[int] | None,
        typer.Option(
            help="Long side that the network sees, scaling up or down. appendix: several; without it, 1600, 1200, 800."
        ),
    ] = None,
    top: Annotated[
        int | None,
        typer.Option(help="Score the best so many matches; without it, 1000 and 2000 for hpatches, else 4000."),
    ] = None,
    crop: Annotated[
        str | None,
        typer.Option(
            metavar="X,Y", help="hpatches: cut X columns and Y rows off pictures 2 to 6, on the left and top."
        ),
    ] = None,
    pairs: Annotated[
        Path | None,
        typer.Option(
            help="appendix: draw the pairs of this text file, two names a line, such as v_wall/1.ppm v_wall/6.ppm."
        ),
    ] = None,
    truth: Annotated[
        Path | None, typer.Option(help="aachen and inloc: a file of true poses; inloc finds its own in ROOT.")
    ] = None,
    shortlist: Annotated[
        Path | None,
        typer.Option(help="inloc: candidates of each query, .mat as published or text; without it, the one in ROOT."),
    ] = None,
    candidates: Annotated[int, typer.Option(help="inloc: match each query with the best so many candidates.")] = 10,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="inloc: rank poses by dense verification against the scan, not by inliers."),
    ] = False,
    results: Annotated[
        list[Path] | None,
        typer.Option(help="inloc: score this list of results (.mat) too, or, without ROOT, alone; several times."),
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write all figures and the config here too.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Folder for matches, figures, results.json and report.html; a second run "
            "goes on where the first stopped. Without it, evaluation-BENCHMARK.",
        ),
    ] = None,
) -> None:
    """Score matchers on HPatches or on two-view poses (MegaDepth-1500, ScanNet-1500, or folders with cameras.json).

    dualrc evaluate hpatches data/hpatches --matcher dualrc --matcher sift --out hpatches

    dualrc evaluate pose data/strecha --matcher mine.py:match

    inloc localizes InLoc's queries by cut-outs of its scans, and draws the curve beside the published ones.

    dualrc evaluate inloc data/inloc --verify --out inloc

    aachen localizes the queries of Aachen Day-Night, v1.0 or v1.1, and writes their poses for the benchmark's service.

    dualrc evaluate aachen data/aachen --out aachen

    appendix compares networks on HPatches as the paper's appendix does: fusion variants, channels, sizes, and costs.

    dualrc evaluate appendix data/hpatches --weights a.safetensors --weights b.safetensors
    """
    from dualrc.evaluation import EvaluationSettings, InLocSettings, parse_crop
    from dualrc.evaluation import evaluate as run

    out = out or Path(f"evaluation-{benchmark}")
    if benchmark == "appendix":
        from dualrc.evaluation.appendix import DEFAULT_SIZES, AppendixSettings, evaluate_appendix

        if crop is not None or truth is not None or shortlist is not None or verify or results:
            raise ConfigError("--crop, --truth, --shortlist, --verify, --results are not for appendix; leave them out.")
        comparison = AppendixSettings(
            roots=tuple(roots or ()),
            weights=tuple(weights or ()),
            preset=preset,
            matchers=tuple(matcher or ()),
            device=device,
            sizes=tuple(size or DEFAULT_SIZES),
            top=top,
            pairs=pairs,
            json=json,
            out=out,
        )
        evaluate_appendix(comparison, screen=screen, messages=messages)
        return
    if pairs is not None:
        raise ConfigError("--pairs is for appendix; leave it out.")
    settings = EvaluationSettings(
        benchmark=benchmark,
        roots=tuple(roots or ()),
        inloc=InLocSettings(shortlist=shortlist, candidates=candidates, verify=verify, results=tuple(results or ())),
        matchers=tuple(matcher or ["dualrc"]),
        preset=preset,
        weights=_at_most_one(weights, "--weights"),
        device=device,
        size=_at_most_one(size, "--size"),
        top=top,
        crop=None if crop is None else parse_crop(crop),
        truth=truth,
        json=json,
        out=out,
    )
    run(settings, screen=screen, messages=messages)


@app.command()
def collection(
    images: Annotated[Path, typer.Argument(metavar="IMAGES", help="Folder of pictures; subfolders are searched too.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the matches; a second run goes on with it.")],
    pairs: Annotated[
        str,
        typer.Option(
            help="exhaustive, sequential, retrieval, a text file (two names a line), or the folder of a COLMAP model; "
            "auto: exhaustive for few pictures, else retrieval."
        ),
    ] = "auto",
    neighbors: Annotated[int, typer.Option(help="Retrieval and model: match each picture with so many.")] = 20,
    overlap: Annotated[int, typer.Option(help="Sequential: match each picture with so many that follow.")] = 10,
    loops: Annotated[int, typer.Option(help="Sequential: and with so many that look alike further away.")] = 2,
    top: Annotated[int, typer.Option(help="Keep the best so many matches of each pair.")] = 4000,
    min_score: Annotated[float, typer.Option(help="Keep only matches with at least this score.")] = 0.0,
    size: SizeOption = None,
    preset: PresetOption = "default",
    weights: WeightsOption = None,
    device: DeviceOption = None,
    engine: Annotated[
        Literal["local", "ray"], typer.Option(help="Processes of this machine, or a Ray cluster.")
    ] = "local",
    address: Annotated[
        str | None, typer.Option(help="Where the Ray cluster is; without it, one is started on this machine.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Workers; without it, one per GPU, else one per core, as far as memory allows.")
    ] = None,
    max_memory: Annotated[
        float | None, typer.Option(help="GiB for all workers of a machine; without it, three quarters of what it has.")
    ] = None,
    cache: Annotated[float, typer.Option(help="How many GiB of that are for features kept for later pairs.")] = 4.0,
) -> None:
    """Match the pictures of a folder with each other, on one machine or many.

    Matches go to OUT/matches.sqlite as they come: run the same command again after a crash, or with more pictures.

    dualrc collection photos --out matched

    dualrc collection frames --out matched --pairs sequential --engine ray --address auto
    """
    from dualrc.collection.config import CollectionConfig
    from dualrc.collection.run import match_collection

    config = CollectionConfig(
        pairs=pairs,
        neighbors=neighbors,
        overlap=overlap,
        loops=loops,
        top=top,
        min_score=min_score,
        size=size,
        preset=preset,
        weights=weights,
        device=device,
        engine=engine,
        address=address,
        workers=workers,
        max_memory=max_memory,
        cache=cache,
    )
    result = match_collection(images, out, config)
    table = _table(f"{result.matched:,} pairs matched in {result.seconds:.1f} s")
    table.add_row("pictures", f"{len(result.names):,}")
    table.add_row("pairs", f"{len(result.pairs):,}, of which {result.skipped:,} were there")
    if result.broken:
        table.add_row("pictures left out", f"{len(result.broken):,}: {', '.join(list(result.broken)[:5])}")
    if result.failed:
        table.add_row("pairs that failed", f"{len(result.failed):,}; the same command tries them again")
    screen.print(table)
    screen.print(f"Written: {result.store}")


@app.command()
def reconstruct(
    images: Annotated[Path, typer.Argument(metavar="IMAGES", help="Folder of pictures; subfolders are searched too.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the model; a second run goes on with it.")],
    cameras: Annotated[
        Path | None,
        typer.Option(
            help="cameras.json or COLMAP's cameras.txt, taken as they are; without it, focal lengths are refined from "
            "EXIF, or from a guess for each picture size."
        ),
    ] = None,
    pairs: Annotated[
        str,
        typer.Option(
            help="exhaustive, sequential, retrieval, a text file (two names a line), or the folder of a COLMAP model; "
            "auto: exhaustive for few pictures, else retrieval."
        ),
    ] = "auto",
    top: Annotated[int, typer.Option(help="Keep the best so many matches of each pair; more give more points.")] = 4000,
    size: SizeOption = None,
    preset: PresetOption = "default",
    weights: WeightsOption = None,
    device: DeviceOption = None,
    engine: Annotated[
        Literal["local", "ray"], typer.Option(help="Match in processes of this machine, or on a Ray cluster.")
    ] = "local",
    address: Annotated[
        str | None, typer.Option(help="Where the Ray cluster is; without it, one is started on this machine.")
    ] = None,
    hloc: Annotated[bool, typer.Option("--hloc", help="Also write hloc's features.h5, matches.h5, pairs.txt.")] = False,
) -> None:
    """Reconstruct cameras and points from a folder of pictures.

    OUT gets model (COLMAP's), points.ply, model.png, summary.json, and COLMAP's database.db. Matches are kept in
    OUT/matches.sqlite: run the same command again after a crash, or with more pictures.

    dualrc reconstruct photos --out town

    dualrc reconstruct photos --out town --cameras cameras.txt --pairs sequential
    """
    from dualrc.collection.config import CollectionConfig
    from dualrc.collection.reconstruct import ReconstructConfig
    from dualrc.collection.reconstruct import reconstruct as run

    matching = CollectionConfig(
        pairs=pairs,
        top=top,
        size=size,
        preset=preset,
        weights=weights,
        device=device,
        engine=engine,
        address=address,
    )
    summary = run(images, out, ReconstructConfig(collection=matching, cameras=cameras, hloc=hloc))
    table = _table(f"{summary.registered:,} of {summary.pictures:,} pictures placed")
    table.add_row("points", f"{summary.points:,}")
    table.add_row("track length, mean", f"{summary.track_length:.2f} pictures")
    table.add_row("reprojection error, mean", f"{summary.reprojection_error_px:.2f} px")
    table.add_row("cameras", summary.cameras)
    moved = f"{summary.merging.moved_median_px:.2f} px (median), {summary.merging.moved_95_px:.2f} px (95 %)"
    table.add_row("matches moved to keypoints by", moved)
    if summary.left_out:
        table.add_row("pictures left out", f"{len(summary.left_out):,}: {', '.join(summary.left_out[:5])}")
    if summary.models > 1:
        table.add_row("beware", f"{summary.models} models did not join; this is the largest. Match more pairs.")
    table.add_row("time", ", ".join(f"{step} {seconds:.0f} s" for step, seconds in summary.seconds.items()))
    screen.print(table)
    screen.print(f"Written: {out / 'model'}; look at {out / 'model.png'}.")


@app.command()
def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="The run; configs/ has ours.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for checkpoint, log and weights.")] = Path(
        "runs/train"
    ),
    minutes: Annotated[float | None, typer.Option(help="Save and stop after so long; run again to go on.")] = None,
    device: DeviceOption = None,
    devices: Annotated[int, typer.Option(help="So many GPUs (or processes on a CPU) of this machine.")] = 1,
    nodes: Annotated[int, typer.Option(help="So many machines; start the command on each, as Fabric expects it.")] = 1,
) -> None:
    """Train a network on your own data: single photographs are enough, pairs are made from them.

    Ctrl-C saves; the same command goes on from there. docs/training.md tells of all kinds of data.

    dualrc train configs/default-1.toml --out runs/mine

    dualrc match a.jpg b.jpg --weights runs/mine/weights.safetensors
    """
    from dualrc import train as training
    from dualrc.config import read_toml

    settings = read_toml(training.TrainConfig, config)
    training.train(settings, out, minutes=minutes, device=device, devices=devices, nodes=nodes)
    screen.print(f"Written: {out / 'weights.safetensors'}")


pairs_app = typer.Typer(
    help="Write pairs files for training: a line a pair, `image0 image1 x0 y0 x1 y1 ...`, in pixels.",
    no_args_is_help=True,
)
app.add_typer(pairs_app, name="pairs")
PairPointsOption = Annotated[int, typer.Option(min=1, help="Random correspondences a pair; pairs with fewer are out.")]
PairSeedOption = Annotated[int, typer.Option(help="Another number, another choice; the same number, the same file.")]
PairsFileOption = Annotated[Path, typer.Option("--out", "-o", help="The pairs file to write.")]


@pairs_app.command("megadepth")
def pairs_megadepth(
    root: Annotated[
        Path,
        typer.Argument(
            metavar="ROOT",
            help="MegaDepth with D2-Net's preprocessing: scene_info/*.npz, and the pictures and depth maps they name.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the files; run again to go on.")],
    seed: PairSeedOption = 0,
    workers: Annotated[int, typer.Option(min=1, help="Processes; each takes a scene at a time.")] = 1,
) -> None:
    """Write MegaDepth's training_pairs.txt and validation_pairs.txt by the paper's recipe.

    Pairs of more than 50 % overlap, 128 correspondences each, checked by depth; 110 pairs of each scene that has more
    than 500, and all pairs of the others for validation.

    dualrc pairs megadepth data/MegaDepth --out data/MegaDepth/pairs --workers 8
    """
    from rich.progress import track

    from dualrc.data.megadepth import MegaDepthRecipe, join_scenes, scene_files, write_scenes

    results = []
    scenes = write_scenes(root, out, MegaDepthRecipe(seed=seed), workers=workers)
    for result in track(scenes, "Scenes", total=len(scene_files(root)), console=messages):
        results.append(result)
        if result.broken:
            more = f" ({len(result.broken) - 1} more like it)" if len(result.broken) > 1 else ""
            messages.print(f"{result.name}: {result.broken[0]}{more}", style="yellow", highlight=False, markup=False)
    for split, pairs in join_scenes(out, results).items():
        screen.print(f"Written: {out / f'{split}_pairs.txt'} ({pairs:,} pairs)", highlight=False, soft_wrap=True)
    if broken := sum(bool(result.broken) for result in results):
        screen.print(f"{broken} of {len(results)} scenes lack files; get those and run this again.")


@pairs_app.command("colmap")
def pairs_colmap(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder with cameras.bin, images.bin, points3D.bin.")],
    images: Annotated[Path, typer.Option(help="Folder of the model's pictures.")],
    out: PairsFileOption,
    min_overlap: Annotated[float, typer.Option(help="Least share of 3D points that two pictures both see.")] = 0.2,
    points: PairPointsOption = 128,
    seed: PairSeedOption = 0,
) -> None:
    """Write the pairs of a COLMAP model whose pictures see the same 3D points.

    dualrc pairs colmap sparse/0 --images images --out pairs.txt
    """
    from dualrc.data.colmap import ColmapPairs

    check_writable(out)
    with messages.status("Reading the model..."):
        source = ColmapPairs(model, images, min_overlap=min_overlap, min_common=points)
    _write_pairs(source, images, out, points, seed)


@pairs_app.command("rgbd")
def pairs_rgbd(
    root: Annotated[
        Path,
        typer.Argument(
            metavar="ROOT",
            help="Folder with images/NAME, depth/NAME.png (16 bits, millimetres, 0: none), K.txt (3x3) and "
            "world_from_cam.txt (lines of a name and 16 numbers, row by row).",
        ),
    ],
    out: PairsFileOption,
    min_overlap: Annotated[float, typer.Option(help="Least share of each picture that the other one shows.")] = 0.3,
    points: PairPointsOption = 128,
    seed: PairSeedOption = 0,
) -> None:
    """Write the overlapping pairs of RGB-D frames with poses; names are those under ROOT/images.

    dualrc pairs rgbd kitchen --out kitchen.txt
    """
    from dualrc.data.rgbd import RgbdPairs

    check_writable(out)
    with messages.status("Looking for pictures that overlap..."):
        source = RgbdPairs(root, min_overlap=min_overlap)
    for reason in source.broken.values():
        messages.print(reason, style="yellow", highlight=False, markup=False)
    _write_pairs(source, root / "images", out, points, seed)


@app.command()
def localize(
    queries: Annotated[Path, typer.Argument(metavar="QUERIES", help="Folder of pictures to localize, or one picture.")],
    map: Annotated[
        Path, typer.Option("--map", help="Folder of a COLMAP model, or of RGB-D frames (images, depth, K.txt, poses).")
    ],
    images: Annotated[Path | None, typer.Option(help="Folder of a COLMAP model's pictures.")] = None,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="Results: FILE.json, and the poses as name qw qx qy qz tx ty tz: FILE.txt."),
    ] = Path("localization.json"),
    cameras: Annotated[
        Path | None,
        typer.Option(help="The queries' cameras.json or cameras.txt; else EXIF, else the map's, else estimated."),
    ] = None,
    candidates: Annotated[int, typer.Option(help="Pictures of the map to match each query with.")] = 10,
    threshold: Annotated[float, typer.Option(help="Inlier threshold, in pixels of the query.")] = 4.0,
    size: SizeOption = None,
    preset: PresetOption = "default",
    weights: WeightsOption = None,
    device: DeviceOption = None,
) -> None:
    """Find where pictures were taken in a map; a second run goes on where the first stopped.

    dualrc localize queries --map sparse/0 --images images --out poses.json
    """
    from dualrc import colmap
    from dualrc import localize as localization

    check_writable(out)
    config = localization.LocalizeConfig(candidates=candidates, threshold_px=threshold)
    pictures = localization.find_queries(queries)
    known = None
    if cameras is not None:
        by_path = colmap.read_cameras(cameras, [str(path) for path in pictures.values()])
        known = {name: by_path[str(path)] for name, path in pictures.items()}
    with messages.status("Reading the map and loading the network..."):
        world = localization.read_map(map, images)
        matcher = load(preset, weights=weights, device=device, size=size)
    localizer = localization.Localizer(matcher, world, config, descriptors=out.with_name(f"{out.stem}-map.npz"))
    results = localization.ResultsFile(out, localization.results_config(localizer), info=matcher.info)
    with messages.status("Looking at the map's pictures...") as status:
        todo = len(localization.missing(pictures, results))
        ready = localization.localize_all(localizer, pictures, results, cameras=known)
        for done, (name, found) in enumerate(ready, start=1):
            what = f"{found.inliers:,} inliers" if found.reason is None else f"not localized: {found.reason}"
            messages.print(f"{name}: {what}", highlight=False, markup=False, soft_wrap=True)
            status.update(f"Localizing, {done} of {todo} done...")
    _print_localizations(localizer, {name: results[name] for name in pictures})
    screen.print(f"Written: {out}, {results.poses_path}")


@app.command()
def convert(
    published: Annotated[Path, typer.Argument(help="A published DualRC-Net checkpoint (.pth.tar).")],
    out: Annotated[Path, typer.Argument(help="The weights file to write (.safetensors).")],
) -> None:
    """Turn a published DualRC-Net checkpoint into a weights file for the preset paper.

    The checkpoint is read without running any code that it may hold.

    dualrc convert dualrc-net.pth.tar paper.safetensors

    dualrc match a.jpg b.jpg --preset paper --weights paper.safetensors
    """
    from dualrc.model.checkpoint import convert_published

    check_writable(out)
    if out.suffix != ".safetensors" or out.resolve() == published.resolve():
        raise OutputError(f"{out}: weights are written as .safetensors, beside the checkpoint; choose another name.")
    with messages.status("Converting..."):
        config = convert_published(published, out)
    screen.print(f"Written: {out} (preset {config.preset}, {config.backbone}, {config.consensus})", highlight=False)


@app.command()
def info() -> None:
    """Versions, devices, presets, weights and licence."""
    import torch

    from dualrc.model.checkpoint import bundled, file_hash

    table = _table("dualrc")
    for package in ("dualrc", "torch", "numpy", "poselib"):
        table.add_row(package, metadata.version(package))
    table.add_row("python", sys.version.split()[0])
    devices = ["cpu"]
    if torch.cuda.is_available():
        devices.insert(0, f"cuda ({torch.cuda.get_device_name()})")
    if torch.backends.mps.is_available():
        devices.insert(0, "mps")
    table.add_row("devices, best first", ", ".join(devices))
    for name, (network, matcher) in PRESETS.items():
        path = bundled(name)
        weights = "give a file with --weights" if path is None else f"inside the package, {file_hash(path)}"
        table.add_row(f"preset {name}", f"{network.backbone.kind}, at most {matcher.max_size} px; weights: {weights}")
    table.add_row("licence", metadata.metadata("dualrc")["License-Expression"] or "Apache-2.0")
    screen.print(table)


def main() -> None:
    """Run the command line; a user's mistake prints one line and exits with 1."""
    try:
        app()
    except DualRCError as error:
        messages.print(f"Error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        messages.print("Stopped.")
        sys.exit(130)


def _at_most_one(values: list[T] | None, option: str) -> T | None:
    """The value of an option that only `evaluate appendix` takes several times."""
    if values and len(values) > 1:
        raise ConfigError(f"{option} is given {len(values)} times; here it is taken once.")
    return values[0] if values else None


def _write_pairs(source: "PairSource", images: Path, out: Path, points: int, seed: int) -> None:
    """Write a source's pairs to a file, with progress, and say what was left out."""
    from rich.progress import track

    from dualrc.data.pairsfile import lines_of, write_pairs

    skipped: dict[str, str] = {}
    lines = lines_of(source, images, points=points, seed=seed, skipped=skipped)
    count = write_pairs(out, track(lines, "Pairs", total=len(source), console=messages))
    if skipped:
        name, reason = next(iter(skipped.items()))
        text = f"Left out: {len(skipped)} of {len(source)} pairs; the first, {name}: {reason}"
        messages.print(text, style="yellow", highlight=False, markup=False, soft_wrap=True)
    screen.print(f"Written: {out} ({count:,} pairs)", highlight=False, soft_wrap=True)


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
    table = _table(f"{len(matches):,} matches in {seconds:.2f} s on {matcher.device}")
    for number, size in enumerate((matches.size0, matches.size1)):
        seen = matches.info[f"network_size{number}"]
        table.add_row(f"picture {number}", f"{size[0]}x{size[1]}, seen as {seen[0]}x{seen[1]}")
    if len(matches):
        table.add_row("scores", f"{matches.scores.max():.3g} to {matches.scores.min():.3g}")
        table.add_row("pair score", f"{matches.pair_score:.2f}")
    if matches.estimate is not None:
        model = matches.estimate
        inliers = int(model.inliers.sum())
        if model.matrix is None:
            table.add_row(model.kind, f"none found: {model.info.get('reason', '')}")
        else:
            table.add_row(model.kind, _rows(model.matrix))
        if "cam1_from_cam0" in model.info:
            table.add_row("rotation, direction", _rows(model.info["cam1_from_cam0"]))
        share = inliers / max(1, len(matches))
        table.add_row("inliers", f"{inliers:,} of {len(matches):,} ({share:.0%})")
        if model.matrix is not None and (inliers < 30 or share < 0.1):
            table.add_row("beware", "few matches agree: the pictures may not show the same thing")
        if "cameras" in model.info:
            table.add_row("cameras", str(model.info["cameras"]))
    screen.print(table)


def _print_localizations(localizer: "Localizer", found: "dict[str, Localization]") -> None:
    good = [one for one in found.values() if one.cam_from_world is not None]
    table = _table(f"{len(good)} of {len(found)} pictures localized")
    if good:
        for label, values, unit in (
            ("inliers", [float(one.inliers) for one in good], ""),
            ("confidence", [one.confidence for one in good], ""),
            ("deviation of the place", [one.position_deviation for one in good], " units of the map"),
            ("deviation of the rotation", [one.rotation_deviation_deg for one in good], " degrees"),
        ):
            table.add_row(label, f"median {sorted(values)[len(values) // 2]:.3g}{unit}")
    sources = sorted({one.camera.source for one in good if one.camera is not None})
    table.add_row("cameras", ", ".join(sources) or "none")
    for label, failures in (
        ("not localized", {name: one.reason for name, one in found.items() if one.reason is not None}),
        ("unusable in the map", localizer.broken),
    ):
        for name, reason in failures.items():
            table.add_row(label, f"{name}: {reason}")
    screen.print(table)


def _rows(matrix: Any) -> str:
    """A matrix as aligned lines."""
    return "\n".join("".join(f"{value:>13.6g}" for value in row) for row in matrix)


def _table(title: str) -> Table:
    # Above the table rather than as its title, which would be wrapped to the table's width.
    screen.print(title, style="bold", highlight=False)
    table = Table(show_header=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    return table
