"""The store of `kvasir up --store`, which runs elsewhere: its tokens, and whether this engine can use it.

It is queried before anything starts, because an engine alone starts without a store that refuses it, and forgets."""

import socket
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kvasir.address import accepts, parse_address
from kvasir.cli.failures import WrongUsage
from kvasir.cli.own_services.installed_messages import import_messages
from kvasir.cli.running.home import Endpoint, Home
from kvasir.credentials import DEFAULT_NAMESPACE, ENGINE, CredentialFileError
from kvasir.errors import (
    FailedPrecondition,
    InvalidArgument,
    KvasirError,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from kvasir.options.up import UpTable
from kvasir.waits import ANSWER_S

if TYPE_CHECKING:
    from kvasir.cachestore.v1 import cachestore_pb2


def shares_credentials(up: UpTable) -> bool:
    """Whether the home shows its own tokens to the store: they are copies of those of the store's home."""
    return not up.store_token_file and not up.store.startswith("unix:")


def engine_tokens(home: Home, up: UpTable) -> Mapping[str, Path]:
    """The engine's token files at the store, by namespace: those that were given, or the home's own."""
    own = home.tokens / "engine.token"
    is_copied = shares_credentials(up) and home.credentials_file.exists() and own.exists()
    return up.store_token_file or ({DEFAULT_NAMESPACE: own} if is_copied else {})


def endpoint_of(home: Home, up: UpTable) -> Endpoint:
    """How commands of this home reach the store: as its client where the home has the store's credentials, else as the
    engine, which reads agents and changes none."""
    tokens, client = engine_tokens(home, up), home.tokens / "client.token"
    token = tokens.get(DEFAULT_NAMESPACE) or next(iter(tokens.values()), None)
    is_client = shares_credentials(up) and client.exists()
    return Endpoint(up.store, client if is_client else token, up.store_ca_file)


def check_options(home: Home, up: UpTable) -> None:
    """Raises WrongUsage for options of a store elsewhere that do not go together."""
    if not up.store:
        for option, given in (("--store-token-file", up.store_token_file), ("--store-ca-file", up.store_ca_file)):
            if given:
                raise WrongUsage.of(option, "it is for a store elsewhere: name that with --store")
        return
    if up.store_listen:
        raise WrongUsage.of("--store-listen", "with --store no store runs here; leave one of them out")
    try:
        address = parse_address(up.store)
    except ValueError as error:
        raise WrongUsage.of("--store", error) from None
    tokens = [("--store-token-file", path) for path in up.store_token_file.values()]
    for option, path in (("--store-ca-file", up.store_ca_file), *tokens):
        if path is not None and not path.is_file():
            raise WrongUsage.of(option, f"{path}: there is no such file")
    if up.store_ca_file is not None:
        if address.socket_path is not None:
            raise WrongUsage.of("--store-ca-file", "a Unix socket has no TLS; leave this out")
        _check_certificate(up.store_ca_file)
    if not address.is_loopback and up.store_ca_file is None:
        text = f"--store: {up.store} is another machine: TLS is needed, --store-ca-file with the store's certificate"
        raise WrongUsage(text, field="--store-ca-file")
    if address.socket_path is None and not engine_tokens(home, up):
        text = (
            f"--store: the store at {up.store} wants a token: copy credentials.toml and tokens/ of its home to "
            f"{home.root}, or name a file with --store-token-file"
        )
        raise WrongUsage(text, field="--store-token-file")


def _check_certificate(path: Path) -> None:
    try:
        ssl.create_default_context(cafile=path)
    except ssl.SSLError:
        raise WrongUsage.of("--store-ca-file", f"{path}: expected the store's certificate (PEM)") from None


def check_store(home: Home, up: UpTable) -> None:
    """Call the store, with each token. Raises Unavailable (STORE_UNREACHABLE), FailedPrecondition
    (STORE_CERTIFICATE_WRONG, STORE_VERSION_DIFFERS, NO_STORE_THERE), Unauthenticated (STORE_TOKEN_WRONG), and
    PermissionDenied (STORE_TOKEN_WRONG) for a token of another namespace or without the role engine."""
    tokens: Mapping[str, Path | None] = engine_tokens(home, up) or {DEFAULT_NAMESPACE: None}
    for namespace, file in tokens.items():
        _check_answer(_asked(Endpoint(up.store, file, up.store_ca_file)), namespace, file, up.store)


def _asked(endpoint: Endpoint) -> "cachestore_pb2.GetCapabilitiesResponse":
    import_messages()  # `up -d` has not yet
    try:
        with endpoint.store_client(ANSWER_S) as client:
            return client.get_capabilities()
    except CredentialFileError as error:
        raise InvalidArgument(str(error), field="--store-token-file", reason="TOKEN_FILE_UNUSABLE") from None
    except Unauthenticated as error:
        text = f"--store-token-file: the store at {endpoint.address} does not know the token in {endpoint.token_file}"
        raise Unauthenticated(
            text, reason="STORE_TOKEN_WRONG", field="--store-token-file", metadata=error.metadata
        ) from None
    except Unavailable:
        raise _why_unavailable(endpoint) from None
    except InvalidArgument as error:
        raise WrongUsage.of("--store", error.message) from None
    except KvasirError as error:
        text = f"the program at {endpoint.address} does not answer as a store: {error.message}"
        raise FailedPrecondition.of("--store", text, reason="NO_STORE_THERE") from None


def _check_answer(
    answer: "cachestore_pb2.GetCapabilitiesResponse", namespace: str, file: Path | None, address: str
) -> None:
    from kvasir.formats.block_hash import BLOCK_TOKENS
    from kvasir.formats.manifest_checks import MANIFEST_FORMAT

    if (answer.manifest_format, answer.block_tokens) != (MANIFEST_FORMAT, BLOCK_TOKENS):
        text = (
            f"the store at {address} is Kvasir {answer.version or 'of an unknown version'}, whose manifests "
            f"have format {answer.manifest_format} and blocks {answer.block_tokens} tokens; this Kvasir has "
            f"{MANIFEST_FORMAT} and {BLOCK_TOKENS}"
        )
        raise FailedPrecondition.of("--store", text, reason="STORE_VERSION_DIFFERS")
    if answer.namespace != namespace:
        text = f"{file} is a token of namespace {answer.namespace!r}, expected {namespace!r}"
        raise PermissionDenied.of("--store-token-file", text, reason="STORE_TOKEN_WRONG")
    if ENGINE not in answer.roles:
        roles = ", ".join(answer.roles)
        text = f"the token in {file} has the roles {roles} at {address}, expected {ENGINE}"
        raise PermissionDenied.of("--store-token-file", text, reason="STORE_TOKEN_WRONG")


def _why_unavailable(endpoint: Endpoint) -> KvasirError:
    """gRPC has one word for "nobody listens" and for "the certificate is another one": try again without gRPC."""
    if not accepts(endpoint.address):
        return Unavailable.of("--store", f"nothing answers at {endpoint.address}", reason="STORE_UNREACHABLE")
    problem = _tls_problem(endpoint)
    if problem:
        return FailedPrecondition.of("--store-ca-file", problem, reason="STORE_CERTIFICATE_WRONG")
    return Unavailable.of("--store", f"what listens at {endpoint.address} does not answer", reason="STORE_UNREACHABLE")


def _tls_problem(endpoint: Endpoint) -> str:
    address = parse_address(endpoint.address)
    if address.socket_path is not None:
        return ""
    context = ssl.create_default_context(cafile=None if endpoint.ca_file is None else str(endpoint.ca_file))
    if endpoint.ca_file is None:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection((address.host, address.port), timeout=ANSWER_S) as plain:
            context.wrap_socket(plain, server_hostname=address.host).close()
    except ssl.SSLCertVerificationError as error:
        return f"{endpoint.address} shows another certificate than {endpoint.ca_file} ({error.verify_message})"
    except (ssl.SSLError, ConnectionError):
        advice = "leave this out" if address.is_loopback else "a store that other machines reach has it"
        return "" if endpoint.ca_file is None else f"the program at {endpoint.address} has no TLS: {advice}"
    except OSError:
        return ""
    return f"{endpoint.address} wants TLS: give its certificate" if endpoint.ca_file is None else ""
