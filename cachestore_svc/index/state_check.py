"""Whether the states that a manifest names are states of its layout, asked before its commit."""

from collections.abc import Sequence
from functools import partial

from cachestore_svc.index.catalog import SLICE, BlobEntry, Catalog, CatalogView
from cachestore_svc.index.refusals import unfit_blob
from cachestore_svc.manifests import ManifestFacts, NamedBlob, StateSchemas


def check_states(catalog: Catalog, namespace: str, facts: ManifestFacts) -> None:
    """Raises FailedPrecondition, as the commit of a manifest with states would, for the first blob that is missing or
    unfit, and for a state whose tensors are not the layout's.

    Before the transaction, because there may be a thousand states with thousands of tensors each.
    """
    if facts.named and facts.named[-1].kind != "state":
        return
    schemas = StateSchemas(facts.kv_identity, windows_in_blocks=facts.windows_in_blocks)
    for start in range(0, len(facts.named), SLICE):
        some = facts.named[start : start + SLICE]
        found = catalog.read(namespace, partial(_fitting, namespace=namespace, facts=facts, needs=some))
        for need, row in zip(some, found, strict=True):
            if need.kind == "state" and (problem := schemas.unfit(need.tokens, row.schema_hash)):
                raise unfit_blob(need.digest, problem)


def _fitting(view: CatalogView, *, namespace: str, facts: ManifestFacts, needs: Sequence[NamedBlob]) -> list[BlobEntry]:
    return view.fitting_blobs(namespace, facts, needs)
