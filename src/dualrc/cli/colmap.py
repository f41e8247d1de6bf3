"""Command that matches the images of a COLMAP database."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from dualrc.adapters.colmap_database import MatchDatabaseConfig, match_database
from dualrc.cli import common, running
from dualrc.cli.collections import MATCHING
from dualrc.collection.config import CollectionConfig

# The database has the images, the command lists the pairs, and the default of the score depends on the keypoints.
_MATCHING = {
    name: option
    for name, option in MATCHING.items()
    if name not in ("pairs", "neighbors", "overlap", "loops", "executor", "address", "min_score")
}


_OPTIONS = {
    "pairs": typer.Option(help="Text file with two image names per line; the default is all pairs."),
    "keep_keypoints": typer.Option("--keep-keypoints", help="Match the existing keypoints of the database."),
    "replace_keypoints": typer.Option(
        "--replace-keypoints", help="Replace the keypoints, descriptors and matches of the database."
    ),
    "overwrite": typer.Option("--overwrite", help="With --keep-keypoints: match again pairs that have matches."),
    "verify": typer.Option("--verify/--no-verify", help="Let COLMAP estimate the two-view geometry of the pairs."),
    "radius": typer.Option(
        help="With --keep-keypoints: maximum distance of a match from a keypoint, in network pixels."
    ),
    "min_score": common.matches_option(
        help="Lowest score of a match to keep, between 0 and 1; the default is 0.5 with --keep-keypoints, else 0."
    ),
}


@running.command(
    "match-colmap", kept=lambda options: f"Finished pairs are in {options['database']}, or in the folder beside it."
)
def match_colmap(
    database: Annotated[Path, typer.Argument(metavar="DATABASE", help="COLMAP database that lists the images.")],
    images: Annotated[Path, typer.Option(help="Folder that the image names in the database are relative to.")],
    matching: Annotated[CollectionConfig, _MATCHING],
    config: Annotated[MatchDatabaseConfig, _OPTIONS],
) -> dict[str, Any]:
    """Match the images of a COLMAP database and write the matches into it.

    With --keep-keypoints, the existing keypoints are matched in standard quality, and each finished pair is written.

    Otherwise the images receive new keypoints, and finished pairs are stored in DATABASE.dualrc.

    Run the same command again to continue after an interruption.

    Examples:
      dualrc match-colmap database.db --images images --keep-keypoints
      dualrc match-colmap database.db --images images --pairs pairs.txt
    """
    done = match_database(database, images, replace(config, collection=matching), quiet=common.quiet)
    table = common.table(f"{done.matched:,} pairs matched")
    table.add_row("pairs", f"{done.pairs:,} of {done.images:,} images, of which {done.skipped:,} were there")
    table.add_row("matches", f"{done.matches:,}")
    table.add_row("pairs with a two-view geometry", f"{done.verified:,}")
    for names, reason in list(done.failed.items())[:5]:
        table.add_row("failed", f"{names[0]} and {names[1]}: {reason}")
    common.screen.print(table)
    common.written(database)
    return {**asdict(done), "database": database}
