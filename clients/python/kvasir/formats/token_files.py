"""Which tensor files make up the memory of a run of tokens, and each file's own facts: two turns stay apart."""

from collections.abc import Sequence

from kvasir.formats.block_file import FileIdentity
from kvasir.formats.block_hash import BLOCK_TOKENS, chain_hash, chain_hashes


def file_identities(
    kv_identity_hash: str, token_ids: Sequence[int], chain: Sequence[str], first_block: int = 0, group: int = 0
) -> list[FileIdentity]:
    """The files of one group: full blocks from `first_block` on, and a tail. `chain`: all full blocks' hashes."""
    files = [
        FileIdentity("block", kv_identity_hash, index * BLOCK_TOKENS, BLOCK_TOKENS, chain[index], group)
        for index in range(first_block, len(chain))
    ]
    start = len(chain) * BLOCK_TOKENS
    if rest := len(token_ids) - start:
        last = _chain_after(kv_identity_hash, token_ids, len(token_ids), chain)
        files.append(FileIdentity("tail", kv_identity_hash, start, rest, last, group))
    return files


def state_identity(
    kv_identity_hash: str, token_ids: Sequence[int], tokens: int, known_chain: Sequence[str] = ()
) -> FileIdentity:
    """The state file after the first `tokens`; `known_chain` has the chain hashes of its first blocks."""
    last = _chain_after(kv_identity_hash, token_ids, tokens, known_chain)
    return FileIdentity("state", kv_identity_hash, 0, tokens, last)


def _chain_after(kv_identity_hash: str, token_ids: Sequence[int], tokens: int, known: Sequence[str]) -> str:
    """The chain hash of the first `tokens`, cut into blocks; the last block may be partial."""
    full_blocks, rest = divmod(tokens, BLOCK_TOKENS)
    chain = known if len(known) >= full_blocks else chain_hashes(kv_identity_hash, token_ids[:tokens], known)
    parent = chain[full_blocks - 1] if full_blocks else ""
    return chain_hash(kv_identity_hash, parent, token_ids[tokens - rest : tokens]) if rest else parent
