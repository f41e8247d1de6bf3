"""Localization of many queries, with every result saved at once."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dualrc.collection.progress import Progress, no_progress
from dualrc.files import content_hashes, only_run
from dualrc.geometry import Camera
from dualrc.image import find_images
from dualrc.localize.localizer import Localization, Localizer
from dualrc.localize.results import ResultsFile


def find_queries(path: str | Path) -> dict[str, Path]:
    """Return the images to localize, by name: one file, or those of a folder, with names relative to it."""
    path = Path(path)
    if path.is_file():
        return {path.name: path}
    return {name: path / name for name in find_images(path)}


def results_config(localizer: Localizer) -> dict[str, Any]:
    """Return the settings that results depend on; results of different settings are not mixed."""
    info = localizer.matcher.info
    config = asdict(localizer.config)
    del config["max_memory"]
    kept = {key: info[key] for key in ("network", "weights")}
    # Without the memory limit, so that a run can continue on another machine.
    kept["matcher"] = {key: value for key, value in info["matcher"].items() if key != "max_memory"}
    return {**kept, "localize": config, "map": dict(localizer.map.info)}


def localize_all(
    localizer: Localizer,
    queries: Mapping[str, Path],
    results: ResultsFile,
    *,
    cameras: Mapping[str, Camera] | None = None,
    candidates: Mapping[str, Sequence[str]] | None = None,
    progress: Progress = no_progress,
) -> Iterator[tuple[str, Localization]]:
    """Localize the queries that have no result, and yield each after it is saved.

    A query is localized again if its image, its camera in `cameras`, or a map image (or depth map) that it was matched
    with, has changed. Only one run at a time can write to the results.
    """
    with only_run(results.path.with_name(f".{results.path.name}.lock")):
        # Another run may have ended in the meantime.
        results.load()
        if len(results):
            # An earlier run may have died between writing its two files.
            results.save()
        hashes, cameras = content_hashes(queries), cameras or {}
        todo = [name for name in hashes if _is_missing(localizer, name, hashes[name], results, cameras.get(name))]
        if todo and candidates is None and len(localizer.map.names) > localizer.config.candidates:
            localizer.prepare(progress)
        for done, name in enumerate(todo, start=len(queries) - len(todo)):
            progress("Localizing", done, len(queries))
            found = localizer.localize(
                queries[name],
                camera=cameras.get(name),
                candidates=None if candidates is None else candidates.get(name),
            )
            results.put(name, found, content=_content(localizer, hashes[name], found, cameras.get(name)))
            progress("Localizing", done + 1, len(queries))
            yield name, found


def missing(
    localizer: Localizer,
    queries: Mapping[str, Path],
    results: ResultsFile,
    *,
    cameras: Mapping[str, Camera] | None = None,
) -> list[str]:
    """Return the queries without a result, or with an outdated one.

    Images that could not be read are tried again, because they may have been repaired.
    """
    hashes, cameras = content_hashes(queries), cameras or {}
    return [name for name in hashes if _is_missing(localizer, name, hashes[name], results, cameras.get(name))]


def _is_missing(localizer: Localizer, name: str, query: str, results: ResultsFile, camera: Camera | None) -> bool:
    if name not in results:
        return True
    found, known = results[name], results.content(name)
    if found.cam_from_world is None and not found.candidates:
        return True
    # Only a stored hash is worth reading the map images.
    return bool(known) and known != _content(localizer, query, found, camera)


def _content(localizer: Localizer, query: str, found: Localization, camera: Camera | None) -> str:
    """Return a hash of a query image, of its camera if that was given, and of the map images it was matched with."""
    of_map = (localizer.content(name) for name in found.candidates if name in localizer.map.images)
    given = [] if camera is None else [repr((camera.size, camera.K.tolist(), camera.lens))]
    return hashlib.sha256(" ".join([query, *given, *of_map]).encode()).hexdigest()[:32]
