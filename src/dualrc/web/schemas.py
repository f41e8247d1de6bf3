"""Bodies of requests, checked before anything else looks at them."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from dualrc.config import Quality
from dualrc.web.pairs import MatchSettings

Id = Annotated[str, Field(min_length=1, max_length=64)]
Kind = Literal["homography", "fundamental", "essential"]
Score = Annotated[float, Field(ge=0, le=1, description="Least score (a probability) of a match.")]
Threshold = Annotated[float, Field(gt=0, le=1000, description="Inlier threshold in pixels.")]
Top = Annotated[int, Field(ge=1, le=1_000_000, description="Keep only this many matches, the best ones.")]
Size = Annotated[
    int, Field(ge=64, le=4096, multiple_of=16, description="Long side that the network sees, a multiple of 16.")
]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class MatchOptions(_Body):
    """How to match."""

    quality: Quality = "standard"
    top: Top | None = None
    min_score: Score = 0.0
    size: Size | None = None
    estimate: Kind | None = Field(default=None, description="Fit this model too.")
    threshold_px: Threshold = 2.0

    def settings(self) -> MatchSettings:
        """The same for the service."""
        return MatchSettings(**{name: getattr(self, name) for name in MatchOptions.model_fields})


class MatchBody(MatchOptions):
    """Two uploaded images and how to match them."""

    image0: Id
    image1: Id


class EstimateBody(_Body):
    """Which model to fit to a pair's matches."""

    kind: Kind
    threshold_px: Threshold = 2.0
    min_score: Score = 0.0
    top: Top | None = None


class PointsBody(_Body):
    """Points of image 0 whose places in image 1 are asked for."""

    image0: Id
    image1: Id
    points: list[tuple[float, float]] = Field(description="(x, y) in pixels of the upright image 0.")
    min_score: Score = 0.0


class WarpBody(_Body):
    """Two images between which a dense warp is asked for."""

    image0: Id
    image1: Id
    max_side: int = Field(default=512, ge=1, le=4096)
    min_score: Score = 0.0


class CollectionBody(_Body):
    """Images of which all pairs are matched."""

    images: list[Id] = Field(min_length=2)
