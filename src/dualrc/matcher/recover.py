"""Recovery of pairs whose first matches do not agree: other scales, then tilted views, then a warning."""

from dataclasses import replace
from typing import TYPE_CHECKING

from dualrc import agreement
from dualrc.config import MatcherConfig
from dualrc.evidence import fills_few_cells
from dualrc.matcher.features import FeaturePair
from dualrc.matches import Matches
from dualrc.texture import is_suspicious, without_blank_areas

if TYPE_CHECKING:
    from dualrc.matcher.matcher import Matcher

# Pair score below which two images most likely have nothing in common.
_CANDIDATE = 0.05
# Score from which a match is more likely right than wrong.
_GOOD = 0.5


def recover(matcher: "Matcher", matches: Matches, pair: FeaturePair, settings: MatcherConfig) -> Matches:
    """Return the matches if they agree with each other, else those of other views of the images if these agree."""
    suspicious, searches = is_suspicious(matches), settings.max_zoom > 1
    # Without a calibration or a search, only blank images matter.
    if not (suspicious or searches or matcher.calibration is not None):
        return matches
    found = agreement.measure_agreement(matches)
    if not found.firm or suspicious:
        textured = without_blank_areas(matches, [own.seen for own in pair])
        if "warning" in textured.info:
            # Without a calibration, all matches of the network are returned.
            return textured if matcher.calibration is not None else replace(matches, info=textured.info)
        if matcher.calibration is not None and textured is not matches:
            matches, found = textured, agreement.measure_agreement(textured)
    # This imports the estimators, which no other call needs.
    from dualrc.matcher.rematch import search_scales, search_tilts

    first, firm = matches, found.firm
    if searches and not (firm and found.same_scale):
        matches = search_scales(matcher, pair, first, found)
        found = agreement.measure_agreement(matches)
    if _is_convincing(matcher, matches, found, suspicious):
        return matches
    if searches and firm:
        # The first matches agreed by chance, so they say nothing about the scale.
        again = search_scales(matcher, pair, first, agreement.NONE)
        if _is_convincing(matcher, again, agreement.measure_agreement(again), suspicious):
            return again
    # Matches that agree in spite of a low pair score are better than those of another view.
    if searches and settings.max_tilt > 1 and matcher.calibration is not None and found.share < agreement.CHANCE:
        tilted = search_tilts(matcher, pair, first, settings.max_tilt)
        if tilted is not None:
            return tilted
    return replace(matches, info={"warning": agreement.LOW, **matches.info})


def settled(matches: Matches) -> Matches:
    """Return matches with calibrated scores, without a warning of their first pass if the pair score contradicts it."""
    if "warning" not in matches.info or matches.pair_score < _CANDIDATE:
        return matches
    return replace(matches, info={key: value for key, value in matches.info.items() if key != "warning"})


def _is_convincing(matcher: "Matcher", matches: Matches, found: agreement.Agreement, suspicious: bool) -> bool:
    """Return whether matches with raw scores agree beyond doubt, or have a pair score that is not very low."""
    if "warning" in matches.info:
        return False
    if matcher.calibration is None:
        return True
    # The few matches of two images at very different scales can agree by chance, and those of the same caption do.
    doubtful = suspicious or "zoom" in matches.info or found.share < agreement.CHANCE or _is_local(matcher, matches)
    return not doubtful or matcher.selected(matches, matcher.config).pair_score >= _CANDIDATE


def _is_local(matcher: "Matcher", matches: Matches) -> bool:
    """Return whether the good ones of the best matches, with raw scores, are in a small part of an image."""
    assert matcher.calibration is not None
    best = matches[: agreement.TOP]
    good = matcher.calibration.matches(best.scores) >= _GOOD
    return fills_few_cells(best.points0[good], best.size0) or fills_few_cells(best.points1[good], best.size1)
