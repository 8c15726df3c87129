"""`kvasir keys …`: sealed namespaces and their keys. The store must not run meanwhile, but for `ls`."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kvasir.cli.caller import Caller, command
from kvasir.cli.callers.tokens import check_word
from kvasir.cli.rows import counted, size
from kvasir.cli.running.checks import check_installed
from kvasir.cli.running.program import done, option_words
from kvasir.cli.showing.arguments import option
from kvasir.credentials import check_own_directory
from kvasir.errors import FailedPrecondition

app = typer.Typer(help="Seal namespaces: encrypt all that the store keeps of them.", no_args_is_help=True)

DataDirOption = Annotated[Path | None, option("The store's data. Default: the data of the home.")]
KeyFileOption = Annotated[
    Path | None, option("The master key's file. Default: seal.key in the home, which `kvasir up` reads.")
]
KeychainOption = Annotated[
    str, option("The master key's name in the system's keychain, if it lies there.", metavar="NAME")
]
NamespaceArgument = Annotated[str, typer.Argument(metavar="NAMESPACE")]


@command(app, "ls")
def ls(caller: Caller, data_dir: DataDirOption = None) -> None:
    """List sealed namespaces, and the master keys that open them."""
    _run(caller, "ls", data_dir)


@command(app, "new")
def new(
    caller: Caller,
    namespace: NamespaceArgument,
    data_dir: DataDirOption = None,
    key_file: KeyFileOption = None,
    keychain: KeychainOption = "",
) -> None:
    """Seal a namespace that holds nothing yet. Makes the master key if there is none.

    Keep a copy of the master key: without it nobody can read the namespace again. To seal existing agents, seal a new
    namespace and copy them there with `kvasir agents export` and `import`. The audit, which lies outside the data, also
    names agents of sealed namespaces."""
    if data_dir is None:  # of a store that runs alone, the credentials may name any namespace
        check_word("NAMESPACE", namespace)
    master = _master(caller, key_file, keychain)
    _run(caller, "new", data_dir, namespace, *master)
    caller.say(f"Keep a copy of the master key ({master[1]}): without it nobody reads {namespace} again.")
    key = (key_file or caller.home.seal_key_file).resolve()
    if not caller.as_json and not (keychain and key_file is None) and key.is_relative_to(caller.home.root.resolve()):
        caller.out.print(
            f"A backup with {key} and the data opens everything: move the key to another volume, and name it in "
            "KVASIR_STORE_SEAL_KEY_FILE; or use --keychain."
        )


@command(app, "rotate")
def rotate(
    caller: Caller,
    new_key_file: Annotated[
        Path | None, option("The new master key's file; the command makes it if it does not exist.")
    ] = None,
    new_keychain: Annotated[str, option("Its name in the keychain; the command makes it if it does not exist.")] = "",
    data_dir: DataDirOption = None,
    key_file: KeyFileOption = None,
    keychain: KeychainOption = "",
) -> None:
    """Replace the master key. Rewrites no blob; from then on the store needs the new one.

    After a crash repeat the command: the old key or the new one opens all namespaces."""
    options = [*option_words("--new-key-file", new_key_file), *option_words("--new-keychain", new_keychain)]
    _run(caller, "rotate", data_dir, *options, *_master(caller, key_file, keychain))


@command(app, "erase")
def erase(
    caller: Caller,
    namespace: NamespaceArgument,
    yes: Annotated[bool, option("Do not ask.", "--yes")] = False,
    data_dir: DataDirOption = None,
) -> None:
    """Destroy a namespace's key: nobody can read its content again, with any master key. Cannot be undone.

    Each replica of a store has its own record of the key: erase it in the data of all of them (--data-dir)."""
    if not yes and not typer.confirm(f"Destroy the key of {namespace}, and with it all that it holds?", err=True):
        raise typer.Exit(1)
    _run(caller, "erase", data_dir, namespace)


def _run(caller: Caller, action: str, data_dir: Path | None, *arguments: str) -> None:
    check_installed("store")
    if data_dir is None and caller.home.root.exists():
        check_own_directory(caller.home.root)
    words = ["keys", action, *arguments, "--data-dir", str(data_dir or caller.home.store_data)]
    words += ["--audit-file", str(caller.home.audit_file("store")), *caller.home.sealed_options(data_dir)]
    ended = done("cachestore_svc", words)
    if ended.code:
        raise FailedPrecondition(ended.why, reason="CANNOT_SEAL")
    found: list[dict[str, Any]] = ended.value
    caller.result({"namespaces": found}, lambda out: _show(out, found, action))


def _show(out: Console, found: list[dict[str, Any]], action: str) -> None:
    if not found:
        out.print("no namespace is sealed")
    for each in found:
        opened = f"opened by master key {' or '.join(each['master_ids'])}"
        state = "its key was destroyed" if each["erased_unix_ms"] else opened
        out.print(f"{each['namespace']}: {state}; {counted(each['files'], 'file')}, {size(each['bytes'])}")
    if action == "rotate":
        out.print(
            "From now on the store needs the new master key: put its file in the place of the old one, or name it in "
            "KVASIR_STORE_SEAL_KEY_FILE or KVASIR_STORE_SEAL_KEYCHAIN."
        )
    if action == "erase":
        out.print(
            "The files and rows remain, sealed for ever; sizes, times and counts can be seen. Copies of the data, as "
            "each replica has one, and an SSD's spare blocks, may hold the wrapped key: only the master key opens it."
        )


def _master(caller: Caller, key_file: Path | None, keychain: str) -> list[str]:
    if keychain and key_file is None:
        return ["--seal-keychain", keychain]
    return ["--seal-key-file", str(key_file or caller.home.seal_key_file), *option_words("--seal-keychain", keychain)]
