"""Commands that train networks, prepare training data and convert checkpoints."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from dualrc.cli import common, running
from dualrc.collection.progress import show_progress
from dualrc.errors import OutputError
from dualrc.files import check_writable

if TYPE_CHECKING:
    from dualrc.data.pairs import LazyPair

T = TypeVar("T")


@running.command(kept=lambda options: f"The checkpoint is in {options['out']}.", waits=False)
def train(
    config: Annotated[
        Path,
        typer.Argument(metavar="CONFIG.toml", help="Training configuration; the folder configs/ has examples."),
    ],
    out: Annotated[
        Path,
        common.out_option(help="Folder for the checkpoint, the log and the weights."),
    ] = Path("runs/train"),
    minutes: Annotated[
        float | None,
        typer.Option(
            help="Time after which to save a checkpoint and stop, in minutes. Default: run until the last step."
        ),
    ] = None,
    device: common.DeviceOption = None,
    devices: Annotated[int, common.network_option(help="Number of GPUs, or of CPU processes, per machine.")] = 1,
    nodes: Annotated[
        int,
        common.network_option(
            help="Number of machines. Start the command on each of them, with the environment variables that Lightning "
            "Fabric expects."
        ),
    ] = 1,
) -> dict[str, Any]:
    """Train a network on your own data.

    Single images are enough: pairs are synthesized from them. docs/training.md describes all kinds of data.

    Ctrl-C saves a checkpoint. Run the same command again to continue from it.

    Examples:
      dualrc train configs/default-1.toml --out runs/mine
      dualrc train configs/default-1.toml --out runs/mine --minutes 60 --devices 4
      dualrc match a.jpg b.jpg --weights runs/mine/weights.safetensors
    """
    from dualrc import train as training
    from dualrc.toml import read_toml

    settings = read_toml(training.TrainConfig, config)
    figures = training.train(settings, out, minutes=minutes, device=device, devices=devices, nodes=nodes)
    common.written(out / "weights.safetensors")
    return {"weights": out / "weights.safetensors", "held_out": figures}


pairs_app = typer.Typer(
    help="Write pairs files for training.\n\n"
    "Each line of a pairs file is one pair: `image0 image1 x0 y0 x1 y1 ...`, in pixels.\n\n"
    "Examples:\n"
    "  dualrc pairs colmap sparse/0 --images images --out pairs.txt\n"
    "  dualrc pairs megadepth data/MegaDepth --out data/MegaDepth/pairs",
    no_args_is_help=True,
)
common.app.add_typer(pairs_app, name="pairs")
PairPointsOption = Annotated[
    int, typer.Option(min=1, help="Number of random correspondences per pair; pairs with fewer are left out.")
]
PairSeedOption = Annotated[int, typer.Option(help="Seed of the random choice; the same seed gives the same file.")]
PairsFileOption = Annotated[Path, common.out_option(help="Pairs file to write.")]


@running.command(
    "megadepth", app=pairs_app, kept=lambda options: f"Finished scenes are in {options['out'] / 'scenes'}."
)
def pairs_megadepth(
    root: Annotated[
        Path,
        typer.Argument(
            metavar="ROOT",
            help="Folder of MegaDepth with the preprocessing of D2-Net: scene_info/*.npz, and the images and depth "
            "maps that these files name.",
        ),
    ],
    out: Annotated[Path, common.out_option(help="Folder for the pairs files; a second run continues there.")],
    seed: PairSeedOption = 0,
    workers: Annotated[
        int, typer.Option(min=1, help="Number of processes; each process handles one scene at a time.")
    ] = 1,
) -> dict[str, Any]:
    """Write training_pairs.txt and validation_pairs.txt of MegaDepth by the recipe of the paper.

    Pairs overlap by more than 50 % and have 128 correspondences each, verified by depth.

    Training uses 110 pairs of each scene with more than 500 pairs; validation uses all pairs of the other scenes.

    Examples:
      dualrc pairs megadepth data/MegaDepth --out data/MegaDepth/pairs
      dualrc pairs megadepth data/MegaDepth --out data/MegaDepth/pairs --workers 8
    """
    from dualrc.data.megadepth import MegaDepthRecipe, join_scenes, scene_files, write_scenes

    results = []
    scenes = write_scenes(root, out, MegaDepthRecipe(seed=seed), workers=workers)
    for result in _tracked(scenes, "Scenes", len(scene_files(root))):
        results.append(result)
        if result.broken:
            more = f" ({len(result.broken) - 1} more)" if len(result.broken) > 1 else ""
            common.note(f"{result.name}: {result.broken[0]}{more}")
    counts = join_scenes(out, results)
    for split, pairs in counts.items():
        common.written(f"{out / f'{split}_pairs.txt'} ({pairs:,} pairs)")
    if broken := sum(bool(result.broken) for result in results):
        remedy = "correct their files and run the command again"
        common.screen.print(f"{broken} of {len(results)} scenes are incomplete (see above); {remedy}.")
    return {"pairs": counts, "scenes": len(results), "incomplete": broken}


@running.command("colmap", app=pairs_app)
def pairs_colmap(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder with cameras.bin, images.bin, points3D.bin.")],
    images: Annotated[Path, typer.Option(help="Folder with the images of the model.")],
    out: PairsFileOption,
    min_overlap: Annotated[
        float, typer.Option(help="Minimum covisibility: share of 3D points that both images observe, from 0 to 1.")
    ] = 0.2,
    points: PairPointsOption = 128,
    seed: PairSeedOption = 0,
) -> dict[str, Any]:
    """Write the pairs of a COLMAP model whose images observe the same 3D points.

    Image names in the file are relative to --images.

    Examples:
      dualrc pairs colmap sparse/0 --images images --out pairs.txt
      dualrc pairs colmap sparse/0 --images images --out pairs.txt --min-overlap 0.3 --points 256
    """
    from dualrc.data.colmap import colmap_pairs

    check_writable(out)
    with common.status("Reading the model..."):
        pairs = colmap_pairs(model, images, min_overlap=min_overlap, min_common=points)
    return _write_pairs(pairs, images, out, points, seed)


@running.command("rgbd", app=pairs_app)
def pairs_rgbd(
    root: Annotated[
        Path,
        typer.Argument(
            metavar="ROOT",
            help="Folder with images/NAME, depth/NAME.png (16 bits, millimeters, 0: no depth), K.txt (3x3) and "
            "world_from_cam.txt (per line a name and 16 numbers, a 4x4 matrix row by row).",
        ),
    ],
    out: PairsFileOption,
    min_overlap: Annotated[
        float, typer.Option(help="Minimum overlap: share of each image that the other image shows, from 0 to 1.")
    ] = 0.3,
    points: PairPointsOption = 128,
    seed: PairSeedOption = 0,
) -> dict[str, Any]:
    """Write the overlapping pairs of RGB-D frames with known poses.

    Image names in the file are relative to ROOT/images.

    Examples:
      dualrc pairs rgbd kitchen --out kitchen.txt
      dualrc pairs rgbd kitchen --out kitchen.txt --min-overlap 0.5
    """
    from dualrc.data.rgbd import rgbd_pairs

    check_writable(out)
    with common.status("Searching for images that overlap..."):
        pairs, broken = rgbd_pairs(root, min_overlap=min_overlap)
    for reason in broken.values():
        common.note(reason)
    return _write_pairs(pairs, root / "images", out, points, seed)


@common.app.command()
def convert(
    published: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT", help="Published checkpoint of DualRC-Net, NCNet or Sparse-NCNet (.pth.tar)."
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Weights file to write (.safetensors).")],
) -> None:
    """Convert a published checkpoint to a weights file.

    Use the file with the preset paper for DualRC-Net, and with ncnet or sparse-ncnet for the other networks.

    Reading the checkpoint does not execute code that it may contain.

    Examples:
      dualrc convert dualrc-net.pth.tar paper.safetensors
      dualrc match a.jpg b.jpg --preset paper --weights paper.safetensors
      dualrc convert ncnet_ivd.pth.tar ncnet.safetensors
      dualrc match a.jpg b.jpg --preset ncnet --weights ncnet.safetensors
    """
    from dualrc.model.checkpoint import convert_published

    check_writable(out)
    if out.suffix != ".safetensors" or out.resolve() == published.resolve():
        raise OutputError(
            f"{out} cannot be written; choose a name that ends in .safetensors and is not the checkpoint."
        )
    with common.status("Converting..."):
        config = convert_published(published, out)
    common.written(f"{out}; use it with --preset {config.preset} --weights {out}")


def _tracked(items: Iterable[T], step: str, total: int) -> Iterator[T]:
    """Yield the items and show progress."""
    with show_progress(common.quiet) as tell:
        tell(step, 0, total)
        for done, item in enumerate(items, start=1):
            yield item
            tell(step, done, total)


def _write_pairs(pairs: "Sequence[LazyPair]", images: Path, out: Path, points: int, seed: int) -> dict[str, Any]:
    """Write pairs to a file, show progress, and report pairs that were left out."""
    from dualrc.data.pairsfile import lines_of, write_pairs

    skipped: dict[str, str] = {}
    lines = lines_of(pairs, images, points=points, seed=seed, skipped=skipped)
    count = write_pairs(out, _tracked(lines, "Pairs", len(pairs)))
    if skipped:
        name, reason = next(iter(skipped.items()))
        common.note(f"Left out {len(skipped)} of {len(pairs)} pairs; the first is {name}: {reason}")
    common.written(f"{out} ({count:,} pairs)")
    return {"file": out, "pairs": count, "left_out": skipped}
