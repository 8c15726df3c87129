"""Faults of the SDK, each with the tests that are asked whether they notice it."""

from pathlib import Path

from tests.campaigns.mutation.mutant import Mutant, Suite

MUTANTS = (
    Mutant(
        "a block's hash forgets the blocks before it",
        "formats/block_hash.py",
        '        parent = hashes[-1] if hashes else ""\n',
        '        parent = ""\n',
        "vectors",
    ),
    Mutant(
        "known hashes are taken for those of later blocks",
        "formats/block_hash.py",
        "range(len(hashes) * BLOCK_TOKENS, len(token_ids)",
        "range(0, len(token_ids)",
        "vectors",
    ),
    Mutant(
        "a tail's name forgets what came before it",
        "formats/token_files.py",
        '    parent = chain[full_blocks - 1] if full_blocks else ""\n',
        '    parent = ""\n',
        "vectors",
    ),
    Mutant(
        "a state has the name of the last full block before it",
        "formats/token_files.py",
        " if rest else parent\n",
        " if rest and tokens == len(token_ids) else parent\n",
        "vectors",
    ),
    Mutant(
        "a state behind its known blocks is named by those alone",
        "formats/token_files.py",
        "known if len(known) >= full_blocks else chain_hashes(kv_identity_hash, token_ids[:tokens], known)",
        "known if known else chain_hashes(kv_identity_hash, token_ids[:tokens], known)\n    full_blocks = len(chain)",
        "vectors",
    ),
    Mutant(
        "a client for another token keeps the first one's",
        "clients/aio/service_client.py",
        "        other._metadata = bearer(token)\n",
        "        bearer(token)\n",
        "tokens_handed_on",
    ),
    Mutant(
        "a client for another token knows what the first one's turns told",
        "clients/aio/inference_client.py",
        "        other._known = KnownVersions()",
        "        pass",
        "tokens_handed_on",
    ),
    Mutant(
        "a caller without a token is handed on as none",
        "clients/channel.py",
        "if not token or not token.isascii()",
        "if not token.isascii()",
        "tokens_handed_on",
    ),
    Mutant(
        "a client for another token closes the channel of all",
        "clients/aio/service_client.py",
        "        other._owns_channel = False\n",
        "",
        "tokens_handed_on",
    ),
)

SDK = Suite(
    "sdk",
    "Mutants of the SDK",
    "clients/python/kvasir",
    Path("tests/kvasir/MUTANTS.md"),
    MUTANTS,
    tests="tests/*/test_{}.py",
)
