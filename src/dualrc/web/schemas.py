"""Schemas of requests and responses."""

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
# (x, y) in pixels; the center of the first pixel is (0, 0).
Point = tuple[float, float]
Row3 = tuple[float, float, float]


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


class _PairBody(_Body):
    image0: Id
    image1: Id


class MatchBody(_PairBody, MatchOptions):
    """Two uploaded images and the options to match them."""


class EstimateBody(_Body):
    """Model to fit to the matches of a pair."""

    kind: Kind
    threshold_px: Threshold = 2.0
    min_score: Score = 0.0
    top: Top | None = None


class PointsBody(_PairBody):
    """Points of image 0 to find in image 1."""

    points: list[tuple[float, float]] = Field(description="(x, y) in pixels of the upright image 0.")
    min_score: Score = 0.0


class WarpBody(_PairBody):
    """Two images and the settings of a dense warp between them."""

    max_side: int = Field(default=512, ge=1, le=4096)
    min_score: Score = 0.0


class CollectionBody(_Body):
    """Images whose pairs are all matched."""

    images: list[Id] = Field(min_length=2, json_schema_extra={"uniqueItems": True})


class Error(_Body):
    """Error of a request."""

    error: str
    code: str


class Health(_Body):
    """Status of the server."""

    status: Literal["ok"]
    version: str


class Example(_Body):
    """Example pair."""

    name: str
    title: str
    description: str
    thumbnails: tuple[str, str]


class ModelSummary(_Body):
    """Reconstruction that the server shows."""

    name: str
    images: int
    points: int


class Info(_Body):
    """Versions and limits of a server."""

    version: str
    preset: str
    weights: str | None
    device: str
    engine: str
    precision: str
    qualities: list[str]
    max_bytes: int
    max_pixels: int
    max_images: int
    max_collection: int
    max_points: int
    keep_s: float
    examples: list[Example]
    reconstruction: ModelSummary | None


class _Image(_Body):
    id: str
    name: str
    width: int
    height: int


class Image(_Image):
    """Stored image; width and height are those of the upright image."""

    expires_s: int


class ExampleImages(_Body):
    """Images of an example."""

    image0: Image
    image1: Image
    truth: bool = Field(description="Whether both images show the same scene.")


class Verdict(_Body):
    """Pair score as a phrase."""

    level: Literal["same", "unsure", "different"]
    text: str


class Commands(_Body):
    """Shell command and Python code that find the same matches and fit the same model."""

    shell: str
    python: str


class EstimateResult(_Body):
    """Model fitted to the matches of a pair."""

    kind: Kind
    matrix: list[Row3] | None
    fundamental: list[Row3] | None = Field(description="Fundamental matrix in pixels, or null for a homography.")
    inliers: list[bool] = Field(description="A flag for each match of the pair.")
    inlier_count: int
    threshold_px: float | None
    cameras: str | None = Field(description="Source of the cameras of an essential matrix.")
    cam1_from_cam0: list[list[float]] | None = Field(description="3x4 pose of an essential matrix.")
    warnings: list[str]


class FittedModel(EstimateResult):
    """Model that was fitted to the matches of a pair on request."""

    commands: Commands


class PairResult(_Body):
    """Matches of two images, best first, in pixels of the upright images."""

    pair: str
    image0: str
    image1: str
    name0: str
    name1: str
    size0: tuple[int, int]
    size1: tuple[int, int]
    count: int
    points0: list[Point]
    points1: list[Point]
    scores: list[float]
    covariance: list[tuple[Point, Point]] | None
    pair_score: float | None
    verdict: Verdict
    warning: str | None
    zoom: float | None
    tilted: bool
    estimate: EstimateResult | None
    seconds: float
    device: str
    network_size0: tuple[int, int] | None
    network_size1: tuple[int, int] | None
    commands: Commands


class JobStarted(_Body):
    """Job of a match with `wait=false`."""

    job: str


class CollectionStarted(JobStarted):
    """Job that matches all pairs of a collection."""

    collection: str


class Points(_Body):
    """Positions in image 1 of the requested points; null if no counterpart was found."""

    points1: list[Point | None]
    scores: list[float]


class Event(BaseModel):
    """Last event of a job: the fields of `progress`, the `result` of `done`, or the error of `failed`."""

    event: Literal["progress", "done", "failed", "cancelled"]
    state: str | None = None
    position: int | None = None
    stage: str | None = None
    fraction: float | None = None
    step: int | None = None
    result: str | None = None
    error: str | None = None
    code: str | None = None
    done: int | None = None
    total: int | None = None


class CollectionImage(_Image):
    """Image of a collection."""


class CollectionResult(_Body):
    """Pair scores of a collection, and its results by "i,j"."""

    images: list[CollectionImage]
    scores: list[list[float | None]] = Field(description="Symmetric; null for pairs that are not matched yet.")
    pairs: dict[str, str]


class CameraModel(_Body):
    """Camera with COLMAP's parameters."""

    model: str
    width: int
    height: int
    params: list[float]
    K: list[Row3]


class ModelImage(_Image):
    """Pose and camera of an upright image."""

    cam_from_world: list[list[float]]
    camera: CameraModel | None
    observations: int


class Model(_Body):
    """Images of a reconstruction."""

    name: str
    images: list[ModelImage]
    points_url: str
    count: int
    views: bool = Field(description="Whether the server has the images.")


class Observation(_Body):
    """Position of a 3D point in an image."""

    image: str
    name: str
    x: float
    y: float


class ModelPoint(_Body):
    """3D point and its observations."""

    xyz: Row3
    rgb: tuple[int, int, int]
    error: float | None
    track: list[Observation]
