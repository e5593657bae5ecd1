"""nano_oasis: a compact LLM inference engine built around OasisKV (arXiv 2608.08097)."""
