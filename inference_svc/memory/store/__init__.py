"""One namespace's cache store as the engine sees it: `remote_cache` has its parts."""
