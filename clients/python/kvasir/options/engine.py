"""The options of the engine: `python -m inference_svc serve`."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from kvasir.credentials import DEFAULT_NAMESPACE
from kvasir.options.common import ListeningTable, seconds, seconds_until_expiry
from kvasir.options.table import Table, UpFlag, WrongOption, option

KvPolicy = Literal["q4", "q4-rotated", "k8v4", "q8", "fp", "auto"]
AUTO = "auto"  # the word for a size that the engine chooses


@dataclass(frozen=True, kw_only=True)
class EngineFiles(Table):
    """Addresses, files, and other services."""

    listen: str = option("", "The address of the engine.", metavar="unix:/path|HOST:PORT", of_home=True, needed=True)
    model: tuple[str, ...] = option(
        (),
        "A directory or Hugging Face repository of a model that mlx-lm can load: PATH, or NAME=PATH. Repeat it to "
        "offer several models: the engine loads the first, and `kvasir models load` changes to another. Default: "
        "kvasir-tiny, which is in the package, as kvasir-tiny-wedlm is.",
        metavar="[NAME=]PATH",
        up="model",
    )
    store: str = option(
        "",
        "The address of the cache store. Default: no store; memories are hot only, and end with the process.",
        metavar="unix:/path|HOST:PORT",
        of_home=True,
    )
    store_token_file: dict[str, Path] = option(
        {},
        "A file with the engine's token at the store: PATH, or NAMESPACE=PATH, once for each namespace that the "
        "engine serves.",
        metavar="[NAMESPACE=]PATH",
        usual_name=DEFAULT_NAMESPACE,
        of_home=True,
    )
    store_token_dir: Path | None = option(
        None,
        "A directory with a file engine@NAMESPACE.token for each further namespace. After SIGHUP the engine also "
        "serves new ones.",
        of_home=True,
    )
    store_data_dir: Path | None = option(
        None,
        "The store's data directory, if it belongs to this user and lies on this machine: the engine reads blobs "
        "there, and verifies them. Default: the store sends all blobs.",
        of_home=True,
    )
    store_ca_file: Path | None = option(
        None,
        "PEM: the store's own certificate, which the engine pins, or that of the authority that signed it. Needed "
        "beyond this machine.",
        of_home=True,
    )
    service_admin: tuple[str, ...] = option(
        (),
        "A credential with the role admin that may change models and see the numbers of all namespaces; repeatable. "
        "Other admins act for their own namespace. The owner of the Unix socket always may.",
        metavar="NAME",
        of_home=True,
    )
    neighbour: bool = option(
        False,
        "Also serve mlx.grpc.engine.MlxEngine, at the same address, for gateways that call it. Needs "
        "kvasir[neighbour].",
        up="neighbour",
    )
    state_dir: Path = option(
        Path.home() / ".kvasir" / "engine",
        "The engine's own directory. It keeps the digests of weights by file identity, and so hashes each file once.",
        of_home=True,
    )


@dataclass(frozen=True, kw_only=True)
class EnginePeers(Table):
    """Other engines, to which turns may move."""

    peer: dict[str, str] = option(
        {},
        "Another engine to which decoding turns may move (`kvasir agents move`); repeatable. Readers over HTTP "
        "follow the turn. The gateway shows their keys to that engine, which must accept them: name only an engine "
        "that you trust as much as this one.",
        metavar="NAME=ADDRESS",
        up="peer",
    )
    peer_token_file: dict[str, Path] = option(
        {},
        "A file with this engine's token at a peer: NAME=PATH, or NAMESPACE/NAME=PATH; repeatable. The token has the "
        "role engine, or, if the peer has another store, the role handover and the name by which that store knows "
        "this engine's store.",
        metavar="NAME=PATH",
        up="peer-token-file",
    )
    peer_store: dict[str, str] = option(
        {},
        "The peer NAME has another store, which this engine's store calls STORE. When a decoding turn moves to that "
        "engine, its agent moves to that store. Default: both engines use one store.",
        metavar="NAME=STORE",
        up="peer-store",
    )
    peer_ca_file: dict[str, Path] = option(
        {},
        "PEM: the peer's certificate, which the engine pins, or that of the authority that signed it. Needed for "
        "each peer beyond this machine.",
        metavar="NAME=PATH",
        up="peer-ca-file",
    )
    peers_file: Path | None = option(
        None,
        "The file (TOML) of the store's paired peers. Turns may move to their engines, too, under the same names and "
        "with the certificates of the pairing. Default: none.",
        of_home=True,
    )
    drain_to: str = option(
        "", "The peer that takes over decoding turns when this engine stops. Default: they finish here.", metavar="NAME"
    )


@dataclass(frozen=True, kw_only=True)
class EngineMemory(Table):
    """The KV of agents: its bytes, its form, and how long it stays."""

    memory_gib: float | None = option(
        None,
        "The most memory for the KV of all agents, hot and running, in GiB. The engine allocates it when it needs "
        "it; on an NVIDIA GPU at its start. auto: half of the memory that weights and other engines here leave, or "
        "64 full contexts; see `kvasir doctor`. Default: auto.",
        above=0,
        none=AUTO,
        metavar="GIB|auto",
        up="memory-gib",
    )
    device_gib: float | None = option(
        None,
        "The most memory that all engines of this machine use together, in GiB. Default: all memory, on a Mac the "
        "part that Metal recommends.",
        above=0,
        metavar="GIB",
    )
    keep_hot_s: float = option(
        600.0,
        "After this time without a turn the engine drops stored memories from RAM, except 64 MiB. It also drops "
        "them, the least expected first, while the machine is short of memory. No effect on an NVIDIA GPU.",
        above=0,
        metavar="SECONDS",
    )
    context_tokens: int | None = option(
        None,
        "The most tokens of an agent's context. Default, and limit: the model's own (the log reports a larger value).",
        least=2,
        metavar="TOKENS",
        up="context-tokens",
    )
    kv_policy: KvPolicy = option(
        "q4",
        "How K and V are stored, cheapest first: q4, q4-rotated (rotates keys first), k8v4, q8, fp (16 bits); or "
        "auto: the cheapest that answers as exact KV does, which the engine measures at the first start with a model "
        "(up to two minutes). `kvasir bench quality` shows their costs.",
        up="kv-policy",
    )
    kv_exact_layers: str = option(
        "",
        'Layers that keep 16 bits: "last", or indexes separated by commas.',
        metavar="last|N,…",
        up="kv-exact-layers",
    )
    asleep_after_s: float | None = option(
        None,
        "While no turn runs, the engine puts agents to sleep that nobody used for this long, as `kvasir agents "
        "sleep` does: their next turn computes their KV again, bit for bit. Older versions are removed. Default: "
        "never.",
        least=1,
        metavar="SECONDS",
        up=UpFlag("agents-asleep-after", "12h|30d|never", seconds_until_expiry),
    )
    wake_ahead_share: float = option(
        0.1,
        "The engine wakes sleeping agents before their next turn, where earlier turns show when it may come: while "
        "no turn runs, for at most this share of the time (0.1 is a tenth), in half of the KV memory. For that it "
        "keeps the names of agents and the times of their turns in returns.json of its state, but none of sealed "
        "namespaces. 0: it wakes none, and removes that file.",
        least=0,
        most=1,
        metavar="SHARE",
        up="wake-ahead-share",
    )


@dataclass(frozen=True, kw_only=True)
class EngineModels(Table):
    """How models are loaded, compute, and are unloaded."""

    compute_type: Literal["float32", "float16", "bfloat16"] | None = option(
        None, "The type of the model's arithmetic. Default: float32 on a CPU, else the model's own."
    )
    copy_weights: bool = option(
        False,
        "Read the weights into memory, even if their files can be mapped. Use it if a program may truncate or "
        "overwrite the files while the model serves; to replace a file by a rename is harmless.",
    )
    batch_invariant: bool = option(
        False,
        "On a GPU, make each reply's tokens independent, bit for bit, of the turns beside it: each pass decodes 16 "
        "rows, some of them empty. On a CPU they always are.",
    )
    kernels: Literal["auto", "reference"] = option(
        "auto",
        "Kernels for attention, new KV and products of a few rows on a GPU. auto: those whose results are correct in "
        "a check at start, else MLX's own operations. reference: always MLX's operations.",
        up="kernels",
    )
    embeddings: str = option(
        "",
        "A model that only makes embeddings, beside the others: PATH or NAME=PATH, a directory or Hugging Face "
        "repository in sentence-transformers' layout (BERT, RoBERTa) or in mlx-lm's. Default: the loaded model makes "
        "them.",
        metavar="[NAME=]PATH",
        up="embeddings",
    )
    embedding_pooling: Literal["mean", "last"] = option(
        "mean",
        "Which of a text's last hidden rows make its embedding: the mean of all rows, or the last row. It applies to "
        "the loaded model and to models in mlx-lm's layout; those in sentence-transformers' layout name their own.",
    )
    keep_alive_s: float | None = option(
        None,
        "The engine unloads a model that no turn used for this long, or up to twice as long; the next turn loads it "
        "again. Default: never.",
        above=0,
        metavar="SECONDS",
        up=UpFlag("keep-alive", "90s|10m|2h", seconds),
    )


@dataclass(frozen=True, kw_only=True)
class EngineDrafts(Table):
    """Tokens that a step tries ahead."""

    most_drafts: int | None = option(
        None,
        "The most draft tokens of a turn in one step. The engine drafts from repeated text, and decides how many "
        "tokens pay by how often they are accepted and what a step costs. 0: none. Default: 16, but 0 on Metal, "
        "where no Mac has shown yet that drafts change no reply. For a WeDLM model: the masks behind the first one; "
        "default: as in its config.json.",
        least=0,
        up="most-drafts",
    )
    drafts_from: Literal["namespace", "turn"] = option(
        "namespace",
        "The source of draft tokens: also the text of other agents of the same namespace whose KV is in memory, or "
        "the turn's own text alone. It changes no reply, but a faster reply may show an agent that another agent has "
        "the same text.",
        up="drafts-from",
    )


@dataclass(frozen=True, kw_only=True)
class EngineLimits(Table):
    """Limits of bytes, turns and times."""

    longest_gap_ms: float = option(
        50.0,
        "How long an interactive stream may wait for its next token while the engine computes other prompts. A "
        "higher value gives earlier first tokens under many requests. If a step alone takes most of this time, the "
        "work beside it may take as long as the step.",
        least=0,
        metavar="MS",
        up="longest-gap-ms",
    )
    max_prompt_bytes: int = option(
        8 << 20,
        "The largest prompt. gRPC refuses a request of more than twice this and 1 MiB, without naming a field.",
        above=0,
    )
    max_turns: int = option(
        256, "The most turns that may wait or run. The engine refuses more, with a time to retry.", above=0
    )
    max_turns_per_namespace: int | None = option(
        None,
        "The most of these turns in one namespace; fewer while other namespaces have turns, so that a place stays "
        "free. Default: three quarters.",
        above=0,
    )
    max_turns_per_caller: int | None = option(
        None, "The most of these turns of one credential. Default: three quarters.", above=0
    )
    max_publishing_bytes: int = option(512 << 20, "The most bytes of KV copies that wait for the store.", above=0)
    max_unread_bytes: int = option(
        256 << 10, "The engine ends the turns of a reader that leaves more bytes of its replies unread.", above=0
    )
    reader_stall_s: float = option(
        60.0, "The engine also ends the turns of a reader that reads no message for this long.", above=0
    )
    store_budget_ms: float = option(
        250.0,
        "The most time that a turn waits for a store that makes no progress, in total. A turn of append_messages "
        "waits two seconds if that is more to learn its agent's memory, without which it is refused.",
        least=0,
    )
    store_wait_s: float = option(
        0.0,
        "How long the engine's start waits for a store that starts at the same time. After that it continues without.",
        least=0,
        of_home=True,
    )
    commit_wait_s: float = option(
        2.0, "How long the last message of a turn waits for the commit before it reports: pending.", least=0
    )
    publish_timeout_s: float = option(
        30.0,
        "A publication fails after this long without progress; the memory stays hot, and the engine tries again.",
        above=0,
    )
    stop_grace_s: float = option(
        10.0,
        "How long running turns may continue after SIGTERM. After that the engine stores hot memories until nothing "
        "has progressed for this long.",
        least=0,
    )


@dataclass(frozen=True, kw_only=True)
class EngineTable(EngineFiles, EnginePeers, EngineMemory, EngineModels, EngineDrafts, EngineLimits, ListeningTable):
    program: ClassVar[str] = "engine"

    def check(self) -> None:
        for name in ("store_token_file", "store_token_dir"):
            if getattr(self, name) and not self.store:
                raise WrongOption(name, "it needs a store: name one with --store, or omit this")
        if self.store and not self.store.startswith("unix:") and not (self.store_token_file or self.store_token_dir):
            raise WrongOption("store_token_file", f"the store at {self.store} takes no calls without a token")
        if self.drain_to and self.drain_to not in self.peer and self.peers_file is None:
            raise WrongOption("drain_to", f"{self.drain_to!r} is no peer: name it with --peer {self.drain_to}=ADDRESS")
