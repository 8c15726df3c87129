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
        Path(), "The directory of all data. The store makes it (0700) if it does not exist.", of_home=True, needed=True
    )
    catalog: str = option(
        "",
        "The PostgreSQL database that lists agents and blobs, in place of a file in the data directory, from the "
        "first start on. Its password comes from PGPASSFILE, ~/.pgpass or PGPASSWORD. Or a bucket, which then keeps "
        "the blobs, too: any machine can continue from it, one at a time. Needs kvasir[fleet].",
        metavar="postgresql://USER@HOST/DATABASE|s3://BUCKET/PREFIX",
        check=check_catalog,
    )
    listen: str = option(
        "", "The address of the store. `serve` needs it.", metavar="unix:/path|HOST:PORT", of_home=True
    )
    engine_listen: str = option(
        "",
        "A second address, for the engines of this machine: their calls do not queue behind those at the first "
        "address.",
        metavar="unix:/path",
        of_home=True,
    )
    peers_file: Path | None = option(
        None,
        "A file (TOML) that lists other stores, and what each may do here. Default: no other store.",
        of_home=True,
    )
    seal_key_file: Path | None = option(
        None,
        "A file with the master key that opens sealed namespaces: 64 hex digits, readable by its owner only. Keep it "
        "apart from the data.",
        of_home=True,
    )
    seal_keychain: str = option(
        "", "The master key's name in the operating system's keychain. Needs kvasir[keychain].", metavar="NAME"
    )
    sealed_file: Path | None = option(
        None,
        "A file that lists the sealed namespaces, a line each. The store refuses a listed namespace if its key "
        "record is missing from the data, and never stores it in plain form. Keep it apart from the data. `keys new` "
        "and `keys rotate` add lines. Default: no file.",
        of_home=True,
    )
    blobs: str = option(
        "",
        "Keep blobs in an S3 bucket, which belongs to this store alone. Needs kvasir[fleet]; credentials come from "
        "the environment (AWS_…). Default: blobs lie beside the index.",
        metavar="s3://BUCKET/PREFIX",
        check=check_bucket,
    )
    blob_credentials_file: Path | None = option(
        None,
        "Credentials of the bucket, readable by their owner only: lines `name = value` of aws_access_key_id, "
        "aws_secret_access_key, aws_session_token, region, endpoint_url.",
    )
    blob_tier_bytes: int = option(
        20 << 30,
        "Bytes of the disk that cache the bucket's most recently used blobs: at most half of the free room.",
        least=0,
    )
    last_runs_dir: Path | None = option(
        Path("~/.local/state/kvasir/stores"),
        "A directory, outside the data, in which each store notes its last commit. A store refuses to start with "
        "older data: somebody restored an old copy, which lacks memories that engines had acknowledged.",
    )
    accept_older: bool = option(
        False,
        "Start with data that are older than those that last ran in their directory (a restored backup), or that "
        "were copied from another directory; from then on they are the newest. Without data: continue the store of "
        "--catalog and --blobs whose directory is gone, or begin an empty one.",
        up="accept-older",
    )


@dataclass(frozen=True, kw_only=True)
class StoreRetention(Table):
    """Quotas, versions and expiry."""

    quota_bytes: int | None = option(
        None,
        "The most bytes of blobs that a namespace may hold. Default: only the disk limits it.",
        least=1,
        up=UpFlag("store-quota-gib", "GIB", gib),
    )
    namespace_quota_bytes: dict[str, int | None] = option(
        {}, "Quotas of single namespaces, in place of the quota of all; null: no quota.", least=1
    )
    evict_heads: bool = option(
        False,
        "When a quota is full, the store may remove the newest version of a line that is not pinned and was not used "
        "for long. Default: the store refuses the write.",
    )
    free_disk_reserve_bytes: int = option(
        256 * MIB, "The store refuses writes that would leave less free space on the disk.", least=0
    )
    max_blob_bytes: int = option(256 * MIB, "The largest blob that the store accepts.", least=1)
    grace_period_s: float = option(3600.0, "How long the store keeps a blob that no version names.", least=0)
    retained_versions: int = option(
        8,
        "Versions that the store keeps of each line, unless the agent has its own number.",
        least=1,
        most=1000,
        up="keep-versions",
    )
    expires_after_s: float | None = option(
        None,
        "The store deletes an agent that nobody used for this long, unless the agent is pinned or has its own time "
        "in the label kvasir.expires_after. Only time in which the store runs counts. Default: never.",
        least=60,
        metavar="SECONDS",
        up=UpFlag("expire-agents", "12h|30d|never", seconds_until_expiry),
    )
    namespace_expires_after_s: dict[str, float | None] = option(
        {}, "The same for single namespaces, in place of the time of all; null: never.", least=60
    )


@dataclass(frozen=True, kw_only=True)
class StoreLimits(Table):
    """Work in the background, and limits of calls."""

    write_budget_bytes: int | None = option(
        None,
        "Daily write budget (UTC) for blobs, in bytes, which protects an SSD. Index and journal write one or two "
        "hundred kilobytes more for each turn. `kvasir status` warns when the budget is exceeded. Default: the store "
        "only counts.",
        least=1,
    )
    write_budget_over: Literal["tell", "refuse"] = option(
        "tell",
        "What the store does beyond the budget. tell: it warns. refuse: it refuses tensors until midnight UTC; "
        "engines keep those memories in RAM, and lose them if they end earlier.",
    )
    scrub_bytes_per_s: int = option(
        8 * MIB,
        "How fast the store verifies its blobs in the background, in bytes a second. It fetches a damaged blob from "
        "a peer that has it. 0: it does not verify.",
        least=0,
    )
    scrub_every_s: float = option(7 * 86_400.0, "The pause between two such passes.", above=0)
    read_ahead_bytes: int | None = option(
        None,
        "How much the store reads behind its start of the memories that were used last, so that their first turns do "
        "not wait for the disk: the system keeps it as long as nobody else needs the room. 0: nothing, and so of a "
        "bucket. Default: an eighth of the machine's memory.",
        least=0,
    )
    gc_interval_s: float = option(600.0, "The time between two garbage collections.", above=0)
    read_buffer_bytes: int = option(
        128 * MIB, "The most bytes that may wait to be sent to all readers together.", least=1
    )
    stall_timeout_s: float = option(
        30.0,
        "The store ends a transfer in which the other side neither sends nor reads anything for this long.",
        above=0,
    )
    move_patience_s: float = option(
        30.0,
        "The store cancels a move if the destination is silent for this long before it has the whole agent.",
        above=0,
    )
    stop_grace_s: float = option(5.0, "How long running calls may continue after SIGTERM.", least=0)


@dataclass(frozen=True, kw_only=True)
class StoreTable(StoreFiles, StoreRetention, StoreLimits, ListeningTable):
    """Peers come from a file of their own, because they are a list: `cachestore_svc/pairing/peers_file.py`."""

    program: ClassVar[str] = "store"
