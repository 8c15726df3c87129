"""Which page formats the kernels of tiles serve: those that have tiles, but none whose check failed in this process."""

from inference_svc.kv.attention.geometry import MAX_QUERIES, MAX_TILED_QUERIES, has_tiles
from inference_svc.kv.page import PageFormat

_refused = dict[tuple[PageFormat, str], str]()


def refuse(page_format: PageFormat, query_type: str, why: str) -> None:
    """Let other kernels serve pages of a format to queries of a type."""
    _refused[page_format, query_type] = why


def why_refused(page_format: PageFormat, query_type: str) -> str:
    return _refused.get((page_format, query_type), "")


def are_refused(page_format: PageFormat, query_type: str) -> bool:
    return bool(_refused) and (page_format, query_type) in _refused  # each launch of a layer needs this


def serve(page_format: PageFormat, query_type: str) -> bool:
    return has_tiles(page_format, query_type) and not are_refused(page_format, query_type)


def most_queries(page_format: PageFormat, query_type: str) -> int:
    """Queries of a sequence that the kernels serve. MLX's own attention over de-quantized rows may be faster for fewer,
    which callers see to (`ShortPass.takes`, `InPlaceLayer`).
    """
    return MAX_TILED_QUERIES if serve(page_format, query_type) else MAX_QUERIES
