"""The options of the cache store: `python -m cachestore_svc serve`."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal
from urllib.parse import parse_qs, urlsplit

from kvasir.options.common import MIB, ListeningTable, gib, seconds_until_expiry
from kvasir.options.table import Table, UpFlag, option


def check_bucket(text: str) -> None:
    """Raises ValueError, which does not repeat what was given: a secret may be in it."""
    try:
        address = urlsplit(text)
        is_right = address.scheme == "s3" and address.netloc and "@" not in text and not {"?", "#"} & {*text}
    except ValueError:
        is_right = False
    if not is_right:
        raise ValueError(
            "expected s3://BUCKET/PREFIX and nothing else; credentials are the environment's (AWS_...), or of "
            "--blob-credentials-file"
        )


def check_catalog(text: str) -> None:
    """Raises ValueError, which does not repeat what was given. A password here would be seen in lists of processes."""
    if text.startswith("s3:"):
        check_bucket(text)
        return
    if not text.startswith(("postgresql://", "postgres://")):
        raise ValueError("expected postgresql://USER@HOST/DATABASE, or s3://BUCKET/PREFIX")
    address = urlsplit(text)
    if address.password is not None or {"password", "sslpassword"} & parse_qs(address.query, True).keys():
        raise ValueError("leave the password out: it is read from PGPASSFILE, ~/.pgpass or PGPASSWORD")


@dataclass(frozen=True, kw_only=True)
class StoreFiles(Table):
    """Addresses and files."""

    data_dir: Path = option(
        Path(), "Where everything is kept. Made (0700) when it does not exist.", of_home=True, needed=True
    )
    catalog: str = option(
        "",
        "The PostgreSQL database that lists agents and blobs, in place of a file in the data directory, from the first "
        "start on. Its password comes from PGPASSFILE, ~/.pgpass or PGPASSWORD. Or a bucket, which then keeps the "
        "blobs, too: any machine goes on from there, one at a time. Needs kvasir[fleet].",
        metavar="postgresql://USER@HOST/DATABASE|s3://BUCKET/PREFIX",
        check=check_catalog,
    )
    listen: str = option("", "Where it listens. Needed to serve.", metavar="unix:/path|HOST:PORT", of_home=True)
    engine_listen: str = option(
        "",
        "A second address for the engines of this machine: their calls wait behind no crowd at the first.",
        metavar="unix:/path",
        of_home=True,
    )
    peers_file: Path | None = option(
        None,
        "Other stores (TOML): which agents may be pulled from them, and which may read here. Left out: none yet.",
        of_home=True,
    )
    seal_key_file: Path | None = option(
        None,
        "The master key that opens sealed namespaces: 64 hex digits, readable by its owner only. Not beside the data.",
        of_home=True,
    )
    seal_keychain: str = option(
        "", "The master key's name in the operating system's keychain. Needs kvasir[keychain].", metavar="NAME"
    )
    sealed_file: Path | None = option(
        None,
        "Lists the sealed namespaces, a line each: one whose key record is gone from the data is refused, and never "
        "plain. Not beside the data. `keys new` and `keys rotate` add to it. Left out: none yet.",
        of_home=True,
    )
    blobs: str = option(
        "",
        "Keep blobs in a bucket of S3, which belongs to this store alone. Needs kvasir[fleet]; credentials are the "
        "environment's (AWS_…). Left out: they lie beside the index.",
        metavar="s3://BUCKET/PREFIX",
        check=check_bucket,
    )
    blob_credentials_file: Path | None = option(
        None,
        "Credentials of the bucket, readable by their owner only: lines `name = value` of aws_access_key_id, "
        "aws_secret_access_key, aws_session_token, region, endpoint_url.",
    )
    blob_tier_bytes: int = option(
        20 << 30, "Of a bucket's blobs, so many bytes that were used last are kept on the disk, too.", least=0
    )
    last_runs_dir: Path | None = option(
        Path("~/.local/state/kvasir/stores"),
        "Where the last commit of each store is noted, outside its data. A start refuses data that are older: an old "
        "copy was put back, and what engines were promised since is lost.",
    )
    accept_older: bool = option(
        False,
        "Start with data that are older than what last ran in their directory, a backup that was put back, or that "
        "were copied from another one; they are the newest from then on. Without data: go on as the store of --catalog "
        "and --blobs whose directory is gone, or begin an empty one.",
        up="accept-older",
    )


@dataclass(frozen=True, kw_only=True)
class StoreRetention(Table):
    """Quotas, versions and expiry."""

    quota_bytes: int | None = option(
        None,
        "Blob bytes that a namespace may hold. Left out: only the disk limits it.",
        least=1,
        up=UpFlag("store-quota-gib", "GIB", gib),
    )
    namespace_quota_bytes: dict[str, int | None] = option(
        {}, "Quotas of some namespaces, before the one of all; null for none.", least=1
    )
    evict_heads: bool = option(
        False,
        "A full quota may remove the newest version of an unpinned, long-unused line. Left out: writes are refused.",
    )
    free_disk_reserve_bytes: int = option(
        256 * MIB, "Writes are refused when they would leave less than this on the disk.", least=0
    )
    max_blob_bytes: int = option(256 * MIB, "A larger blob is refused.", least=1)
    grace_period_s: float = option(3600.0, "How long a blob that nothing names is kept before it is removed.", least=0)
    retained_versions: int = option(
        8, "Versions kept per line, unless the agent says otherwise.", least=1, most=1000, up="keep-versions"
    )
    expires_after_s: float | None = option(
        None,
        "An agent that nobody used for so long is deleted, unless its label kvasir.expires_after says otherwise or it "
        "is pinned. Counted while the store runs. Left out: it stays.",
        least=60,
        metavar="SECONDS",
        up=UpFlag("expire-agents", "12h|30d|never", seconds_until_expiry),
    )
    namespace_expires_after_s: dict[str, float | None] = option(
        {}, "The same of some namespaces, before the one of all; null for never.", least=60
    )


@dataclass(frozen=True, kw_only=True)
class StoreLimits(Table):
    """Work in the background, and limits of calls."""

    write_budget_bytes: int | None = option(
        None,
        "Bytes of blobs that may be written in a day (UTC), for the sake of an SSD; those of index and journal, one or "
        "two hundred kilobytes for a turn, come on top. `kvasir status` warns when it is exceeded. Left out: they are "
        "only counted.",
        least=1,
    )
    write_budget_over: Literal["tell", "refuse"] = option(
        "tell",
        "What happens beyond the budget. tell: it is reported. refuse: tensors are refused until midnight UTC; engines "
        "keep in memory what they cannot store, and lose it if they end before.",
    )
    scrub_bytes_per_s: int = option(
        8 * MIB,
        "How fast every blob is hashed again in the background. What is damaged is fetched from a peer that has it. 0: "
        "never.",
        least=0,
    )
    scrub_every_s: float = option(7 * 86_400.0, "The rest between two such passes.", above=0)
    gc_interval_s: float = option(600.0, "Garbage is collected this often.", above=0)
    read_buffer_bytes: int = option(128 * MIB, "Bytes that all readers together may have waiting to be sent.", least=1)
    stall_timeout_s: float = option(
        30.0,
        "A caller or peer that neither sends nor takes anything for so long in the middle of a transfer is given up.",
        above=0,
    )
    move_patience_s: float = option(
        30.0,
        "An agent stays here when the store that it was to move to is silent for so long before it has all of it.",
        above=0,
    )
    stop_grace_s: float = option(5.0, "How long running calls may go on after SIGTERM.", least=0)


@dataclass(frozen=True, kw_only=True)
class StoreTable(StoreFiles, StoreRetention, StoreLimits, ListeningTable):
    """Peers come from a file of their own, because they are a list: `cachestore_svc/pairing/peers_file.py`."""

    program: ClassVar[str] = "store"
