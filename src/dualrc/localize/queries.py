"""Many queries, one after the other, with every result kept as soon as it is there."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dualrc.geometry import Camera
from dualrc.image import find_pictures
from dualrc.localize.localizer import Localization, Localizer
from dualrc.localize.results import ResultsFile


def find_queries(path: str | Path) -> dict[str, Path]:
    """The pictures to localize, by name: one file, or those of a folder, named relative to it."""
    path = Path(path)
    if path.is_file():
        return {path.name: path}
    return {name: path / name for name in find_pictures(path)}


def results_config(localizer: Localizer) -> dict[str, Any]:
    """What results depend on: results of another config are not mixed with these."""
    info = localizer.matcher.info
    config = asdict(localizer.config)
    del config["max_memory"]
    kept = {key: info[key] for key in ("network", "weights")}
    # Not on memory, without which a run can't go on elsewhere.
    kept["matcher"] = {key: value for key, value in info["matcher"].items() if key != "max_memory"}
    return {**kept, "localize": config, "map": dict(localizer.map.info)}


def localize_all(
    localizer: Localizer,
    queries: Mapping[str, Path],
    results: ResultsFile,
    *,
    cameras: Mapping[str, Camera] | None = None,
    candidates: Mapping[str, Sequence[str]] | None = None,
) -> Iterator[tuple[str, Localization]]:
    """Localize the queries that the results lack, and give each as it is kept."""
    if len(results):
        results.save()  # an earlier run may have died between its two files
    for name in missing(queries, results):
        found = localizer.localize(
            queries[name],
            camera=None if cameras is None else cameras.get(name),
            candidates=None if candidates is None else candidates.get(name),
        )
        results.put(name, found)
        yield name, found


def missing(queries: Mapping[str, Path], results: ResultsFile) -> list[str]:
    """Queries without a result; a picture that could not be read is tried again, as it may have been mended."""
    return [name for name in queries if name not in results or _unread(results[name])]


def _unread(found: Localization) -> bool:
    return found.cam_from_world is None and not found.candidates
