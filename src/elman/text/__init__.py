"""Files to documents to tokens: sources, tokenizers and named corpora. No torch."""
