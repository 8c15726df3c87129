"""One namespace's cache store as the engine sees it: `remote_cache` is what it may be asked."""
