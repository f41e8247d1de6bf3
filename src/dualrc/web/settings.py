"""Settings and limits of the service."""

from dataclasses import dataclass, fields

from dualrc.errors import ConfigError

# Number of bytes in a mebibyte.
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Settings of a server: access, limits of requests, storage and queue."""

    # Token that requests must contain. None disables the check, which is allowed on loopback addresses only.
    token: str | None = None
    # Accepted host names, as a protection against DNS rebinding. An empty tuple accepts all.
    hosts: tuple[str, ...] = ()
    # Maximum size of an uploaded file, in bytes.
    max_bytes: int = 64 * MIB
    # Maximum number of pixels of an uploaded image.
    max_pixels: int = 100_000_000
    # Maximum size of a JSON request body, in bytes.
    max_json: int = 4 * MIB
    # Maximum number of stored images.
    max_images: int = 256
    # Maximum size of all stored images on disk, in bytes.
    max_disk: int = 2048 * MIB
    # Seconds after their last use for which images and results are stored.
    keep_s: float = 3600.0
    # Maximum memory of cached features, in bytes.
    feature_bytes: int = 768 * MIB
    # Maximum memory of decoded images, in bytes.
    pixel_bytes: int = 256 * MIB
    # Maximum memory of results, in bytes.
    result_bytes: int = 256 * MIB
    # Maximum number of queued jobs.
    max_queue: int = 64
    # Maximum number of queued and running jobs of one client.
    max_client_jobs: int = 16
    # Time limit of a job, in seconds.
    limit_s: float = 120.0
    # Time limit of the job of a collection, in seconds.
    collection_s: float = 3600.0
    # Maximum number of images of a collection.
    max_collection: int = 40
    # Maximum number of points in one request.
    max_points: int = 20_000
    # Maximum number of concurrent uploads.
    max_uploads: int = 8
    # Time limit of an upload, in seconds.
    upload_s: float = 60.0
    # Maximum number of open event streams.
    max_streams: int = 128
    # Maximum number of pairs in a batch on a GPU.
    batch: int = 8

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and not value > 0:
                raise ConfigError(f"{field.name} = {value} must be positive.")
        if self.token is not None and (len(self.token) < 8 or not self.token.isascii() or not self.token.isprintable()):
            raise ConfigError("The token must have at least 8 characters, all of them printable ASCII.")
