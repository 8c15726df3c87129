"""A model's tokenizer files as the neighbour's gateways load them: one zip archive, the same bytes each time."""

import io
import zipfile
from pathlib import Path

# No weights, and nothing that runs.
_NAMES = frozenset(
    {
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "config.json",
        "generation_config.json",
        "merges.txt",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
    }
)


def tokenizer_archive(directory: Path) -> bytes:
    """The zip archive of the directory's tokenizer files. Takes a second for a large vocabulary."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(directory.iterdir()):
            if (path.name in _NAMES or path.suffix == ".tiktoken") and path.is_file():
                archive.writestr(zipfile.ZipInfo(path.name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return out.getvalue()
