"""Models in mlx-lm's cache: `python -m inference_svc.model.hub pull|rm|ls [NAME]`; exit code 5: no such model."""

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

import huggingface_hub
from huggingface_hub.utils import disable_progress_bars
from kvasir.errors import KvasirError, NotFound

NOT_FOUND = 5


def pull(name: str) -> dict[str, Any]:
    # Only fetching imports mlx-lm: it takes seconds, which the other commands do not need.
    from inference_svc.model.loading import find_model

    path = find_model(name)
    if not (path / "config.json").is_file():
        raise NotFound(f"model: {name} has no config.json: it is no model of mlx-lm", field="model")
    size_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return {"name": name, "path": str(path), "size_bytes": size_bytes}


def rm(name: str) -> dict[str, Any]:
    kept = [repository for repository in _cached() if repository.repo_id == name]
    if not kept:
        raise NotFound(f"model: {name} is not on this machine", field="model")
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


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m inference_svc.model.hub", description=__doc__)
    parser.add_argument("command", choices=("pull", "rm", "ls"))
    parser.add_argument("name", nargs="?", default="", help="OWNER/NAME")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    given = parser.parse_args()
    if given.quiet:
        disable_progress_bars()  # type: ignore[no-untyped-call]
    try:
        answer = ls() if given.command == "ls" else {"pull": pull, "rm": rm}[given.command](given.name)
    except KvasirError as error:
        sys.stderr.write(f"{' '.join(error.message.split())}\n")
        return NOT_FOUND
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
