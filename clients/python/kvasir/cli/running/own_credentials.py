"""The credentials that a home makes for itself: of programs, its operator, its engine, and another store."""

import secrets
from pathlib import Path

from kvasir.cli.running.holding import tokens_locked
from kvasir.cli.running.home import Home
from kvasir.credentials import (
    ADMIN,
    CLIENT,
    DEFAULT_NAMESPACE,
    ENGINE,
    PEER,
    CredentialFileError,
    Credentials,
    Principal,
    read_credentials,
    read_private_text,
    read_token,
    replace_private_text,
)
from kvasir.errors import FailedPrecondition

# Programs get the client's key. Who operates the home by its page has another one: a program that holds the first makes
# no keys and sees no peers. `kvasir tokens new` takes no name with "@", so no token from before becomes the operator's.
_CLIENT = Principal("client", DEFAULT_NAMESPACE, frozenset({CLIENT, ADMIN}))
_OPERATOR = Principal("operator@home", DEFAULT_NAMESPACE, frozenset({CLIENT, ADMIN}))
_OWN = (
    _CLIENT,
    _OPERATOR,
    Principal("engine", DEFAULT_NAMESPACE, frozenset({ENGINE})),
    Principal("peer", DEFAULT_NAMESPACE, frozenset({PEER})),  # another Mac's store that pulls
)
OPERATORS = (_OPERATOR.name,)
"""Who operates the home by its page."""
SERVICE_ADMINS = (_CLIENT.name, _OPERATOR.name)
"""Who changes models, and sees the numbers of all namespaces."""


def is_own(name: str) -> bool:
    """Whether the home needs this credential, or its engine does, for some namespace."""
    return name in {each.name for each in _OWN} or name.startswith(ENGINE)


def people_token(home: Home) -> str:
    """The token with which a person opens the page: the operator's, or the client's in a home that was not started
    since there is the former; empty if there is neither. Raises CredentialFileError."""
    files = (_token_file(home, each) for each in (_OPERATOR, _CLIENT))
    return next((read_token(file) for file in files if file.exists()), "")


def known_credentials(home: Home) -> Credentials:
    """Raises FailedPrecondition for a file that cannot be used."""
    try:
        return read_credentials(home.credentials_file)
    except CredentialFileError as error:
        raise FailedPrecondition(str(error), reason="UNUSABLE_CREDENTIALS") from None


def make_credentials(home: Home) -> None:
    """Write the credentials and tokens that the home lacks. The credentials get their name last: then all tokens are
    there. Raises FailedPrecondition."""
    with tokens_locked(home):
        if not home.credentials_file.exists():
            _make_all(home)
        elif not _has_operator(home):
            _make_operator(home)


def _make_all(home: Home) -> None:
    tokens = {principal: _new_token() for principal in _OWN}
    for principal, token in tokens.items():
        replace_private_text(_token_file(home, principal), token + "\n")
    replace_private_text(home.credentials_file, Credentials(()).with_tokens(tokens).text)


def _has_operator(home: Home) -> bool:
    try:
        token = read_token(_token_file(home, _OPERATOR))
    except CredentialFileError:  # it is not there, or others can read it
        return False
    return known_credentials(home).principal_of(token) == _OPERATOR


def _make_operator(home: Home) -> None:
    """For a home that has none, or whose token is gone; the file of credentials keeps its comments where it can."""
    known, token = known_credentials(home), _new_token()
    others = known.without({_OPERATOR.name})
    kept = read_private_text(home.credentials_file) if len(others) == len(known) else others.text
    replace_private_text(_token_file(home, _OPERATOR), token + "\n")
    added = Credentials(()).with_tokens({_OPERATOR: token}).text
    replace_private_text(home.credentials_file, f"{kept.rstrip()}\n\n{added}")


def _token_file(home: Home, principal: Principal) -> Path:
    return home.tokens / f"{principal.name}.token"


def _new_token() -> str:
    return secrets.token_urlsafe(32)
