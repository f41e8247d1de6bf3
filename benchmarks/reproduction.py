"""Train the systems that the paper compares on the same pairs for the same number of steps, and compare them.

    python benchmarks/reproduction.py train RUNS --photos photos/*.tar --trunk resnet50.safetensors
    python benchmarks/reproduction.py evaluate RUNS --hpatches HPATCHES --scenes STRECHA
    python benchmarks/reproduction.py show RUNS/results.json

`train` leaves a folder per system in RUNS and continues unfinished runs. `evaluate` scores every system whose training
has ended on HPatches with the paper's protocol and on relative poses, then measures time and memory one system after
the other, and writes RUNS/results.json. `show` prints its tables as Markdown. The trunk is a frozen ResNet-50 up to
conv4.
Systems and training are in reproduction_systems.py.
"""

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from reproduction_systems import (
    ALL,
    RESNET101,
    SYSTEMS,
    TRAINING_FILE,
    Json,
    System,
    Tasks,
    choose,
    derive,
    read_json,
    read_log,
    train_all,
    unfinished,
)

import dualrc
from dualrc.evaluation.appendix_tables import PUBLISHED_COSTS
from dualrc.evaluation.benchmark import open_benchmark
from dualrc.evaluation.hpatches import GROUPS, SHOWN_PX, accuracy_cells, published
from dualrc.evaluation.pose import POSELIB
from dualrc.evaluation.report import share
from dualrc.files import write_json
from dualrc.image import read
from dualrc.matcher.budget import release_memory
from dualrc.matcher.extract import choose_device
from dualrc.measure import Timing, peak_of, time_once, warm_ups
from dualrc.model.checkpoint import file_hash, load_weights
from dualrc.provenance import provenance
from dualrc.types import ImageArray

# Long side of the images of HPatches, in the paper's protocol, and one with the map size of NCNet at that size.
SIZES = (1600, 800)
# Sizes of the images whose matching is timed.
TIMED = ((800, 592), (1600, 1200))
_REPEATS = 9
_RESULTS, _ACCURACY, _COSTS = "results.json", "accuracy.json", "costs.json"
_PUBLISHED_CURVES = (
    "DualRC-Net, 1600 px, best 2000",
    "Sparse-NCNet, 3200 px, hard + soft, best 2000",
    "Sparse-NCNet, 1600 px, hard + soft, best 2000",
    "NCNet, 1600 px, relocalized, best 2000",
)


@dataclass(frozen=True, kw_only=True)
class Data:
    """What is evaluated, and how."""

    hpatches: tuple[Path, ...]
    scenes: tuple[Path, ...]
    # Interval of the pose pairs that are used.
    every: int
    sizes: tuple[int, ...]
    timed: tuple[tuple[int, int], ...]
    device: str | None


def _evaluate(options: argparse.Namespace) -> None:
    data = Data(
        hpatches=tuple(options.hpatches),
        scenes=tuple(options.scenes),
        every=options.every,
        sizes=tuple(options.size or SIZES),
        timed=tuple(options.timed or TIMED),
        device=options.device,
    )
    derive(options.runs)
    left_out = unfinished(options.runs)
    systems = [
        system
        for system in choose(options, ALL.values())
        if system.name not in left_out and (options.runs / system.name / "weights.safetensors").exists()
    ]
    tasks = Tasks(options.runs)
    # The features of the network with the cost of a ResNet-101 are those of the original.
    scored = [system for system in systems if system != RESNET101]
    timed = [system for system in systems if system.loss is not None]
    tasks.run("accuracy", run_accuracy, _stale(scored, options.runs, _ACCURACY), data, jobs=options.jobs)
    # One after the other, because they would slow each other down. A CPU's peak is that of the whole process.
    on_gpu = choose_device(options.device).type == "cuda"
    tasks.run("time and memory", run_costs, _stale(timed, options.runs, _COSTS), data, jobs=1, reuse=on_gpu)
    results = collect(options.runs, data)
    write_json(options.runs / _RESULTS, results)
    print(tables(results))
    tasks.end()


def _stale(systems: Iterable[System], runs: Path, file: str) -> list[System]:
    """Return the systems without a result of their present weights."""
    chosen = []
    for system in systems:
        known = read_json(runs / system.name / file)
        if known is None or known["weights"] != file_hash(runs / system.name / "weights.safetensors"):
            chosen.append(system)
    return chosen


def run_accuracy(system: System, runs: Path, data: Data) -> float:
    """Score a system on HPatches and on relative poses; return the seconds."""
    start, weights = time.monotonic(), runs / system.name / "weights.safetensors"
    options: Json = {"matchers": (str(weights),), "device": data.device, "out": runs / system.name}
    found: Json = {"weights": file_hash(weights), "hpatches": {}, "pose": None}
    # Only the first system is scored at all sizes.
    for size in data.sizes if system == SYSTEMS[0] else data.sizes[:1]:
        if data.hpatches:
            scored = _score("hpatches", {**options, "roots": data.hpatches, "protocol": "paper", "size": size})
            found["hpatches"][str(size)] = {
                str(top.top): {
                    group: {"mma": score.mma, "homography_auc": score.homography_auc, "matches": score.matches}
                    for group, score in top.groups.items()
                }
                for top in scored
            }
    if data.scenes:
        scored = _score("pose", {**options, "roots": data.scenes}, every=data.every)
        overall = scored.overall
        found["pose"] = {
            "pairs": overall.pairs,
            "auc": overall.auc[POSELIB],
            "not_estimated": overall.not_estimated[POSELIB],
            "epipolar_share": overall.epipolar_share,
            "matches": overall.matches,
        }
    write_json(runs / system.name / _ACCURACY, found)
    return time.monotonic() - start


def _score(name: str, options: Json, every: int = 1) -> Any:
    """Match and score the pairs of a benchmark, without storing the matches."""
    benchmark = open_benchmark(name, options)
    benchmark.pairs = benchmark.pairs[::every]
    if name == "pose":
        # The estimators of OpenCV take most of the time, and rank the systems alike.
        benchmark.estimators = [POSELIB]  # type: ignore[attr-defined]
    ((label, matcher),) = benchmark.matchers()
    return benchmark.score(label, lambda pair: matcher.match(pair.path0, pair.path1))


def run_costs(system: System, runs: Path, data: Data) -> float:
    """Measure time and memory of a system; return the seconds."""
    start, weights = time.monotonic(), runs / system.name / "weights.safetensors"
    rows = []
    for size in data.timed:
        release_memory()
        matcher = dualrc.load(system.network.preset, weights=weights, device=data.device, size=max(size))
        for name, images in _timed_pairs(data, size):
            rows.append({"size": "{}x{}".format(*size), "pair": name, **_measure(matcher, *images)})
        del matcher
    write_json(runs / system.name / _COSTS, {"weights": file_hash(weights), "rows": rows})
    return time.monotonic() - start


def _measure(matcher: dualrc.Matcher, image0: ImageArray, image1: ImageArray) -> Json:
    """Measure a pair, from arrays to matches, and the features of one image."""

    def match() -> dualrc.Matches:
        return matcher.match(image0, image1)

    def features() -> object:
        return matcher.features(image0)

    on_gpu = matcher.device.type == "cuda"
    # The first runs compile kernels and capture graphs.
    for _ in range(warm_ups(matcher.device)):
        matches = match()
        features()
    repeats = range(_REPEATS if on_gpu else 3)
    timing, extraction = (Timing.of([time_once(run, matcher.device) for _ in repeats]) for run in (match, features))
    return {
        "seconds": timing.median_s,
        "quartiles": (timing.low_s, timing.high_s),
        "features_seconds": extraction.median_s,
        "peak_bytes": peak_of(match, matcher.device),
        "matches": len(matches),
        "engine": matcher.engine,
        "precision": matcher.precision,
    }


def _timed_pairs(data: Data, size: tuple[int, int]) -> Iterable[tuple[str, list[ImageArray]]]:
    """Yield real pairs at this size: of an illumination sequence, of a viewpoint sequence and of a multi-view scene."""
    chosen: dict[str, tuple[Path, Path]] = {}
    for name, roots in (("hpatches", data.hpatches), ("pose", data.scenes)):
        if roots:
            for pair in open_benchmark(name, {"roots": roots, "out": Path()}).pairs:
                chosen.setdefault(pair.group[:2] if name == "hpatches" else name, (pair.path0, pair.path1))
    names = {"i_": "illumination", "v_": "viewpoint", "pose": "multi-view"}
    for key, paths in chosen.items():
        images = [Image.fromarray(read(path)).resize(size, Image.Resampling.LANCZOS) for path in paths]
        yield names[key], [np.asarray(image) for image in images]


def collect(runs: Path, data: Data) -> Json:
    """Return the content of results.json from the folders of all systems whose training has ended."""
    systems, left_out = [], unfinished(runs)
    for system in ALL.values():
        folder = runs / system.name
        parts = [read_json(folder / file) for file in (_ACCURACY, _COSTS)]
        if system.name in left_out or not any(parts):
            continue
        accuracy, costs = (part or {} for part in parts)
        log = read_log(folder / "log.csv")
        network = load_weights(folder / "weights.safetensors")
        frozen = [p for name, p in network.named_parameters() if _is_frozen(name)]
        held_out = {name.removeprefix("held_out_"): log[name] for name in log if name.startswith("held_out_")}
        systems.append(
            {
                "name": system.name,
                "label": system.label,
                "loss": system.loss,
                "parameters": sum(p.numel() for p in network.parameters()) - sum(p.numel() for p in frozen),
                "curve": log.get("loss", []),
                "steps_per_second": [value for _, value in log.get("steps_per_second", [])],
                "held_out": held_out,
                "hpatches": accuracy.get("hpatches", {}),
                "pose": accuracy.get("pose"),
                "costs": costs.get("rows", []),
            }
        )
    made = provenance("poselib", device=choose_device(data.device))
    return {"made": made, "training": read_json(runs / TRAINING_FILE), "systems": systems, "unfinished": left_out}


def _is_frozen(name: str) -> bool:
    return name.startswith("backbone.trunk.") and not name.startswith("backbone.trunk.layer4.")


def tables(results: Json) -> str:
    """Return the results as Markdown tables: accuracy, poses, time and memory, published values, what is missing."""
    parts = [
        _accuracy_table(results, "2000"),
        _accuracy_table(results, "1000"),
        _pose_table(results),
        _cost_table(results),
        _published_table(),
    ]
    if results["unfinished"]:
        parts.append(_unfinished_table(results))
    return "\n\n".join(parts)


def _accuracy_table(results: Json, top: str) -> str:
    header = [f"best {top} matches", "loss", "size", *(f"{px} px" for px in SHOWN_PX), "illum.", "viewp.", "matches"]
    rows = []
    for system in results["systems"]:
        for size, scored in system["hpatches"].items():
            groups = scored[top]
            cells = accuracy_cells({group: groups[group]["mma"] for group in groups})
            matches = f"{groups['overall']['matches']:.0f}"
            rows.append([system["label"], _loss(system), size, *cells, matches])
    return _markdown(header, rows)


def _loss(system: Json) -> str:
    return f"`{system['loss']}`" if system["loss"] else "not trained"


def _pose_table(results: Json) -> str:
    header = ["pose", "loss", "AUC 5°", "10°", "20°", "lost", "epipolar", "matches"]
    rows = []
    for system in results["systems"]:
        pose = system["pose"]
        if pose:
            lost = f"{pose['not_estimated']} of {pose['pairs']}"
            cells = [*map(share, pose["auc"]), lost, share(pose["epipolar_share"]), f"{pose['matches']:.0f}"]
            rows.append([system["label"], _loss(system), *cells])
    return _markdown(header, rows)


def _cost_table(results: Json) -> str:
    sizes = list(dict.fromkeys(row["size"] for system in results["systems"] for row in system["costs"]))
    header = ["time and memory", "loss", "trained parameters", *(f"{size}, {what}" for size in sizes for what in _WHAT)]
    rows = []
    for system in results["systems"]:
        cells = []
        for size in sizes:
            own = [row for row in system["costs"] if row["size"] == size]
            cells += _cost_cells(own) if own else ["-"] * len(_WHAT)
        if system["costs"]:
            rows.append([system["label"], _loss(system), f"{system['parameters']:,}", *cells])
    return _markdown(header, rows)


# Time of a pair, of features of one image, and memory.
_WHAT = ("a pair", "one image", "memory")


def _cost_cells(rows: Sequence[Json]) -> list[str]:
    """Return the time over the pairs as a median and a range, the time of features, and the largest peak."""
    times = [1000 * row["seconds"] for row in rows]
    features = 1000 * float(np.median([row["features_seconds"] for row in rows]))
    memory = max(row["peak_bytes"] for row in rows) / 2**30
    spread = f"{min(times):.1f} to {max(times):.1f}"
    return [f"{np.median(times):.1f} ms ({spread})", f"{features:.1f} ms", f"{memory:.2f} GiB"]


def _published_table() -> str:
    curves = published()
    header = ["as published", *(f"{px} px" for px in SHOWN_PX), "illum.", "viewp.", "a pair", "memory"]
    rows = [[name, *accuracy_cells({g: curves[name][g] for g in GROUPS}), "-", "-"] for name in _PUBLISHED_CURVES]
    for name, (size, seconds, memory) in PUBLISHED_COSTS.items():
        rows.append([f"{name}, {size} px, map of 200 x 150", *["-"] * 6, f"{seconds} s", f"{memory} MB"])
    return _markdown(header, rows)


def _unfinished_table(results: Json) -> str:
    steps = results["training"]["steps"]
    rows = [
        [ALL[name].label, _loss({"loss": ALL[name].loss}), f"{made} of {steps} steps"]
        for name, made in results["unfinished"].items()
    ]
    return _markdown(["not trained yet", "loss", "trained for"], rows)


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines).replace("| --- ", "|---").replace("|--- |", "|---|")


def _show(options: argparse.Namespace) -> None:
    print(tables(json.loads(options.results.read_text(encoding="utf-8"))))


def _size(text: str) -> tuple[int, int]:
    width, height = text.split("x")
    return int(width), int(height)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    training = commands.add_parser("train", help="train the systems")
    evaluation = commands.add_parser("evaluate", help="compare the trained systems")
    for command in (training, evaluation):
        command.add_argument("runs", type=Path, help="folder of the runs")
        command.add_argument("--only", nargs="*", choices=list(ALL), help="names of systems; default: all")
        command.add_argument("--jobs", type=int, default=1, help="systems at a time; default %(default)s")
        command.add_argument("--device", help="cuda or cpu; default: the fastest available")
    training.set_defaults(function=train_all)
    training.add_argument("--photos", type=Path, nargs="+", required=True, help="folders or tar files of photographs")
    training.add_argument("--trunk", type=Path, required=True, help="ImageNet weights of a ResNet-50 up to conv4")
    training.add_argument("--steps", type=int, default=600, help="steps of each system; default %(default)s")
    training.add_argument("--size", type=int, default=400, help="side of the images in pixels; default %(default)s")
    training.add_argument("--pairs", type=int, default=16, help="pairs per step; default %(default)s")
    training.add_argument("--points", type=int, default=128, help="positions per pair; default %(default)s")
    training.add_argument("--rates", type=float, nargs="+", help="learning rates to try; default: by kind of system")
    training.add_argument("--probe", type=int, default=150, help="steps to try a rate; default %(default)s")
    training.add_argument("--minutes", type=float, help="stop then; the same command continues")
    evaluation.set_defaults(function=_evaluate)
    evaluation.add_argument("--hpatches", type=Path, nargs="+", default=[], help="folders of sequences i_* and v_*")
    evaluation.add_argument("--scenes", type=Path, nargs="+", default=[], help="folders with cameras.json")
    evaluation.add_argument("--every", type=int, default=1, help="use every Nth pose pair; default %(default)s")
    evaluation.add_argument("--size", type=int, nargs="+", help="long sides for HPatches; default 1600 800")
    evaluation.add_argument("--timed", type=_size, nargs="+", help="sizes to time; default 800x592 1600x1200")
    showing = commands.add_parser("show", help="print the tables of a results.json as Markdown")
    showing.set_defaults(function=_show)
    showing.add_argument("results", type=Path)
    options = parser.parse_args()
    options.function(options)


if __name__ == "__main__":
    main()
