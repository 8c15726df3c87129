"""vLLM's KV in a cache store: `KvasirConnector` is a KV connector of unmodified vLLM; `StoredKv` is its half that needs
no vLLM."""
