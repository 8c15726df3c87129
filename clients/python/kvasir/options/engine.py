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

    listen: str = option("", "Where it listens.", metavar="unix:/path|HOST:PORT", of_home=True, needed=True)
    model: tuple[str, ...] = option(
        (),
        "A directory or Hugging Face repository of a model that mlx-lm loads: PATH, or NAME=PATH, once for each model "
        "that may be loaded; the first is, and `kvasir models load` swaps them. Left out: kvasir-tiny, which ships, as "
        "kvasir-tiny-wedlm does.",
        metavar="[NAME=]PATH",
        up="model",
    )
    store: str = option(
        "",
        "Cache store. Left out: memories are hot only, and end with the process.",
        metavar="unix:/path|HOST:PORT",
        of_home=True,
    )
    store_token_file: dict[str, Path] = option(
        {},
        "The engine's token at the store: PATH, or NAMESPACE=PATH, once for each namespace that is served.",
        metavar="[NAMESPACE=]PATH",
        usual_name=DEFAULT_NAMESPACE,
        of_home=True,
    )
    store_token_dir: Path | None = option(
        None,
        "A directory with a file engine@NAMESPACE.token for each further namespace; SIGHUP takes up new ones.",
        of_home=True,
    )
    store_data_dir: Path | None = option(
        None,
        "The store's data directory, if it is this user's and on this machine: blobs are read there, and verified. "
        "Left out: all come from the store.",
        of_home=True,
    )
    store_ca_file: Path | None = option(
        None,
        "PEM: the store's own certificate, which pins it, or the authority that signed it. Needed beyond this machine.",
        of_home=True,
    )
    service_admin: tuple[str, ...] = option(
        (),
        "A credential with role admin that may change models and see the numbers of all namespaces, once for each. Any "
        "other admin acts for its own namespace. The owner of the Unix socket needs no naming.",
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
        "Digests of weights are kept here by file identity, so that they are hashed once.",
        of_home=True,
    )


@dataclass(frozen=True, kw_only=True)
class EnginePeers(Table):
    """Other engines, to which turns may move."""

    peer: dict[str, str] = option(
        {},
        "Another engine, to which turns may move while they are decoding (`kvasir agents move`), once for each. HTTP "
        "readers follow, with keys that hold there too and are shown to it as they are: trust it as this engine.",
        metavar="NAME=ADDRESS",
        up="peer",
    )
    peer_token_file: dict[str, Path] = option(
        {},
        "This engine's token at a peer, with role engine, or handover if its store is another one (of the name by "
        "which that store knows this engine's): NAME=PATH, or NAMESPACE/NAME=PATH, once for each.",
        metavar="NAME=PATH",
        up="peer-token-file",
    )
    peer_store: dict[str, str] = option(
        {},
        "That peer has another store, which this engine's store knows as its peer STORE; an agent that goes to the one "
        "engine while it is decoding moves to the other store. Left out: both engines have one store.",
        metavar="NAME=STORE",
        up="peer-store",
    )
    peer_ca_file: dict[str, Path] = option(
        {},
        "PEM: its certificate, which pins it, or the authority that signed it; once for each peer beyond this machine.",
        metavar="NAME=PATH",
        up="peer-ca-file",
    )
    peers_file: Path | None = option(
        None,
        "Paired peers of the store (TOML), whose engines are this one's peers, too: turns move to them under the same "
        "name, with the certificates of the pairing. Left out: none.",
        of_home=True,
    )
    drain_to: str = option(
        "", "The peer that takes over decoding turns when this engine stops. Left out: they end here.", metavar="NAME"
    )


@dataclass(frozen=True, kw_only=True)
class EngineMemory(Table):
    """The KV of agents: its bytes, its form, and how long it stays."""

    memory_gib: float | None = option(
        None,
        "The most memory for the KV of all agents, hot and running, in GiB; it is taken as it is used, but on an "
        "NVIDIA GPU at the start. auto: half of what the weights and other engines here leave, or 64 whole contexts; "
        "see `kvasir doctor`. Default: auto.",
        above=0,
        none=AUTO,
        metavar="GIB|auto",
        up="memory-gib",
    )
    device_gib: float | None = option(
        None,
        "The most memory that this machine's engines take together, in GiB. Left out: all that it has, on a Mac the "
        "part that Metal recommends.",
        above=0,
        metavar="GIB",
    )
    keep_hot_s: float = option(
        600.0,
        "When no turn has come for so long, memories that the store has leave RAM, but for 64 MiB. So they do, the "
        "least expected first, while the machine is short of memory. Without effect on an NVIDIA GPU.",
        above=0,
        metavar="SECONDS",
    )
    context_tokens: int | None = option(
        None,
        "The most tokens of an agent's context. Left out, or more (which the log reports): the model's own.",
        least=2,
        metavar="TOKENS",
        up="context-tokens",
    )
    kv_policy: KvPolicy = option(
        "q4",
        "How K and V are stored, cheapest first: q4, q4-rotated (keys rotated first), k8v4, q8, fp (16 bits); or auto: "
        "the cheapest that answers as exact KV does, measured at the first start with a model (up to a minute or two). "
        "`kvasir bench quality` shows their costs.",
        up="kv-policy",
    )
    kv_exact_layers: str = option(
        "",
        'Layers that stay at 16 bits: "last", or indexes with commas between.',
        metavar="last|N,…",
        up="kv-exact-layers",
    )
    asleep_after_s: float | None = option(
        None,
        "Agents that nobody used for so long are put to sleep while no turn runs, as by `kvasir agents sleep`: their "
        "next turn computes their KV again, bit for bit. Older versions go. Left out: none are.",
        least=1,
        metavar="SECONDS",
        up=UpFlag("agents-asleep-after", "12h|30d|never", seconds_until_expiry),
    )
    wake_ahead_share: float = option(
        0.1,
        "Agents that are asleep are woken before their next turn, where earlier ones show when it may come: while no "
        "turn runs, for at most this share of the time (0.1 is a tenth), in half of the KV memory. The names of agents "
        "and the times of their turns are kept for that in returns.json of the engine's state, but none of sealed "
        "namespaces. 0: none are woken, and that file is removed.",
        least=0,
        most=1,
        metavar="SHARE",
        up="wake-ahead-share",
    )


@dataclass(frozen=True, kw_only=True)
class EngineModels(Table):
    """How models are loaded, compute, and are unloaded."""

    compute_type: Literal["float32", "float16", "bfloat16"] | None = option(
        None, "Left out: float32 on a CPU, else the model's own."
    )
    copy_weights: bool = option(
        False,
        "Read the weights into memory, also where their files can be mapped: for files that may be cut short or "
        "written to while the model serves. One that is replaced by a rename does no harm.",
    )
    batch_invariant: bool = option(
        False,
        "On a GPU a reply's tokens then do not depend, to the bit, on the turns beside it: each pass decodes 16 rows, "
        "some of them empty. On a CPU they never do.",
    )
    kernels: Literal["auto", "reference"] = option(
        "auto",
        "For attention, new KV and products of a few rows on a GPU: auto takes the kernels whose "
        "results are right when the engine starts, else MLX's own operations; reference always takes these.",
        up="kernels",
    )
    embeddings: str = option(
        "",
        "A model that only makes embeddings, beside the others: PATH or NAME=PATH, a directory or Hugging Face "
        "repository in sentence-transformers' layout (BERT, RoBERTa) or one of mlx-lm's. Left out: the loaded model "
        "makes them.",
        metavar="[NAME=]PATH",
        up="embeddings",
    )
    embedding_pooling: Literal["mean", "last"] = option(
        "mean",
        "Which of a text's last hidden rows make its embedding: the mean of all, or the last; of the loaded model, and "
        "of one in mlx-lm's layout. sentence-transformers' name their own.",
    )
    keep_alive_s: float | None = option(
        None,
        "A model that no turn has used for so long, or up to twice as long, is unloaded; the next turn loads it again. "
        "Left out: it stays.",
        above=0,
        metavar="SECONDS",
        up=UpFlag("keep-alive", "90s|10m|2h", seconds),
    )


@dataclass(frozen=True, kw_only=True)
class EngineDrafts(Table):
    """Tokens that a step tries ahead."""

    most_drafts: int | None = option(
        None,
        "How many tokens a step may try ahead for a turn whose text repeats itself; how many of them are tried follows "
        "from how often they are right and from what a step costs. 0: none. Left out: 16, but none on Metal, where "
        "no Mac has shown yet that no reply changes by it. Of a WeDLM model: the masks behind the first one; left out: "
        "as its config.json has it.",
        least=0,
        up="most-drafts",
    )
    drafts_from: Literal["namespace", "turn"] = option(
        "namespace",
        "Whose text may come again, and is tried: also the text of other agents of the same namespace, as far as "
        "their KV is in memory; or the turn's own alone. It changes no reply; how fast a reply comes may show an agent "
        "that another one has the same text.",
        up="drafts-from",
    )


@dataclass(frozen=True, kw_only=True)
class EngineLimits(Table):
    """Limits of bytes, turns and times."""

    longest_gap_ms: float = option(
        50.0,
        "How long a stream that a person reads may wait for its next token while others' prompts are computed. More "
        "brings first tokens sooner when many ask at once. Where a step alone takes most of it, the work beside it may "
        "take as long as the step.",
        least=0,
        metavar="MS",
        up="longest-gap-ms",
    )
    max_prompt_bytes: int = option(
        8 << 20,
        "A larger prompt is refused. A request of more than twice this and 1 MiB is refused by gRPC, no field named.",
        above=0,
    )
    max_turns: int = option(256, "Turns that may wait or run; more are refused, with a time to come back.", above=0)
    max_turns_per_namespace: int | None = option(
        None,
        "Of those, turns of one namespace; beside others' fewer, so that a place is left. Left out: three quarters.",
        above=0,
    )
    max_turns_per_caller: int | None = option(
        None, "Of those, turns of one credential. Left out: three quarters.", above=0
    )
    max_publishing_bytes: int = option(512 << 20, "Copies of KV that wait for the store.", above=0)
    max_unread_bytes: int = option(
        256 << 10, "A reader that leaves more of its replies unread is ended, and its place is free.", above=0
    )
    reader_stall_s: float = option(60.0, "A reader that takes no message for so long is ended too.", above=0)
    store_budget_ms: float = option(
        250.0, "Time without progress that a turn may lose to the store, in total.", least=0
    )
    store_wait_s: float = option(
        0.0,
        "How long the start waits for a store that is being started beside it. Then it goes on without.",
        least=0,
        of_home=True,
    )
    commit_wait_s: float = option(
        2.0, "How long the last message of a turn waits for the commit before it reports: pending.", least=0
    )
    publish_timeout_s: float = option(
        30.0, "After so long without progress a publication fails; the memory stays hot, and is tried again.", above=0
    )
    stop_grace_s: float = option(
        10.0,
        "How long running turns may go on after SIGTERM; then hot memories are stored until nothing has moved for so "
        "long.",
        least=0,
    )


@dataclass(frozen=True, kw_only=True)
class EngineTable(EngineFiles, EnginePeers, EngineMemory, EngineModels, EngineDrafts, EngineLimits, ListeningTable):
    program: ClassVar[str] = "engine"

    def check(self) -> None:
        for name in ("store_token_file", "store_token_dir"):
            if getattr(self, name) and not self.store:
                raise WrongOption(name, "it is for a store: name that with --store, or leave this out")
        if self.drain_to and self.drain_to not in self.peer and self.peers_file is None:
            raise WrongOption("drain_to", f"{self.drain_to!r} is no peer: name it with --peer {self.drain_to}=ADDRESS")
