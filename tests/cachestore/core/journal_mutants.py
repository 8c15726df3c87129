"""Mutants of journal, starts, setting aside and recovery: what is broken, where, how, and which tests to ask."""

JOURNAL_MUTANTS = (
    (
        "journal: the start leaves unlisted files",
        "asides.py",
        "    for hash_ in unnamed:\n        core.set_aside(blobs, hash_)\n",
        "    for _ in unnamed:\n        pass\n",
        "care",
    ),
    (
        "journal: the start removes unlisted files",
        "asides.py",
        "    for hash_ in unnamed:\n        core.set_aside(blobs, hash_)\n",
        "    for hash_ in unnamed:\n        blobs.remove(hash_)\n",
        "care",
    ),
    (
        "journal: what is set aside goes at once",
        "asides.py",
        "if aside.since_unix_ms <= until]",
        "if True]",
        "index_damage",
    ),
    (
        "journal: a group is committed before it is recorded",
        "sqlite_catalog.py",
        "            if self._recorder is not None:\n"
        "                self._recorder.record(SqliteTransaction(connection))\n"
        '            self._disk.reached("index: before commit")\n'
        '            connection.execute("COMMIT")\n',
        '            self._disk.reached("index: before commit")\n'
        '            connection.execute("COMMIT")\n'
        "            if self._recorder is not None:\n"
        "                self._recorder.record(SqliteTransaction(connection))\n",
        "index_damage",
    ),
    (
        "journal: a group is not synced",
        "journal.py",
        "            self._disk.write(self._descriptor, line)\n            self._disk.fsync(self._descriptor)\n",
        "            self._disk.write(self._descriptor, line)\n",
        "journaling",
    ),
    (
        "journal: a failed commit is not taken back",
        "sqlite_catalog.py",
        "                if self._recorder is not None:\n                    self._recorder.take_back()\n",
        "                pass\n",
        "index_damage full_disk",
    ),
    (
        "journal: a lost commit is not missed",
        "recovery/looking.py",
        "    if behind > 0 and",
        "    if behind > 99 and",
        "index_damage",
    ),
    (
        "journal: a group that was not committed is forgotten",
        "recovery/looking.py",
        'return Look(found, "", store, position, found.last, damage)',
        'return Look(None, "", store, position, (), damage)',
        "index_damage",
    ),
    (
        "journal: rows are not compared",
        "recovery/looking.py",
        "        damage = differences(found.state, view.state_anyway())\n",
        "        damage = dict[str, dict[str, str]]()\n",
        "index_damage",
    ),
    (
        "journal: what a manifest holds is no part of it",
        "index_state.py",
        '    said = f"{(facts or ())[1:]}|{blobs}"\n',
        '    said = f"{(facts or ())[1:]}"\n',
        "index_damage",
    ),
    (
        "journal: a damaged namespace is served",
        "opening.py",
        "    catalog.keep_out(words)\n",
        "",
        "index_damage",
    ),
    (
        "journal: a damaged namespace is collected",
        "collecting.py",
        "known - core.catalog.damage.keys()",
        "known",
        "index_damage",
    ),
    (
        "journal: a clean end blesses damaged rows",
        "opening.py",
        "            if not core.catalog.damage:\n",
        "            if True:\n",
        "index_damage",
    ),
    (
        "journal: the note of the end does not tell the journal's bytes",
        "closed.py",
        "    for path in (database, log):",
        "    for path in (database,):",
        "index_damage",
    ),
    (
        "journal: another store's index is taken",
        "recovery/looking.py",
        '    raise _foreign("it is another store\'s than the journal")\n',
        '    return Look(None, "", store, position)\n',
        "index_damage",
    ),
    (
        "journal: an index that names little is taken without a journal",
        "recovery/looking.py",
        "    if unnamed > _HANDFUL and",
        "    if unnamed > 99999 and",
        "index_damage",
    ),
    (
        "journal: shortening forgets what was appended since",
        "journal.py",
        "[*state_lines(self.store, position, state), *self._pieces(read_bytes)]",
        "list(state_lines(self.store, position, state))",
        "journal",
    ),
    (
        "journal: it is never shortened",
        "collecting.py",
        "    if not log.is_long:\n",
        "    if True:\n",
        "journaling",
    ),
    (
        "journal: a cascade is not recorded",
        "recording.py",
        '    _Caught("DELETE ON main.agents", "\'forget\', namespaces.name, OLD.name", '
        '_OF_NAMESPACE.format(row="OLD")),\n',
        "",
        "index_damage",
    ),
    (
        "journal: a mark of what was brought is not recorded",
        "recording.py",
        "(*_ALL_CAUGHT, *_CAUGHT_OF_OWNERS, *_CAUGHT_OF_BLOBS)",
        "(*_ALL_CAUGHT, *_CAUGHT_OF_OWNERS)",
        "recovering",
    ),
    (
        "journal: a recovery believes damaged blobs",
        "salvage.py",
        "            if Digest.of(data) == plain:\n",
        "            if len(data) == plain.size_bytes:\n",
        "recovering",
    ),
    (
        "journal: a recovery forgets marks that nobody knows",
        "recovering.py",
        "            state.brought = {digest.hash for digest in (*space.manifests, *space.named)}\n",
        "            pass\n",
        "recovering",
    ),
    (
        "journal: a recovery lets lease generations come again",
        "recovering.py",
        "        change.set_lease_floor(self._now)\n",
        "        pass\n",
        "recovering",
    ),
    (
        "journal: a recovery puts the new journal in place first",
        "recovering.py",
        '        kept = [self._move_away(Path(f"{self._database}{suffix}"), old, suffix) for '
        "suffix in _DATABASE_SUFFIXES]\n",
        "        disk.rename(new_log, log)\n"
        '        kept = [self._move_away(Path(f"{self._database}{suffix}"), old, suffix) for '
        "suffix in _DATABASE_SUFFIXES]\n",
        "recovering",
    ),
    (
        "journal: what is no file is read",
        "disk.py",
        "    if not stat.S_ISREG(os.fstat(descriptor).st_mode):\n",
        "    if False:\n",
        "strange",
    ),
    (
        "journal: a pipe is waited for",
        "disk.py",
        "        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)\n",
        "        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)\n",
        "strange",
    ),
    (
        "journal: a clock goes beyond the year 9999",
        "messages.py",
        "min(max(unix_ms, 0), records.LAST_UNIX_MS)",
        "unix_ms",
        "strange",
    ),
    (
        "journal: one flipped name keeps all namespaces out",
        "index_state.py",
        "        if not _OF_AN_INDEX.match(problem):\n",
        "        if True:\n",
        "index_damage",
    ),
)
