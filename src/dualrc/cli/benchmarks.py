"""The command that scores matchers."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from dualrc.cli import common
from dualrc.errors import ConfigError


@common.app.command()
def evaluate(
    benchmark: Annotated[
        Literal["hpatches", "pose", "inloc", "aachen", "appendix"], typer.Argument(help="What to evaluate.")
    ],
    roots: Annotated[list[Path] | None, typer.Argument(metavar="ROOT...", help="Folders of the data set.")] = None,
    matcher: Annotated[
        list[str] | None,
        typer.Option(
            help="dualrc (if nothing is given), dualrc-high (a second look), sift (RootSIFT by OpenCV: sift-ratio and "
            "sift-mutual), or FILE.py:function, a function of two paths that returns points0, points1, scores. Give it "
            "several times to compare in one table."
        ),
    ] = None,
    preset: common.PresetOption = "default",
    weights: Annotated[
        list[Path] | None,
        typer.Option(
            help="Weights file (.safetensors); without it, those inside the package. "
            "appendix: several, one for each fusion variant and number of channels."
        ),
    ] = None,
    device: common.DeviceOption = None,
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
    """Score matchers on HPatches, two-view poses, InLoc, Aachen Day-Night, and as the paper's appendix does.

    dualrc evaluate hpatches data/hpatches --matcher dualrc --matcher sift --out hpatches

    pose takes MegaDepth-1500, ScanNet-1500, or folders with cameras.json.

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
        evaluate_appendix(comparison, screen=common.screen, messages=common.messages)
        return
    if pairs is not None:
        raise ConfigError("--pairs is for appendix; leave it out.")
    settings = EvaluationSettings(
        benchmark=benchmark,
        roots=tuple(roots or ()),
        inloc=InLocSettings(shortlist=shortlist, candidates=candidates, verify=verify, results=tuple(results or ())),
        matchers=tuple(matcher or ["dualrc"]),
        preset=preset,
        weights=common.at_most_one(weights, "--weights"),
        device=device,
        size=common.at_most_one(size, "--size"),
        top=top,
        crop=None if crop is None else parse_crop(crop),
        truth=truth,
        json=json,
        out=out,
    )
    run(settings, screen=common.screen, messages=common.messages)
