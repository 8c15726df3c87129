"""Credentials: names, namespaces and roles of callers, in one file (TOML, 0600) of tokens' hashes, never of tokens."""

import errno
import hmac
import os
import shlex
import stat
import tempfile
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from kvasir.errors import FailedPrecondition, InvalidArgument
from kvasir.formats.digest import is_hash
from kvasir.names import check_namespace
from kvasir.syncing import sync, sync_directory, why_not_own

ENGINE, CLIENT, PEER, HANDOVER, ADMIN = "engine", "client", "peer", "handover", "admin"
ROLES = frozenset({ENGINE, CLIENT, PEER, HANDOVER, ADMIN})
DEFAULT_NAMESPACE = "default"
GATEWAY_KEY, GATEWAY_MARK = "conversations.key", "x-kvasir-gateway"  # a file of its state, a header of /healthz
_MIN_TOKEN_CHARS = 32
_MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller: the name of its credential, the namespace that it is bound to, and its roles."""

    name: str
    namespace: str
    roles: frozenset[str]

    @property
    def is_peer(self) -> bool:
        """Whether it is another Kvasir and nothing else: a store, or an engine that gives turns."""
        return self.roles <= {PEER, HANDOVER}


# A caller on the Unix socket without a token: file modes let only the owner of the service (and root) connect.
OWNER = Principal("owner", DEFAULT_NAMESPACE, ROLES)


@dataclass(frozen=True, slots=True)
class Credential:
    """One entry of the credential file."""

    principal: Principal
    token_blake3: str


class CredentialFileError(ValueError):
    """The credential file cannot be used. The message has the remedy."""


class Credentials:
    """The entries of a credential file. They answer one question: whose token is this?"""

    def __init__(self, entries: Sequence[Credential]) -> None:
        self._entries = tuple(entries)

    def principal_of(self, token: str) -> Principal | None:
        """The caller of this token, or None. Takes the same time whichever entry matches."""
        presented = hash_token(token).encode()
        found: Principal | None = None
        for entry in self._entries:
            if hmac.compare_digest(presented, entry.token_blake3.encode()):
                found = entry.principal
        return found

    def lost_in(self, new: "Credentials") -> frozenset[Principal]:
        """Callers whose token is none of the new entries, or means another caller there."""
        kept = set(new._entries)
        return frozenset(entry.principal for entry in self._entries if entry not in kept)

    @property
    def principals(self) -> list[Principal]:
        """Whose they are, in the file's order."""
        return [entry.principal for entry in self._entries]

    def with_tokens(self, new: Mapping[Principal, str]) -> "Credentials":
        """These, and one for each new caller and its token. Raises CredentialFileError for a name that is taken."""
        if taken := {principal.name for principal in new} & {each.name for each in self.principals}:
            raise CredentialFileError(f"there is a credential {sorted(taken)[0]!r} already")
        return Credentials((*self._entries, *(Credential(caller, hash_token(new[caller])) for caller in new)))

    def without(self, names: Collection[str]) -> "Credentials":
        """These but for those names."""
        return Credentials([entry for entry in self._entries if entry.principal.name not in names])

    @property
    def text(self) -> str:
        """The credential file that holds them."""
        return "\n".join(_lines(entry) for entry in self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def hash_token(token: str) -> str:
    """BLAKE3-256 of a token's UTF-8 bytes, in hex."""
    return blake3(token.encode("utf-8", "surrogatepass")).hexdigest()


def read_credentials(path: Path) -> Credentials:
    """Raises CredentialFileError for a file that is absent, readable by others, malformed, empty or ambiguous."""
    document = _parse(read_private_text(path), path)
    unknown = set(document) - {"credential"}
    entries = document.get("credential", [])
    if unknown or not isinstance(entries, list) or not entries:
        raise CredentialFileError(f"{path}: expected [[credential]] tables and nothing else")
    credentials = [_credential(entry, f"{path}: credential {index + 1}") for index, entry in enumerate(entries)]
    if len({credential.token_blake3 for credential in credentials}) != len(credentials):
        raise CredentialFileError(f"{path}: two credentials have the same token")
    if len({credential.principal.name for credential in credentials}) != len(credentials):
        raise CredentialFileError(f"{path}: two credentials have the same name")
    return Credentials(credentials)


def write_credentials(path: Path, principals: Iterable[Principal], new_token: Callable[[], str]) -> dict[str, str]:
    """A new file with a fresh token (`new_token`) per principal; returns name → token. Raises FileExistsError."""
    tokens = {principal: new_token() for principal in principals}
    if short := next((token for token in tokens.values() if len(token) < _MIN_TOKEN_CHARS), None):
        raise ValueError(f"a token has at least {_MIN_TOKEN_CHARS} characters, got {len(short)}")
    write_private_text(path, Credentials(()).with_tokens(tokens).text)
    return {principal.name: token for principal, token in tokens.items()}


def read_token(path: Path) -> str:
    """The token in a client's token file. Raises CredentialFileError when others can read it or it is empty."""
    token = read_private_text(path).strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise CredentialFileError(f"{path}: expected one token of printable ASCII")
    return token


def engine_of(namespace: str) -> str:
    """The name of the engine's credential at its store for a namespace, which is its token file's, too."""
    return ENGINE if namespace == DEFAULT_NAMESPACE else f"{ENGINE}@{namespace}"


def further_engine_tokens(directory: Path) -> dict[str, Path]:
    """The files of the engine's tokens for namespaces beside the default one, by their names."""
    files = sorted(directory.glob(engine_of("*") + ".token"))
    return {file.name.removeprefix(engine_of("")).removesuffix(".token"): file for file in files}


def read_engine_tokens(files: Mapping[str, Path]) -> tuple[dict[str, str], list[str]]:
    """The tokens by namespace, and what is wrong with the other files."""
    tokens, wrong = dict[str, str](), list[str]()
    for namespace, path in files.items():
        try:
            tokens[check_namespace(namespace)] = read_token(path)
        except InvalidArgument as error:
            wrong.append(f"{path}: {error.message}")
        except CredentialFileError as error:
            wrong.append(str(error))
    return tokens, wrong


def check_own_directory(path: Path) -> None:
    """Raises FailedPrecondition for a directory, or one that a link to it leads to, in which another user may write."""
    if why := why_not_own(path):
        raise FailedPrecondition(why)


def write_private_text(path: Path, text: str) -> None:
    """Create a file of its owner's alone, its directory too if that is new. It gets its name with all of its text: a
    kill leaves no key of half its digits. On return it survives a loss of power. Raises FileExistsError."""
    named_in = _make_directory(path)
    with _written_beside(path, text) as new:
        _give_name(new, path)
    for directory in named_in:
        sync_directory(directory)


def replace_private_text(path: Path, text: str) -> None:
    """As write_private_text, in the place of what is there: a reader sees the one or the other, of several writers the
    last one's."""
    named_in = _make_directory(path)
    with _written_beside(path, text) as new:
        new.replace(path)
    for directory in named_in:
        sync_directory(directory)


@contextmanager
def _written_beside(path: Path, text: str) -> Iterator[Path]:
    """A new file of the text, of its owner's alone, that is gone at the block's end unless it got another name."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:64]}.", suffix=".new")
    new = Path(name)
    try:
        _write(descriptor, text)
        yield new
    finally:
        new.unlink(missing_ok=True)


def _make_directory(path: Path) -> list[Path]:
    """Make a file's directory, if it is new; returns the directories in which something gets a name."""
    named_in = [path.parent, *(each.parent for each in path.parents if not each.exists())]
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    return named_in


def _write(descriptor: int, text: str) -> None:
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        sync(file.fileno())


def _give_name(new: Path, path: Path) -> None:
    """Raises FileExistsError where something has the name already."""
    try:
        os.link(new, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links, as a stick's
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        new.rename(path)


def read_private_text(path: Path) -> str:
    """Text of a file that group and others cannot read. Raises CredentialFileError otherwise, saying what to do."""
    try:
        with path.open("rb") as file:
            # The mode of the open file: the path could be replaced between a check and the read.
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise CredentialFileError(f"{path}: expected a regular file")
            if mode & 0o077:
                remedy = f"run: chmod 600 {shlex.quote(str(path))}"
                raise CredentialFileError(f"{path}: mode {stat.S_IMODE(mode):04o} lets others read it; {remedy}")
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise CredentialFileError(f"{path}: {error.strerror or error}") from None
    if len(data) > _MAX_FILE_BYTES:
        raise CredentialFileError(f"{path}: expected at most {_MAX_FILE_BYTES} bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise CredentialFileError(f"{path}: expected UTF-8") from None


def gateway_mark(state_dir: Path, home: Path | None) -> str:
    """A home's gateway shows it at /healthz, so that `kvasir up` takes no other home's gateway for its own. It is made
    of the key in the gateway's state, and so reveals nothing of the home. Raises CredentialFileError."""
    key = read_private_text(state_dir / GATEWAY_KEY).strip()
    text = f"{key} {home and home.resolve()}"
    return blake3(text.encode(), derive_key_context="kvasir gateway of a home").hexdigest(16)


def _parse(text: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise CredentialFileError(f"{path}: not TOML: {error}") from None


def _credential(entry: object, where: str) -> Credential:
    if not isinstance(entry, dict) or set(entry) != {"name", "token_blake3", "roles", "namespace"}:
        raise CredentialFileError(f"{where}: expected exactly name, token_blake3, roles and namespace")
    name, token_hash, roles, namespace = (entry[key] for key in ("name", "token_blake3", "roles", "namespace"))
    # "peer:" begins the names of paired stores, which have no token.
    if not isinstance(name, str) or not name or not name.isprintable() or name.startswith("peer:"):
        raise CredentialFileError(f'{where}: name: expected printable text that does not begin with "peer:"')
    if not isinstance(token_hash, str) or not is_hash(token_hash):
        raise CredentialFileError(f"{where}: token_blake3: expected 64 lower-case hex digits")
    if not isinstance(roles, list) or not roles or not ROLES.issuperset(map(str, roles)):
        raise CredentialFileError(f"{where}: roles: expected some of {sorted(ROLES)}")
    try:
        check_namespace(namespace if isinstance(namespace, str) else "")
    except InvalidArgument as error:
        raise CredentialFileError(f"{where}: {error.message}") from None
    return Credential(Principal(name, namespace, frozenset(roles)), token_hash)


def _lines(entry: Credential) -> str:
    roles = ", ".join(_quoted(role) for role in sorted(entry.principal.roles))
    return (
        f"[[credential]]\nname = {_quoted(entry.principal.name)}\ntoken_blake3 = {_quoted(entry.token_blake3)}\n"
        f"roles = [{roles}]\nnamespace = {_quoted(check_namespace(entry.principal.namespace))}\n"
    )


def _quoted(text: str) -> str:
    """A TOML basic string. Names hold no control characters, so two escapes suffice."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
