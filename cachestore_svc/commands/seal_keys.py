"""The program behind `kvasir keys`: lists sealed namespaces, and makes, wraps and erases their keys; JSON on stdout."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvasir.errors import InvalidArgument
from kvasir.options.texts import path_of
from kvasir.server.operating.audit import owners_deed

from cachestore_svc.config import StoreSettings
from cachestore_svc.recovery.key_care import KeyCare, SealedNamespace
from cachestore_svc.sealing import master_keys
from cachestore_svc.sealing.keys import MasterKey
from cachestore_svc.sealing.sealed_form import RandomBytes
from cachestore_svc.sealing.sealed_list import add_to_list


def add_parser(commands: "argparse._SubParsersAction[Any]", shared: argparse.ArgumentParser) -> None:
    keys = commands.add_parser("keys", help="look after the keys of sealed namespaces; the store must not run")
    actions = keys.add_subparsers(dest="action", required=True)
    for name, what in (
        ("ls", "list sealed namespaces"),
        ("new", "seal a namespace that holds nothing yet; makes the master key if there is none"),
        ("rotate", "wrap all keys with another master key; writes no blob"),
        ("erase", "destroy a namespace's key: nobody can ever read its content again"),
    ):
        action = actions.add_parser(name, parents=[shared], help=what, description=what)
        action.add_argument("--audit-file", type=path_of, help="the store's audit, which gets a line for each change")
        if name in ("new", "erase"):
            action.add_argument("named", metavar="NAMESPACE")
        if name == "rotate":
            action.add_argument(
                "--new-key-file", type=path_of, help="the file of the new master key; made if not there"
            )
            action.add_argument("--new-keychain", default="", help="its name in the keychain; made if not there")


def take_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options that are not the store's settings, taken out of the others."""
    return {name: options.pop(name, None) for name in ("action", "named", "new_key_file", "new_keychain")}


def masters_of(settings: StoreSettings) -> list[MasterKey]:
    found = []
    if settings.seal_key_file is not None:
        found.append(master_keys.from_file(settings.seal_key_file))
    if settings.seal_keychain:
        found.append(master_keys.from_keychain(settings.seal_keychain))
    return found


def run_keys(settings: StoreSettings, care: KeyCare, asked: dict[str, Any], random_bytes: RandomBytes) -> None:
    action = asked["action"]
    if action == "ls":
        found = care.records()
    else:
        with owners_deed("store", settings.audit_file, f"keys/{action}", {"namespace": asked["named"] or ""}):
            found = _changed(settings, care, asked, random_bytes)
            add_to_list(settings.sealed_file, [each.namespace for each in found])
    print(json.dumps([asdict(each) for each in found]))


def _changed(
    settings: StoreSettings, care: KeyCare, asked: dict[str, Any], random_bytes: RandomBytes
) -> list[SealedNamespace]:
    match asked["action"]:
        case "new":
            return [care.seal(asked["named"], _made(settings.seal_key_file, settings.seal_keychain, random_bytes))]
        case "rotate":
            new = _made(asked["new_key_file"], asked["new_keychain"], random_bytes)
            return care.rotate(masters_of(settings), new)
        case _:
            return [care.erase(asked["named"])]


def _made(path: Path | None, keychain: str, random_bytes: RandomBytes) -> MasterKey:
    if (path is None) == (not keychain):
        raise InvalidArgument("name the master key's file or its entry in the keychain, one of them", field="key_file")
    if path is not None:
        return master_keys.from_file(path) if path.exists() else master_keys.make_file(path, random_bytes)
    if master_keys.is_in_keychain(keychain):
        return master_keys.from_keychain(keychain)
    return master_keys.make_in_keychain(keychain, random_bytes)
