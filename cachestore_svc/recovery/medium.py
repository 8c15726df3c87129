"""Where a store's blobs lie, by its settings: in its data directory, or in a bucket with copies there."""

import secrets
import time
from collections.abc import Callable

from kvasir.errors import FailedPrecondition, InvalidArgument

from cachestore_svc.blobs.backend import BlobBackend
from cachestore_svc.blobs.bucket.bucket import Bucket, open_bucket, probe
from cachestore_svc.blobs.bucket.bucket_blobs import BucketBlobs
from cachestore_svc.blobs.bucket.catalogs_bucket import CatalogOwner
from cachestore_svc.blobs.bucket.disk_tier import DiskTier
from cachestore_svc.blobs.bucket.owning import BucketOwner, look_at_bucket, noted_bucket, take_bucket
from cachestore_svc.blobs.disk import Disk, refusal
from cachestore_svc.blobs.local_directory import LocalDirectory
from cachestore_svc.facts.records import StoreConfig
from cachestore_svc.index.catalog import BucketCatalog

BUCKET_NOTE = "bucket"  # in the data directory: which bucket, and by which name it knows this store


def in_bucket(config: StoreConfig) -> bool:
    """Whether the index lies in the bucket, beside the blobs."""
    return config.catalog.startswith("s3://")


def blobs_of(
    config: StoreConfig,
    disk: Disk,
    bucket: Bucket | None = None,
    token_hex: Callable[[int], str] = secrets.token_hex,
    steady: Callable[[], float] = time.monotonic,
    *,
    only_looks: bool = False,
) -> BlobBackend:
    """The blobs of the data directory; without a setting, in the bucket where they were. One that `only_looks` takes no
    bucket, and can remove nothing there. Raises InvalidArgument (a setting), FailedPrecondition (another store's
    bucket, one that does not hold what is needed, or blobs that lie elsewhere; BUCKET_TAKEN: a copy of these data has
    it), DataLoss, Unavailable. `bucket`: the one of the settings."""
    local, note = LocalDirectory(config.data_dir / "namespaces", disk), config.data_dir / BUCKET_NOTE
    has_index = in_bucket(config)
    if has_index and config.blobs not in ("", config.catalog):
        words = f"with an index in a bucket they lie there, too; leave it out, or give {config.catalog}"
        raise InvalidArgument.of("blobs", words)
    where = (config.catalog if has_index else "") or config.blobs or noted_bucket(note)
    if not where:
        return local
    if any(each.list().blobs for each in local.all()):
        raise FailedPrecondition(
            f"the blobs of this store lie in {local.where}: begin a new store with --blobs, and bring its agents there "
            "with kvasir agents export and import"
        )
    bucket = bucket or open_bucket(where, config.blob_credentials_file)
    try:
        owner: BucketOwner | CatalogOwner
        if config.catalog and not has_index:
            if not only_looks:
                disk.make_directory(config.data_dir)
                probe(bucket, token_hex)
            owner = CatalogOwner(bucket, steady)  # takes it once the catalog is open
        elif only_looks:
            owner = look_at_bucket(bucket, note, has_index=has_index)
        else:
            disk.make_directory(config.data_dir)
            probe(bucket, token_hex)
            takes = config.accept_older
            if has_index:  # a store that runs has the lost objects in memory, and goes on
                BucketCatalog.check_listed(bucket, accepts_older=takes)
            owner = take_bucket(bucket, note, token_hex, takes_from_copy=takes, has_index=has_index)
        kept_bytes = config.free_disk_reserve_bytes + config.ballast_bytes
        tier_bytes = 0 if only_looks else config.blob_tier_bytes
        tier = DiskTier(config.data_dir / "tier", tier_bytes, disk, kept_bytes, only_looks=only_looks)
        return BucketBlobs(bucket, owner, local, tier)
    except OSError as error:
        raise refusal(error, where) from error
