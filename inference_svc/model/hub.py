"""Models in mlx-lm's cache: `python -m inference_svc.model.hub pull|rm|ls [NAME]`; exit code 5: no such model."""

import argparse
import fnmatch
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import disable_progress_bars
from kvasir.errors import KvasirError, NotFound
from kvasir.waits import PAUSE_S

NOT_FOUND = 5


def pull(name: str) -> dict[str, Any]:
    # Only fetching imports mlx-lm: it takes seconds, which the other commands do not need.
    from inference_svc.model.loading import find_model

    path = find_model(name)
    if not (path / "config.json").is_file():
        raise NotFound.of("model", f"{name} has no config.json: it is no model of mlx-lm")
    size_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return {"name": name, "path": str(path), "size_bytes": size_bytes}


@contextmanager
def _reported(name: str) -> Iterator[None]:
    """Report on stderr how many of the model's bytes are here, five times a second and at the block's end."""
    ended = threading.Event()
    blobs = Path(HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model") / "blobs"
    total = _size_on_hub(name)

    def report() -> None:
        is_last = not total
        while not is_last:
            is_last = ended.wait(PAUSE_S)
            sys.stderr.write(json.dumps({"done": min(_size_of(blobs), total), "total": total}) + "\n")
            sys.stderr.flush()

    reporter = threading.Thread(target=report)
    reporter.start()
    try:
        yield
    finally:
        ended.set()
        reporter.join()


def _size_of(folder: Path) -> int:
    """The bytes of its files, those that are not whole yet too."""
    found = 0
    for file in folder.glob("*"):
        with suppress(FileNotFoundError):  # whole meanwhile, and called otherwise
            found += file.stat().st_size
    return found


def _size_on_hub(name: str) -> int:
    """The bytes of all files that the loader takes; 0 if the hub does not know."""
    from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

    try:
        listed = huggingface_hub.HfApi().list_repo_tree(name, recursive=True)
        files = [(file.path, file.size) for file in listed if isinstance(file, RepoFile)]
    except Exception:  # noqa: BLE001  the loader reports why it cannot be fetched
        return 0
    return sum(size for path, size in files if any(fnmatch.fnmatch(path, each) for each in DEFAULT_ALLOW_PATTERNS))


def rm(name: str) -> dict[str, Any]:
    kept = [repository for repository in _cached() if repository.repo_id == name]
    if not kept:
        raise NotFound.of("model", f"{name} is not on this machine")
    revisions = [revision.commit_hash for repository in kept for revision in repository.revisions]
    removal = huggingface_hub.scan_cache_dir().delete_revisions(*revisions)
    removal.execute()
    return {"name": name, "freed_bytes": removal.expected_freed_size}


def ls() -> list[dict[str, Any]]:
    return [{"name": repository.repo_id, "size_bytes": repository.size_on_disk} for repository in _cached()]


def _cached() -> Iterator[Any]:
    try:
        cache = huggingface_hub.scan_cache_dir()
    except huggingface_hub.CacheNotFound:
        return
    yield from sorted((each for each in cache.repos if each.repo_type == "model"), key=lambda each: str(each.repo_id))


def _pulled(given: argparse.Namespace) -> dict[str, Any]:
    if given.quiet:
        disable_progress_bars()  # type: ignore[no-untyped-call]
    with _reported(given.name) if given.progress else nullcontext():
        return pull(given.name)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m inference_svc.model.hub", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("ls")
    for name in ("pull", "rm"):
        commands.add_parser(name).add_argument("name", help="OWNER/NAME")
    pulling = commands.choices["pull"]
    pulling.add_argument("--progress", action="store_true", help="done and total bytes on stderr, as JSON")
    pulling.add_argument("--quiet", action="store_true", help="no progress bars on stderr")
    given = parser.parse_args()
    try:
        answer = ls() if given.command == "ls" else rm(given.name) if given.command == "rm" else _pulled(given)
    except KvasirError as error:
        sys.stderr.write(f"{' '.join(error.message.split())}\n")
        return NOT_FOUND
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
