"""Faults of what a store is trusted with day by day, each with the tests that are asked whether they notice it."""

from pathlib import Path

from tests.campaigns.mutation.mutant import Mutant, Suite

_OF_THE_STORE = (
    # --- agents that expire ---
    Mutant(
        "a pinned agent expires",
        "upkeep/expiring.py",
        "return None if agent.is_pinned or allowed_s is None else",
        "return None if allowed_s is None else",
        "core/test_expiring",
    ),
    Mutant(
        "an agent whose lease is live expires",
        "upkeep/expiring.py",
        "        change.fence_leases(query, core.leases)  # raises where one is live, which undoes all of it\n",
        "",
        "core/test_expiring",
    ),
    Mutant(
        "an agent on its way to another store expires",
        "upkeep/expiring.py",
        " or left > 0 or is_on_its_way:",
        " or left > 0:",
        "core/test_expiring",
    ),
    Mutant(
        "after a restart the clock that people set says how much time passed",
        "upkeep/passed_time.py",
        "return max(min(passed_s, self.unix_s - before.unix_s), 0.0)",
        "return max(self.unix_s - before.unix_s, 0.0)",
        "core/test_expiring",
    ),
    Mutant(
        "in another machine the time that it runs counts as passed",
        "upkeep/passed_time.py",
        "return max(min(passed_s, self.unix_s - before.unix_s), 0.0)",
        "return max(passed_s, 0.0)",
        "core/test_expiring",
    ),
    # --- the write budget ---
    Mutant(
        "the eighth that is kept for the others may be spent by one",
        "index/write_budget.py",
        "kept = self.budget_bytes // _SHARE if own > self.budget_bytes // _SHARE else 0",
        "kept = 0",
        "core/test_write_budget",
    ),
    Mutant(
        "a budget that is only told refuses",
        "index/write_budget.py",
        "if self.budget_bytes is None or not self._refuses:",
        "if self.budget_bytes is None:",
        "core/test_write_budget",
    ),
    Mutant(
        "yesterday's bytes count today",
        "index/write_budget.py",
        "            if day == self._day:\n                return dict(self._written)\n",
        "            if self._day >= 0:\n                return dict(self._written)\n",
        "core/test_write_budget",
    ),
    Mutant(
        "bytes of a write that did not commit count",
        "index/write_budget.py",
        "        change.after_commit(counted)\n",
        "        counted()\n",
        "core/test_write_budget",
    ),
    # --- the scrub ---
    Mutant(
        "a pass begins anew after a restart",
        "upkeep/scrubbing.py",
        "after = self.state.number if namespace == self.state.namespace else 0",
        "after = 0",
        "service/test_scrubbing",
    ),
    Mutant(
        "a pass that is cancelled does not note where it was",
        "store/background_scrub.py",
        "        except asyncio.CancelledError:\n            await self._threads.run(HOUSE, self._scrubbing.save)\n",
        "        except asyncio.CancelledError:\n",
        "service/test_scrubbing",
    ),
    Mutant(
        "a blob that cannot be read now counts as damaged",
        "upkeep/scrubbing.py",
        "        except Unavailable:\n            raise\n",
        "        except Unavailable:\n            is_whole = False\n",
        "service/test_scrubbing",
    ),
    Mutant(
        "a clock that was set back puts the next pass off",
        "upkeep/scrubbing.py",
        "passed_s = max(0, self._core.now_unix_ms() - self.state.ended_unix_ms) / 1000",
        "passed_s = (self._core.now_unix_ms() - self.state.ended_unix_ms) / 1000",
        "service/test_scrubbing",
    ),
    Mutant(
        "blobs are hashed as fast as they can be read",
        "store/background_scrub.py",
        "await asyncio.sleep(blob.digest.size_bytes / self._bytes_per_s)",
        "await asyncio.sleep(0)",
        "service/test_scrubbing",
    ),
    Mutant(
        "what a peer sent in vain is gone on with",
        "moving/repairing.py",
        "            exits.callback(writer.abandon)\n",
        "",
        "service/test_scrubbing",
    ),
    # --- pairing ---
    Mutant(
        "a wrong guess is not counted",
        "pairing/exchange.py",
        "        self._wrong_guesses += 1\n",
        "",
        "pairing/test_exchange",
    ),
    Mutant(
        "a code may be used twice",
        "pairing/exchange.py",
        "            self._is_used = True\n",
        "            pass\n",
        "pairing/test_exchange",
    ),
    Mutant(
        "a code never gets old",
        "pairing/exchange.py",
        " or self.seconds_left <= 0",
        "",
        "pairing/test_exchange",
    ),
    Mutant(
        "a certificate is believed without its key",
        "pairing/exchange.py",
        "if signature is None or not certificate.has_signed(signature, signed):",
        "if signature is None:",
        "pairing/test_exchange",
    ),
    Mutant(
        "a run that began before the last guess has one more",
        "pairing/exchange.py",
        "        self.check()\n        if is_right:\n",
        "        if is_right:\n",
        "pairing/test_exchange",
    ),
    Mutant(
        "a paired peer comes into every namespace",
        "moving/peers.py",
        "if peer is None or namespace not in peer.namespaces:",
        "if peer is None:",
        "pairing/test_peers_file",
    ),
    Mutant(
        "a file of peers that others can write is read",
        "pairing/peers_file.py",
        "if path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):",
        "if False:",
        "pairing/test_peers_file",
    ),
    Mutant(
        "our own pull from a peer goes on when it is removed",
        "edge/peer_service.py",
        "        ended += await self._peers.hang_up()\n",
        "",
        "pairing/test_paired_stores",
    ),
)

_OF_ALL_SERVICES = (
    # --- the audit ---
    Mutant(
        "who lacks a credential or a role is not told",
        "server/audit.py",
        " or is_peer or status in _LACKS_PRIVILEGE):",
        " or is_peer):",
        "audit",
    ),
    Mutant(
        "what a peer reads is not told",
        "server/audit.py",
        " or is_peer or status in _LACKS_PRIVILEGE):",
        " or status in _LACKS_PRIVILEGE):",
        "audit",
    ),
    Mutant(
        "the audit is readable by others",
        "server/audit.py",
        "        os.fchmod(self._descriptor, 0o600)\n",
        "        os.fchmod(self._descriptor, 0o644)\n",
        "audit",
    ),
    Mutant(
        "the audit grows without end",
        "server/audit.py",
        "if self._size_bytes and self._size_bytes + len(line) > self._max_bytes:",
        "if False:",
        "audit",
    ),
    Mutant(
        "a line that was cut takes the next one with it",
        "server/audit.py",
        'if self._size_bytes and os.pread(self._descriptor, 1, self._size_bytes - 1) != b"\\n":',
        "if False:",
        "audit",
    ),
    Mutant(
        "a full disk ends the audit for good",
        "server/audit.py",
        "            except OSError as error:\n                self._fail(error)\n",
        "            except OSError as error:\n                self._fail(error)\n                return\n",
        "audit",
    ),
    Mutant(
        "a flood of strangers hides who is known",
        "server/interceptors.py",
        "                    left_out = left_out or 0  # a flood of strangers hides nobody who is known\n",
        "                    pass\n",
        "audit",
    ),
    # --- reload ---
    Mutant(
        "running calls of who was removed go on",
        "server/interceptors.py",
        "        return self.end_calls(lambda caller: caller in lost)\n",
        "        return 0\n",
        "reloading",
    ),
    Mutant(
        "who has another role now keeps the old one in a running call",
        "credentials.py",
        "        kept = set(new._entries)\n",
        "        kept = {entry.token_blake3 for entry in new._entries}\n",
        "reloading",
        (
            "for entry in self._entries if entry not in kept)",
            "for entry in self._entries if entry.token_blake3 not in kept)",
        ),
    ),
    Mutant(
        "a file that is wrong keeps the others from being read",
        "server/reloading.py",
        "part, stays, error)\n                problems.append(part)\n",
        "part, stays, error)\n                problems.append(part)\n                break\n",
        "reloading",
    ),
    Mutant(
        "a reload that was refused is told as done",
        "server/reloading.py",
        "if problems else (ALLOWED",
        "if not self._parts else (ALLOWED",
        "reloading",
    ),
)

UPKEEP = Suite(
    "upkeep",
    "Mutants of expiry, write budget, scrub and pairing",
    "cachestore_svc",
    Path("tests/cachestore/service/UPKEEP_MUTANTS.md"),
    _OF_THE_STORE,
    tests="tests/cachestore/{}.py",
)
AUDIT = Suite(
    "audit",
    "Mutants of audit and reload",
    "clients/python/kvasir",
    Path("tests/cachestore/service/AUDIT_MUTANTS.md"),
    _OF_ALL_SERVICES,
    tests="tests/cachestore/service/test_{}.py",
)
