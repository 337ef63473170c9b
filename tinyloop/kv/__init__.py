"""KV memory: `pages` and `prefix` count and name pages (integers only), `cache` holds the tensors."""
