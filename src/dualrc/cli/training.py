"""Commands that make networks."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from dualrc.cli import common, running
from dualrc.collection.progress import show_progress
from dualrc.errors import OutputError
from dualrc.files import check_writable

if TYPE_CHECKING:
    from dualrc.data.pairs import PairSource

T = TypeVar("T")


@running.command(kept=lambda options: f"The checkpoint is in {options['out']}.", waits=False)
def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="The run; configs/ has ours.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for checkpoint, log and weights.")] = Path(
        "runs/train"
    ),
    minutes: Annotated[float | None, typer.Option(help="Save and stop after so long; run again to go on.")] = None,
    device: common.DeviceOption = None,
    devices: Annotated[int, typer.Option(help="So many GPUs (or processes on a CPU) of this machine.")] = 1,
    nodes: Annotated[int, typer.Option(help="So many machines; start the command on each, as Fabric expects it.")] = 1,
) -> dict[str, Any]:
    """Train a network on your own data: single photographs are enough, pairs are made from them.

    Ctrl-C saves; the same command goes on from there. docs/training.md tells of all kinds of data.

    dualrc train configs/default-1.toml --out runs/mine

    dualrc match a.jpg b.jpg --weights runs/mine/weights.safetensors
    """
    from dualrc import train as training
    from dualrc.config import read_toml

    settings = read_toml(training.TrainConfig, config)
    figures = training.train(settings, out, minutes=minutes, device=device, devices=devices, nodes=nodes)
    common.written(out / "weights.safetensors")
    return {"weights": out / "weights.safetensors", "held_out": figures}


pairs_app = typer.Typer(
    help="Write pairs files for training: a line a pair, `image0 image1 x0 y0 x1 y1 ...`, in pixels.",
    no_args_is_help=True,
)
common.app.add_typer(pairs_app, name="pairs")
PairPointsOption = Annotated[int, typer.Option(min=1, help="Random correspondences a pair; pairs with fewer are out.")]
PairSeedOption = Annotated[int, typer.Option(help="Another number, another choice; the same number, the same file.")]
PairsFileOption = Annotated[Path, typer.Option("--out", "-o", help="The pairs file to write.")]


@running.command(
    "megadepth", app=pairs_app, kept=lambda options: f"Scenes that are done are in {options['out'] / 'scenes'}."
)
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
) -> dict[str, Any]:
    """Write MegaDepth's training_pairs.txt and validation_pairs.txt by the paper's recipe.

    Pairs of more than 50 % overlap, 128 correspondences each, checked by depth; 110 pairs of each scene that has more
    than 500, and all pairs of the others for validation.

    dualrc pairs megadepth data/MegaDepth --out data/MegaDepth/pairs --workers 8
    """
    from dualrc.data.megadepth import MegaDepthRecipe, join_scenes, scene_files, write_scenes

    results = []
    scenes = write_scenes(root, out, MegaDepthRecipe(seed=seed), workers=workers)
    for result in _tracked(scenes, "Scenes", len(scene_files(root))):
        results.append(result)
        if result.broken:
            more = f" ({len(result.broken) - 1} more like it)" if len(result.broken) > 1 else ""
            common.note(f"{result.name}: {result.broken[0]}{more}")
    counts = join_scenes(out, results)
    for split, pairs in counts.items():
        common.written(f"{out / f'{split}_pairs.txt'} ({pairs:,} pairs)")
    if broken := sum(bool(result.broken) for result in results):
        common.screen.print(f"{broken} of {len(results)} scenes lack files; get those and run this again.")
    return {"pairs": counts, "scenes": len(results), "incomplete": broken}


@running.command("colmap", app=pairs_app)
def pairs_colmap(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder with cameras.bin, images.bin, points3D.bin.")],
    images: Annotated[Path, typer.Option(help="Folder of the model's pictures.")],
    out: PairsFileOption,
    min_overlap: Annotated[float, typer.Option(help="Least share of 3D points that two pictures both see.")] = 0.2,
    points: PairPointsOption = 128,
    seed: PairSeedOption = 0,
) -> dict[str, Any]:
    """Write the pairs of a COLMAP model whose pictures see the same 3D points.

    dualrc pairs colmap sparse/0 --images images --out pairs.txt
    """
    from dualrc.data.colmap import ColmapPairs

    check_writable(out)
    with common.status("Reading the model..."):
        source = ColmapPairs(model, images, min_overlap=min_overlap, min_common=points)
    return _write_pairs(source, images, out, points, seed)


@running.command("rgbd", app=pairs_app)
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
) -> dict[str, Any]:
    """Write the overlapping pairs of RGB-D frames with poses; names are those under ROOT/images.

    dualrc pairs rgbd kitchen --out kitchen.txt
    """
    from dualrc.data.rgbd import RgbdPairs

    check_writable(out)
    with common.status("Looking for pictures that overlap..."):
        source = RgbdPairs(root, min_overlap=min_overlap)
    for reason in source.broken.values():
        common.note(reason)
    return _write_pairs(source, root / "images", out, points, seed)


@common.app.command()
def convert(
    published: Annotated[
        Path, typer.Argument(help="A published checkpoint of DualRC-Net, NCNet or Sparse-NCNet (.pth.tar).")
    ],
    out: Annotated[Path, typer.Argument(help="The weights file to write (.safetensors).")],
) -> None:
    """Turn a published checkpoint into a weights file: DualRC-Net's for the preset paper, others' for their own.

    The checkpoint is read without running any code that it may hold.

    dualrc convert dualrc-net.pth.tar paper.safetensors

    dualrc match a.jpg b.jpg --preset paper --weights paper.safetensors

    dualrc convert ncnet_ivd.pth.tar ncnet.safetensors

    dualrc match a.jpg b.jpg --preset ncnet --weights ncnet.safetensors
    """
    from dualrc.model.checkpoint import convert_published

    check_writable(out)
    if out.suffix != ".safetensors" or out.resolve() == published.resolve():
        raise OutputError(f"{out}: weights are written as .safetensors, beside the checkpoint; choose another name.")
    with common.status("Converting..."):
        config = convert_published(published, out)
    common.written(f"{out} (preset {config.preset}, {config.backbone}, {config.consensus})")


def _tracked(items: Iterable[T], step: str, total: int) -> Iterator[T]:
    """The same items, with progress."""
    with show_progress(common.current.quiet) as tell:
        tell(step, 0, total)
        for done, item in enumerate(items, start=1):
            yield item
            tell(step, done, total)


def _write_pairs(source: "PairSource", images: Path, out: Path, points: int, seed: int) -> dict[str, Any]:
    """Write a source's pairs to a file, with progress, and say what was left out."""
    from dualrc.data.pairsfile import lines_of, write_pairs

    skipped: dict[str, str] = {}
    lines = lines_of(source, images, points=points, seed=seed, skipped=skipped)
    count = write_pairs(out, _tracked(lines, "Pairs", len(source)))
    if skipped:
        name, reason = next(iter(skipped.items()))
        common.note(f"Left out: {len(skipped)} of {len(source)} pairs; the first, {name}: {reason}")
    common.written(f"{out} ({count:,} pairs)")
    return {"file": out, "pairs": count, "left_out": skipped}
