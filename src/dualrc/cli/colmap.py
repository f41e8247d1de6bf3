"""The command for COLMAP's databases."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from dualrc.cli import common, running
from dualrc.cli.collections import CacheOption, MemoryOption, TopOption, WorkersOption


@running.command(
    "match-colmap", kept=lambda options: f"Finished pairs are in {options['database']}, or in the folder beside it."
)
def match_colmap(
    database: Annotated[Path, typer.Argument(metavar="DATABASE", help="COLMAP's database.db, with its images.")],
    images: Annotated[Path, typer.Option(help="Folder that the names of the database's images are relative to.")],
    pairs: Annotated[
        Path | None, typer.Option(help="Text file of two image names a line; without it, all pairs.")
    ] = None,
    keep_keypoints: Annotated[
        bool, typer.Option("--keep-keypoints", help="Match the keypoints that the database has.")
    ] = False,
    replace_keypoints: Annotated[
        bool,
        typer.Option("--replace-keypoints", help="Replace the database's keypoints, descriptors and matches."),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="With --keep-keypoints: match pairs again that have matches.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Let COLMAP estimate the two-view geometry of the pairs.")
    ] = True,
    radius: Annotated[
        float,
        typer.Option(help="With --keep-keypoints: pixels of the network between a keypoint and where it is found."),
    ] = 2.0,
    top: TopOption = 4000,
    min_score: common.MinScoreOption = 0.0,
    size: common.SizeOption = None,
    quality: common.QualityOption = "standard",
    preset: common.PresetOption = "default",
    weights: common.WeightsOption = None,
    device: common.DeviceOption = None,
    workers: WorkersOption = None,
    max_memory: MemoryOption = None,
    cache: CacheOption = 4.0,
    threads: common.ThreadsOption = None,
) -> dict[str, Any]:
    """Fill matches into a COLMAP database.

    With --keep-keypoints each keypoint of the database is matched, and a pair is written as soon as it is done. Else
    the images get keypoints of our own; matches are kept in DATABASE.dualrc. Run the same command again after a crash.

    dualrc match-colmap database.db --images images --keep-keypoints

    dualrc match-colmap database.db --images images --pairs pairs.txt
    """
    from dualrc.adapters.colmap_database import MatchDatabaseConfig, match_database
    from dualrc.collection.config import CollectionConfig

    given = locals()
    matching = common.settings(CollectionConfig, {key: value for key, value in given.items() if key != "pairs"})
    config = common.settings(MatchDatabaseConfig, {**given, "collection": matching})
    done = match_database(database, images, config, quiet=common.current.quiet)
    table = common.table(f"{done.matched:,} pairs matched")
    table.add_row("pairs", f"{done.pairs:,} of {done.images:,} images, of which {done.skipped:,} were there")
    table.add_row("matches", f"{done.matches:,}")
    table.add_row("pairs with a two-view geometry", f"{done.verified:,}")
    for names, reason in list(done.failed.items())[:5]:
        table.add_row("failed", f"{names[0]} and {names[1]}: {reason}")
    common.screen.print(table)
    common.written(database)
    return {**asdict(done), "database": database}
