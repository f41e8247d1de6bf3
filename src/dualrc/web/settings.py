"""Limits of the service."""

from dataclasses import dataclass, fields

from dualrc.errors import ConfigError

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What a server accepts and keeps; every limit is a number that a request can't exceed."""

    # Token that requests must carry; None: no token, which only a loopback address allows.
    token: str | None = None
    # Host names that requests may be addressed to; empty: any. Guards a local server against DNS rebinding.
    hosts: tuple[str, ...] = ()
    # Bytes of one uploaded file, and pixels of the image in it.
    max_bytes: int = 64 * MIB
    max_pixels: int = 100_000_000
    # Bytes of a JSON body.
    max_json: int = 4 * MIB
    # Uploaded images that are kept, their bytes on disk, and the seconds that each is kept after its last use.
    max_images: int = 256
    max_disk: int = 2048 * MIB
    keep_s: float = 3600.0
    # Bytes of features, of decoded images, and of results in memory.
    feature_bytes: int = 768 * MIB
    pixel_bytes: int = 256 * MIB
    result_bytes: int = 256 * MIB
    # Jobs that wait, in total and for one client; each ends after `limit_s`, that of a collection after `collection_s`.
    max_queue: int = 64
    max_client_jobs: int = 16
    limit_s: float = 120.0
    collection_s: float = 3600.0
    # Images of a collection, all pairs of which are matched, and points of one request.
    max_collection: int = 40
    max_points: int = 20_000
    # Requests that upload at the same time, and seconds that each may take.
    max_uploads: int = 8
    upload_s: float = 60.0
    # Event streams that are open at the same time.
    max_streams: int = 128
    # Pairs that are matched together on a GPU.
    batch: int = 8

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and not value > 0:
                raise ConfigError(f"{field.name} = {value} must be positive.")
        if self.token is not None and (len(self.token) < 8 or not self.token.isascii() or not self.token.isprintable()):
            raise ConfigError("The token must have at least 8 characters, all of them printable ASCII.")
