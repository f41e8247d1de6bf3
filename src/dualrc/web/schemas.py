"""Schemas of request bodies."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from dualrc.config import Quality

Id = Annotated[str, Field(min_length=1, max_length=64)]
Kind = Literal["homography", "fundamental", "essential"]
Score = Annotated[float, Field(ge=0, le=1, description="Minimum score (a probability) of a match.")]
Threshold = Annotated[float, Field(gt=0, le=1000, description="Inlier threshold in pixels.")]
Top = Annotated[int, Field(ge=1, le=1_000_000, description="Maximum number of matches; the best ones are kept.")]
Size = Annotated[
    int, Field(ge=64, le=4096, multiple_of=16, description="Long side of the network input, a multiple of 16.")
]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class MatchOptions(_Body):
    """Options of a match request."""

    quality: Quality = "standard"
    top: Top | None = None
    min_score: Score = 0.0
    size: Size | None = None
    covariance: bool = Field(default=False, description="Also return the covariance of each point of image 1.")
    estimate: Kind | None = Field(default=None, description="Model to fit to the matches.")
    threshold_px: Threshold = 2.0


class MatchBody(MatchOptions):
    """Two uploaded images and the options to match them."""

    image0: Id
    image1: Id


class EstimateBody(_Body):
    """Model to fit to the matches of a pair."""

    kind: Kind
    threshold_px: Threshold = 2.0
    min_score: Score = 0.0
    top: Top | None = None


class PointsBody(_Body):
    """Points of image 0 to find in image 1."""

    image0: Id
    image1: Id
    points: list[tuple[float, float]] = Field(description="(x, y) in pixels of the upright image 0.")
    min_score: Score = 0.0


class WarpBody(_Body):
    """Two images and the settings of a dense warp between them."""

    image0: Id
    image1: Id
    max_side: int = Field(default=512, ge=1, le=4096)
    min_score: Score = 0.0


class CollectionBody(_Body):
    """Images whose pairs are all matched."""

    images: list[Id] = Field(min_length=2)
